"""A folder of weights is there whole or not at all, whatever fails or kills on the way."""

import errno

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from saving import CountingFiles, FailingFiles, KillingFiles
from test_killed_writers import killed

from executor.weights.folder import WeightsFolder

TENSORS = {name: torch.randn(40, 30) for name in "abcde"}
SHAPES = {name: tensor.to("meta", torch.float32) for name, tensor in TENSORS.items()}


def write(folder, files=None):
    with WeightsFolder(folder, files) as new:
        (new.path / "config.json").write_text("{}")
        new.write_tensors(SHAPES, TENSORS.items(), max_shard_bytes=10_000)
        new.commit()


def is_whole(folder):
    """Return whether the folder is there, after checking that it is complete if it is."""
    if not folder.exists():
        return False
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert {path.name for path in folder.iterdir()} >= {"config.json", "model.safetensors.index.json"}
    return True


def num_operations(tmp_path):
    files = CountingFiles()
    write(tmp_path / "counted", files)
    return files.num_operations


def test_a_failing_operation_leaves_nothing_that_looks_complete(tmp_path):
    for number in range(num_operations(tmp_path)):
        for error in (errno.ENOSPC, errno.EIO, None):
            folder = tmp_path / f"{number}-{error}"
            files = FailingFiles(number, error)
            try:
                write(folder, files)
            except OSError as failure:
                assert error == failure.errno
                assert files.failed == "sync_folder" or not folder.exists()
            else:
                assert is_whole(folder), "a write that was cut short goes on"
            assert is_whole(folder) or files.failed != "sync_folder" or error is not None
            if not folder.exists():
                write(folder)  # what was left of the other does not matter
            assert is_whole(folder)


def test_a_full_drive_is_one_line_that_names_the_folder(tmp_path):
    class Full(CountingFiles):
        def at(self, _number, name):
            if name == "allocate":
                raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device; give a new folder on a drive with room") as failure:
        write(tmp_path / "mine", Full())
    assert failure.value.filename == str(tmp_path / "mine")
    with (
        WeightsFolder(tmp_path / "mine") as new,
        pytest.raises(OSError, match=r"No space .*; give a new folder") as failure,
        new.naming(),
    ):
        raise SafetensorError("I/O error: No space left on device (os error 28)")  # as peft's files fail
    assert failure.value.filename == str(tmp_path / "mine")
    assert not list(tmp_path.iterdir())


def test_a_kill_leaves_the_whole_folder_or_none_of_that_name(tmp_path):
    count = num_operations(tmp_path)
    points = [(number, phase) for number in range(count) for phase in ("before", "middle", "after")]
    chosen = [points[i] for i in np.random.default_rng(0).permutation(len(points))[:20]]
    num_killed = 0
    for i, (number, phase) in enumerate(chosen):
        folder = tmp_path / f"{i}"
        _, was_killed = killed(folder, lambda to, _report: write(to, KillingFiles(number, phase)))  # noqa: B023
        num_killed += was_killed
        if not is_whole(folder):
            write(folder)
        assert is_whole(folder)
        assert not (tmp_path / f".{i}.new").exists()
    assert num_killed > 15
