"""Checkpoints that are no longer wanted are written over; see [Note: Spares] in places/folder.py."""

import numpy as np
import pytest
from safetensors import safe_open
from saving import part_of, save, step_of

import executor.checkpoint.files.writer
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import TensorBox, boxes, layout
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace


def files_of(folder):
    return {path.name: path.stat().st_ino for path in folder.rglob("*.safetensors")}


def retire(store, *steps):
    for step in steps:
        save(store, step)
    store.prune()


def test_the_next_one_has_the_files_of_one_that_went(tmp_path):
    store = FolderPlace(tmp_path / "store")
    inodes = files_of(save(store, 1))
    retire(store, 2, 3)
    assert len(list(store.root.iterdir())) == 3
    assert step_of(store) == 3
    assert files_of(save(store, 4)) == inodes
    assert step_of(FolderPlace(store.root)) == 4
    assert len(list(store.root.iterdir())) == 3


def test_what_another_plan_had_besides_goes(tmp_path):
    store = FolderPlace(tmp_path / "store")
    retire(store, 1, 2, 3)
    made = layout((TensorBox("x", "F32", (5000,), next(boxes((5000,), 0, 5000))),))
    draft = store.begin(4, ("model", "more"))
    with Flusher(Files(), ring_of(3, 4096)) as flusher:
        writer = ShardWriter(flusher, draft, "model/values.safetensors", made)
        writer.append(np.arange(5000, dtype=np.float32).view(np.uint8))
        path = store.complete(draft.name, Manifest.of(4, [part_of([(made, writer.finish())])], {}))
    assert sorted(p.name for p in path.rglob("*") if p.is_file()) == ["manifest.json", "values.safetensors"]
    with Checkpoint(path) as checkpoint:
        checkpoint.verify()
    with safe_open(path / "model/values.safetensors", "np") as file:
        assert np.array_equal(file.get_tensor("x"), np.arange(5000, dtype=np.float32))


def test_no_reader_takes_a_file_that_is_written_over_for_the_old_one(tmp_path, monkeypatch):
    monkeypatch.setattr(
        executor.checkpoint.files.writer, "alignment_bytes", lambda _fd, **_: 1
    )  # which tries with zeros
    store = FolderPlace(tmp_path / "store")
    retire(store, 1, 2, 3)
    draft = store.begin(4, ("model", "optimizer"))
    old = draft / "model/values.safetensors"
    with safe_open(old, "np") as file:
        shape = tuple(file.get_slice("w").get_shape())
    made = layout((TensorBox("w", "F32", shape, next(boxes(shape, 0, int(np.prod(shape))))),))
    with Flusher(Files(), ring_of(3, 4096)) as flusher:
        writer = ShardWriter(flusher, draft, "model/values.safetensors", made)
        with pytest.raises(Exception, match=r"[Hh]eader"), safe_open(old, "np"):
            pass
        assert old.read_bytes()[:8] == bytes(8), "the header's length: none, whatever the file's length is"
        writer.abandon()
    store.abandon(draft.name)
    assert step_of(store) == 3
    assert {path.name for path in store.root.iterdir()} == {"step-00000002", "step-00000003"}


def test_they_go_in_the_end_and_those_of_a_dead_process_are_used(tmp_path):
    store = FolderPlace(tmp_path / "store")
    retire(store, 1, 2, 3)
    assert any(path.name.startswith("spare-") for path in store.root.iterdir())
    save(FolderPlace(store.root), 4)
    assert not any(path.name.startswith("spare-") for path in store.root.iterdir())
    store.prune()
    store.remove_spares()
    assert {path.name for path in store.root.iterdir()} == {"step-00000003", "step-00000004"}


def test_no_more_are_kept_than_are_of_use(tmp_path):
    store = FolderPlace(tmp_path / "store")
    retire(store, *range(1, 9))
    assert sum(path.name.startswith("spare-") for path in store.root.iterdir()) == 2


def test_a_step_that_is_there_is_refused_as_ever(tmp_path):
    store = FolderPlace(tmp_path / "store")
    retire(store, 1, 2, 3)
    with pytest.raises(CheckpointError, match="another run writes here"):
        save(store, 3)
    assert step_of(store) == 3
