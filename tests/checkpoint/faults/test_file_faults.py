"""Every operation fails, or writes less than it was asked to: one clear error, and what was there before is there."""

import errno
import sys
import threading

import numpy as np
import pytest
from saving import CountingFiles, FailingFiles, entries, save, step_of, values

from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import layout
from executor.checkpoint.places.folder import FolderPlace

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES)


def num_operations(tmp_path):
    files = CountingFiles()
    store = FolderPlace(tmp_path / "counted", files)
    for step in (1, 2, 3):
        save(store, step)
    store.prune()
    return files.num_operations


def check(root, number, error, after):
    """Save three times and prune with one operation failing; then save again with files that work."""
    healthy = FolderPlace(root)
    save(healthy, 1)
    files = FailingFiles(number, error, after=after)
    last, failures = 1, []
    for step in (2, 3, 4):
        try:
            save(FolderPlace(root, files), step)
            last = step
        except CheckpointError as failure:
            failures.append(str(failure))
    try:
        FolderPlace(root, files).prune()
    except CheckpointError as failure:
        failures.append(str(failure))
    reported = f"{files.failed} with {error}"
    assert step_of(healthy) >= last, reported
    assert len(failures) <= 1, reported
    save(healthy, 5)
    assert step_of(healthy) == 5, reported
    return failures, files.failed


def chosen(tmp_path, count):
    every = [
        (number, error, after)
        for number in range(num_operations(tmp_path))
        for error in (*ERRORS, None)
        for after in (False, True)
        if error is not None or not after
    ]
    picked = np.random.default_rng(1).permutation(len(every))[:count]
    return [every[i] for i in picked]


@pytest.mark.parametrize("count", [40, pytest.param(None, marks=pytest.mark.torture)], ids=["some", "all"])
def test_a_failing_operation_costs_one_checkpoint_at_most(tmp_path, capsys, count):
    num_failures, tried = 0, chosen(tmp_path, count)
    for i, (number, error, after) in enumerate(tried):
        failures, operation = check(tmp_path / f"{i}", number, error, after)
        if error is None:
            assert not failures, "a write that was cut short goes on"
        elif operation not in {"", "remove", "remove_folder"}:  # not reached, or of what is given up
            assert failures, operation
            num_failures += 1
    assert num_failures
    with capsys.disabled():
        sys.stdout.write(
            f"\n{len(tried)} faults of operations survived, {num_failures} of them errors that were told\n"
        )


def test_a_full_drive_is_reported_before_anything_is_written(tmp_path):
    class Full(Files):
        def allocate(self, _fd, _num_bytes):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"values.safetensors: No space left .*it needs 1\d,\d{3} B: make room"):
        save(FolderPlace(tmp_path / "full"), 1, Full())


def test_a_drive_that_does_not_answer_is_waited_for_no_longer_than_was_said(tmp_path):
    over, ended = threading.Event(), threading.Event()

    class Hanging(Files):
        def write(self, fd, data, offset):
            over.wait(60)
            ended.set()
            return super().write(fd, data, offset)

    with Flusher(Hanging(), ring_of(1, 4096), num_threads=1, patience_s=0.2) as flusher:
        (tmp_path / "model").mkdir()
        writer = ShardWriter(flusher, tmp_path, "model/values.safetensors", layout(entries("model")))
        with pytest.raises(CheckpointError, match=r"the drive has not answered for 0.2 s, or is too slow"):
            for entry in writer.layout.entries:
                writer.append(values(entry.name, 1).view("uint8"))
        writer.abandon()
        assert not ended.is_set(), "training would have waited for the drive"
        over.set()
