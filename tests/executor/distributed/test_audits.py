"""Audits of modules that ranks divide: each rank runs them whole, and compares its part."""

import pytest
import torch
from plans import mixed
from rank_programs import audited
from training import Task, decide, uniform

DEGREES = {
    "zero 3": ("llama", {"data_parallel": 2, "zero_stage": 3}),
    "in backward": ("llama", {"data_parallel": 2, "zero_stage": 2, "update_start": "backward"}),
    "tensor": ("llama-shared", {"tensor_parallel": 2}),
    "with dropout": ("gpt2-shared", {"tensor_parallel": 2}),
    "expert": ("mixtral", {"data_parallel": 2, "expert_parallel": 2, "zero_stage": 3}),
    "expert units": ("mixtral", {"data_parallel": 2, "expert_parallel": 2, "expert_units": 2}),
}


def found(processes, family, degrees, spoilt=""):
    task = Task(family, torch.float32, 2, iterations=1, max_norm=None if "update_start" in degrees else 1.0)
    choose = uniform("gpu", "stream") if degrees.get("zero_stage") == 2 else mixed
    return processes.call(2, audited, task, decide(task, choose, **degrees), spoilt)


@pytest.mark.part(3)
@pytest.mark.parametrize(("family", "degrees"), DEGREES.values(), ids=DEGREES)
def test_modules_that_ranks_divide_are_audited(processes, family, degrees):
    draws = {"ranks divide it, and draw other random numbers"} if family == "gpt2-shared" else set()
    for kinds, left_out, difference in found(processes, family, degrees):
        assert not difference
        assert len(kinds) >= 4
        assert set(left_out.values()) == draws


@pytest.mark.parametrize(("case", "name"), [("tensor", "layers.1.mlp.up_proj"), ("expert", "1.mlp.experts.down_proj")])
def test_a_wrong_gradient_of_a_divided_module_is_found(processes, case, name):
    assert all(name in difference for _, _, difference in found(processes, *DEGREES[case], name))
