"""Experts in units of their own, and on ranks of their own, against the whole model in the memory of one process."""

import functools
import re

import pytest
import torch
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_failures import failed
from rank_programs import around_training, freeze, left, seen_from_outside, trained
from rank_references import reference as reference_of_ranks
from rounding import check_one_step
from training import (
    Task,
    assert_same,
    decide,
    make_model,
    make_optimizer,
    model_units,
    planned,
    prepare,
    reference,
    session_options,
    train,
    uniform,
    weights,
)

from executor.distributed.products import grouped_product
from executor.distributed.shards import BindingError
from executor.distributed.watchdog import RankError
from executor.prepare import prepare_session
from planner.graph import Batch, build_graph, units
from planner.models import from_hf_config

FAMILIES = ["mixtral-shared", "qwen3-moe-shared"]


@settings(max_examples=examples(8), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(st.data(), st.sampled_from([2, 4]))
def test_experts_apart_give_the_bits_of_the_whole(data, expert_units):
    """Every unit is placed by itself, by any plan; the arithmetic is that of the whole."""
    task, decisions = data.draw(plans(families=FAMILIES, degrees={"expert_units": expert_units}))
    assert_same(planned(task, decisions), reference(task))


EXPERTS = {
    "resident": ((1, 2, 2, 1), 0, uniform("gpu", "gpu")),
    "apart": ((1, 2, 2, 2), 3, mixed),
    "with replicas": ((1, 4, 2, 2), 3, mixed),
    "with replicas, streamed": ((1, 4, 2, 1), 2, uniform("gpu", "stream", "recompute")),
    "in shared layers": ((2, 2, 2, 2), 0, mixed),
}


@pytest.mark.part(8)
@pytest.mark.parametrize(("degrees", "zero_stage", "choose"), EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_has_the_gradients_of_all_tokens(processes, degrees, zero_stage, choose, dtype):
    *degrees, num_expert_units = degrees
    family = FAMILIES[zero_stage == 2]
    check_one_step(
        processes, family, dtype, choose, (*degrees, 1), expert_units=num_expert_units, zero_stage=zero_stage
    )


@functools.cache
def in_the_simplest_way(processes, task):
    decisions = decide(task, uniform("gpu", "gpu"), data_parallel=2, expert_parallel=2)
    return processes.call(2, trained, task, decisions)


@settings(max_examples=examples(5), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(plans(sizes=[2], families=FAMILIES, degrees={"expert_parallel": 2, "expert_units": 2}), st.integers(0, 99))
def test_any_plan_of_one_degree_gives_the_same_bits(processes, plan, seed):
    task, decisions = plan
    if task.num_micro_batches > 1:  # whole gradients pile up in another order than sums over ranks
        task, decisions = (
            Task(task.family, task.dtype, 1, task.max_norm, task.iterations),
            decisions.model_copy(update={"num_micro_batches": 1}),
        )
    expected = in_the_simplest_way(processes, task)
    for ours, theirs in zip(processes.call(2, trained, task, decisions, seed), expected, strict=True):
        assert ours[0] == theirs[0]
        different = [name for name in theirs[1] if ours[1][name].tobytes() != theirs[1][name].tobytes()]
        assert not different, different


def test_memory_and_times_are_those_of_the_schedule(processes):
    for ranks, expert, num_expert_units, zero_stage, dtype in (
        (2, 2, 2, 0, torch.float32),
        (4, 2, 1, 3, torch.bfloat16),
    ):
        task = Task("mixtral-shared", dtype, iterations=2)
        degrees = {"data_parallel": ranks, "expert_parallel": expert, "expert_units": num_expert_units}
        decisions = decide(task, mixed, zero_stage=zero_stage, **degrees)
        assert processes.call(ranks, seen_from_outside, task, decisions) == [[]] * ranks


def test_evaluation_states_and_a_closed_model_are_whole(processes):
    task = Task("mixtral-shared", torch.float32, iterations=1, schedule=False)
    decisions, more = (
        decide(task, mixed, data_parallel=4, expert_parallel=2, expert_units=num_expert_units, zero_stage=stage)
        for num_expert_units, stage in ((2, 3), (1, 0))
    )
    assert processes.call(4, around_training, task, decisions, more) == [[]] * 4


def test_what_experts_make_leaves_as_far_as_there_is_room(processes):
    """How many tokens come to whom is known only then: what is more than planned is made again, and nothing hangs."""
    task = Task("mixtral-shared", torch.float32, iterations=2)
    degrees = {"data_parallel": 2, "tensor_parallel": 2, "expert_parallel": 2, "expert_units": 2}
    decisions = decide(task, uniform("gpu", "gpu", "offload"), **degrees)
    found = processes.call(4, left, task, decisions)
    for moved, stated, again, _ in found:
        assert {unit for unit in stated if moved[unit] == stated[unit]} >= {u for u in stated if u.endswith("attn")}
        assert all(0 <= moved[unit] <= num_bytes for unit, num_bytes in stated.items())
        assert set(again) <= {"ullage.grouped_product.default"}
    assert any(again for _, _, again, _ in found), "some rank's experts are visited more than planned"
    assert sum(map(len, (again for _, _, again, _ in found))) < 4 * 2 * 3 * 2, "and most leave"


def test_frozen_experts_stay_as_they_are_and_thaw():
    task = Task("mixtral-shared", torch.float32, iterations=3)
    decisions = decide(task, mixed, expert_units=2)
    frozen = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts")
    first = weights(make_model(task))
    model, optimizer = prepare(task, decisions, model=freeze(make_model(task), frozen))
    with optimizer.session as session:
        seen = train(task, model, optimizer)
        final = {name: weight.clone() for name, weight in session.full_parameters().items()}
        losses, expected = reference_of_ranks(task, 1, decisions, frozen)
        assert seen == losses[0]
        for name, weight in expected.items():
            assert torch.equal(final[name], weight), name
            assert torch.equal(weight, first[name]) == name.startswith(frozen), name


def test_experts_train_once_they_are_thawed():
    task = Task("mixtral-shared", torch.float32, iterations=2, schedule=False)
    model = freeze(make_model(task), ("model.layers.1.mlp.experts",))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    separate_units = model_units(task.family, expert_units=2)
    decisions = decide(task, uniform("gpu", "gpu"), expert_units=2).model_copy(
        update={"optimizer": "sgd", "subgroup_params": 3000}
    )
    model, ours = prepare_session(model, optimizer, separate_units, decisions, session_options())
    name = "model.layers.1.mlp.experts.down_proj"
    with ours.session as session:
        before = session.runtime.weights(name).clone()
        train(task, model, ours)
        assert torch.equal(session.runtime.weights(name), before)
        model.requires_grad_(True)
        train(task, model, ours)
        assert not torch.equal(session.runtime.weights(name), before)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))
def test_products_of_experts_are_those_of_torch(sizes, dtype):
    """Also for experts without tokens, whose gradient is zero."""
    torch.manual_seed(sum(sizes))
    rows, matrices = torch.randn(sum(sizes), 16), torch.randn(len(sizes), 24, 16)
    found = []
    for multiply in (
        lambda x, w: grouped_product(x, w, sizes),
        lambda x, w: torch.cat([x @ m.t() for x, m in zip(x.split(sizes), w.unbind(), strict=True)]),
    ):
        x, w = (tensor.to(dtype).requires_grad_() for tensor in (rows, matrices))
        y = multiply(x, w)
        y.sum().backward()
        found.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert not any(found[0][2][i].any() for i, size in enumerate(sizes) if not size)


def test_a_rank_that_fails_ends_those_that_share_experts_with_it(processes):
    task = Task("mixtral-shared", iterations=50)
    decisions = decide(task, uniform("gpu", "gpu"), data_parallel=2, expert_parallel=2)
    processes.begin(2, failed, task, decisions, "forward")
    first, second = processes.results(2)
    assert isinstance(second, ZeroDivisionError)
    assert isinstance(first, RankError)
    assert re.search("rank 1 failed: ZeroDivisionError: in the loop", str(first)), first


def test_other_experts_are_refused():
    task = Task("mixtral-shared")
    decisions = decide(task, uniform("gpu", "gpu"), expert_units=2)
    model = make_model(task)
    model.model.layers[1].mlp.experts.has_bias = True
    with pytest.raises(
        BindingError, match=r"layers.1.mlp.experts \(MixtralExperts\) .* plan with --parallel expert-units=1"
    ):
        prepare(task, decisions, model=model)


def test_hooks_that_would_never_run_are_refused():
    task = Task("mixtral-shared")
    model = make_model(task)
    model.model.layers[0].mlp.experts.down_proj.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(BindingError, match=r"layers.0.mlp.experts.down_proj has a hook, which would never run"):
        prepare(task, decide(task, uniform("gpu", "gpu"), expert_units=2), model=model)


def test_experts_that_were_planned_without_visits_must_be_on_the_device():
    task = Task("mixtral-shared")
    config = from_hf_config(make_model(task).config.to_dict(), task.family)
    unvisited = units(build_graph(config, Batch(2, 8, expert_units=4, expert_load=((0.5, 0.5, 0.0, 0.0),))))
    decisions = decide(task, uniform("host", "cpu"), expert_units=4)
    model = make_model(task)
    with pytest.raises(
        ValueError, match=r"layers.0.experts.2 was planned for experts that no token .* without --expert-load"
    ):
        prepare_session(model, make_optimizer(task, model), unvisited, decisions, session_options())
