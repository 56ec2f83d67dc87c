"""What is not as it was written is never read: bits, lengths, files of another step, manifests."""

import itertools
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from saving import save, step_of

import executor.checkpoint.files.timeouts
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace, joined_folder
from executor.checkpoint.places.place import newest_of

FILES = ("model/values.safetensors", "optimizer/values.safetensors", "manifest.json")


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return a folder with the checkpoints of steps 1 and 2."""
    root = tmp_path_factory.mktemp("two") / "store"
    store = FolderPlace(root)
    save(store, 1)
    save(store, 2)
    return root


@pytest.fixture
def store(two, tmp_path):
    shutil.copytree(two, tmp_path / "store")
    return FolderPlace(tmp_path / "store")


def newest(store):
    return store.folders()[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.torture)], ids=["some", "many"])
def test_a_flipped_bit_anywhere_is_found_and_the_one_before_is_taken(store, capsys, name, count):
    path = newest(store) / name
    whole = path.read_bytes()
    positions = np.unique(np.linspace(0, len(whole) - 1, count).astype(int))  # header, pads and values
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        found, refused = newest_of([store])
        assert found is not None
        assert found.manifest.step == 1, f"byte {position} of {name}"
        assert len(refused) == 1
        assert path.name in refused[0]
    path.write_bytes(whole)
    assert step_of(store) == 2
    with capsys.disabled():
        sys.stdout.write(f"\n{len(positions)} flipped bits of {name} found\n")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("length", [0, 1, 4096, -4096, -1, 1 << 20])
def test_another_length_is_found(store, name, length):
    path = newest(store) / name
    whole = path.read_bytes()
    path.write_bytes((whole + bytes(1 << 20))[: length if length >= 0 else len(whole) + length])
    assert step_of(store) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step_is_found(store, name):
    old, new = store.folders()[1], newest(store)
    shutil.copy(old / name, new / name)
    if name == "manifest.json":
        found, _ = newest_of([store])
        assert found is not None
        assert found.folder == old
    assert step_of(store) == 1


def test_swapped_files_are_found(store):
    model, optimizer = (newest(store) / name for name in FILES[:2])
    intact = model.read_bytes()
    shutil.copy(optimizer, model)
    optimizer.write_bytes(intact)
    assert step_of(store) == 1


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found(store, name):
    (newest(store) / name).unlink()
    found, refused = newest_of([store])
    assert found is not None
    assert found.manifest.step == 1
    assert "No such file" in refused[0]


def test_a_manifest_that_leads_out_of_its_folder_is_refused(store):
    path = newest(store) / "manifest.json"
    data = json.loads(path.read_text())
    data["files"][0]["path"] = "../step-00000001/model/values.safetensors"
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"should match pattern .* at files.0.path"):
        Checkpoint(path.parent)


def test_nobody_waits_long_for_a_rank_that_is_lost(tmp_path, monkeypatch):
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(seconds), sleep=int)
    monkeypatch.setattr(executor.checkpoint.files.timeouts, "time", clock)
    with pytest.raises(CheckpointError, match="rank 0 has not made this folder, and is lost"):
        joined_folder(FolderPlace(tmp_path / "store").root, 2, ("model",), "00000000", 600.0, lambda: True)
    assert next(seconds) < 50


def test_nothing_whole_is_reported_with_the_reasons(store):
    for folder in store.folders():
        (folder / "manifest.json").unlink()
    found, refused = newest_of([store])
    assert found is None
    assert len(refused) == 2


def test_a_file_whose_header_never_came_is_refused_by_the_stock_reader(store):
    path = newest(store) / FILES[0]
    whole = path.read_bytes()
    path.write_bytes(bytes(4096) + whole[4096:])
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
