"""``ullage execute --weights DIR --save DIR``: a folder of ``save_pretrained`` goes in, and one comes out."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from ullage.main import main

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, intermediate_size=128, tie_word_embeddings=True, rope_theta=5e5),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES, intermediate_size=128),  # captured
}


@pytest.fixture(params=CONFIGS, scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A saved model, with a tokenizer's file, and a plan for it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    model.save_pretrained(folder / "source")
    (folder / "source" / "tokenizer.json").write_text("{}")
    arguments = ["--seq-len", "32", "--micro-batch", "2", "--hardware", "epyc-turin-2c", "--precision", "fp32"]
    config, plan = folder / "source" / "config.json", folder / "plan.json"
    assert main(["plan", "--model", str(config), *arguments, "--output", str(plan), "--json"]) == 0
    return folder / "source", plan


def test_a_model_goes_in_and_comes_out_as_transformers_has_it(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan = made
    run = ["execute", str(plan), "--iterations", "6", "--output-dir", str(tmp_path), "--allow-other-machine", "--json"]
    saved = tmp_path / "models" / "mine"
    more = ["--weights", str(source), "--lr", "1e-9", "--save", f"{saved},dtype=float32"]
    assert main([*run, *more]) == 0
    shown = capsys.readouterr()
    assert f"model saved in {saved}" in shown.err
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    after = transformers.AutoModelForCausalLM.from_pretrained(saved)
    theirs = after.state_dict()
    for name, values in before.state_dict().items():
        torch.testing.assert_close(theirs[name], values, rtol=0, atol=1e-6)  # six steps of 1e-9
    own = {"_name_or_path", "dtype", "transformers_version", "architectures"}
    configs = [{k: v for k, v in model.config.to_dict().items() if k not in own} for model in (before, after)]
    assert configs[0] == configs[1]
    assert (saved / "tokenizer.json").read_text() == "{}"
    assert main([*run, *more]) == 2
    assert f"{saved} is there already; give a new folder\n" in capsys.readouterr().err


def test_what_cannot_be_loaded_or_saved_is_one_line(
    made: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, plan = made
    run = ["execute", str(plan), "--output-dir", str(tmp_path), "--allow-other-machine"]
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((source / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    (other / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    for given, words in {
        ("--weights", "./nowhere"): "./nowhere: there is no such folder; give a folder with model.safetensors",
        ("--weights", str(other)): f"the model in {other} does not match the plan: ",
        ("--save", str(other)): f"{other} is there already; give a new folder",
        ("--save", str(other / "config.json" / "x")): "--save ",
        ("--save", "dtype=float16"): "--save dtype=float16 has no folder; give --save DIR,dtype=float16",
    }.items():
        assert main([*run, *given]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
