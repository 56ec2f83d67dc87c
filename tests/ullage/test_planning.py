"""``ullage.plan`` takes what the command line takes, and finds the same."""

import re
from pathlib import Path

import pytest

import ullage
from ullage.main import main


def from_command(folder: Path, *arguments: str) -> ullage.Plan:
    assert main(["plan", *arguments, "--output", str(folder / "plan.json"), "--json"]) == 0
    return ullage.load_plan(folder / "plan.json")


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--model", "opt-125m"), {}),
        (
            ("--model", "opt-125m", "--hardware", "epyc-turin-2c", "--seq-len", "256"),
            {"hardware": "epyc-turin-2c", "seq_len": 256},
        ),
        (
            ("--model", "opt-125m", "--gpus", "2", "--hardware", "h100", "--precision", "fp32", "--micro-batch", "1"),
            {"gpus": 2, "hardware": "h100", "precision": "fp32", "micro_batch": 1},
        ),
    ],
)
def test_plans_are_those_of_the_command(arguments: tuple[str, ...], options: dict[str, object], tmp_path: Path) -> None:
    assert ullage.plan("opt-125m", **options) == from_command(tmp_path, *arguments)


def test_a_path_and_a_profile_will_do(tiny_model: Path) -> None:
    machine = ullage.load_profile("rtx-4090")
    plan = ullage.plan(tiny_model, hardware=machine)
    assert plan.seq_len == 128  # as long as the model can
    assert plan.hardware == machine
    again = ullage.plan(ullage.Request(plan.model, machine, seq_len=128))
    assert again.constraints == plan.constraints


def test_a_captured_model_brings_its_sizes_and_type() -> None:
    torch = pytest.importorskip("torch")
    captured = ullage.capture_module(lambda: torch.nn.Linear(8, 8), ["4x8"], dtype="fp32", as_on_gpu=False)
    plan = ullage.plan(captured, hardware="epyc-turin-2c")
    assert plan.decisions.precision.weights == "fp32"
    assert plan.decisions.micro_batch == 4


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("opt-13c", {}, "no model or file is called 'opt-13c'; did you mean opt-13b"),
        ("opt-13b", {"hardware": "a100-8"}, "a100-80"),
        ("opt-13b", {"sequence_length": 5}, "plan() has no option sequence_length; use one of clip, expert_load"),
        ("opt-13b", {"micro_batch": "4"}, "micro_batch is '4', but must be a whole number of at least 1"),
        ("opt-13b", {"storage": "disk"}, "storage is 'disk', but must be one of never, activations, nvme"),
        ("opt-13b", {"micro_batch": 0}, "micro_batch is 0, but must be a whole number of at least 1"),
    ],
)
def test_what_is_refused(model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ullage.plan(model, **options)


def test_a_request_stands_for_all() -> None:
    request = ullage.Request(ullage.resolve_model("opt-125m"), ullage.load_profile("h100"))
    with pytest.raises(ValueError, match="gpus, seq_len cannot be combined with a Request; put them into the request"):
        ullage.plan(request, gpus=2, seq_len=5)
