"""Ranks that share the tokens of every sequence, against the whole model in the memory of one process."""

import pytest
import torch
from plans import mixed
from rank_programs import trained
from rounding import assert_same_step, one_step
from training import decide, uniform

# tensor, data, expert and context ranks
SHARED = {
    "2 ranks": ("llama-shared", (1, 2, 1, 2), {"zero_stage": 0}, uniform("gpu", "gpu")),
    "4 ranks, more than heads of keys": ("llama-shared", (1, 4, 1, 4), {"zero_stage": 3}, mixed),
    "beside replicas": ("qwen3-shared", (1, 4, 1, 2), {"zero_stage": 2}, uniform("gpu", "stream", "recompute")),
    "beside tensors": ("qwen2-shared", (2, 2, 1, 2), {"zero_stage": 3}, mixed),
    "beside experts": ("mixtral-shared", (1, 2, 2, 2), {"zero_stage": 3}, mixed),
    "joint projections": ("gpt2-still-shared", (1, 2, 1, 2), {"zero_stage": 3}, mixed),
    "learned positions": ("opt-still-shared", (1, 2, 1, 2), {"zero_stage": 3}, uniform("host", "cpu", "offload")),
    "loss in tiles": ("llama-tied-shared", (1, 2, 1, 2), {"zero_stage": 3, "loss_tile_tokens": 5}, mixed),
}


@pytest.mark.parametrize(("family", "degrees", "further", "choose"), SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_has_the_gradients_of_whole_sequences(processes, family, degrees, further, choose, dtype):
    tensor, data, expert, context = degrees
    task = one_step(family, dtype)
    decisions = decide(
        task,
        choose,
        tensor_parallel=tensor,
        data_parallel=data,
        expert_parallel=expert,
        context_parallel=context,
        **further,
    )
    results = processes.call(tensor * data, trained, task, decisions)
    assert_same_step(task, decisions, results, num_parts=tensor * data)
