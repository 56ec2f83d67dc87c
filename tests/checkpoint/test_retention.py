"""Retention beside training: what stays was read again, and what there is stays bounded however fast it comes."""

import threading
import time

import pytest
from saving import save, step_of

from executor.checkpoint.engine import Outcome
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.places.folder import FolderPlace
from planner.checkpoints.policy import EXTRA_CHECKPOINTS, READING_SHARE


def steps(store):
    return sorted(int(path.name.split("-")[1]) for path in store.folders())


def retained(place, keep, errors):
    """Return a level that retains checkpoints of a place."""
    levels = Levels([Level(place.root, 1, keep)], lambda outcome: outcome.error and errors.append(outcome.error))
    levels.places = (place,)
    return levels


def saved(place, step):
    """Save a checkpoint, and return what training reports of it."""
    return Outcome(step, save(place, step), None, 0, 0)


class Slow(FolderPlace):
    """A store of which each checkpoint is read when that is allowed."""

    def __init__(self, root):
        super().__init__(root)
        self.allowed = threading.Semaphore(0)
        self.read = []

    def verify(self, folder):
        self.allowed.acquire()
        self.read.append(folder.name)
        return super().verify(folder)


@pytest.fixture
def errors():
    found = []
    yield found
    assert not found


def test_all_are_read_where_there_is_time_and_the_newest_stay(tmp_path, errors):
    store = FolderPlace(tmp_path / "store")
    levels = retained(store, 3, errors)
    for step in range(1, 8):
        levels.report(saved(store, step))
        levels.settle()
        assert steps(store) == list(range(max(step - 2, 1), step + 1))
    levels.close()


def test_those_that_come_while_one_is_read_go_unread_but_the_newest(tmp_path, errors):
    store = Slow(tmp_path / "store")
    levels = retained(store, 2, errors)
    for step in (1, 2):
        levels.report(saved(store, step))
        store.allowed.release()
        levels.settle()
    for step in range(3, 10):  # the third one is being read all the time
        levels.report(saved(store, step))
        assert set(steps(store)) <= {1, 2, 3, 4, step}
        assert {1, 2} <= set(steps(store)), "nothing that was read goes before something newer was"
    for _ in range(2):
        store.allowed.release()
    levels.settle()
    assert steps(store) == [store_step(store.read[-2]), 9]
    assert len(store.read) == 4
    levels.close()


def store_step(name):
    return int(name.split("-")[1])


def test_nothing_goes_before_enough_were_read(tmp_path, errors):
    store = Slow(tmp_path / "store")
    levels = retained(store, 2, errors)
    for step in range(1, 6):
        levels.report(saved(store, step))
    assert steps(store) == [1, 2, 3, 4, 5]
    for _ in range(5):
        store.allowed.release()
    levels.close()
    assert len(steps(store)) == 2
    assert steps(store)[-1] == 5


def test_what_is_found_damaged_does_not_count(tmp_path, errors):
    store = FolderPlace(tmp_path / "store")
    levels = retained(store, 2, errors)
    for step in (1, 2):
        levels.report(saved(store, step))
        levels.settle()
    path = save(store, 3)
    damaged = path / Checkpoint(path).manifest.files[0].path
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    levels.report(Outcome(3, path, None, 0, 0))
    levels.settle()
    levels.report(saved(store, 4))
    levels.close()
    assert steps(store) == [2, 3, 4], "the damaged one stays, for who wants to know why"
    assert step_of(FolderPlace(store.root)) == 4


class Timed(FolderPlace):
    """A store that takes a while to read, and knows how long it has."""

    def __init__(self, root):
        super().__init__(root)
        self.reads_s = []

    def verify(self, folder):
        begin_s = time.monotonic()
        time.sleep(0.01)
        found = super().verify(folder)
        self.reads_s.append(time.monotonic() - begin_s)
        return found


def test_once_enough_were_read_reading_takes_its_share_of_the_time_and_no_more(tmp_path, errors):
    store = Timed(tmp_path / "store")
    levels = retained(store, 2, errors)
    for step in (1, 2):
        levels.report(saved(store, step))
        levels.settle()
    begin_s, first = time.monotonic(), len(store.reads_s)
    step = 2
    while len(store.reads_s) < first + 4:
        step += 1
        levels.report(saved(store, step))
        assert len(steps(store)) <= 2 + EXTRA_CHECKPOINTS + 1, "and one that is read"
    took_s, reads_s = time.monotonic() - begin_s, store.reads_s[first:]
    levels.close()
    assert sum(reads_s[:-1]) <= READING_SHARE * took_s + reads_s[-1]
    assert steps(store)[-1] == step
