"""Checkpoints on several levels: what comes where, what stays, and what it costs the others if one fails."""

import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.registry import known_implementations
from saving import TENSORS, save, step_of, values

import executor.checkpoint.levels
import executor.checkpoint.places.folder
from executor.checkpoint.engine import Outcome
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.format.reader import ReadRequest
from executor.checkpoint.levels import Level, Levels, check_levels
from executor.checkpoint.places.folder import file_system
from executor.checkpoint.places.locating import place_at
from executor.checkpoint.places.place import newest_of

S = 10.0
SHARED = Path("/dev") / "shm"


@pytest.fixture
def url():
    """Return a URL of an object store in memory that nobody else uses."""
    system = fsspec.filesystem("memory")
    yield "memory://bucket/run"
    if system.exists("/bucket"):
        system.rm("/bucket", recursive=True)


class Run:
    """Levels, and a trainer that makes a small checkpoint of a step."""

    def __init__(self, *levels, files=None):
        self.outcomes = []
        self.levels = Levels(levels, self.outcomes.append, files=files)

    def make(self, *steps):
        for step in steps:
            path = save(self.levels.fastest, step)
            self.levels.report(Outcome(step, path, None, 0, 0))
            self.wait(0)

    def wait(self, *levels):
        for level in levels or range(len(self.levels.levels)):
            assert self.levels._workers[level].wait(time.monotonic() + S)

    def steps(self):
        return [[step_of_name(folder) for folder in store.folders()] for store in self.levels.places]

    def failures(self):
        return [(outcome.level, outcome.step, outcome.error) for outcome in self.outcomes if outcome.error]


def step_of_name(folder):
    return int(folder.name.split("-")[1])


def paced(run, *steps):
    for step in steps:
        run.make(step)
        run.wait()


def test_each_level_has_its_own_interval_and_keeps_its_own(tmp_path, url):
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 2, keep=3), Level(url, 4))
    paced(run, *range(1, 19))
    assert run.steps() == [[18, 17], [18, 16, 14], [16, 12]]
    assert not run.failures()
    assert [step_of(store) for store in run.levels.places] == [18, 18, 16]
    assert [o.step for o in run.outcomes if o.level == 2] == [4, 8, 12, 16]
    run.levels.promote_newest(S)
    run.levels.close()
    assert run.steps() == [[18, 17], [18, 16, 14], [18, 16]], "the last one comes to all"
    assert step_of(run.levels.places[2]) == 18


def test_the_latency_of_a_copy_counts_from_the_beginning_of_the_checkpoint(tmp_path):
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 1), Level(tmp_path / "c", 1))
    path, begin_s = save(run.levels.fastest, 1), time.monotonic() - 100.0
    run.levels.report(Outcome(1, path, None, 0.0, 90.0, begin_s=begin_s))
    run.wait()
    run.levels.close()
    assert {outcome.level for outcome in run.outcomes} == {0, 1, 2}
    assert all(outcome.latency_s > 99.0 for outcome in run.outcomes if outcome.level)


def test_every_value_comes_whatever_the_size_of_a_chunk(tmp_path, url):
    """Files are of four chunks here, and the header of one of its own."""
    store = place_at(tmp_path / "a")
    save(store, 3)
    for place in (tmp_path / "b", url, f"file://{tmp_path}/c"):
        there = place_at(place)
        folder = there.put(newest_of([store])[0])
        again = newest_of([there])[0]
        assert again.folder == folder
        assert again.manifest == newest_of([store])[0].manifest
        with again:
            for name in TENSORS:
                found = np.empty_like(values(name, 3))
                again.read([ReadRequest(name, 0, found.view(np.uint8))])
                assert np.array_equal(found, values(name, 3))
        assert there.put(newest_of([store])[0]) == folder, "it is there already"
        assert len(there.folders()) == 1
    assert {p.name for p in (tmp_path / "c").iterdir()} == {"step-00000003"}


class Gate(Files):
    """Files below a folder that are not written before that is allowed."""

    def __init__(self, folder):
        self.folder, self.opened, self.reached = folder, threading.Event(), threading.Event()

    def create(self, path):
        if path.is_relative_to(self.folder):
            self.reached.set()
            assert self.opened.wait(S)
        return super().create(path)


def test_a_slow_level_gets_the_newest_and_what_it_reads_stays(tmp_path):
    gate = Gate(tmp_path / "b")
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 1), Level(tmp_path / "c", 1), files=gate)
    run.make(1)
    assert gate.reached.wait(S)
    for step in (2, 3, 4, 5):
        run.make(step)
        run.wait(2)
    assert run.steps() == [[5, 4, 1], [], [4, 3]], "1 is being read; the level below gets what this one cannot take"
    gate.opened.set()
    run.wait()
    assert [(level, step) for level, step, _ in run.failures()] == [(1, 2), (1, 3), (1, 4)]
    assert all("is too slow; give the level a longer interval" in error for *_, error in run.failures())
    assert run.steps()[:2] == [[5, 4, 1], [5, 1]]
    assert run.steps()[2][0] == 5
    run.make(6)
    run.wait()
    assert run.steps() == [[6, 5], [6, 5], [6, 5]]
    run.levels.close()


def test_a_level_that_fails_costs_its_checkpoint_and_the_next_gets_it_from_above(tmp_path):
    class Full(Files):
        def allocate(self, fd, num_bytes):
            if self.full and "/b/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                raise OSError(28, "No space left on device")
            super().allocate(fd, num_bytes)

    files = Full()
    files.full = True
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 1), Level(tmp_path / "c", 1), files=files)
    paced(run, 1, 2)
    assert run.steps() == [[2, 1], [], [2, 1]]
    assert len(run.failures()) == 2
    assert f"not in {tmp_path}/b: " in run.failures()[0][2]
    assert "make room, or keep fewer" in run.failures()[0][2]
    assert not list((tmp_path / "b").glob("*-*"))
    files.full = False
    paced(run, 3)
    assert run.steps() == [[3, 2], [3], [3, 2]]
    run.levels.close()


def test_what_was_removed_before_its_turn_is_reported(tmp_path):
    gate = Gate(tmp_path / "b")
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 2), files=gate)
    run.make(2)
    assert gate.reached.wait(S)
    run.make(4, 5, 7)
    gate.opened.set()
    run.wait()
    assert run.steps() == [[7, 5, 2], [2]]
    assert "step-00000004 was removed for newer checkpoints before it was copied" in run.failures()[0][2]
    run.levels.close()


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_end_is_waited_for_no_longer_than_was_said(tmp_path, monkeypatch, interrupted):
    gate = Gate(tmp_path / "b")
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 5), files=gate)
    run.make(1)
    if interrupted:
        monkeypatch.setattr(type(run.levels._workers[1]), "wait", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    threading.Timer(0.3, gate.opened.set).start()
    run.levels.promote_newest(0.1)
    assert run.steps() == [[1], []]
    assert not list((tmp_path / "b").glob("*-*"))
    why = "training was interrupted again" if interrupted else "not within 0.1 s after training"
    assert why in run.failures()[0][2]


def test_a_place_that_does_not_answer_is_reported_and_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(executor.checkpoint.levels, "_END_S", 0.2)
    gate = Gate(tmp_path / "b")
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 1), files=gate)
    run.make(1)
    assert gate.reached.wait(S)
    run.levels.promote_newest(0.1)
    assert "not within 0.1 s after training; the place has not answered for 0.2 s" in run.failures()[0][2]
    gate.opened.set()


def test_the_newest_is_taken_wherever_it_is_and_why_others_are_not(tmp_path, url):
    run = Run(Level(tmp_path / "a", 1), Level(tmp_path / "b", 1), Level(url, 1))
    paced(run, 1, 2)
    run.levels.close()
    found, refused = newest_of(run.levels.places)
    assert (found.folder, refused) == (tmp_path / "a" / "step-00000002", [])
    for level, place in ((1, "a"), (2, "b")):
        damage(tmp_path / place / "step-00000002")
        found, refused = newest_of(run.levels.places)
        assert found.folder in run.levels.places[level].folders()
        assert (found.manifest.step, len(refused)) == (2, level)
        assert f"{tmp_path / place}/step-00000002" in refused[-1]
    fs = run.levels.places[2].root.system
    fs.rm_file(run.levels.places[2].folders()[0].path + "/manifest.json")
    found, refused = newest_of(run.levels.places)
    assert (found.folder, len(refused)) == (tmp_path / "a" / "step-00000001", 2), "the fastest of equals"


def damage(folder):
    with (folder / "model" / "values.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\xff\xff\xff")


def test_levels_that_do_not_fit_are_refused(url):
    for levels, message in (
        ([], "no place for checkpoints"),
        ([Level("a", 10), Level("b", 25)], r"b gets its .* every 10 iterations, so 25 is .*multiple, such as 30"),
        ([Level("a", 10), Level("b", 5)], "multiple, such as 10"),
        ([Level("a", 0)], "a has a checkpoint every 0 iterations; give 1 or more"),
        ([Level("a", 10), Level("a/", 10)], "two levels have the same place"),
        ([Level(url)], "is not a folder, but training writes only into folders; give a folder as the level before"),
    ):
        with pytest.raises(ValueError, match=message):
            check_levels(levels)


def test_room_is_checked_for_what_is_there_at_once(tmp_path):
    store = place_at(tmp_path / "a")
    save(store, 1)
    left = store.root / "tmp-00000002-0000beef"  # of a writer that died
    left.mkdir()
    store.check_room(3, 1000)
    assert not left.exists()
    with pytest.raises(CheckpointError, match=r"3 checkpoints at once, of [1,0]+ B each, take .*keep fewer there"):
        store.check_room(3, 10**15)


def test_file_systems_are_known_and_places_are_marked(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "a / ext4 rw 0 0\nb /nfs\\040x nfs4 rw 0 0\nc /nfs\\040x/y tmpfs rw 0 0\nd /dev/shm tmpfs rw 0 0\n"
    )
    with monkeypatch.context() as patched:
        patched.setattr(executor.checkpoint.places.folder, "_MOUNTS", mounts)
        kinds = [file_system(Path(path)) for path in ("/home/x", "/nfs x/z", "/nfs x/y/z", "/nfs xx", SHARED)]
    assert kinds == ["ext4", "nfs4", "tmpfs", "ext4", "tmpfs"]
    assert file_system(SHARED) == "tmpfs"
    with place_at(tmp_path).marked("7"):
        assert place_at(tmp_path).has_mark("7")
        assert not place_at(tmp_path / "another").has_mark("7")
        assert not place_at(tmp_path).has_mark("8")
    assert not place_at(tmp_path).has_mark("7")
    with pytest.raises(CheckpointError, match=r"take [\d,]+ B of host memory, but"):
        place_at(SHARED / tmp_path.name).check_room(3, 10**15)
    (SHARED / tmp_path.name).rmdir()


def test_what_cannot_be_reached_is_reported_in_one_line(monkeypatch):
    with pytest.raises(CheckpointError, match=r"nonsense://x: Protocol not known: nonsense; give a folder, or a URL"):
        place_at("nonsense://x")
    absent = {"class": "absent.System", "err": "Install absent to access it"}
    monkeypatch.setitem(known_implementations, "absent", absent)
    with pytest.raises(CheckpointError, match=r"absent://x: Install absent to access it: the driver .* not installed"):
        place_at("absent://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(CheckpointError, match=r"s3://x needs fsspec; pip install 'ullage\[remote\]'"):
        place_at("s3://x")
