"""``--lora`` and ``--quantize``: planned by name, prepared around a model of one's own, executed and saved."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import ullage
from executor.packed import stored_parameters
from hwprofiles.profile import FOR_LIBRARIES_BYTES
from planner.models.adapters import Lora
from planner.models.captured import CapturedModel
from planner.models.quantization import Quantization
from planner.plan.document import Plan
from ullage.capture.adapters import make_adapted
from ullage.capture.architectures import architecture
from ullage.capture.quantized import quantization_config, quantize
from ullage.cli.options import QUANTIZATIONS
from ullage.cli.request import model_named
from ullage.main import main
from ullage.training.batches import Batches
from ullage.training.loop import train
from ullage.training.models import prepared
from ullage.training.text import read_text, sequences, windows

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "eos_token_id": 0,
}
LORA = "rank=4,targets=q_proj+down_proj"
MACHINE = ["--hardware", "epyc-turin-2c", "--precision", "fp32", "--memory", "device=1MB"]
BATCH = ["--seq-len", "32", "--micro-batch", "2"]
EITHER: tuple[Quantization | None, ...] = (None, "nf4", "int8")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def adapted(
    base: Path,
    quantization: Quantization | None = None,
    rank: int = 4,
    targets: list[str] | str = ["q_proj", "down_proj"],  # noqa: B006 - read only
    adapter: str = "default",
    **options: Any,
) -> nn.Module:
    """Return a user's own model of a base that is on the drive."""
    given = {} if quantization is None else {"quantization_config": quantization_config(quantization, torch.float32)}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, device_map="cpu", **given)
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=rank, target_modules=targets, **options), adapter_name=adapter)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model.train()


def planned(base: Path, quantization: Quantization | None = None, lora_option: str | None = LORA) -> Plan:
    machine = ullage.load_profile("epyc-turin-2c").with_device_memory(1_000_000)
    return ullage.plan(
        base / "config.json",
        hardware=machine,
        precision="fp32",
        seq_len=32,
        micro_batch=2,
        clip=False,
        lora=lora_option,
        quantize=quantization,
    )


def losses(model: nn.Module, optimizer: Any) -> Iterator[float]:
    for seed in range(4):
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.part(2)
@pytest.mark.parametrize("quantization", EITHER)
def test_the_plan_of_a_name_trains_a_model_of_peft_as_in_memory(base: Path, quantization: Quantization | None) -> None:
    model = adapted(base, quantization)
    expected = list(losses(model, adam(model)))
    plan = planned(base, quantization)
    assert any(decided.params != "gpu" or decided.activations != "keep" for decided in plan.decisions.units.values())
    model = adapted(base, quantization)
    model, optimizer = ullage.prepare(model, adam(model), plan)
    with optimizer.session:
        assert list(losses(model, optimizer)) == pytest.approx(expected, rel=1e-6)  # optimizers round otherwise


@pytest.mark.parametrize("quantization", EITHER)
@pytest.mark.parametrize("name", ["gpt2", "opt-125m"])
@pytest.mark.part(3)
def test_what_is_planned_by_name_is_what_peft_makes(name: str, quantization: Quantization | None) -> None:
    model = model_named(name, 64, 1, "bf16", lora=Lora(rank=8), quantization=quantization, as_on_gpu=True)
    assert isinstance(model, CapturedModel)
    with torch.device("meta"):
        made = architecture(name).make(torch.bfloat16)
        made = quantize(made, quantization) if quantization else made
        made = get_peft_model(made, LoraConfig(r=8, target_modules="all-linear"))
    specs = {spec.name: spec for operator in model.operators() for spec in operator.parameters}
    assert {n: (s.shape, s.is_trained) for n, s in specs.items()} == {
        n: (tuple(stored.shape), stored.parameter.requires_grad) for n, stored in stored_parameters(made).items()
    }
    assert model.num_trained == made.get_nb_trainable_parameters()[0]
    assert any(isinstance(spec.frozen, int) for spec in specs.values()) == bool(quantization)


@pytest.mark.part(2)
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_plan_is_executed_on_text_and_its_adapter_saved(
    base: Path, quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    lora_option = ["--lora", LORA, "--quantize", quantization or "none"]
    assert main(["plan", "--model", f"{base}/config.json", *lora_option, *BATCH, *MACHINE]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    num_trained = 3 * 4 * (64 + 64 + 128 + 64)
    assert f"{num_trained:,} of them trained" in shown
    run = ["execute", "plan.json", "--iterations", "8", "--lr", "1e-2", "--seed", "3", "--json"]
    assert main([*run, "--weights", str(base), "--save", "adapter"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["memory"]["gpu"]["error"] == pytest.approx(0, abs=0.03)
    found = json.loads(Path("adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert (found["r"], found["lora_alpha"], found["base_model_name_or_path"]) == (4, 4, str(base))
    assert found["task_type"] == "CAUSAL_LM"
    assert sorted(found["target_modules"]) == ["down_proj", "q_proj"]
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), "adapter")
    moved = [parameter for name, parameter in again.named_parameters() if "lora_B" in name]
    assert len(moved) == 6
    assert all(parameter.abs().max() > 0 for parameter in moved)


def test_a_run_goes_on_in_the_middle_to_the_same_adapter(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--model", f"{base}/config.json", "--lora", f"{LORA},dropout=0.1", *BATCH, *MACHINE]) == 0
    run = ["execute", "plan.json", "--iterations", "8", "--lr", "1e-2", "--seed", "3", "--weights", str(base)]
    saves = [*run, "--checkpoint-dir", "saved,every=6"]
    assert main([*saves, "--save", "whole"]) == 0
    shutil.rmtree("saved/step-00000008")
    assert main([*saves, "--resume", "--save", "resumed"]) == 0
    whole, resumed = (Path(folder, "adapter_model.safetensors").read_bytes() for folder in ("whole", "resumed"))
    assert whole == resumed


def test_the_base_of_an_executed_plan_has_its_weights(base: Path) -> None:
    """Adapters begin as zero, so that the first loss is the base's."""
    plan = planned(base)
    model, optimizer = prepared(plan, lr=1e-3, seed=0, weights=base, options={})
    with optimizer.session:
        step = next(train(model, optimizer, Batches(plan, read_text(None)), 0, 1))
    tokens = sequences(windows(read_text(None), plan.seq_len), 0, 2)
    model = AutoModelForCausalLM.from_pretrained(base)
    assert step.loss == pytest.approx(model(input_ids=tokens, labels=tokens).loss.item(), rel=1e-6)


@pytest.mark.part(6)
@pytest.mark.parametrize(
    ("lora_option", "quantization", "options", "message"),
    [
        (LORA, None, {"rank": 8}, "adapters have rank 8, but 4 in the plan; make the model with LoraConfig(r=4), or"),
        (LORA, None, {"rank": 8}, "plan with --lora rank=8,targets=down_proj+q_proj"),
        (LORA, None, {"targets": ["q_proj"]}, "the plan has LoRA adapters on down_proj, but the model has none there"),
        (
            LORA,
            None,
            {"targets": ["q_proj", "down_proj", "v_proj"]},
            "with the plan's LoraConfig(target_modules=['down_proj', 'q_proj']), or plan with --lora rank=4,",
        ),
        (LORA, None, {"adapter": "mine"}, "the model's adapter is named mine, but default in the plan; leave"),
        (LORA, None, {"use_dora": True}, "use_dora=True), but the plan with use_dora=False"),
        (LORA, None, {"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']), but the plan with []"),
        (LORA, None, {"quantization": "nf4"}, "is quantized, but not in the plan; plan with --quantize"),
        (
            LORA,
            "nf4",
            {},
            "is not quantized, and takes 16,384 bytes, but the plan has 2,144 bytes; quantize it as planned",
        ),
        (LORA, "nf4", {"quantization": "int8"}, "is quantized to 4,352 bytes, but the plan has 2,144"),
        (
            None,
            None,
            {},
            "the model has LoRA adapters of rank 4 on down_proj, q_proj, but the plan has none; plan with",
        ),
    ],
)
def test_a_model_that_does_not_match_is_refused_with_the_option_that_differs(
    base: Path, lora_option: str | None, quantization: Quantization | None, options: dict[str, Any], message: str
) -> None:
    model = adapted(base, **options)
    with pytest.raises(ullage.BindingError) as refused:
        ullage.prepare(model, adam(model), planned(base, quantization, lora_option))
    assert message in str(refused.value)


def test_a_model_without_adapters_is_refused(base: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(base)
    with pytest.raises(
        ullage.BindingError, match=r"the plan has LoRA adapters of rank 4 on down_proj, q_proj, but the"
    ):
        ullage.prepare(model, adam(model), planned(base))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--quantize", "nf4"],
            "--quantize nf4 is for frozen weights, but without --lora all weights are trained; give",
        ),
        (["--lora", "16"], "'16' is no LoRA: '16' is not understood; give rank=N"),
        (["--lora", "rank=4,targets="], "'rank=4,targets=' is no LoRA: targets: '' is no name of a module; give"),
        (
            ["--lora", "rank=4,targets=norm"],
            "config.json: LoRA rank=4,targets=norm: norm is a LlamaRMSNorm, but adapters are for projections and",
        ),
        (["--lora", "rank=4,targets=qproj"], "its projections are down_proj, gate_proj, k_proj, lm_head, o_proj"),
        (["--lora", "rank=4,targets=q_proj+vproj"], "it has no vproj; its projections are down_proj"),
        (
            ["--lora", "rank=4", "--gpus", "2", "--parallel", "tensor=2"],
            "was captured whole, so ranks cannot share its layers, as they share those of opt, gpt2, llama, ",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["plan", "--model", f"{base}/config.json", *BATCH, *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert not Path("plan.json").exists()


def spoil(path: Path, how: str) -> None:
    tensors = load_file(path)
    if how == "missing":
        del tensors["model.norm.weight"]
    elif how == "shape":
        tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", r"has no model\.norm\.weight, but the model has; give weights of this model$"),
        ("shape", r"model\.norm\.weight has shape \(3,\), but \(64,\) in the model; make the model"),
        ("cut", r"model\.safetensors is damaged, or is not a safetensors file .*; copy it again"),
    ],
)
def test_weights_of_a_quantized_base_are_checked_before_they_are_read(
    base: Path, tmp_path: Path, how: str, words: str
) -> None:
    folder = shutil.copytree(base, tmp_path / "base")
    spoil(folder / "model.safetensors", how)
    with pytest.raises(ValueError, match=words) as refused:
        make_adapted(architecture(folder), Lora(rank=4), "nf4", torch.float32, folder)
    assert "\n" not in str(refused.value)


def test_models_says_what_is_trained_and_what_is_frozen(base: Path, capsys: Any) -> None:
    words = ["models", f"{base}/config.json", "--lora", LORA]
    assert main([*words, "--json"]) == 0
    plain = AutoModelForCausalLM.from_pretrained(base)
    num_frozen = sum(p.numel() for p in plain.parameters())
    found = json.loads(capsys.readouterr().out)
    num_trained = sum(p.numel() for p in adapted(base).parameters() if p.requires_grad)
    assert found == {"num_trained": num_trained, "num_frozen": num_frozen, "frozen_bytes": 2 * num_frozen}
    assert main([*words, "--quantize", "nf4", "--json"]) == 0
    quantized = json.loads(capsys.readouterr().out)
    assert quantized == found | {"frozen_bytes": quantized["frozen_bytes"]}
    assert quantized["frozen_bytes"] < found["frozen_bytes"]
    assert main(words) == 0
    assert f"{num_trained:,}" in capsys.readouterr().out
    for wrong, message in (
        (["models", "--lora", LORA], "--lora and --quantize need a model; give its name too"),
        (["models", "gpt2", "--quantize", "nf4"], "--quantize nf4 is for frozen weights, but without --lora"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_a_function_returns_its_own_adapters(capsys: Any) -> None:
    assert main(["plan", "--model", "own.models:make", "--lora", "rank=4"]) == 2
    assert "--lora is for models of transformers, but --model own.models:make is a function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"quantize": "nf4"},
            "--quantize nf4 is for frozen weights, but without --lora all weights are trained",
        ),
        ({"lora": "rank=4", "quantize": "nf3"}, "quantize is 'nf3', but must be one of none, nf4, int8"),
    ],
)
def test_python_refuses_likewise(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ullage.plan("gpt2", **arguments)


def test_sizes_alone_have_no_adapters() -> None:
    with pytest.raises(ValueError, match=r"lora is for a name or a config.json, but the model is a ModelConfig"):
        ullage.plan(ullage.resolve_model("gpt2"), lora="rank=4")


def test_studies_vary_adapters_and_quantization(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    model = [
        "--model",
        f"{base}/config.json",
        *BATCH,
        "--hardware",
        "rtx-4090",
        "--memory",
        "device=" + str(FOR_LIBRARIES_BYTES + 8_000_000),
    ]
    sweeps = ["--sweep", "lora=none,rank=2,rank=4,targets=q_proj", "--sweep", "quantize=none,nf4"]
    assert main(["whatif", *model, *sweeps, "--workers", "1", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    found = {(p["settings"]["lora"], p["settings"]["quantize"]): p["result"] for p in points}
    assert list(found) == [
        (lora, kind) for lora in ("none", "rank=2", "rank=4,targets=q_proj") for kind in ("none", "nf4")
    ]
    assert found.pop(("none", "nf4"))["status"] == "refused"
    assert {result["status"] for result in found.values()} == {"fits"}
    peaks = {key: result["figures"]["memory"]["gpu"]["peak_bytes"] for key, result in found.items()}
    assert len(set(peaks.values())) == len(peaks)


def test_the_command_line_knows_all_quantizations() -> None:
    assert get_args(Quantization) == QUANTIZATIONS


def test_adapters_of_parameters_train_as_in_memory_and_their_base_moves(base: Path) -> None:
    """Two of one module, and one that dropout of its own precedes: each forward of ``peft`` makes them anew."""
    targets = ["q_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"]
    ids = torch.arange(64).view(2, 32)

    def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        losses = []
        for _ in range(4):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = adapted(base, targets=[], target_parameters=targets)
        return model, torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=0.01)

    plain, theirs = made()
    expected = losses_of(plain, theirs)
    model, optimizer = made()
    batch = {"input_ids": ids, "labels": ids}
    model, ours = ullage.prepare(model, optimizer, batch, hardware="epyc-turin-2c", device_memory=1_000_000)
    with ours.session:
        assert any(unit.params == "host" for unit in ours.plan.decisions.units.values())
        assert losses_of(model, ours) == expected
        assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())
    assert model(**batch).loss.item() == plain(**batch).loss.item(), "as peft does it again"
    assert not any("_activate_lora" in vars(module) for module in model.modules())
