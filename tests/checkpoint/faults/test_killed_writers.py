"""Writers that are killed by the system at every operation, and in the middle of each write."""

import os
import sys

import numpy as np
import pytest
from saving import CountingFiles, KillingFiles, save, step_of

from executor.checkpoint.places.folder import FolderPlace

PHASES = ("before", "middle", "after")


def train(root, files, acknowledge):
    """Go on from what is there, for three checkpoints, and keep two of them."""
    store = FolderPlace(root, files)
    first = (step_of(store) or 0) + 1
    for step in range(first, first + 3):
        save(store, step)
        acknowledge(step)
        store.prune()


def num_operations(tmp_path):
    files = CountingFiles()
    train(tmp_path / "counted", files, lambda _step: None)
    return files.num_operations


def killed(root, work):
    """Do ``work(root, acknowledge)`` in a process that is killed on the way; return the last acknowledged step."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest's may run here
        try:
            os.close(read)
            work(root, lambda step: os.write(write, bytes([step])))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        acknowledged = pipe.read()
    _, status = os.waitpid(child, 0)
    return (acknowledged[-1] if acknowledged else 0), os.WIFSIGNALED(status)


def check(root, number, phase, last):
    """One kill point: what is there afterwards, to this other process, is the last acknowledged step or a later one."""
    acknowledged, was_killed = killed(root, lambda *to: train(to[0], KillingFiles(number, phase), to[1]))
    found = step_of(FolderPlace(root)) or 0
    assert found >= max(acknowledged, last), f"killed {phase} operation {number}"
    return found, was_killed


def points(tmp_path):
    return [(number, phase) for number in range(num_operations(tmp_path)) for phase in PHASES]


def shuffled(items, seed):
    return [items[i] for i in np.random.default_rng(seed).permutation(len(items))]


def test_nothing_acknowledged_is_lost_wherever_the_writer_is_killed(tmp_path):
    chosen = shuffled(points(tmp_path), 0)[:25]
    assert sum(check(tmp_path / f"{i}", number, phase, 0)[1] for i, (number, phase) in enumerate(chosen)) > 20


@pytest.mark.torture
def test_every_kill_point_one_behind_the_other_in_the_same_folder(tmp_path, capsys):
    """Each new writer goes on from what the killed one before it has left; every point, in five orders."""
    num_killed = 0
    for order in range(5):
        chosen, last = shuffled(points(tmp_path / f"count{order}"), order), 0
        for i, (number, phase) in enumerate(chosen):
            root = tmp_path / f"{order}-{i // 50}"  # steps are sent as one byte
            last = 0 if i % 50 == 0 else last
            last, was_killed = check(root, number, phase, last)
            num_killed += was_killed
        assert len(list(root.glob("tmp-*"))) <= 1, "the rest of killed writers is swept away"
    with capsys.disabled():
        sys.stdout.write(f"\n{num_killed} kill points survived\n")
    assert num_killed >= 1000
