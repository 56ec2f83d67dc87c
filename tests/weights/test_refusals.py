"""Every file of weights that cannot be loaded is answered in one line that names it, what is wrong, and what to do."""

import json
import shutil

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from training import Task, batches, decide, prepare, train, uniform
from weights_objects import made, on_meta

from executor.training_state.restoring import restore
from executor.training_state.saving import Checkpoints
from executor.weights.loading import load
from executor.weights.saving import save

TASK = Task("llama", torch.float32)


@pytest.fixture
def source(tmp_path):
    made(TASK.family, torch.float32, tmp_path)
    return tmp_path / "source"


@pytest.fixture
def optimizer():
    _, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")), model=on_meta(TASK.family))
    with optimizer.session:
        yield optimizer


def change(source, change):
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, source / "model.safetensors")


def cut(source):
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index(source, weight_map):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def only_pickle(source):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")


def of_another_type(source):
    change(source, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}))


def checkpoints(source):
    (source / "model.safetensors").unlink()
    (source / "step-00000001").mkdir()
    (source / "step-00000001" / "manifest.json").write_text("{}")


BAD = {
    "missing": (
        lambda s: change(s, lambda t: t.pop("model.norm.weight")),
        r"source has no model\.norm\.weight, but the model has; give weights of this model, .*the model on the CPU",
    ),
    "shape": (
        lambda s: change(s, lambda t: t.update({"lm_head.weight": torch.ones(3, 4)})),
        r"lm_head\.weight has shape \(3, 4\), but \(64, 32\) in the model; make the model from the config\.json",
    ),
    "type": (of_another_type, r"lm_head\.weight has type F8_E4M3, but weights are .*; convert the model to bf16"),
    "integers": (
        lambda s: change(s, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int32)})),
        r"lm_head\.weight is int32, but a floating-point tensor in the model; give weights that are not quantized",
    ),
    "bool": (
        lambda s: change(s, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] > 0})),
        r"lm_head\.weight is bool, but a floating-point tensor in the model",
    ),
    "renamed": (
        lambda s: change(s, lambda t: [t.update({f"other.{name}": t.pop(name)}) for name in list(t)]),
        r"source has no model\.embed_tokens\.weight and \d+ more, but the model has; give weights of this model",
    ),
    "nothing": (lambda s: change(s, dict.clear), r"source has no model\.embed_tokens\.weight and \d+ more"),
    "header": (lambda s: (s / "model.safetensors").write_bytes(b"hello" * 99), r"is damaged, or is not"),
    "a folder": (
        lambda s: (s / "model.safetensors").unlink() or (s / "model.safetensors").mkdir(),
        r"model\.safetensors is damaged, or is not a safetensors file",
    ),
    "link": (
        lambda s: (s / "model.safetensors").unlink() or (s / "model.safetensors").symlink_to("nowhere"),
        r"model\.safetensors is missing; copy all files of the model again",
    ),
    "no JSON": (
        lambda s: (s / "model.safetensors.index.json").write_text("{"),
        r"index\.json is not JSON .*; copy the files of the model again",
    ),
    "list": (lambda s: index(s, [1]), r"index\.json has no weight_map, which lists the file of each tensor"),
    "numbers": (lambda s: index(s, {"a": 3}), r"index\.json has no weight_map, which lists the file of each tensor"),
    "unnamed": (lambda s: index(s, {"a": ""}), r"index\.json names a file outside of its folder, ''"),
    "cut": (cut, r"model\.safetensors is damaged, or is not a safetensors file .*; copy it again"),
    "empty": (lambda s: (s / "model.safetensors").write_bytes(b""), r"model\.safetensors is damaged"),
    "none": (lambda s: (s / "model.safetensors").unlink(), r"source has no model\.safetensors; give a folder that"),
    "pickle": (only_pickle, r"has weights only as pickles.*from_pretrained\('.*source'\)\.save_pretrained\(NEW"),
    "checkpoints": (checkpoints, r"has checkpoints of Ullage; export one: ullage checkpoint export .*source"),
    "index": (lambda s: index(s, {"a": "other.safetensors"}), r"other\.safetensors is missing; copy all files"),
    "listed": (lambda s: index(s, {"a": "model.safetensors"}), r"lists a in model\.safetensors, but it is not there"),
    "outside": (lambda s: index(s, {"a": "../x.safetensors"}), r"names a file outside of its folder, '\.\./x"),
    "no map": (lambda s: index(s, {}), r"index\.json has no weight_map"),
    "adapter": (
        lambda s: (s / "model.safetensors").rename(s / "adapter_model.safetensors"),
        r"source has an adapter, but the model has none; add one",
    ),
    "several": (
        lambda s: (
            [shutil.copy(s / "model.safetensors", s / f"{i}.safetensors") for i in "ab"]
            and (s / "model.safetensors").unlink()
        ),
        r"several safetensors files but no model\.safetensors\.index\.json",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_before_anything_changes(source, optimizer, spoil, words):
    spoil(source)
    with pytest.raises(ValueError, match=words) as refused:
        load(optimizer, source)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match="have no values, because the model was made on the meta device"):
        optimizer.session.full_parameters()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ("./nowhere", r"\./nowhere: there is no such folder"),
        ("a/b/c", "a/b/c: there is no such folder"),
        ("someone/nothing", r"cache of hub models has no model.*hf download someone/nothing"),
    ],
)
def test_weights_that_are_not_there_are_refused(optimizer, weights, words, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=words):
        load(optimizer, weights)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file; give the folder"):
        load(optimizer, tmp_path / "file")
    with pytest.raises(TypeError, match="the weights are None; give the path of a folder, or the name of a model"):
        load(optimizer, None)


def test_the_name_of_a_hubs_model_means_its_folder_on_this_machine(source, optimizer, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--someone--llama"
    revision = "0123456789" * 4
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(revision)
    source.rename((model / "snapshots" / revision).parent.mkdir() or model / "snapshots" / revision)
    assert load(optimizer, "someone/llama").folder == model / "snapshots" / revision


def test_tensors_that_the_model_does_not_use_are_named_in_a_warning(source, optimizer):
    change(source, lambda t: t.update({f"extra.{i}": torch.ones(2) for i in range(5)}))
    with pytest.warns(RuntimeWarning, match=r"does not use: extra\.0, extra\.1, extra\.2 and 2 more"):
        loaded = load(optimizer, source)
    assert len(loaded.unused) == 5


def test_a_parameter_that_files_lack_keeps_its_values_if_that_is_wanted(source):
    change(source, lambda t: t.pop("lm_head.weight"))
    model, optimizer = prepare(TASK, decide(TASK, uniform("host", "cpu")))
    with optimizer.session as session:
        head = session.full_parameters()["lm_head.weight"].clone()
        with pytest.raises(ValueError, match=r"has no lm_head\.weight.*load\(strict=False\)"):
            load(optimizer, source)
        assert load(optimizer, source, strict=False).kept == ("lm_head.weight",)
        assert torch.equal(session.full_parameters()["lm_head.weight"], head)
        train(TASK, model, optimizer)


def test_what_has_no_weights_yet_does_not_train_evaluate_or_save(source, optimizer, tmp_path):
    model, tokens = optimizer.session.model, batches(TASK)[0, 0]
    words = r"and \d+ more have no values, .*; load them first, for example with ullage\.load"
    for act in (
        lambda: model(input_ids=tokens, labels=tokens),
        lambda: model.eval()(input_ids=tokens),
        model.state_dict,
        optimizer.session.full_parameters,
        lambda: save(optimizer, tmp_path / "saved"),
        lambda: next(optimizer.session.stream_weights()),
    ):
        with pytest.raises(ValueError, match=words):
            act()
    load(optimizer, source)
    model.train()
    train(TASK, model, optimizer)


def test_saving_is_refused_before_anything_is_written(source, optimizer, tmp_path):
    load(optimizer, source)
    with pytest.raises(ValueError, match="source is there already; give a new folder"):
        save(optimizer, source)
    for given, words in (
        ({"dtype": "int8"}, "dtype is 'int8', but must be one of bfloat16, float16, float32, or left out"),
        ({"max_shard_bytes": "5GB"}, "max_shard_bytes is '5GB', but must be a whole number of at least 1"),
        ({"max_shard_bytes": 0}, "max_shard_bytes is 0, but must be a whole number of at least 1"),
        ({"tokenizer": "base"}, "the tokenizer is str; give one of transformers, or leave it out"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            save(optimizer, tmp_path / "saved", **given)
    assert not (tmp_path / "saved").exists()
    for folder in (None, ""):
        with pytest.raises(TypeError, match=f"the folder is {folder!r}; give the path of a new one"):
            save(optimizer, folder)


@pytest.mark.parametrize("act", [save, load, restore, Checkpoints])
def test_another_optimizer_than_the_prepared_one_is_refused(act, tmp_path):
    with pytest.raises(TypeError, match=r"the optimizer is Linear; give the one that ullage\.prepare returned"):
        act(torch.nn.Linear(1, 1), tmp_path)
