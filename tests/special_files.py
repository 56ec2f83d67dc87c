"""Files that are no regular ones: what an output must never replace, and an input must never be read from for ever."""

import contextlib
import os
import pty
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

READERS_S = 60.0


def device(path: Path, minor: int, real: str) -> None:
    """Make a device of our own as root, and else a link to the system's, which nobody but root could replace."""
    if os.geteuid():
        path.symlink_to(real)
        return
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        path.read_bytes() if minor == 3 else path.open("rb").close()
    except OSError:  # a container without device nodes, or a file system mounted without them
        pytest.skip("no device node can be made here")


@contextlib.contextmanager
def fifo(path: Path) -> Iterator[Callable[[], bytes]]:
    """Yield what returns all that came through a named pipe; somebody reads it all the time."""
    os.mkfifo(path)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(path.read_bytes()), daemon=True)
    reader.start()

    def all_of_it() -> bytes:
        reader.join(READERS_S)
        assert came, "nobody closed the pipe"
        return came[0]

    try:
        yield all_of_it
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # lets a reader go to whom nobody wrote


@contextlib.contextmanager
def terminal(path: Path) -> Iterator[None]:
    """Make a link to a terminal, which is a device that anybody can have."""
    ours, theirs = pty.openpty()
    try:
        path.symlink_to(os.ttyname(theirs))
        yield
    finally:
        os.close(ours)
        os.close(theirs)


@contextlib.contextmanager
def unix_socket(path: Path) -> Iterator[None]:
    """Make a socket."""
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(path.parent)  # a name of a socket has 108 bytes at most
        try:
            bound.bind(path.name)
        finally:
            os.chdir(before)
        yield


def identity(path: Path) -> tuple[int, int, int]:
    """Return what tells whether a file has been replaced."""
    found = path.stat()
    return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)
