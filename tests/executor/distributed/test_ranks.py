"""Training on several ranks against the same training in one process, and what happens if a rank fails."""

import os
import re
from pathlib import Path

import pytest
import rank_pool
import torch
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_failures import (
    buffers_of,
    diverged,
    failed,
    first_of,
    losing_handshakes,
    raising_or_waiting,
    resumed_where_one_sees_less,
    saved_alone,
    with_another_optimizer,
    with_another_plan,
    with_other_options,
    without_a_gradient,
)
from rank_programs import (
    around_training,
    bound_cores,
    changed,
    rng_state_after,
    saved,
    seen_from_outside,
    trained,
    trained_with_complex_weights,
)
from rank_references import reference, trained_by_torch
from ranks import assert_same_bits
from training import Task, decide, uniform

from executor.devices.cores import divide, in_order, open_cores
from executor.devices.lanes import LaneError
from executor.distributed.watchdog import RankError
from executor.gradients import GradientError
from executor.memory.arenas import DeviceMemoryError

ROOT = Path(__file__).parents[3]
STAGES = {
    "0, resident": (0, uniform("gpu", "gpu")),
    "0, everything": (0, mixed),
    "1, resident": (1, uniform("gpu", "gpu")),
    "1, streamed": (1, uniform("gpu", "stream")),
    "2, resident": (2, uniform("gpu", "gpu")),
    "2, cpu": (2, uniform("gpu", "cpu", "recompute")),
    "3, resident": (3, uniform("gpu", "gpu")),
    "3, cpu": (3, uniform("gpu", "cpu")),
    "3, fetched": (3, uniform("host", "cpu", "recompute")),
    "3, everything": (3, mixed),
}


@pytest.mark.part(10)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("zero_stage", "choose"), STAGES.values(), ids=STAGES)
def test_two_ranks_give_the_bits_of_one_process(processes, zero_stage, choose, num_micro_batches):
    """A sum of two has one order, so that nothing is left to chance."""
    turn = zero_stage + num_micro_batches
    task = Task(["gpt2", "llama"][turn % 2], [torch.bfloat16, torch.float32][turn // 2 % 2], num_micro_batches)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, trained, task, decisions), reference(task, 2, decisions))


CHANGES = [
    (3, mixed),
    (0, uniform("gpu", "gpu", "recompute")),
    (2, uniform("gpu", "cpu")),
    (3, uniform("host", "nvme")),
]


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("dtype", "optimizer"), [(torch.bfloat16, "adamw"), (torch.float32, "adamw"), (torch.float32, "nadam")], ids=str
)
def test_another_plan_in_the_middle_gives_the_same_bits(processes, tmp_path, dtype, optimizer):
    """Of another ZeRO stage too, so that other shards of the state are on other ranks."""
    task = Task("gpt2", dtype, iterations=5, optimizer=optimizer)
    ways = [decide(task, choose, data_parallel=2, zero_stage=stage) for stage, choose in CHANGES]
    results = processes.call(2, changed, task, ways, tmp_path / "handed over")
    assert_same_bits([found[:2] for found in results], reference(task, 2, ways[0]))
    assert [found[2] for found in results] == [[], []]
    assert list((tmp_path / "handed over").iterdir()) == []


@pytest.mark.part(2)
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"data_parallel": 2, "expert_parallel": 2}], ids=str)
def test_another_plan_where_ranks_share_layers_or_experts(processes, tmp_path, degrees):
    task = Task("mixtral-shared", torch.float32, iterations=4)
    ways = [
        decide(task, choose, **degrees, expert_units=expert_units)
        for choose, expert_units in (
            (mixed, 2),
            (uniform("gpu", "gpu"), 1),
            (uniform("host", "cpu", "offload"), 4 // 2),
        )
    ]
    expected = processes.call(2, trained, task, ways[1])
    for (seen, final, _), (losses, weights) in zip(
        processes.call(2, changed, task, ways, tmp_path), expected, strict=True
    ):
        assert seen == losses
        assert all(final[name].tobytes() == weight.tobytes() for name, weight in weights.items())


def test_if_one_rank_cannot_begin_with_another_plan_all_go_on_with_the_old_one(processes, tmp_path):
    task = Task("gpt2", iterations=4)
    ways = [decide(task, choose, data_parallel=2, zero_stage=3) for choose in (mixed, uniform("host", "cpu"), mixed)]
    results = processes.call(2, changed, task, ways, tmp_path, 1)
    assert_same_bits([found[:2] for found in results], reference(task, 2, ways[0]))
    assert [found[2] for found in results] == [["RankError"], ["DeviceMemoryError"]]


def test_if_there_is_no_place_for_the_state_all_go_on(processes, tmp_path):
    task = Task("gpt2", iterations=3)
    ways = [decide(task, choose, data_parallel=2, zero_stage=3) for choose in (mixed, uniform("host", "cpu"))]
    (tmp_path / "file").touch()
    results = processes.call(2, changed, task, ways, tmp_path / "file")
    assert_same_bits([found[:2] for found in results], reference(task, 2, ways[0]))
    assert [found[2] for found in results] == [["StorageError"]] * 2


def test_a_plan_for_other_ranks_is_refused(processes, tmp_path):
    task = Task("gpt2", iterations=2)
    ways = [decide(task, mixed, data_parallel=2, zero_stage=3), decide(task, mixed)]
    with pytest.raises(ValueError, match="other plan has data_parallel 1, but training runs with 2"):
        processes.call(2, changed, task, ways, tmp_path)


@settings(max_examples=examples(25), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(plans(sizes=[2]), st.integers(0, 99))
def test_any_plan_for_two_gives_the_same_bits_on_lanes_of_any_speed(processes, plan, seed):
    task, decisions = plan
    assert_same_bits(processes.call(2, trained, task, decisions, seed), reference(task, 2, decisions))


@settings(max_examples=examples(12), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(plans(sizes=[3, 4]), st.integers(0, 99))
def test_any_plan_for_more_agrees_within_rounding(processes, plan, seed):
    """How gloo's ring orders a sum depends on where it cuts it.

    Each of a sum's roundings is at most 2**-24 (bf16: 2**-8) of its terms. An update divides by the gradient's own
    size, so that a weight is off by about the rate (5e-3) times such a rounding: below 1e-6 (bf16: 1e-3, and the
    rounding of the weight itself). Only where the terms nearly cancel the quotient may be anything, and the weight off
    by all its updates together: of a few weights in a thousand. Their gradients are small, so that losses move by
    little more than a weight's rounding.
    """
    task, decisions = plan
    size = decisions.data_parallel
    results = processes.call(size, trained, task, decisions, seed)
    losses, weights = reference(task, size, decisions)
    bf16 = task.dtype is torch.bfloat16
    for rank, (seen, final) in enumerate(results):
        assert seen == pytest.approx(losses[rank], rel=4e-3 if bf16 else 1e-5)
        assert all(final[name].tobytes() == results[0][1][name].tobytes() for name in weights), (
            "ranks agree in all bits"
        )
    final = {name: torch.from_numpy(values.copy()) for name, values in results[0][1].items()}
    off = [(final[n].view(w.dtype).view(w.shape).float() - w.float()).abs().reshape(-1) for n, w in weights.items()]
    size_of = torch.cat([w.float().abs().reshape(-1) for w in weights.values()])
    bound = 1e-3 + size_of * 2**-7 if bf16 else torch.full_like(size_of, 1e-6)
    assert float((torch.cat(off) > bound).float().mean()) < (1e-2 if bf16 else 1e-3)
    assert float(torch.cat(off).max()) < 2 * 5e-3 * task.iterations


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ddp_gives_the_same_bits(processes, dtype):
    task = Task("gpt2", dtype)
    decisions = decide(task, mixed, data_parallel=2, zero_stage=3)
    theirs = processes.call(2, trained_by_torch, task)
    for ours, (seen, final) in zip(processes.call(2, trained, task, decisions), theirs, strict=True):
        assert ours[0] == seen
        assert all(ours[1][name].tobytes() == weight.tobytes() for name, weight in final.items())


def test_ranks_share_complex_weights_and_their_state(processes, tmp_path):
    assert processes.call(2, trained_with_complex_weights, tmp_path) == [[], []]


def test_one_rank_alone_is_as_before(processes):
    task = Task("llama")
    decisions = decide(task, mixed)
    assert_same_bits(processes.call(1, trained, task, decisions), reference(task, 1, decisions))


@pytest.mark.part(10)
@pytest.mark.parametrize(
    ("zero_stage", "choose"), [STAGES[k] for k in ("0, everything", "1, streamed", "2, cpu", "3, everything")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_evaluation_states_and_a_closed_model_are_whole_on_all_ranks(processes, zero_stage, choose, dtype):
    task = Task("gpt2", dtype, iterations=2, schedule=False)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage, num_param_slots=1)
    more = decide(task, mixed, data_parallel=2, zero_stage=3 - zero_stage if zero_stage % 3 == 0 else 3)
    for found in processes.call(2, around_training, task, decisions, more):
        assert found == []


@pytest.mark.part(5)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("zero_stage", "choose"), STAGES.values(), ids=STAGES)
def test_memory_and_times_are_those_of_the_schedule(processes, zero_stage, choose, size):
    task = Task("llama", [torch.bfloat16, torch.float32][zero_stage % 2], iterations=2)
    decisions = decide(task, choose, data_parallel=size, zero_stage=zero_stage)
    assert processes.call(size, seen_from_outside, task, decisions) == [[]] * size


@pytest.mark.part(2)
@pytest.mark.parametrize(("zero_stage", "choose"), [STAGES[k] for k in ("0, everything", "2, cpu", "3, everything")])
def test_frozen_parameters_stay_as_they_are(processes, zero_stage, choose):
    """So much that backward does not reach the first units."""
    task = Task("gpt2", torch.bfloat16, iterations=3)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    frozen = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.mlp.c_fc.bias")
    assert_same_bits(processes.call(2, trained, task, decisions, None, frozen), reference(task, 2, decisions, frozen))


@pytest.mark.parametrize("group_sizes", [(), (2, 1, 1)], ids=["whole groups", "short groups"])
def test_a_gradient_that_some_ranks_lack_counts_as_zero(processes, group_sizes):
    """It counts in the norm on all ranks too, also if the loop ends a step early."""
    task = Task(
        "gpt2", max_norm=0.5, iterations=3, num_micro_batches=len(group_sizes[:2]) or 1, group_sizes=group_sizes
    )
    for zero_stage in (0, 2, 3):
        decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=zero_stage)
        (seen, final, steps), (_, other, other_steps) = processes.call(2, without_a_gradient, task, decisions)
        assert steps == other_steps
        assert set(steps.values()) == {0, 3}, "what no rank has a gradient of is not updated"
        assert all(final[name].tobytes() == other[name].tobytes() for name in final)
        assert seen[1] > 0


def test_a_gradient_that_some_ranks_lack_is_reported_where_its_update_has_begun(processes):
    task = Task("gpt2", max_norm=None, iterations=1)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=2, update_start="backward")
    processes.begin(2, without_a_gradient, task, decisions)
    for error in processes.results(2):
        assert isinstance(error, GradientError)
        assert "got a gradient on 1 of 2 ranks" in str(error)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that can bind threads")
def test_ranks_divide_what_they_share_and_keep_what_they_were_given(processes):
    """Four ranks: those that may use the same cores divide them, all of their threads stay there, and all is undone."""
    cores = in_order(open_cores())
    shares = processes.call(4, bound_cores, "auto", None)
    for rank, (own, found, after) in enumerate(shares):
        assert own == divide(cores, rank, 4)
        assert found == {frozenset(own)}, "no thread of the rank is anywhere else"
        assert after == {frozenset(cores)}
    for own, found, _ in processes.call(4, bound_cores, "free", None):
        assert len(own) == max(len(cores) // 4, 1)
        assert found == {frozenset(cores)}
    if len(cores) > 1:  # two were given one core each, by whoever started them
        given = [cores[:1], cores[1:2], cores, cores]
        found = [own for own, _, _ in processes.call(4, bound_cores, "auto", given)]
        assert found == [(cores[0],), (cores[1],), divide(cores, 0, 2), divide(cores, 1, 2)]


TASK = Task("gpt2", iterations=50)
SHARED = decide(TASK, mixed, data_parallel=3, zero_stage=3)


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("moment", "kind", "message"),
    [
        ("gather", LaneError, "rank 1 failed: LaneError: lane collective in gather .*a broken cable"),
        ("scatter", LaneError, "rank 1 failed: LaneError: .*a broken cable"),
        ("update", LaneError, "rank 1 failed: LaneError: .*a broken cable"),
        ("forward", ZeroDivisionError, "rank 1 failed: ZeroDivisionError: in the loop"),
        ("prepare", DeviceMemoryError, "rank 1 failed: DeviceMemoryError: the gpu is out of memory"),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_words(processes, moment, kind, message):
    processes.begin(3, failed, TASK, SHARED, moment)
    first, second, third = processes.results(3)
    assert isinstance(second, kind)
    for error in (first, third):
        assert isinstance(error, RankError)
        assert re.search(message, str(error)), error


def test_a_lost_handshake_is_tried_again(processes):
    """Once: in the group of all ranks, then in a session. The rank that lost it raises, and the others wait for it."""
    task = Task("gpt2", iterations=1)
    decisions = decide(task, mixed, data_parallel=2, zero_stage=3)
    assert_same_bits(processes.call(2, losing_handshakes, task, decisions, 1), reference(task, 2, decisions))
    processes.begin(2, losing_handshakes, task, decisions, 9)
    for error in processes.results(2):
        assert isinstance(error, RankError)
        assert re.match(r"rank \d could not connect to the others in 3 attempts of 0.4 s \(.*\); check", str(error))


def test_ranks_that_wait_for_one_that_has_failed_do_not_stop_the_tests(monkeypatch):
    monkeypatch.setattr(rank_pool, "FAILED_S", 0.2)
    pool = rank_pool.Processes(2)
    try:
        pool.begin(2, raising_or_waiting)
        with pytest.raises(AssertionError, match=r"ranks \[1\] do not answer; the others: .*on its own"):
            pool.results(2)
        assert pool.call(2, first_of) == [0, 1]
    finally:
        pool.close()


def test_other_plans_on_other_ranks(processes):
    processes.begin(2, with_another_plan, TASK, decide(TASK, mixed, data_parallel=2, zero_stage=3))
    for error in processes.results(2):
        assert isinstance(error, ValueError)
        assert "rank 1 has another plan or model than rank 0" in str(error)


@pytest.mark.parametrize("what", ["frozen", "rate"])
def test_other_optimizers_on_other_ranks(processes, what):
    """In data-parallel training, each rank updates a part of the weights."""
    decisions = decide(TASK, mixed, data_parallel=2, zero_stage=3)
    processes.begin(2, with_another_optimizer, TASK, decisions, what)
    for error in processes.results(2):
        assert isinstance(error, ValueError), error
        assert "rank 1 has another optimizer (its groups, their settings, or what is frozen)" in str(error)


@pytest.mark.parametrize("degrees", [{"data_parallel": 2, "zero_stage": 3}, {"pipeline_parallel": 2}], ids=str)
def test_ranks_do_not_wait_for_one_that_refuses_what_it_is_given(processes, degrees):
    task = Task("gpt2", torch.float32, 2)
    processes.begin(2, with_another_optimizer, task, decide(task, mixed, **degrees), "unknown")
    waiting, refusing = processes.results(2)
    assert isinstance(refusing, ValueError)
    assert isinstance(waiting, RankError)
    assert str(refusing).partition(";")[0] in str(waiting)


def test_other_options_on_other_ranks(processes):
    processes.begin(2, with_other_options)
    words = "device_memory is 1MB on rank 0 and 2MB on rank 1, but one plan is for all ranks; give all of them the same"
    assert [str(error) for error in processes.results(2)] == [words] * 2


@pytest.mark.parametrize(("size", "decisions"), [(3, SHARED), (1, decide(TASK, mixed))], ids=["fewer", "more"])
def test_another_number_of_processes(processes, size, decisions):
    """Not even several for a plan for one: each would train a model of its own."""
    words = rf"is for {size} device\(s\), but 2 process\(es\) were started; .*torchrun --nproc-per-node {size}"
    with pytest.raises(ValueError, match=words):
        processes.call(2, trained, TASK, decisions)


def test_a_killed_rank_ends_all(processes):
    processes.begin(3, failed, TASK, SHARED, "kill")
    first, second, third = processes.results(3)
    assert isinstance(second, EOFError)
    for error in (first, third):
        assert isinstance(error, RankError)
        assert re.search(r"rank 1 \(process \d+\) has ended without reporting why", str(error)), error


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("size", "zero_stage", "optimizer"), [(2, 0, "adamw"), (2, 3, "nadam"), (3, 1, "adamw"), (4, 2, "adamw")]
)
def test_any_number_of_ranks_goes_on_from_what_any_number_has_saved(processes, size, zero_stage, optimizer, tmp_path):
    task = Task("llama", iterations=2, optimizer=optimizer)

    def decisions(size, zero_stage, choose):
        return decide(task, choose, data_parallel=size, zero_stage=zero_stage, clip=True)

    choose = uniform("gpu", "cpu") if zero_stage < 3 else uniform("host", "stream")
    results = processes.call(size, saved, task, decisions(size, zero_stage, choose), tmp_path / "first")
    (_, _, end), *_ = results
    again = processes.call(size, saved, task, decisions(size, zero_stage, uniform("gpu", "gpu")), tmp_path / "first", 2)
    assert {begin for begin, _, _ in again} == {end}
    for others in {1, 2, 4} - {size}:
        stage = 3 if others > 1 else 0
        found = processes.call(
            others, saved, task, decisions(others, stage, uniform("gpu", "cpu")), tmp_path / "first", 2
        )
        assert {begin for begin, _, _ in found} == {end}, others
    if size == 2:  # a sum of two has one order
        other = decisions(2, 3, uniform("gpu", "stream"))
        halfway = processes.call(2, saved, task, other, tmp_path / "second", 1, tmp_path / "first")
        assert [(seen, last) for _, seen, last in halfway] == [(seen[2:], last) for _, seen, last in results]


REMEDY = "make all ranks iterate, clip, evaluate, save and close together, with equally many batches"
POSITIONS = {
    "branch": ("iteration 3, which left the plan after N of its tasks", "iteration 3"),
    "state": ("state_dict()", "iteration 3"),
    "evaluation": ("an evaluation", "iteration 3"),
    "one evaluation more": ("an evaluation", "iteration 3"),
    "norms": ("clipping, or reading norms, in iteration 2", "iteration 3"),
    "batches": ("close(), after 3 iterations", "iteration 4"),
    "short group": ("iteration 2, which ended after micro-batch 1", "iteration 2"),
}


@pytest.mark.part(8)
# Under stage 1 weights are whole on each rank once all have made them so: one may evaluate more often than others.
@pytest.mark.parametrize(
    ("deed", "zero_stage"),
    [(deed, stage) for deed in POSITIONS for stage in (3, 1) if stage == 3 or "evaluation" not in deed],
)
def test_ranks_that_diverge_are_named_with_where_they_are(processes, deed, zero_stage):
    """And not left to wait for each other, nor ended by gloo where sizes differ."""
    task = Task("gpt2", iterations=4, num_micro_batches=2 if deed == "short group" else 1)
    choose = uniform("host", "cpu") if zero_stage == 3 else uniform("gpu", "gpu")
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage, clip=True)
    processes.begin(2, diverged, task, decisions, deed)
    for error in processes.results(2):
        assert isinstance(error, RankError), error
        own, other = POSITIONS[deed]
        words = re.sub(r"after \d+ of its tasks", "after N of its tasks", str(error))
        assert f"rank 0 is in {own}, and rank 1 in {other}" in words
        assert REMEDY in str(error)


@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("deed", ["rate", "skip"])
def test_what_one_rank_decides_alone_is_reported(processes, deed, zero_stage):
    """Each would train another model otherwise, or parts of two."""
    task = Task("gpt2", iterations=4)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=zero_stage, clip=True)
    processes.begin(2, diverged, task, decisions, deed)
    noticed = {"rate": "iteration 4", "skip": "iteration 3"}[deed]
    for error in processes.results(2):
        assert isinstance(error, RankError), error
        assert f"rank 1 has updated differently from rank 0 before {noticed}: " in str(error)


@pytest.mark.parametrize("what", ["save()", "checkpoints.save(0)"])
def test_what_one_rank_saves_alone_is_reported(processes, tmp_path, what):
    decisions = decide(TASK, uniform("gpu", "cpu"), data_parallel=2, zero_stage=1, clip=True)
    processes.begin(2, saved_alone, TASK, decisions, tmp_path, what)
    for error in processes.results(2):
        assert isinstance(error, RankError), error
        assert f"rank 0 is in {what}, and rank 1 in iteration 1" in str(error)


def test_buffers_are_those_of_the_first(processes):
    task = Task("gpt2")
    found = processes.call(2, buffers_of, task, decide(task, mixed, data_parallel=2, zero_stage=3))
    assert found[0] == found[1]
    assert not found[0][1]


def test_ranks_that_share_layers_draw_alike_after_those_that_did_not(processes, tmp_path):
    task = Task("gpt2", iterations=1)
    processes.call(2, saved, task, decide(task, mixed, data_parallel=2, zero_stage=3, clip=True), tmp_path)
    first, second = processes.call(
        2, rng_state_after, task, decide(task, mixed, tensor_parallel=2, clip=True), tmp_path
    )
    assert first == second


@pytest.mark.part(2)
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_what_one_rank_cannot_open_is_passed_over_by_all(processes, zero_stage, tmp_path):
    task = Task("gpt2", iterations=3)
    decisions = decide(task, uniform("gpu", "cpu"), data_parallel=2, zero_stage=zero_stage, clip=True)
    processes.call(2, saved, task, decisions, tmp_path)
    arguments = task, decisions, tmp_path, "step-00000003"
    found = processes.call(2, resumed_where_one_sees_less, *arguments)
    assert [(step, len(refused)) for _, step, refused, _ in found] == [(2, 1)] * 2
    assert len({digest for *_, digest in found}) == 1
