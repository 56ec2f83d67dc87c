"""``ullage plan --model package.module:function`` as a user runs it, in a folder with a package of their own."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.models.captured import CapturedInput, CapturedModel
from planner.plan.document import load_plan
from planner.plan.planning import make_plan
from ullage.capture import capture_module
from ullage.cli.arguments import input_shape
from ullage.main import main

SOURCE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.mlp(x)


def make():
    return nn.Sequential(nn.Linear(8, 64), nn.Sequential(*(Block() for _ in range(4))), nn.Linear(64, 2))


class Chooses(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(x)
        return y if y.sum() > 0 else -y


def chooses():
    return nn.Sequential(Chooses())


def recurrent():
    return nn.LSTM(8, 8)


def of_integers():
    model = nn.Linear(8, 8)
    model.bias = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
    return model


def no_parameters():
    return nn.ReLU()


def no_module():
    return 7


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).detach()


def detached():
    return Detached()


def needs(size):
    return nn.Linear(size, size)


NUMBER = 7
"""
SHAPE = ["--input-shape", "16x8"]
MACHINE = ["--hardware", "epyc-turin-2c", "--precision", "fp32"]  # no budget in seconds: plans depend on no clock


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package that can be imported from the current directory alone; its name is new for each test."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "models.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return f"{name}.models"


def test_a_plan_stands_alone(package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is verified and simulated where there is neither PyTorch nor the user's package."""
    assert main(["plan", "--model", f"{package}:make", *SHAPE, *MACHINE]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "captured, 4 repeated blocks" in shown
    assert "the loss is the mean of the first floating output" in shown
    plan = load_plan(tmp_path / "plan.json")
    assert isinstance(plan.model, CapturedModel)
    assert f"{plan.model.num_params:,} parameters" in shown
    assert len(plan.model.blocks) == 3
    (tmp_path / "elsewhere").mkdir()
    program = "import sys; sys.modules['torch'] = None; from ullage.main import main; sys.exit(main())"
    for command in ("verify", "simulate"):
        arguments = [sys.executable, "-c", program, command, "../plan.json", "--json"]
        done = subprocess.run(arguments, cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == f"{package}:make"


def test_the_same_capture_gives_the_same_bytes(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = []
    for _ in range(2):
        assert main(["plan", "--model", f"{package}:make", *SHAPE, *MACHINE, "--json"]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]


def test_a_plan_is_executed(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{package}:make", *SHAPE, *MACHINE, "--memory", "device=1.5MB"]) == 0
    capsys.readouterr()
    run = ["execute", "plan.json", "--iterations", "8", "--json"]
    assert main(run) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["losses"][-1] < printed["losses"][0]
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.15)
    assert main([*run, "--data", __file__]) == 2
    assert "trained on one random batch" in capsys.readouterr().err


def test_a_plan_whose_module_is_gone_or_another_is_not_executed(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", f"{package}:make", *SHAPE, *MACHINE]) == 0
    source = tmp_path / package.split(".", maxsplit=1)[0] / "models.py"
    changes = {"nn.Linear(64, 2)": "nn.Linear(64, 300)", "def make(": "def other("}
    messages = ("plan this model again", "has no function make")
    for (before, after), message in zip(changes.items(), messages, strict=True):
        source.write_text(SOURCE.replace(before, after), encoding="utf-8")
        sys.modules.pop(package, None)
        importlib.invalidate_caches()
        capsys.readouterr()
        assert main(["execute", "plan.json", "--iterations", "6"]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_another_engine_is_simulated(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", f"{package}:make", *SHAPE, "--json"]) == 0
    capsys.readouterr()
    assert main(["simulate", "plan.json", "--engine", "zero-offload", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == f"{package}:make"


REFUSED = {
    "of_integers": (SHAPE, "parameter bias has type torch.int8, but must be floating-point"),
    "no_parameters": (SHAPE, "has no parameters"),
    "no_module": (SHAPE, "returned a int, not an nn.Module"),
    "detached": (SHAPE, "no tensor with a gradient"),
    "needs": (SHAPE, "missing 1 required positional argument: 'size'"),
    "absent": (SHAPE, "has no function absent"),
    "NUMBER": (SHAPE, "has no function NUMBER"),
    "make": ([], "needs the shapes of its inputs; give --input-shape"),
    "make ": (["--input-shape", "16x9"], "make it run with these inputs first"),
    "make  ": (
        ["--input-shape", "16x8", "4x8", "--micro-batch", "8"],
        "the inputs 16x8:float 4x8:float have no common leading dimension, so the batch is taken as it is; leave its",
    ),
    "make   ": ([*SHAPE, "--seq-len", "7"], "is not a sequence of tokens; leave --seq-len out"),
    "make    ": ([*SHAPE, "--parallel", "tensor=2", "--gpus", "2"], "was captured whole"),
    "make     ": (["--input-shape", "x=16x8", "16x8"], "change the order of --input-shape"),
    "make      ": (["--input-shape", "16x0"], "'16x0' is not an input"),
    "make       ": (
        ["--input-shape", "16x8:int64"],
        "in module 0: aten.addmm(bfloat16[64], int64[16, 8], bfloat16[8, 64]) does not run",
    ),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_cannot_be_captured_is_refused_in_one_line(
    package: str, function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = REFUSED[function]
    assert main(["plan", "--model", f"{package}:{function.strip()}", *arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert (out, err.count("\n")) == ("", 1)


ASSUMED = {
    "chooses": (SHAPE, "forward needs values that are computed (models.py, line "),
    "recurrent": (["--input-shape", "4x2x8", "--precision", "fp32"], "by the bytes that they move: aten.mkldnn_rnn"),
}


@pytest.mark.parametrize("function", ASSUMED)
def test_a_plan_says_what_its_capture_assumes(package: str, function: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = ASSUMED[function]
    assert main(["plan", "--model", f"{package}:{function}", *arguments, *MACHINE]) == 0
    assert f"warning: {message}" in capsys.readouterr().out.replace("operators without a known cost are priced ", "")


def test_an_unknown_module_and_shapes_for_a_known_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "no_such_package.models:make", *SHAPE]) == 2
    assert "there is no module no_such_package" in capsys.readouterr().err
    assert main(["plan", "--model", "gpt2", *SHAPE]) == 2
    assert "--model gpt2 names no function" in capsys.readouterr().err


@given(
    st.builds(
        CapturedInput,
        name=st.from_regex(r"([A-Za-z_][A-Za-z0-9_]{0,9})?", fullmatch=True),
        shape=st.lists(st.integers(1, 10**9 - 1), min_size=1, max_size=5).map(tuple),
        dtype=st.sampled_from(["float", "int64", "int32", "bool"]),
    )
)
def test_an_input_is_read_as_it_is_written(spec: CapturedInput) -> None:
    assert input_shape(str(spec)) == spec


@pytest.mark.parametrize("captured", [True, False])
def test_a_captured_block_that_is_missing_is_noticed(captured: bool, package: str, tmp_path: Path) -> None:
    assert main(["plan", "--model", f"{package}:make", *SHAPE, *MACHINE]) == 0
    plan = load_plan(tmp_path / "plan.json")
    assert isinstance(plan.model, CapturedModel)
    if captured:
        plan = plan.model_copy(update={"model": plan.model.model_copy(update={"blocks": plan.model.blocks[:1]})})
        with pytest.raises(ValueError, match="has block 1, but there are 1; capture the model again"):
            plan.units()
    else:
        changed = plan.decisions.model_copy(update={"micro_batch": 3})
        with pytest.raises(ValueError, match=r"was captured for micro-batch (\d+), not 3; ask for micro_batch=\1,"):
            plan.model_copy(update={"decisions": changed}).units()


def test_capturing_in_another_precision_is_reported_with_its_remedy() -> None:
    captured = capture_module(lambda: torch.nn.Linear(4, 4), ["8x4"])  # in bf16
    wanted = Request(captured, load_profile("epyc-turin-2c"), seq_len=1, micro_batch=8, precision=FP32)
    with pytest.raises(
        ValueError, match='bytes per value 2, not 4; capture it again with dtype="fp32", or ask'
    ) as caught:
        make_plan(wanted)
    assert "micro_batch" not in str(caught.value)
    with pytest.raises(
        ValueError, match="tokens per sequence 1, not 7 and bytes per value 2, not 4; ask for seq_len=1"
    ):
        make_plan(dataclasses.replace(wanted, seq_len=7))
