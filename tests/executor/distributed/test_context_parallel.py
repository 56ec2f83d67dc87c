"""Ranks that share the tokens of every sequence, against the whole model in the memory of one process."""

import pytest
import torch
from context_programs import attended, exchanged, off_by, wrong_batches
from plans import mixed
from rank_combinations import ALONE, compared
from rank_programs import trained
from rank_references import reference
from rounding import check_one_step
from training import Task, decide, uniform, units_of

from planner.graph import Collective, segments

# tensor, data, expert and context ranks
SHARED = {
    "2 ranks": ("llama-shared", (1, 2, 1, 2), {"zero_stage": 0}, uniform("gpu", "gpu")),
    "4 ranks, more than heads of keys": ("llama-shared", (1, 4, 1, 4), {"zero_stage": 3}, mixed),
    "beside replicas": ("qwen3-shared", (1, 4, 1, 2), {"zero_stage": 2}, uniform("gpu", "stream", "recompute")),
    "beside tensors": ("qwen2-shared", (2, 2, 1, 2), {"zero_stage": 3}, mixed),
    "beside experts": ("mixtral-shared", (1, 2, 2, 2), {"zero_stage": 3}, mixed),
    "joint projections": ("gpt2-still-shared", (1, 2, 1, 2), {"zero_stage": 3}, mixed),
    "learned positions": ("opt-still-shared", (1, 2, 1, 2), {"zero_stage": 3}, uniform("host", "cpu", "offload")),
    "sequences in tiles": ("llama-shared", (1, 2, 1, 2), {"segment_tile_sequences": 1}, uniform("gpu", "gpu")),
    "layers in tiles": ("llama-shared", (1, 2, 1, 2), {"layer_tile_tokens": 3}, uniform("gpu", "gpu")),
    "a ring": ("llama-shared", (1, 2, 1, 2), {"context_exchange": "ring"}, uniform("gpu", "gpu")),
    "a ring, more than heads": ("llama-shared", (1, 4, 1, 4), {"zero_stage": 3, "context_exchange": "ring"}, mixed),
    "a ring beside tensors": ("qwen2-shared", (2, 2, 1, 2), {"zero_stage": 3, "context_exchange": "ring"}, mixed),
    "a ring beside experts": ("mixtral-shared", (1, 2, 2, 2), {"zero_stage": 3, "context_exchange": "ring"}, mixed),
    "a ring, joint projections": (
        "gpt2-still-shared",
        (1, 2, 1, 2),
        {"context_exchange": "ring"},
        uniform("host", "cpu", "offload"),
    ),
    "a ring, learned positions": (
        "opt-still-shared",
        (1, 2, 1, 2),
        {"context_exchange": "ring"},
        uniform("host", "cpu", "recompute"),
    ),
    "loss in tiles": ("llama-tied-shared", (1, 2, 1, 2), {"zero_stage": 3, "loss_tile_tokens": 5}, mixed),
}


@pytest.mark.part(12)
@pytest.mark.parametrize(("family", "degrees", "further", "choose"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_has_the_gradients_of_whole_sequences(processes, family, degrees, further, choose, dtype):
    check_one_step(processes, family, dtype, choose, degrees, **further)


@pytest.mark.part(0)
@pytest.mark.parametrize(("family", "count", "stages", "degrees", "choose"), ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eight_ranks_train_as_one(eight_processes, family, count, stages, degrees, choose, dtype):
    assert (found := compared(eight_processes, family, count, stages, degrees, choose, dtype)).is_same, found


@pytest.mark.part(0)
def test_norms_are_added_up_in_any_order(eight_processes):
    """Four ranks have parts of the last norm, which is a unit of its own, and tensor-parallel ranks the same ones."""
    task = Task("llama-tied-shared", torch.float32, num_micro_batches=2)
    decisions = decide(task, uniform("gpu", "gpu"), tensor_parallel=2, data_parallel=4, zero_stage=2)
    losses, _ = reference(task, decisions.num_readers, decisions)
    for rank, (seen, _) in enumerate(eight_processes.call(8, trained, task, decisions)):
        assert seen == pytest.approx(losses[rank // 2], rel=1e-3)


WAYS = {
    "kept": ("llama-shared", (1, 2), None, uniform("gpu", "gpu")),
    "moved, recomputed": ("llama-shared", (1, 4), None, uniform("host", "cpu", "recompute")),
    "beside tensors": ("llama-shared", (2, 2), None, uniform("gpu", "gpu")),
    "a ring": ("llama-shared", (1, 4), "ring", uniform("host", "cpu", "recompute")),
    "a ring with learned positions": ("opt-still-shared", (1, 2), "ring", uniform("gpu", "gpu", "offload")),
}


@pytest.mark.part(3)
@pytest.mark.parametrize(("family", "degrees", "exchange", "choose"), WAYS.values(), ids=WAYS)
def test_masks_positions_and_losses_are_those_of_whole_sequences(processes, family, degrees, exchange, choose):
    tensor, context = degrees
    task = Task(family, torch.float32, max_norm=None, schedule=False, optimizer="sgd-plain")
    decisions = decide(
        task,
        choose,
        tensor_parallel=tensor,
        data_parallel=context,
        context_parallel=context,
        context_exchange=exchange,
        zero_stage=3,
    )
    for found in processes.call(tensor * context, off_by, task, decisions):
        assert {name: off for name, off in found.items() if off > 5e-4} == {}


@pytest.mark.parametrize(
    ("attention", "num_tokens", "message"),
    [
        ("sdpa", 6, "cannot share sequences of 6 tokens equally; pad them to a multiple of 4"),
        ("eager", 8, "does not call scaled_dot_product_attention, so keys cannot pass from rank to rank"),
    ],
)
def test_what_cannot_go_round_a_ring_is_refused(processes, attention, num_tokens, message):
    task = Task("llama-shared", torch.float32)
    decisions = decide(task, uniform("gpu", "gpu"), data_parallel=2, context_parallel=2, context_exchange="ring")
    processes.begin(2, attended, task, decisions, attention, num_tokens)
    assert all(message in str(error) for error in processes.results(2))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("odd", "cannot share sequences of 7 tokens equally; pad them to a multiple of 2"),
        ("other", "rank 1 has another batch than rank 0"),
        ("function", "would not pass gradients on; give it their values"),
        ("outputs", "output_hidden_states is True, but ranks share sequences"),
        ("second order", "gradients of gradients"),
    ],
)
def test_what_ranks_cannot_share_is_refused(processes, kind, message):
    task = Task("llama-shared", torch.float32)
    decisions = decide(task, uniform("gpu", "gpu"), data_parallel=2, context_parallel=2)
    processes.begin(2, wrong_batches, task, decisions, kind)
    assert all(message in str(error) for error in processes.results(2))


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("family", "ranks", "exchange", "activations"),
    [
        ("llama-shared", 2, None, "keep"),
        ("llama-shared", 4, None, "recompute"),
        ("gpt2-still-shared", 2, None, "keep"),
        ("gpt2-still-shared", 2, None, "offload"),
        ("llama-shared", 2, "ring", "offload"),
        ("llama-shared", 4, "ring", "keep"),
        ("gpt2-still-shared", 2, "ring", "keep"),
        ("gpt2-still-shared", 2, "ring", "recompute"),
    ],
)
def test_what_is_exchanged_and_saved_is_what_is_planned(processes, family, ranks, exchange, activations):
    task = Task(family, torch.bfloat16, max_norm=None)
    decisions = decide(
        task,
        uniform("gpu", "gpu", activations),
        data_parallel=ranks,
        context_parallel=ranks,
        context_exchange=exchange,
    )
    planned, gathered = 0, 0
    units = units_of(task, decisions)
    for unit in units:
        again = {"keep": (), "recompute": unit.recompute, "offload": unit.remake}[
            decisions.units[unit.name].activations
        ]
        sizes = [k.num_bytes * k.count for k in (*unit.forward, *unit.backward, *again) if isinstance(k, Collective)]
        if unit.name == "head":
            gathered = sum(sizes)
        else:
            planned += sum(sizes)
    saved = [sum(unit.saved_bytes for unit in segment) for segment in segments(units)[1:-1]]
    for sent, of_layers in processes.call(ranks, exchanged, task, decisions):
        assert sent["all_to_all"] == planned
        assert sent["all_gather"] + sent["reduce_scatter"] == gathered
        if activations == "keep":
            # The first layer is also the first to save the rotary factors, which all layers share.
            assert of_layers[1:] == pytest.approx(saved[1:], rel=1e-9)
