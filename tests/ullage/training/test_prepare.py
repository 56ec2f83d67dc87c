"""What ``ullage.prepare`` and training on text tell before, or at, the first step."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ullage
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.models import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from ullage.main import main
from ullage.training.batches import tokens_for


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.last(torch.relu(self.first(x))), labels)


@pytest.fixture(scope="module")
def plan() -> Plan:
    captured = ullage.capture_module(Net, ["8x16", "8:int64"], dtype="fp32", as_on_gpu=False)
    sizes = {"seq_len": captured.seq_len, "micro_batch": captured.micro_batch}
    machine = load_profile("epyc-turin-2c").with_device_memory(700_000)
    return make_plan(Request(captured, machine, precision=FP32, **sizes), max_simulations=5)


def small(vocab_size: int) -> Plan:
    changes = {"num_layers": 1, "vocab_size": vocab_size}
    model = resolve_model("demo-llama").model_copy(update=changes)
    hardware = load_profile("epyc-turin-2c").with_device_memory(60_000_000)
    return make_plan(Request(model, hardware, seq_len=32, precision=FP32), max_simulations=5)


def step(model, optimizer, size):
    model(torch.ones(size, 16), torch.zeros(size, dtype=torch.long)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_parameters_that_the_optimizer_lacks_or_has_frozen_are_named_because_they_cannot_be_trained_later(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    net = Net()
    with pytest.warns(RuntimeWarning, match=r"lacks 2 of the parameters that require gradients \(last.weight, ...\)"):
        _, optimizer = ullage.prepare(net, torch.optim.AdamW(net.first.parameters()), plan)
    optimizer.session.close()
    net.last.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, optimizer = ullage.prepare(net, torch.optim.AdamW(net.first.parameters()), plan)
    optimizer.session.close()
    assert "frozen" not in capsys.readouterr().err
    ullage.prepare(net, torch.optim.AdamW(net.parameters()), plan)[1].session.close()
    assert "the optimizer has 2 frozen parameters (last.weight, ...)" in capsys.readouterr().err


@pytest.mark.parametrize("drops", [False, True])
def test_a_step_adds_to_gradients_from_before(plan: Plan, drops: bool) -> None:
    net, same = Net(), Net()
    same.load_state_dict(net.state_dict())
    optimizer, plain = (torch.optim.AdamW(model.parameters(), eps=1e-4) for model in (net, same))
    labels = torch.zeros(8, dtype=torch.long)
    for model in (net, same):
        model(torch.ones(8, 16), labels).backward()
    net, optimizer = ullage.prepare(net, optimizer, plan)
    for model, own in ((net, optimizer), (same, plain)):
        if drops:
            own.zero_grad()
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), labels).backward()
        own.step()
    torch.testing.assert_close(dict(optimizer.session.full_parameters()), dict(same.named_parameters()))
    assert optimizer.session.num_left == (not drops)
    optimizer.session.close()


def test_a_replaced_step_and_replaced_groups_are_refused(plan: Plan) -> None:
    net = Net()
    given = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(given, 1)  # which wraps the step
    scheduled, given.step = given.step, lambda: None
    with pytest.raises(TypeError, match="the optimizer's step was replaced"):
        ullage.prepare(net, given, plan)
    given.step = scheduled
    given.note = 1
    net, optimizer = ullage.prepare(net, given, plan)
    optimizer.note += 1
    assert (given.note, optimizer.note) == (2, 2)
    step(net, optimizer, 8)
    scheduler.step()
    with pytest.raises(ValueError, match="param_groups"):
        optimizer.param_groups = [dict(optimizer.param_groups[0])]
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    with pytest.raises(ValueError, match="set values of the groups"):
        step(net, optimizer, 8)
    optimizer.session.close()


def test_a_batch_that_is_larger_than_planned_is_reported_once(plan: Plan) -> None:
    model, optimizer = ullage.prepare(net := Net(), torch.optim.AdamW(net.parameters()), plan)
    with optimizer.session:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer, 8)
            step(model, optimizer, 3)
            with torch.no_grad():  # nothing is kept of it
                model(torch.ones(9, 16), torch.zeros(9, dtype=torch.long))
        with pytest.warns(RuntimeWarning, match=r"input 1 is 9x16, but the plan is for 8x16.*plan for the largest"):
            step(model, optimizer, 9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer, 32)
    model, optimizer = ullage.prepare(net := Net(), torch.optim.AdamW(net.parameters()), plan)
    optimizer.session.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, torch.optim.SGD(model.parameters()), 32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_another_type_are_converted_with_a_word(plan: Plan, dtype: torch.dtype) -> None:
    net = Net().to(dtype)
    with pytest.warns(RuntimeWarning, match=f"weights are {dtype} and are converted to torch.float32.*--precision"):
        model, optimizer = ullage.prepare(net, torch.optim.AdamW(net.parameters()), plan)
    with optimizer.session:
        step(model, optimizer, 8)


def test_what_is_no_model_optimizer_or_plan_is_named(plan: Plan) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    for arguments, words in (
        ((5, optimizer, plan), r"the model is int; give a torch\.nn\.Module"),
        ((net, 1e-3, plan), r"the optimizer is float; give one of torch\.optim"),
        ((net, optimizer, "plan.json"), r"the third argument is str; give a plan .*load_plan"),
    ):
        with pytest.raises(TypeError, match=words):
            ullage.prepare(*arguments)
    ullage.prepare(net, optimizer, plan)[1].session.close()


def test_text_is_refused_before_training_if_the_model_knows_too_few_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, too_small = small(256), small(255)
    words = "one token per byte, 0 to 255, but the model knows tokens 0 to 254; give the tokens of its own tokenizer"
    assert tokens_for(known, {}) is not None
    np.save(tmp_path / "tokens.npy", np.arange(64, dtype=np.uint8))
    assert tokens_for(too_small, {"": tmp_path / "tokens.npy"}) is not None  # tokens of the user's are no text
    (tmp_path / "plan.json").write_text(json.dumps(json.loads(too_small.to_json())), encoding="utf-8")
    (tmp_path / "text").write_text("a" * 5000)
    for more in ([], ["--data", str(tmp_path / "text")]):
        out = ["--iterations", "6", "--output-dir", str(tmp_path / "out")]
        assert main(["execute", str(tmp_path / "plan.json"), *out, *more]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
