"""Checkpoints on their way from one level to the next: killed, failing, without power, damaged, removed.

Whatever happens, each level has the newest checkpoint that was acknowledged there or a later one, and only whole ones.
"""

import errno
import multiprocessing
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
from objects import Counting, Failing, Killing, Objects
from saving import FOLDERS, CountingFiles, FailingFiles, KillingFiles, save, step_of
from test_checkpoint_store import prune_for_ever
from test_killed_writers import PHASES, killed, shuffled
from test_power_loss import RecordingFiles, check_every_sync_is_needed, lost

from executor.checkpoint.engine import Outcome
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.format.manifest import Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.places.folder import FolderPlace, write_file
from executor.checkpoint.places.locating import place_at
from executor.checkpoint.places.place import newest_of

ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES)
FORK = multiprocessing.get_context("fork")


def places(root, kind, files=None):
    """Return the upper store and the lower one, which is a folder or an object store."""
    upper = FolderPlace(root / "upper", files)
    return upper, place_at(root / "lower", files) if kind == "folder" else place_at(f"objects://{root}/lower/run")


@pytest.fixture(autouse=True)
def _healthy_requests(monkeypatch):
    monkeypatch.setattr(Objects, "at", staticmethod(lambda _name, _after: None))


def train(root, kind, files, acknowledge):
    """Go on from what is there, for three checkpoints on two levels, and keep two of them on each."""
    upper, lower = places(root, kind, files)
    first = (newest_step(root, kind) or 0) + 1
    for step in range(first, first + 3):
        path = save(upper, step)
        lower.put(Checkpoint(path))
        acknowledge(step)
        upper.prune()
        lower.prune()


def newest_step(root, kind):
    checkpoint = newest_of(places(root, kind))[0]
    return checkpoint and checkpoint.manifest.step


def uploads(root):
    """Return what was begun to be sent and never ended."""
    return [one for one in Objects().list_multipart_uploads("") if f"/{one['Key']}".startswith(str(root))]


class Recording(Counting):
    """Notes every request, and where it can be stopped."""

    def __init__(self):
        super().__init__()
        self.points = []

    def do(self, number, name, after):  # noqa: ARG002 - others need it
        self.points.append((number, "after" if after else "before"))


def points(tmp_path, kind):
    """Return where a run can be killed: at operations of both folders, or at requests to the object store."""
    files, requests = CountingFiles(), Recording()
    Objects.at = requests
    train(tmp_path / "counted", kind, files if kind == "folder" else None, lambda _step: None)
    Objects.at = staticmethod(lambda _name, _after: None)
    in_folders = [(number, phase) for number in range(files.num_operations) for phase in PHASES]
    return in_folders if kind == "folder" else requests.points


def check_killed(root, kind, number, phase, last):
    def work(root, acknowledge):
        if kind != "folder":
            Objects.at = Killing(number, phase)
        train(root, kind, KillingFiles(number, phase) if kind == "folder" else None, acknowledge)

    acknowledged, was_killed = killed(root, work)
    upper, lower = places(root, kind)
    found = step_of(lower) or 0
    assert found >= max(acknowledged, last), f"killed {phase} {number}"
    assert (step_of(upper) or 0) >= found
    return found, was_killed


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_nothing_that_came_to_a_level_is_lost_wherever_its_process_is_killed(tmp_path, kind):
    chosen = shuffled(points(tmp_path, kind), 0)[:12]
    found = [check_killed(tmp_path / f"{i}", kind, *point, 0) for i, point in enumerate(chosen)]
    assert sum(was_killed for _, was_killed in found) > 7


@pytest.mark.torture
@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_every_kill_point_one_behind_the_other(tmp_path, capsys, kind):
    """Each process goes on from what the killed ones before it have left; then what they have left is swept."""
    num_killed = 0
    for order in range(4):
        chosen, last = shuffled(points(tmp_path / f"count{order}", kind), order), 0
        for i, point in enumerate(chosen):
            root = tmp_path / f"{order}-{i // 50}"
            last, was_killed = check_killed(root, kind, *point, 0 if i % 50 == 0 else last)
            num_killed += was_killed
        train(root, kind, None, lambda _step: None)
        left = {path.relative_to(root / "lower").parts for path in (root / "lower").rglob("*") if path.is_file()}
        assert len({part for parts in left for part in parts if part.startswith(("step-", "tmp-"))}) == 2
        assert not uploads(root)
    with capsys.disabled():
        sys.stdout.write(f"\n{num_killed} kill points of promotions ({kind}) survived\n")
    assert num_killed >= 200


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the operations of a lower level that four checkpoints come to, of which two are kept."""
    folder = tmp_path_factory.mktemp("recorded")
    files = RecordingFiles(folder / "store")
    upper, lower = FolderPlace(folder / "upper"), FolderPlace(folder / "store", files)
    for step in (1, 2, 3, 4):
        lower.put(Checkpoint(save(upper, step)))
        files.log.append(("acknowledged", step))
        lower.prune()
    return files.log


@pytest.mark.parametrize(("every", "num_fates"), [(11, 5), pytest.param(1, 40, marks=pytest.mark.torture)])
def test_what_came_to_a_level_is_there_when_the_power_is_back(recorded, tmp_path, capsys, every, num_fates):
    stops = range(0, len(recorded), every)
    assert lost(recorded, stops, range(num_fates), tmp_path) == []
    with capsys.disabled():
        sys.stdout.write(f"\n{len(stops) * num_fates} losses of power during promotions survived\n")


def test_every_sync_of_a_promotion_is_needed(recorded, tmp_path):
    check_every_sync_is_needed(recorded, range(3), tmp_path)


def check_failing(root, kind, number, error, after):
    """Make three checkpoints on two levels with one operation failing, then one with none."""
    healthy_upper, healthy_lower = places(root, kind)
    healthy_lower.put(Checkpoint(save(healthy_upper, 1)))
    files = FailingFiles(number, error, after=after)
    requests = Failing(number, OSError(error or errno.EIO, "fails"), after=after)
    Objects.at = requests if kind != "folder" else Objects.at
    failures, last = [], 1

    def attempt(function, *args):
        try:
            return function(*args)
        except CheckpointError as failure:
            failures.append(str(failure))
            return None

    _, lower = places(root, kind, files)
    for step in (2, 3, 4):
        if attempt(lower.put, Checkpoint(save(healthy_upper, step))):
            last = step
        attempt(lower.prune)
    Objects.at = staticmethod(lambda _name, _after: None)
    failed = files.failed if kind == "folder" else requests.failed
    assert (step_of(healthy_lower) or 0) >= last, f"{failed} with {error}"
    assert step_of(healthy_upper) == 4
    assert len(failures) <= 1, failures
    healthy_lower.put(Checkpoint(save(healthy_upper, 5)))
    healthy_lower.prune()
    assert [step_of(healthy_lower), len(healthy_lower.folders())] == [5, 2]
    return failures, failed


@pytest.mark.parametrize("kind", ["folder", "objects"])
@pytest.mark.parametrize("count", [8, pytest.param(None, marks=pytest.mark.torture)], ids=["some", "all"])
def test_a_failing_operation_costs_one_checkpoint_of_one_level_at_most(tmp_path, kind, count, capsys):
    errors = (*ERRORS, None) if kind == "folder" else (errno.EIO,)
    every = [
        (number, error, after)
        for number in sorted({number for number, _ in points(tmp_path, kind)})
        for error in errors
        for after in (False, True)
        if error is not None or not after
    ]
    chosen = shuffled(every, 1)[:count]
    silent = {"remove", "remove_folder", "delete", ""}  # of what is given up nobody needs to hear
    num_failures = 0
    for i, point in enumerate(chosen):
        failures, operation = check_failing(tmp_path / f"{i}", kind, *point)
        num_failures += bool(failures)
        assert failures or point[1] is None or operation in silent, (point, operation)
    assert num_failures
    if count is None:
        with capsys.disabled():
            sys.stdout.write(f"\n{num_failures} failing operations of promotions ({kind}) survived\n")


@pytest.mark.parametrize("kind", ["folder", "objects"])
@pytest.mark.parametrize("name", ["model/values.safetensors", "optimizer/values.safetensors", "manifest.json"])
def test_a_flipped_bit_above_is_never_brought_below(tmp_path, kind, name):
    upper, lower = places(tmp_path, kind)
    lower.put(Checkpoint(save(upper, 1)))
    path = save(upper, 2) / name
    whole = path.read_bytes()
    for position in np.linspace(0, len(whole) - 1, 12).astype(int):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"is damaged|manifest.json"):
            lower.put(Checkpoint(path.parents[name.count("/")]))
        assert step_of(lower) == 1
        assert len(lower.folders()) == 1
    path.write_bytes(whole)
    checkpoint = Checkpoint(upper.folder(2))
    flips = iter([False, True])  # by now it is being read

    def flip():
        if next(flips, False):
            path.write_bytes(damaged)

    if name != "manifest.json":
        with pytest.raises(CheckpointError, match="is damaged"):
            lower.put(checkpoint, flip)
    assert step_of(lower) == 1


def test_what_came_otherwise_than_it_was_sent_does_not_count(tmp_path, monkeypatch):
    class Flipping(Files):
        def sync(self, fd):
            super().sync(fd)
            with Path(f"/proc/self/fd/{fd}").resolve().open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x07")

    upper = FolderPlace(tmp_path / "upper")
    source = Checkpoint(save(upper, 1))
    with pytest.raises(CheckpointError, match="is damaged between"):
        FolderPlace(tmp_path / "lower", Flipping()).put(source)
    assert not list((tmp_path / "lower").iterdir())
    put = Objects.put
    monkeypatch.setattr(Objects, "put", staticmethod(lambda path, value: put(path, value[:-1] + b"\x07")))
    lower = place_at(f"objects://{tmp_path}/objects/run")
    with pytest.raises(CheckpointError, match="is damaged between"):
        lower.put(source)
    assert lower.root.files() == []


def test_what_changes_in_memory_between_reading_and_writing_is_found(tmp_path):
    source = Checkpoint(save(FolderPlace(tmp_path / "upper"), 1))
    record = source.manifest.files[0]

    def chunks():
        for number, chunk in enumerate(source.chunks(record)):
            chunk[-1] ^= number == 1
            yield chunk

    lower = FolderPlace(tmp_path / "lower")
    with pytest.raises(CheckpointError, match="the copy differs from the source"):
        write_file(lower.files, lower.begin(1, FOLDERS), record, chunks())


def test_an_upload_that_was_interrupted_is_never_taken_and_swept_when_enough_are_there(tmp_path):
    upper, lower = places(tmp_path, "objects")
    lower.put(Checkpoint(save(upper, 1)))
    left, source = lower.folder(2, 7), Checkpoint(save(upper, 2))
    for record in source.manifest.files:
        left.system.pipe_file((left / record.path).path, (source.folder / record.path).read_bytes())
    begun = fsspec.filesystem("objects").open(f"{left.path}/more", "wb")
    assert len(uploads(tmp_path)) == 1
    assert step_of(lower) == 1, "all but the manifest is there"
    unfinished = {path for path in lower.root.files() if path.startswith(left.name)}
    assert len(unfinished) == 2
    for step in (2, 3):
        lower.put(Checkpoint(upper.folder(step) if step == 2 else save(upper, step)))
        before = set(lower.root.files())
        lower.prune()
        assert (unfinished <= before) and (not unfinished & set(lower.root.files())) == (step == 3)
        assert len(uploads(tmp_path)) == (step == 2)
    assert not begun.closed
    assert [folder.name[:13] for folder in lower.folders()] == ["step-00000003", "step-00000002"]


def test_another_run_in_the_same_place_is_refused(tmp_path):
    for kind in ("folder", "objects"):
        upper, lower = places(tmp_path, kind)
        other = FolderPlace(tmp_path / f"other-{kind}")
        lower.put(Checkpoint(save(other, 7)))
        path = save(upper, 7 if kind == "folder" else 8)
        manifest = Checkpoint(path).manifest
        made = Manifest.of(7, [manifest], {"seed": 9})
        with pytest.raises(CheckpointError, match="is there already, and whole; another run writes here"):
            lower.put(Checkpoint(path, made))
        assert len(lower.folders()) == 1


def test_promotion_retention_and_readers_at_once(tmp_path):
    """Readers find a whole checkpoint on every level at any time, and never an older one than before."""
    outcomes = []
    levels = Levels([Level(tmp_path / name, 1) for name in "abc"], outcomes.append)
    stop = threading.Event()

    def make():
        step = 1
        while not stop.is_set():
            path = save(levels.fastest, step)
            levels.report(Outcome(step, path, None, 0, 0))
            levels.settle()
            step += 1

    maker = threading.Thread(target=make)
    other = FORK.Process(target=prune_for_ever, args=(tmp_path / "b",), daemon=True)  # knows of no promotion
    other.start()
    maker.start()
    try:
        last, num_reads, end_s = [0, 0, 0], 0, time.monotonic() + 1.5
        while time.monotonic() < end_s or 0 in last:
            for level, name in enumerate("abc"):
                try:
                    found = step_of(FolderPlace(tmp_path / name)) or 0
                except CheckpointError:  # two newer ones came while it was read, and it went
                    continue
                assert found >= last[level]
                last[level], num_reads = found, num_reads + 1
    finally:
        stop.set()
        maker.join()
        other.kill()
        other.join()
    levels.promote_newest(10)
    levels.close()
    assert num_reads > 5
    newest = {step_of(store) for store in levels.places}
    assert newest == {max(outcome.step for outcome in outcomes)}, [o for o in outcomes if o.error][-3:]
    assert not [path for name in "abc" for path in (tmp_path / name).glob("tmp-*")]
