"""A ``config.json`` of any architecture of ``transformers`` is planned, and what is planned is what it describes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_families import _BOTH_SIDES, _DECODER, _ENCODER, _EXPERTS, _GROUPED, _LATENT, _LINEAR, _SPECIAL

import ullage
from planner.models.captured import CapturedModel
from planner.models.config import ModelConfigError
from ullage.capture.architectures import architecture
from ullage.capture.records import CaptureError
from ullage.main import main

_MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
_PATCHES = {"image_size": 16, "patch_size": 4, "num_labels": 8}
_BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_WHISPER = _BOTH_SIDES | {"num_mel_bins": 8, "max_source_positions": 16, "decoder_start_token_id": 1}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bert": _SPECIAL | _ENCODER | {"max_position_embeddings": 32},
    "bloom": _SPECIAL | _BLOOM,
    "deepseek_v3": _DECODER | _EXPERTS | _LATENT | _GROUPED | {"num_key_value_heads": 4, "head_dim": 4},
    "falcon": _SPECIAL | _ENCODER | {"num_kv_heads": 2},
    "gemma": _DECODER,
    "gemma2": _DECODER | {"sliding_window": 8},
    "gemma3_text": _DECODER | {"sliding_window": 8},
    "glm4": _DECODER,
    "gpt_neox": _SPECIAL | _ENCODER | {"max_position_embeddings": 32},
    "gpt_oss": _DECODER | _EXPERTS,
    "granite": _DECODER,
    "llama4_text": _DECODER | _EXPERTS | {"intermediate_size_mlp": 64},
    "mamba2": _SPECIAL | _MAMBA,
    "modernbert": _SPECIAL | _ENCODER | {"max_position_embeddings": 32},
    "olmo2": _DECODER,
    "olmo3": _DECODER | {"sliding_window": 8},
    "phi": _DECODER,
    "phi3": _DECODER,
    "qwen3_next": _DECODER | _EXPERTS | _GROUPED | _LINEAR,
    "smollm3": _DECODER,
    "starcoder2": _DECODER,
    "t5": _SPECIAL | _T5,
    "vit": _ENCODER | _PATCHES,
    "whisper": _SPECIAL | _WHISPER,
}


def written(folder: Path, model_type: str, sizes: dict[str, Any], **more: object) -> Path:
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more), encoding="utf-8")
    return folder


@pytest.mark.parametrize("model_type", CONFIGURATIONS)
def test_any_architecture_is_planned_from_its_configuration(model_type: str, tmp_path: Path) -> None:
    path = written(tmp_path, model_type, CONFIGURATIONS[model_type])
    tokens = {} if model_type == "vit" else {"seq_len": 16}
    plan = ullage.plan(path, hardware="h100", micro_batch=2, **tokens)
    assert isinstance(plan.model, CapturedModel)
    assert plan.prediction.fits
    with torch.device("meta"):
        made = architecture(path).make()
    assert plan.model.num_params == sum(parameter.numel() for parameter in made.parameters())
    assert {spec.shape[0] for spec in plan.model.inputs} == {plan.decisions.micro_batch} == {2}


def test_a_configuration_is_planned_and_executed_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma").mkdir()
    written(tmp_path / "gemma", "gemma2", _DECODER | {"sliding_window": 8})
    sizes = ["--seq-len", "8", "--micro-batch", "3"]
    line = ["plan", "--model", "gemma", *sizes, "--hardware", "epyc-turin-2c", "--output", "plan.json"]
    assert main(line) == 0
    assert "gemma(input_ids=3x8:int64, labels=3x8:int64): captured, 2 repeated blocks" in capsys.readouterr().out
    assert main(["execute", "plan.json", "--iterations", "6", "--output-dir", "run"]) == 0


def test_the_class_that_is_trained_is_the_one_that_the_configuration_names(tmp_path):
    sizes = CONFIGURATIONS["bert"]
    for named, made in (
        (["BertForMaskedLM"], "BertForMaskedLM"),
        (["BertLMHeadModel"], "BertLMHeadModel"),
        (["BertModel"], "BertForMaskedLM"),
        (["BertForSequenceClassification"], "BertForSequenceClassification"),
        ([], "BertForMaskedLM"),
    ):
        found = architecture(written(tmp_path, "bert", sizes, architectures=named))
        with torch.device("meta"):
            assert type(found.make()).__name__ == made
    (_, labels) = found.inputs(2, 16)
    assert labels.shape == (2, 16)


def test_sequences_are_as_long_as_the_model_takes_them(tmp_path):
    found = architecture(written(tmp_path, "gemma2", _DECODER | {"max_position_embeddings": 32}))
    assert (found.seq_len(None, 2048), found.seq_len(None, 16), found.seq_len(24, 2048)) == (32, 16, 24)
    with pytest.raises(CaptureError, match="gemma2 takes at most 32 tokens a sequence, not 33; ask for fewer"):
        found.seq_len(33, 2048)
    images = architecture(written(tmp_path, "vit", CONFIGURATIONS["vit"]))
    assert images.inputs(2, images.seq_len(None, 2048))[0].shape == (2, 3, 16, 16)
    with pytest.raises(
        CaptureError, match="vit takes no tokens, but 16 a sequence are asked for; leave the length out"
    ):
        images.seq_len(16, 2048)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "warp"}, r"transformers \S+ does not know model_type 'warp'; install a newer one, or give"),
        ({"hidden_size": 8}, "does not know model_type None"),
        ({"model_type": "llava"}, "llava takes images beside text"),
        (
            {"model_type": "bert", "architectures": ["BertForQuestionAnswering"]},
            "inputs of BertForQuestionAnswering; give",
        ),
        ({"model_type": "gemma2", "hidden_size": "many"}, "correct the configuration of this gemma2"),
        ({"model_type": "sam"}, "images beside text"),
        ({"model_type": "vits"}, "cannot make the inputs of vits; give --model package.module:function"),
    ],
)
def test_what_cannot_be_captured_is_one_line(tmp_path, capsys, data, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises((CaptureError, ModelConfigError), match=message):
        ullage.plan(path)
    assert main(["plan", "--model", str(path), "--output", str(tmp_path / "plan.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
