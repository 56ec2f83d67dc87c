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


def test_a_size_may_be_a_text() -> None:
    plans = [
        ullage.plan("opt-1.3b", hardware="a100-80", engines=False, max_simulations=1, device_memory=size)
        for size in ("30GiB", 30 << 30)
    ]
    assert plans[0] == plans[1]


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
        ("opt-13b", {"sequence_length": 5}, "plan() has no option sequence_length; use one of batches, clip, "),
        ("opt-13b", {"device_memory": "16 apples"}, "device_memory: '16 apples' is not a size; give bytes with an "),
        ("opt-13b", {"micro_batch": "4"}, "micro_batch is '4', but must be a whole number of at least 1"),
        ("opt-13b", {"storage": "disk"}, "storage is 'disk', but must be one of never, activations, nvme"),
        ("opt-13b", {"micro_batch": 0}, "micro_batch is 0, but must be a whole number of at least 1"),
        ("opt-13b", {"micro_batch": 1.5}, "micro_batch is 1.5, but must be a whole number of at least 1"),
        ("opt-13b", {"gpus": 0}, "num_devices is 0, but must be a whole number of at least 1"),
        ("opt-13b", {"gpus": "2"}, "num_devices is '2', but must be a whole number of at least 1"),
        ("opt-13b", {"seq_len": 10**7}, "sequence length 10000000 exceeds the 2048 positions that opt-13b has learned"),
        ("opt-13b", {"optimizer": "adamx"}, "optimizer is 'adamx', but must be one of adamw, "),
        ("opt-13b", {"precision": "fp8"}, "precision is 'fp8', which cannot be planned; give one of bf16, fp32"),
        ("opt-13b", {"hardware": 5}, "the hardware is int; give the name of a profile, or the path of its file"),
        ("opt-13b", {"budget_s": "x"}, "budget_s is 'x', but must be a number of seconds above 0"),
        ("opt-13b", {"budget_s": -1}, "budget_s is -1, but must be a number of seconds above 0"),
        ("opt-13b", {"lora": 16}, 'lora is 16, but must be a text, as in "rank=16,targets=q_proj+v_proj"'),
        ("opt-13b", {"lora": "16"}, "'16' is no LoRA: '16' is not understood; give rank=N"),
        (
            "opt-13b",
            {"quantize": "nf4"},
            "--quantize nf4 is for frozen weights, but without --lora all weights",
        ),
        ("opt-13b", {"batches": "ragged"}, "batches is 'ragged', but must be one of whole, masked"),
        ("", {}, "no model or file is called ''; a path to a config.json works too"),
        (Path(__file__).parent, {}, "has no config.json; give a folder that save_pretrained() wrote"),
        (
            Path(__file__),
            {},
            "is not JSON (Extra data: line 1 column 3 (char 2)); give a Hugging Face config.json",
        ),
        (None, {}, "the model is NoneType; give a name, the path of a config.json, sizes, a request, or what"),
        (7, {}, "the model is int; give a name, the path of a config.json"),
    ],
)
def test_what_is_refused(model: object, options: dict[str, object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)) as refused:
        ullage.plan(model, **options)
    assert "\n" not in str(refused.value)


def test_a_request_stands_for_all() -> None:
    request = ullage.Request(ullage.resolve_model("opt-125m"), ullage.load_profile("h100"))
    with pytest.raises(ValueError, match="gpus, seq_len cannot be combined with a Request; put them into the request"):
        ullage.plan(request, gpus=2, seq_len=5)
