"""Packaged models that are captured, and models in the hub's cache."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ullage
from planner.models.config import ModelConfigError, NoFormulasError, UnknownModelError
from planner.models.formulas.work import attention_scratch_bytes
from planner.models.kernels import Attention
from planner.models.registry import captured_preset, configuration, list_models, models_with_formulas, resolve_model
from ullage.capture.architectures import architecture
from ullage.main import main

CAPTURED = [name for name in list_models() if name not in models_with_formulas()]


@pytest.mark.part(10)
@pytest.mark.parametrize("name", CAPTURED)
def test_packaged_models_have_the_parameters_that_they_say(name: str) -> None:
    found = captured_preset(name)
    assert found is not None
    with torch.device("meta"):
        assert found[0] == sum(p.numel() for p in architecture(name).make().parameters()) == list_models()[name]
    with pytest.raises(NoFormulasError, match="plan it, which captures"):
        resolve_model(name)
    assert configuration(name.upper()) == found[1]


@pytest.mark.parametrize(
    ("name", "num_params"),
    [
        ("google/gemma-3-4b-it", 4_300_079_472),
        ("microsoft/phi-4", 14_659_507_200),
        ("allenai/OLMo-2-0325-32B", 32_234_279_936),
        ("openai/gpt-oss-20b", 20_914_757_184),
        ("openai/gpt-oss-120b", 116_829_156_672),
        ("Qwen/Qwen2.5-VL-7B-Instruct", 8_292_166_656),
        ("llava-hf/llava-1.5-7b-hf", 7_063_427_072),
        ("openai/whisper-large-v3", 1_543_490_560),
    ],
)
def test_packaged_models_have_the_published_size(name: str, num_params: int) -> None:
    found = captured_preset(name)
    assert found is not None
    assert found[0] == num_params


def test_a_packaged_model_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "openai/gpt-oss-20b"]) == 0
    assert "20,914,757,184" in capsys.readouterr().out
    assert main(["models", "gpt-oss-20b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_local_experts"] == 32
    assert main(["models"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("deepseek-v3 "))
    assert row.split()[2:] == ["config.json", "of", "deepseek-ai/DeepSeek-V3"]


def test_every_packaged_model_has_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: entry["num_params"] for name, entry in found.items()} == list_models()
    sources = {name: entry["source"] for name, entry in found.items() if name != "demo-llama"}
    assert all(re.fullmatch(r"config\.json of \S+/\S+|.*arXiv:\d{4}\.\d{5}.*", text) for text in sources.values())


def test_a_configuration_without_formulas_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neox", "intermediate_size": 8, **sizes}))
    assert main(["models", str(tmp_path / "config.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model_type"] == "gpt_neox"
    assert found["source"] == str(tmp_path / "config.json")
    assert found["num_params"] == 2 * 8 * 8 + 8 * 24 + 24 + 8 * 8 + 8 + 2 * (8 * 8 + 8) + 6 * 8


def cached(home: Path, name: str, config: object) -> None:
    """Write a hub's cache as ``huggingface_hub`` lays it out."""
    model = home / "hub" / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0a1b", encoding="utf-8")
    (model / "snapshots" / "0a1b").mkdir(parents=True)
    (model / "snapshots" / "0a1b" / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_hub_id_on_this_machine_names_a_model(tmp_path: Path) -> None:
    """In a process of its own, as the hub's library reads HF_HOME once."""
    sizes = configuration("qwen2.5-0.5b")
    cached(tmp_path, "someone/small", sizes | {"num_hidden_layers": 2})
    cached(tmp_path, "someone/other", captured_preset("gemma-2-2b")[1] | {"num_hidden_layers": 2})
    program = """
from planner.models.registry import configuration, resolve_model
print(resolve_model("someone/small").name, resolve_model("someone/small").num_layers)
print(configuration("someone/other")["num_hidden_layers"])
for name in ("someone/absent", "someone/../x"):
    try:
        resolve_model(name)
    except ValueError as error:
        print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["small", "2", "2", "UnknownModelError", "UnknownModelError"]


def test_what_names_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="did you mean gemma-2-9b"):
        resolve_model("gemma-2-9")
    with pytest.raises(UnknownModelError, match="the hub id of a model that is on this machine"):
        configuration("someone/absent")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelConfigError, match="holds a list, not an object"):
        configuration(str(tmp_path))


class Attends(torch.nn.Module):
    """Four heads of 16 values, of which two share a key."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 64 + 2 * 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, 16)).transpose(1, 2) for part in self.project(x).split([64, 32, 32], -1)
        )
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=True, enable_gqa=True).sum()


def test_captured_attention_takes_scratch_on_a_gpu() -> None:
    captured = ullage.capture_module(Attends, ["2x32x64"], "bf16", name="attends")
    plain, on_gpu = (captured.graph(dataclasses.replace(captured.batch, attention_scratch=it)) for it in (False, True))
    found = [
        (one.workspace_bytes - other.workspace_bytes, [kernel for kernel in one.backward if type(kernel) is Attention])
        for one, other in zip(on_gpu, plain, strict=True)
    ]
    (kernel,) = (kernel for _, kernels in found for kernel in kernels)
    assert kernel.shares_keys
    scratch_bytes = attention_scratch_bytes(kernel, grouped=True, e=2)
    assert scratch_bytes > 0
    assert [more for more, _ in found] == [scratch_bytes if kernels else 0 for _, kernels in found]
