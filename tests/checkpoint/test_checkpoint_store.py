"""Several processes on one folder, and what is kept in it."""

import multiprocessing
import os
import signal
import time

import pytest
from saving import FOLDERS, save, step_of

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import newest_of

FORK = multiprocessing.get_context("fork")


def steps(store):
    return [int(path.name.removeprefix("step-")) for path in store.folders()]


def damage(store, step):
    path = store.root / f"step-{step:08d}" / "model" / "values.safetensors"
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff")


def test_the_newest_that_are_whole_are_kept(tmp_path):
    store = FolderPlace(tmp_path / "store")
    for step in range(1, 8):
        save(store, step)
    damage(store, 6)
    assert [path.name for path in store.prune(3)] == [f"step-{step:08d}" for step in (3, 2, 1)]
    assert steps(store) == [7, 6, 5, 4], "the damaged one does not count, and stays to be looked at"
    assert store.prune(1) == [store.root / "step-00000004"], "two at least"
    assert steps(store) == [7, 6, 5]


def test_none_goes_before_as_many_as_are_kept_are_known_to_be_whole(tmp_path):
    """Else what is not known could turn out to have been needed."""
    for step in range(1, 6):
        save(FolderPlace(tmp_path / "store"), step)
    store = FolderPlace(tmp_path / "store")  # which knows nothing yet
    newest = store.folders()
    for folder in newest[:3]:
        store.verify(folder)
    assert store.prune(4, reads=False) == []
    assert steps(store) == [5, 4, 3, 2, 1]
    store.verify(newest[3])
    assert store.prune(4, reads=False) == [newest[4]]


def test_the_same_step_twice_is_refused_unless_the_first_is_damaged(tmp_path):
    store = FolderPlace(tmp_path / "store")
    save(store, 1)
    save(store, 2)
    with pytest.raises(CheckpointError, match="is there already, and whole; another run writes here"):
        save(store, 2)
    damage(store, 2)
    assert step_of(store) == 1
    save(store, 2)
    assert step_of(store) == 2
    assert not list(store.root.glob("tmp-*"))


def test_what_a_dead_writer_left_is_swept_and_a_living_writer_is_left_alone(tmp_path):
    store = FolderPlace(tmp_path / "store")
    living = store.begin(5, FOLDERS)

    def die():
        FolderPlace(store.root).begin(6, FOLDERS)
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=die)
    process.start()
    process.join()
    assert len(list(store.root.glob("tmp-*"))) == 2
    store.prune()
    assert list(store.root.glob("tmp-*")) == [living]
    store.abandon(living.name)
    assert not list(store.root.iterdir())


def test_a_folder_that_cannot_be_made_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/store: .*choose another folder"):
        FolderPlace(tmp_path / "file" / "store")


def write_for_ever(root, first):
    store = FolderPlace(root)
    for step in range(first, 10_000, 2):
        save(store, step)


def prune_for_ever(root):
    while True:
        FolderPlace(root).prune()


def test_a_reader_looks_again_if_all_that_it_found_went_meanwhile(tmp_path):
    store = FolderPlace(tmp_path / "store")
    save(store, 1)
    save(store, 2)

    def slow(checkpoint):
        if (step := checkpoint.manifest.step) < 6:
            save(store, step + 2)
            store.remove(store.folder(step))
        checkpoint.verify()

    found, refused = newest_of([store], slow)
    assert found is not None
    assert found.manifest.step == 6
    assert not refused, "what was replaced was not damaged"


def test_two_writers_retention_and_a_reader_at_once(tmp_path):
    """A reader finds a whole checkpoint at any time, and never an older one than before."""
    root = tmp_path / "store"
    save(FolderPlace(root), 1)
    save(FolderPlace(root), 2)
    others = [
        FORK.Process(target=write_for_ever, args=(root, 3), daemon=True),
        FORK.Process(target=write_for_ever, args=(root, 4), daemon=True),
        FORK.Process(target=prune_for_ever, args=(root,), daemon=True),
    ]
    for process in others:
        process.start()
    try:
        last, num_reads, end_s = 0, 0, time.monotonic() + 2
        while time.monotonic() < end_s:
            try:
                found = step_of(FolderPlace(root))
            except CheckpointError:  # two newer ones came while it was read, and it went
                continue
            assert found is not None
            assert found >= last
            last, num_reads = found, num_reads + 1
        assert all(process.is_alive() for process in others)
    finally:
        for process in others:
            process.kill()
            process.join()
    assert num_reads > 5
    assert last > 4, "nothing was written meanwhile"
