"""Training on several ranks against the same training in one process, and what happens if a rank fails."""

import pytest
import torch
from plans import mixed
from together import Processes, reference, trained
from training import Task, decide, uniform


@pytest.fixture(scope="module")
def processes():
    pool = Processes(4)
    yield pool
    pool.close()


def assert_same_bits(results, expected):
    losses, weights = expected
    for rank, (seen, final) in enumerate(results):
        assert seen == losses[rank], rank
        different = [n for n, w in weights.items() if final[n].tobytes() != w.view(torch.uint8).numpy().tobytes()]
        assert not different, (rank, different)


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


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("zero_stage", "choose"), STAGES.values(), ids=STAGES)
def test_two_ranks_give_the_bits_of_one_process(processes, zero_stage, choose, num_micro_batches):
    """A sum of two has one order, so that nothing is left to chance."""
    turn = zero_stage + num_micro_batches
    task = Task(["gpt2", "llama"][turn % 2], [torch.bfloat16, torch.float32][turn // 2 % 2], num_micro_batches)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, trained, task, decisions), reference(task, 2, decisions))
