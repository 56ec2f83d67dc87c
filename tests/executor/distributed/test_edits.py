"""Several ranks that write weights, or read and change gradients between backward and step, as DDP has it."""

import itertools
import re

import pytest
import torch
from edits import EDITS
from plans import mixed
from rank_failures import edited_alone
from rank_programs import edited, with_two_optimizers
from training import Task, decide, uniform

from executor.distributed.watchdog import RankError
from executor.gradients import GradientError

TASK = Task("gpt2-untied", torch.float32, max_norm=None, iterations=3, schedule=False)
PLANS = {"0": (0, mixed), "2": (2, uniform("gpu", "cpu", "recompute")), "3": (3, mixed)}


@pytest.mark.part(20)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", EDITS)
def test_two_ranks_do_what_they_do_in_memory(processes, name, plan):
    zero_stage, choose = PLANS[plan]
    decisions = decide(TASK, choose, data_parallel=2, zero_stage=zero_stage, clip=True)
    for found, expected, off in processes.call(2, edited, TASK, decisions, name):
        if name in {"read_between", "sharpness_aware"}:  # in memory, a mean is found as a difference
            assert list(itertools.chain(*found)) == pytest.approx(list(itertools.chain(*expected)), rel=1e-4)
            assert off < 1e-4
        else:
            assert found == expected
            assert off == 0


@pytest.mark.part(2)
@pytest.mark.parametrize("plan", PLANS)
def test_a_second_optimizer_gets_the_mean_of_gradients_whenever_it_steps(processes, plan):
    zero_stage, choose = PLANS[plan]
    task = Task("gpt2-untied", torch.float32, iterations=4, schedule=False)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage, clip=True)
    for found, expected, off in processes.call(2, with_two_optimizers, task, decisions):
        assert found == pytest.approx(expected, rel=1e-5)
        assert off < 1e-6


@pytest.mark.part(6)
@pytest.mark.parametrize("degrees", [{"tensor_parallel": 2}, {"data_parallel": 2, "expert_parallel": 2}], ids=str)
@pytest.mark.parametrize("name", ["rows", "penalty", "writes", "state_writes", "another_optimizer"])
def test_ranks_that_share_layers_or_experts_refuse_it(processes, name, degrees):
    """Their parameters have other shapes than in memory."""
    task = Task("mixtral-shared", torch.float32, max_norm=None, iterations=3, schedule=False)
    decisions = decide(task, mixed, **degrees, clip=True)
    processes.begin(2, edited, task, decisions, name)
    errors, why = processes.results(2), "share layers or experts|ranks hold parts of it"
    for error in errors:  # one rank may hear of the other's first
        assert isinstance(error, (ValueError, GradientError, RankError)), error
        assert re.search(f"{why}|its session has failed", str(error)), error
    assert any(re.search(why, str(error)) for error in errors)


ALONE = {
    "another write": (ValueError, "rank 1 has another new value of transformer.wte.weight than rank 0; give the same"),
    "another gradient": (ValueError, "rank 1 has another new value of the gradient of transformer.wte.weight"),
    "a write to another": (RankError, "rank 0 is in a (write to|read of) transformer.wte.weight, and rank 1 in a "),
    "a write alone": (RankError, "and rank 1 in a (write to|read of) transformer.wte.weight"),
    "a read alone": (RankError, "and rank 1 in a read of transformer.wte.weight"),
    "another state": (ValueError, "rank 1 has another new value of the optimizer's state than rank 0"),
    "a state alone": (RankError, "and rank 1 in a write to the optimizer's state"),
    "clipping alone": (RankError, "rank 0 is in the audit of iteration 1, and rank 1 in clipping, or reading norms"),
    "an edit alone": (RankError, "and rank 1 in iteration 1, which left the plan"),
}


@pytest.mark.part(12)
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("deed", ALONE)
def test_what_one_rank_does_alone_is_reported(processes, deed, zero_stage):
    if (deed, zero_stage) in {("a read alone", 0), ("clipping alone", 0)}:
        pytest.skip("each rank has all weights, or gradients")
    kind, words = ALONE[deed]
    decisions = decide(TASK, uniform("host", "cpu"), data_parallel=2, zero_stage=zero_stage, clip=True)
    processes.begin(2, edited_alone, TASK, decisions, deed)
    for error in processes.results(2):
        assert isinstance(error, kind), error
        assert re.search(words, str(error)), error
