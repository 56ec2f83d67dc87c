"""A ``config.json`` of any architecture of ``transformers`` is planned, and what is planned is what it describes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ullage
from benchmarks.capture.architectures import BOUND, described, row
from benchmarks.capture.tiny import TINY
from planner.models.captured import CapturedModel
from planner.models.config import ModelConfigError
from ullage.capture import capture
from ullage.capture.architectures import architecture
from ullage.capture.records import CaptureError
from ullage.main import main
from ullage.training.batches import random_input


def written(folder: Path, model_type: str, sizes: dict[str, Any], **more: object) -> Path:
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | more), encoding="utf-8")
    return folder


@pytest.mark.part(80)
@pytest.mark.parametrize("name", TINY)
def test_any_architecture_is_planned_from_its_configuration(name: str, tmp_path: Path) -> None:
    found = described(name, tmp_path)
    tokens = {"seq_len": 32} if found.kind.has_tokens else {}
    plan = ullage.plan(tmp_path, hardware="h100", micro_batch=2, **tokens)
    assert isinstance(plan.model, CapturedModel)
    assert plan.prediction.fits
    with torch.device("meta"):
        made = found.make()
    assert plan.model.num_params == sum(parameter.numel() for parameter in made.parameters())
    assert {spec.shape[0] for spec in plan.model.inputs} == {plan.decisions.micro_batch} == {2}


@pytest.mark.part(80)
@pytest.mark.parametrize("name", TINY)
def test_any_architecture_trains_under_a_tight_plan_as_in_memory(name: str, tmp_path: Path) -> None:
    found = row(name, tmp_path, num_steps=3)
    assert found["num_params"] == found["num_params_of_model"]
    assert found["memory_share"] < 1
    assert max(found["loss_error"], found["weight_error"]) <= BOUND


def test_a_configuration_is_planned_and_executed_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gemma").mkdir()
    written(tmp_path / "gemma", "gemma2", TINY["gemma2"])
    sizes = ["--seq-len", "8", "--micro-batch", "3"]
    line = ["plan", "--model", "gemma", *sizes, "--hardware", "epyc-turin-2c", "--output", "plan.json"]
    assert main(line) == 0
    assert "gemma(input_ids=3x8:int64, labels=3x8:int64): captured, 3 repeated blocks" in capsys.readouterr().out
    assert main(["execute", "plan.json", "--iterations", "6", "--output-dir", "run"]) == 0


def test_the_class_that_is_trained_is_the_one_that_the_configuration_names(tmp_path):
    sizes = TINY["bert"]
    for named, made in (
        (["BertForMaskedLM"], "BertForMaskedLM"),
        (["BertLMHeadModel"], "BertLMHeadModel"),
        (["BertModel"], "BertForMaskedLM"),
        (["BertForSequenceClassification"], "BertForSequenceClassification"),
        (["BertForTokenClassification"], "BertForTokenClassification"),
        (["BertForQuestionAnswering"], "BertForQuestionAnswering"),
        ([], "BertForMaskedLM"),
    ):
        found = architecture(written(tmp_path, "bert", sizes, architectures=named))
        with torch.device("meta"):
            assert type(found.make()).__name__ == made
    (_, labels) = found.inputs(2, 16)
    assert labels.shape == (2, 16)


def test_sequences_are_as_long_as_the_model_takes_them(tmp_path):
    found = architecture(written(tmp_path, "gemma2", TINY["gemma2"] | {"max_position_embeddings": 32}))
    assert (found.seq_len(None, 2048), found.seq_len(None, 16), found.seq_len(24, 2048)) == (32, 16, 24)
    assert found.seq_len(33, 2048) == 33, "its positions are angles"
    learned = architecture(written(tmp_path, "opt", {"max_position_embeddings": 32}))
    with pytest.raises(
        CaptureError, match="opt has learned 32 positions, but the sequence length is 33; give at most 32"
    ):
        learned.seq_len(33, 2048)
    images = architecture(written(tmp_path, "vit", TINY["vit"]))
    assert images.inputs(2, images.seq_len(None, 2048))[0].shape == (2, 3, 16, 16)
    seeing = architecture(written(tmp_path, "llava", TINY["llava"]))
    assert seeing.seq_len(None, 20) == 32  # as many for text as for the image
    with pytest.raises(CaptureError, match="llava: an image takes 16 tokens of a sequence, so 16 leave none"):
        seeing.seq_len(16, 2048)
    with pytest.raises(CaptureError, match="vit takes no tokens, but the sequence length is 16; leave it out"):
        images.seq_len(16, 2048)


def test_buffers_have_the_types_that_they_have_beside_weights_in_bf16(tmp_path):
    described("m2m_100", tmp_path)  # whose positions are a buffer that is added to embeddings
    found = architecture(tmp_path)
    assert capture(str(tmp_path), found.inputs(2, 16), "bf16").dtype == "bf16"


def test_images_are_where_the_configuration_says(tmp_path):
    """And nowhere else, also in random batches: as many tokens as an image has are not enough."""
    first, *_ = architecture(written(tmp_path, "llava", TINY["llava"])).inputs(2, 24)
    ids = random_input(first.model_copy(update={"num_values": 12}), torch.float32, torch.Generator().manual_seed(1))
    assert (ids[:, :16] == 9).all()
    assert not (ids[:, 16:] == 9).any()
    assert len(ids[:, 16:].unique()) > 3


@pytest.mark.part(2)
@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "mistral3"])
def test_what_sees_images_is_captured_with_them(name: str, tmp_path: Path) -> None:
    found = described(name, tmp_path)
    inputs = found.inputs(2, 24)
    assert {spec.name for spec in inputs} >= {"input_ids", "pixel_values", "labels"}
    seen = capture(str(tmp_path), inputs, "bf16")
    assert seen.num_params == sum(parameter.numel() for parameter in found.make().parameters())


def test_images_that_cannot_be_divided_are_left_out(tmp_path: Path) -> None:
    found = architecture(written(tmp_path, "smolvlm", TINY["smolvlm"] | {"scale_factor": 3}))
    assert [spec.name for spec in found.inputs(2, 24)] == ["input_ids", "labels"]


def test_classifiers_get_what_they_are_trained_for(tmp_path):
    for more, expected in (
        ({"num_labels": 3}, "labels=2:int64"),
        ({"num_labels": 1}, "labels=2:float"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "labels=2x3:float"),
        ({"num_labels": 3, "problem_type": "regression"}, "labels=2x3:float"),
    ):
        named = {"architectures": ["BertForSequenceClassification"]}
        path = written(tmp_path, "bert", TINY["bert"] | more, **named)
        assert str(architecture(path).inputs(2, 16)[-1]) == expected
        assert ullage.plan(path, hardware="h100", micro_batch=2, seq_len=16).prediction.fits


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"model_type": "warp"}, r"transformers \S+ does not know model_type 'warp'; install a newer one, or give"),
        ({"hidden_size": 8}, "has no model_type; give the config.json of a model of transformers, or give --model"),
        (
            {"model_type": "bert", "architectures": ["BertForMultipleChoice"]},
            "inputs of BertForMultipleChoice; give",
        ),
        ({"model_type": "gemma2", "hidden_size": "many"}, "correct the configuration of this gemma2"),
        ({"model_type": "sam"}, "cannot make the inputs of sam"),
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
