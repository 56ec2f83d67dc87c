"""Pipelines of stages, each of which its own plan drives, against the whole model in the memory of one process."""

import pytest
import torch
from pipeline_programs import (
    OTHERS,
    REFUSED,
    around_training,
    memory_of_stage,
    model_of_transformers,
    own_model,
    planned_orders,
    refused,
    staged_on_gpu,
    trained_in_memory,
    trained_in_stages,
    waiting_in_stage,
)
from rank_combinations import (
    AGAIN,
    EIGHT,
    HOST,
    KEPT,
    LEAVING,
    NVME,
    OFF,
    ON_DRIVES,
    RING,
    SHARED,
    STAGED,
    ZERO_BUBBLE,
    compared,
)
from rank_programs import saved
from safetensors.torch import load_file
from training import SEQ_LEN, Task, decide
from virtual import NoVirtualGpuError, install

from executor.checkpoint.format.reader import Checkpoint
from planner.lowering import lower
from planner.schedule.tasks import Lane, Op


@pytest.mark.part(12)
@pytest.mark.parametrize(("family", "count", "stages", "degrees", "choose"), STAGED.values(), ids=STAGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_train_as_one_process(processes, family, count, stages, degrees, choose, dtype):
    assert (found := compared(processes, family, count, stages, degrees, choose, dtype)).is_same, found


@pytest.mark.parametrize(
    ("degrees", "choose"), [({}, OFF), ({"data_parallel": 2, "zero_stage": 2} | ZERO_BUBBLE, AGAIN)]
)
def test_a_stage_that_leaves_the_plan_trains_shared_weights_too(processes, degrees, choose):
    found = compared(processes, "llama-tied", 3, 2, degrees, choose, penalty=1e-3)
    assert found._replace(planned=found.sent).is_same, found  # but for what it sends


@pytest.mark.part(0)
@pytest.mark.parametrize(("family", "count", "stages", "degrees", "choose"), EIGHT.values(), ids=EIGHT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stages_of_several_ranks_train_as_one_process(eight_processes, family, count, stages, degrees, choose, dtype):
    assert (found := compared(eight_processes, family, count, stages, degrees, choose, dtype)).is_same, found


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("size", "crosses", "options"),
    [
        (3, "memory", {}),
        (3, "scaled", {}),
        (3, "", {"device_memory": "250kB"}),
        (3, "weights", {}),
        (3, "memory that is ignored", {}),
        (2, "clamped", {}),
        (2, "parts", {}),
        (4, "towers", {}),
        (2, "towers in rounds", {}),
        (2, "detached", {}),
        (3, "without gradients", {}),
        (2, "mask of values", {}),
        (2, "mask of a module", {}),
        (2, "indices", {}),
        (3, "number", {}),
    ],
    ids=[
        "given later",
        "changed at a cut",
        "offloaded",
        "weights that stages share",
        "given for nothing",
        "clamped weights",
        "parts for each layer",
        "towers, in which layers change shapes and are skipped",
        "towers, in rounds",
        "detached",
        "without gradients",
        "a mask of values",
        "a mask of a module",
        "indices",
        "a number",
    ],
)
def test_a_model_of_the_users_own_trains_in_stages(processes, size, crosses, options):
    for *both, plan, _ in (ranks := processes.call(size, own_model, crosses, options, timeout_s=100.0)):
        assert plan.decisions.pipeline_parallel == size
        updates = {place for unit in plan.decisions.units.values() for place in unit.update}
        assert "cpu" in updates or not options
        assert_same(*both)
    assert sum(sent for *_, sent in ranks) == planned_bytes(ranks[0][-2])


def assert_same(losses, wanted, found, weights):
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.allclose(found[name], values, rtol=1e-5, atol=1e-6), name


def planned_bytes(plan) -> int:
    """Return what a plan's stages send each other."""
    tasks = lower(plan.units(), plan.decisions, asynchronous=False).tasks
    return sum(task.num_bytes for task in tasks if task.op is Op.SEND and task.lane is not Lane.COLLECTIVE)


def test_stages_of_compiled_blocks_make_all_gradients_in_backward(processes):
    """Which leaves a bubble, but each block one graph."""
    assert processes.call(2, planned_orders, timeout_s=100.0) == [["zero-bubble", None]] * 2


@pytest.mark.part(4)
@pytest.mark.parametrize("kind", OTHERS)
def test_models_of_transformers_are_cut_as_anybody_elses(processes, kind):
    size = 3 if kind == "scores that layers share" else 2  # with an embedding that three stages share
    for *both, _, _ in (ranks := processes.call(size, model_of_transformers, kind, timeout_s=100.0)):
        assert_same(*both)
    assert sum(sent for *_, sent in ranks) == planned_bytes(ranks[0][-2])


@pytest.mark.parametrize(
    ("size", "crosses", "message"),
    [
        (2, "left in a layer", "depends on a value without gradients of another stage"),
        (3, "skip", "depends on positions of another stage, beside what layers from blocks.2 on are given"),
        (2, "shrunk", "blocks.1.up, with which another micro-batch is to run backward"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(processes, size, crosses, message):
    processes.begin(size, own_model, crosses, {})
    assert [str(error) for error in processes.results(size) if message not in str(error)] == []


@pytest.mark.part(4)
@pytest.mark.parametrize(
    ("family", "choose", "way"),
    [
        ("llama-tied", OFF, {}),
        ("qwen3", KEPT, {}),
        ("qwen3", LEAVING, {}),
        ("llama-deep", OFF, {"pipeline_rounds": 2}),
        ("llama-tied", OFF, ZERO_BUBBLE),
        ("llama-deep", ON_DRIVES, {"pipeline_rounds": 2}),
        ("llama-tied-deep-shared", HOST, {"pipeline_rounds": 2}),
        ("qwen3", LEAVING, ZERO_BUBBLE),
        ("llama-tied-shared", LEAVING, RING),
    ],
)
def test_stages_do_not_depend_on_when_streams_run(processes, family, choose, way):
    """On virtual GPUs, where gloo stands in for NCCL. Keys pass on in bf16 alone, as kernels of GPUs have it."""
    try:
        install()
    except NoVirtualGpuError as error:
        pytest.skip(str(error))
    clips, dtype = "pipeline_rounds" in way, torch.bfloat16 if way is RING else torch.float32
    task = Task(family, dtype, 3, max_norm=0.5 if clips else None, iterations=3, schedule=False)
    decisions = decide(task, choose, pipeline_parallel=2, **way, clip=clips)
    losses, _ = trained_in_memory(task, 1)
    for seen, found in processes.call(decisions.num_devices, staged_on_gpu, task, decisions, timeout_s=100.0):
        assert found == []
        assert seen == pytest.approx(losses[0], rel=1e-3 if dtype is torch.float32 else 2**-6)


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("family", "choose", "way"),
    [
        ("llama-wide", OFF, {"pipeline_rounds": 3}),
        ("llama-wide", KEPT, {"pipeline_rounds": 3}),
        ("llama-wide", AGAIN, {}),
        ("llama-wide", LEAVING, {}),
        ("llama-wide", LEAVING, {"pipeline_rounds": 3}),
        ("llama-wide", KEPT, ZERO_BUBBLE),
        ("llama-wide", AGAIN, ZERO_BUBBLE),
        ("llama-wide", LEAVING, ZERO_BUBBLE),
        ("llama-wide", AGAIN, ZERO_BUBBLE | {"pipeline_rounds": 3}),
        ("opt-words-still-shared", AGAIN, {}),  # which copies logits
        ("llama-wide", KEPT, ZERO_BUBBLE | {"data_parallel": 2, "zero_stage": 2}),
    ],
)
def test_stages_hold_what_is_planned(processes, family, choose, way):
    task = Task(family, torch.float32, 4, iterations=3)
    decisions = decide(task, choose, pipeline_parallel=2, **way, subgroup_params=200_000)
    for planned, measured in processes.call(decisions.num_devices, memory_of_stage, task, decisions):
        assert 0.9 * planned < measured < 1.005 * planned


@pytest.mark.parametrize(("family", "choose"), [("llama-wide", KEPT), ("gpt2-still-shared", AGAIN)])
def test_gradients_of_weights_wait_with_what_is_planned(processes, family, choose):
    """Every matrix of a layer waits, as long as the plan says, and what it waits with has the planned bytes."""
    task = Task(family, torch.float32, 4, iterations=1)
    decisions = decide(task, choose, pipeline_parallel=2, **ZERO_BUBBLE)
    for stage, (matrices, behind, found) in enumerate(processes.call(2, waiting_in_stage, task, decisions)):
        assert behind == {stage + 1}, "micro-batches that wait as the first of them is made"
        for planned, kept, names in found:
            assert names == matrices
            assert 0.97 * planned < kept <= planned


@pytest.mark.part(2)
@pytest.mark.parametrize(("family", "choose"), [("gpt2-still-shared", LEAVING), ("llama-tied", AGAIN)])
def test_gradients_that_wait_have_the_same_bits(processes, family, choose):
    task = Task(family, torch.bfloat16, 4, max_norm=0.5, iterations=3, schedule=False)
    ways = [decide(task, choose, pipeline_parallel=2, **way) for way in ({}, ZERO_BUBBLE)]
    plain, waiting = (processes.call(2, trained_in_stages, task, each, timeout_s=100.0) for each in ways)
    for (losses, weights, _), (wanted, theirs, _) in zip(waiting, plain, strict=True):
        assert losses == wanted
        assert all(torch.equal(weights[name], values) for name, values in theirs.items())


@pytest.mark.part(3)
def test_what_stages_save_goes_on_in_any_stages(processes, tmp_path):
    """All state is the same, whichever stage has which part of it; so is training, in the same stages."""
    task = Task("llama-tied-shared", num_micro_batches=3, iterations=2)
    there = decide(task, OFF, pipeline_parallel=2, data_parallel=2, zero_stage=3)
    others = [
        decide(task, NVME),
        decide(task, KEPT, pipeline_parallel=2, tensor_parallel=2),
        decide(task, AGAIN, pipeline_parallel=3),
    ]
    ends = {end for _, _, end in processes.call(4, saved, task, there, tmp_path)}
    assert len(ends) == 1
    for number, plan in enumerate(others):
        found = processes.call(plan.num_devices, saved, task, plan, tmp_path / f"by {number}", 2, tmp_path)
        assert {begin for begin, _, _ in found} == ends
    again = processes.call(4, saved, task, there, tmp_path / "again", 1, tmp_path)
    assert {end for _, _, end in again} == ends
    alone = processes.call(1, saved, task, others[0], tmp_path / "alone", 1, tmp_path)
    found = processes.call(4, saved, task, there, tmp_path / "back", 2, tmp_path / "alone")
    assert {begin for begin, _, _ in found} == {alone[0][2]}
    ways = [Checkpoint(folder / "step-00000002").manifest.tensors for folder in (tmp_path, tmp_path / "alone")]
    assert ways[0].keys() == ways[1].keys()


@pytest.mark.part(2)
@pytest.mark.parametrize(
    "degrees",
    [{"data_parallel": 2, "zero_stage": 3}, {"tensor_parallel": 2}, SHARED | {"pipeline_rounds": 2}, RING],
    ids=str,
)
def test_stages_evaluate_save_and_load(processes, tmp_path, degrees):
    shapes = ((2, SEQ_LEN), (2, SEQ_LEN // 2))  # which all pass a round before the next one
    task = Task("llama-tied-deep-shared", num_micro_batches=2, iterations=2, shapes=shapes)
    decisions = decide(task, OFF, pipeline_parallel=2, **degrees)
    for first, again, state in processes.call(4, around_training, task, decisions, tmp_path / "saved"):
        assert first[:2] == again[:2]
        evaluated, losses, weights = first
        assert losses[0] == pytest.approx(evaluated, rel=1e-4)  # another kernel may attend
        assert all(torch.equal(values, again[2][name]) for name, values in weights.items())
        assert weights.keys() == load_file(tmp_path / "saved/model.safetensors").keys()
        sizes = [len(group["params"]) for group in state["param_groups"]]
        assert sorted(state["state"]) == list(range(sum(sizes)))


@pytest.mark.parametrize(("kind", "message"), REFUSED.items())
def test_what_a_stage_cannot_do_is_refused(processes, kind, message):
    task = Task("llama", torch.float32, 2, max_norm=0.5)
    decisions = decide(task, KEPT, pipeline_parallel=2)
    processes.begin(2, refused, task, decisions, kind)
    assert all(message in str(error) for error in processes.results(2))
