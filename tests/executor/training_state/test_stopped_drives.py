"""A drive that does not answer, at any operation, for ever: training waits for it no longer than was said.

Nobody can stop a system call that hangs. What can be had is that training, its end, and its threads do without it; and
where training itself needs the drive, that it can be ended.
"""

import os
import signal
import threading
import time

import pytest
from test_immutability import iterations
from test_numerics import mixed
from training import Task, assert_same, decide, prepare, reference, train, uniform

import executor.checkpoint.engine
import executor.devices.lanes
import executor.tasks.snapshots
from executor.checkpoint.files.system_calls import Files
from executor.checkpoint.levels import Level
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import newest_of
from executor.training_state.saving import Checkpoints

PATIENCE_S = 0.2
BOUND_S = 120.0
"""Far more than all waits together, on the busiest machine, and less than for ever."""


class HangingFiles(Files):
    """Files of which one operation never returns once it is told to hang, until the test is over."""

    def __init__(self) -> None:
        self.hangs = False
        self.over = threading.Event()
        self.num_hung = 0


def _hanging(name):
    def method(self, *args):
        if self.hangs and name == self.name:
            self.num_hung += 1
            self.over.wait()
        return getattr(Files, name)(self, *args)

    return method


OPERATIONS = [name for name in vars(Files) if not name.startswith("_")]
for operation in OPERATIONS:
    setattr(HangingFiles, operation, _hanging(operation))


@pytest.fixture
def files(request):
    made = HangingFiles()
    made.name = request.param
    yield made
    made.over.set()


@pytest.mark.part(6)
@pytest.mark.parametrize("files", OPERATIONS, indirect=True, ids=OPERATIONS)
def test_training_does_without_a_drive_that_hangs(files, tmp_path, monkeypatch):
    """The first checkpoint is made, the drive hangs from the second on, and ends with training."""
    monkeypatch.setattr(executor.tasks.snapshots, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(executor.checkpoint.engine, "_END_S", PATIENCE_S)
    task = Task("gpt2")
    outcomes, seen = [], []
    begin_s = time.monotonic()
    model, optimizer = prepare(task, decide(task, mixed), checkpoint_buffer_bytes=4 * 4096)
    level = Level(tmp_path / "saved", keep=2)
    with optimizer.session, Checkpoints(optimizer, level, on_outcome=outcomes.append, files=files) as saved:
        for step in iterations(task, model, optimizer, seen):
            saved.save(step)
            if step == 1:
                saved.finish()
                assert [outcome.error for outcome in outcomes] == [None]
                files.hangs = True
                monkeypatch.setattr(executor.checkpoint.engine, "_PATIENCE_S", PATIENCE_S)
                saved._flusher.patience_s = PATIENCE_S
        saved.finish()
        final = {n: w.clone() for n, w in optimizer.session.full_parameters().items()}
    assert time.monotonic() - begin_s < BOUND_S
    assert_same((seen, final), reference(task))
    made = {outcome.step for outcome in outcomes if outcome.error is None}
    assert {outcome.step for outcome in outcomes} == set(range(1, task.iterations + 1)), "each is told how it ended"
    assert all("the drive has not answered for" in outcome.error for outcome in outcomes if outcome.error is not None)
    if files.num_hung and files.name not in {"remove", "remove_folder"}:  # by a thread for which nobody waits
        assert made < set(range(1, task.iterations + 1))
    assert newest_of([FolderPlace(tmp_path / "saved")])[0].manifest.step >= max(made)


@pytest.fixture
def over():
    made = threading.Event()
    yield made
    made.set()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_ctrl_c_ends_training_that_waits_for_a_drive_that_hangs(call, over, tmp_path, monkeypatch):
    """The file goes. Its descriptor does not, or what comes of the call in the end would be done to another file."""
    monkeypatch.setattr(executor.devices.lanes, "_END_S", PATIENCE_S)
    transfer = getattr(os, call)

    def hanging(fd, buffers, offset):
        if not threading.current_thread().name.startswith("lane nvme-state-"):
            return transfer(fd, buffers, offset)  # a thread that an earlier test has left behind
        hung.append(fd)
        time.sleep(PATIENCE_S)  # until the caller waits too
        os.kill(os.getpid(), signal.SIGINT)
        over.wait(BOUND_S)
        ended.append(transfer(fd, buffers, offset))
        return ended[-1]

    task, hung, ended = Task("gpt2"), [], []
    model, optimizer = prepare(task, decide(task, uniform("host", "nvme")), storage_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    begin_s = time.monotonic()
    with (
        pytest.warns(RuntimeWarning, match=r"^lane nvme-state-(in|out): .* has not ended"),
        pytest.raises(KeyboardInterrupt),
        optimizer.session,
    ):
        monkeypatch.setattr(os, call, hanging)
        train(task, model, optimizer)
    assert time.monotonic() - begin_s < BOUND_S
    assert not path.exists()
    assert os.fstat(hung[0]).st_nlink == 0, "this very file, without a name"
    over.set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("lane nvme-state-")]
    thread.join(BOUND_S)
    assert len(hung) == 1
    assert ended[0] > 0
    os.close(hung[0])
