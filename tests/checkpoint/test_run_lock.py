"""One run writes into a folder of checkpoints at a time; whoever comes second is told at once, and by whom."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from executor.checkpoint.files.lock import LOCK_NAME, run_lock
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.levels import Level, Levels

HOLD = """
import sys, time
from pathlib import Path
from executor.checkpoint.files.lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_with_who_writes_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(CheckpointError) as caught:
            run_lock(tmp_path).__enter__()
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}: another run (process {process.pid} on ")
        assert message.endswith("give this run a folder of its own")
        assert "\n" not in message
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_NAME).exists()
    with run_lock(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_next_start_of_the_same_run_takes_the_lock_of_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That node may be gone, while NFS keeps the lock for it."""
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "job 7"}
    elsewhere = "import platform; platform.node = lambda: 'elsewhere'"
    words = [sys.executable, "-c", elsewhere + HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as process, contextlib.ExitStack() as ending:
        ending.callback(process.kill)
        assert process.stdout is not None
        process.stdout.readline()
        for other in ("job 8", "none", "7", ""):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", other)
            with pytest.raises(CheckpointError, match=r"another run \(process \d+ on \S+ of the run job 7\)"):
                run_lock(tmp_path).__enter__()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job 7")
        with run_lock(tmp_path):
            assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()
            for name in ("job 8", "job 7"):
                monkeypatch.setenv("TORCHELASTIC_RUN_ID", name)
                with pytest.raises(CheckpointError, match=f"process {os.getpid()} on"):
                    run_lock(tmp_path).__enter__()


def test_it_is_given_up_when_closed(tmp_path: Path) -> None:
    for _ in range(2):
        with run_lock(tmp_path):
            with pytest.raises(CheckpointError, match=f"another run \\(process {os.getpid()} on "):
                run_lock(tmp_path).__enter__()
            assert list(tmp_path.iterdir()) == [tmp_path / LOCK_NAME], "whoever is refused leaves it"
        assert list(tmp_path.iterdir()) == []


def test_never_two_have_it(tmp_path: Path) -> None:
    """Also while others give it up and remove its file."""
    inside, most, failures = 0, 0, []
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        for _ in range(300):
            try:
                lock = contextlib.ExitStack()
                lock.enter_context(run_lock(tmp_path))
            except CheckpointError as error:
                if "another run" not in str(error):
                    failures.append(error)
                continue
            with guard:
                inside += 1
                most = max(most, inside)
            with guard:
                inside -= 1
            lock.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, failures) == (1, [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used_all_the_same(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_fd: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fails)
    with run_lock(tmp_path), run_lock(tmp_path):
        pass


def test_what_cannot_be_locked_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "folder" / LOCK_NAME).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="folder: Is a directory; choose another folder for checkpoints"):
        run_lock(tmp_path / "folder").__enter__()
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "somebody's file")
    with pytest.raises(CheckpointError, match="choose another folder for checkpoints"):
        run_lock(tmp_path).__enter__()
    assert not (tmp_path / "somebody's file").exists()


def test_all_folders_of_a_run_are_locked_by_rank_0_until_it_closes(tmp_path: Path) -> None:
    """Whichever of them another run shares; a failure in the middle leaves none locked."""
    places = [Level(tmp_path / name, 1) for name in "abc"]
    held = Levels(places, lambda _: None)
    others = Levels(places, lambda _: None, is_first=False)
    for name in "abc":
        with pytest.raises(CheckpointError, match=f"{name}: another run"):
            Levels([Level(tmp_path / "new", 1), Level(tmp_path / name, 1)], lambda _: None)
    held.close()
    Levels([Level(tmp_path / "new", 1), *places], lambda _: None).close()
    others.close()
    assert not list(tmp_path.rglob(LOCK_NAME))
