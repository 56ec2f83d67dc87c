"""A lock on a folder of checkpoints, so that only one run at a time writes there.

[Note: One run] Two runs in one folder would remove each other's checkpoints, and detect it only when they write the
same step. So rank 0 of a run locks a file in the folder, from before its first iteration until it closes its
checkpoints. The kernel releases the lock however the process ends, so no lock has to be removed by hand. On NFS the
file is locked on the server, for all nodes. If a file system has no locks, none is taken; two runs there get an error
when they write the same step. A URL has no locks, but files of two runs never mix there.

A node that is gone may hold a lock on NFS for minutes, until the server notices. So if ``torchrun`` has started the
same run again (``--rdzv-id``), it takes the lock of its earlier start on another node: those processes have ended, by
themselves or with their node. It removes the file that is locked, and locks another.
"""

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from executor.checkpoint.files.system_calls import CheckpointError

LOCK_NAME: Final = "run.lock"

_NO_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
_MOST_BYTES: Final = 300


@contextlib.contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Return a context in which an existing folder is locked for this run; see [Note: One run].

    Raises:
        CheckpointError: another run has locked the folder, or it cannot be written.
    """
    path = folder / LOCK_NAME
    try:
        try:
            while (fd := _locked(path)) is None:
                pass
        except BlockingIOError:
            if not _is_of_earlier_start(_holder(path)):
                raise
            path.unlink(missing_ok=True)
            while (fd := _locked(path)) is None:
                pass
    except BlockingIOError:
        raise CheckpointError(
            f"{folder}: another run{_holder(path)} writes checkpoints there; wait until it has ended, end it, or give "
            "this run a folder of its own"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}; choose another folder for checkpoints") from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # remove first, so that no run locks a file that is about to be removed
            if os.path.samestat(os.fstat(fd), path.stat()):  # else a later start has taken it
                path.unlink()
        os.close(fd)


def _locked(path: Path) -> int | None:
    """Open and lock a file; return its descriptor, or ``None`` if its last owner has removed its name meanwhile."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    taken = False
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        with contextlib.suppress(FileNotFoundError):
            taken = os.path.samestat(os.fstat(fd), path.stat())
        if taken:
            os.ftruncate(fd, 0)
            words = " ".join(filter(None, (f"process {os.getpid()} on {platform.node()}", _run())))
            os.pwrite(fd, f"{words}\n".encode()[:_MOST_BYTES], 0)
    except BaseException:
        os.close(fd)
        raise
    if not taken:
        os.close(fd)
    return fd if taken else None


def _run() -> str:
    """Return, in words, which run of ``torchrun`` this is; empty if it has no name of its own."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else f"of the run {name}"


def _is_of_earlier_start(holder: str) -> bool:
    """Return whether the holder of a lock, in words, was an earlier start of this run on another node."""
    run = _run()
    return bool(run) and holder.endswith(f" {run})") and f" on {platform.node()} " not in holder


def _holder(path: Path) -> str:
    """Return the process that holds a lock, in words; empty if unknown."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        words = file.read(_MOST_BYTES).decode(errors="replace").strip()
        return f" ({words})" if words.isprintable() and words else ""
    return ""
