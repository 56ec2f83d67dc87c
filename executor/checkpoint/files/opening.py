"""Opens and reads files in folders and at URLs."""

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.files.urls import UrlPath
from executor.direct_io import BLOCK_BYTES, alignment_bytes, in_blocks

Folder = Path | UrlPath
"""The folder of a checkpoint: local, or at a URL."""


@final
class LocalFile:
    """A regular file within a folder, read with ``O_DIRECT`` if possible.

    It follows no links and opens no devices. So untrusted files can neither lead outside the folder nor block the
    reader.

    Args:
        folder: the folder, whose path may contain links.
        path: path of the file within the folder.

    Attributes:
        num_bytes: length of the file.
        alignment_bytes: addresses of memory for :meth:`read` must be multiples of this.

    Raises:
        OSError: there is no such file, or it is not a regular file.
    """

    def __init__(self, folder: Path, path: str) -> None:
        *folders, name = path.split("/")
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for inner in folders:
                outer, at = at, os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(outer)
            self._fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        found = os.fstat(self._fd)
        self.num_bytes = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file")
        self.alignment_bytes = alignment_bytes(self._fd, writes=False)

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """Read whole blocks from ``offset`` on into ``parts``, one after another.

        Returns:
            The number of bytes read, which may be fewer.
        """
        try:
            return os.preadv(self._fd, parts, offset)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # some file systems accept it without having it
            return os.preadv(self._fd, parts, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


OpenFile = LocalFile | UrlPath


def fill(file: OpenFile, parts: Sequence[memoryview], offset: int, num_bytes: int) -> None:
    """Read ``num_bytes`` into ``parts``, one after another. The parts have room for whole blocks.

    ``O_DIRECT`` needs whole blocks, so a read that was cut short continues at a block boundary.

    Raises:
        OSError: the file cannot be read, or ends early.
    """
    done = 0
    while done < num_bytes:
        count = file.read(list(_rest(parts, done)), offset + done)
        done += count if done + count >= num_bytes else count // BLOCK_BYTES * BLOCK_BYTES
        if count < BLOCK_BYTES and done < num_bytes:
            raise OSError(errno.EIO, "it ends early")


def _rest(parts: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """Yield parts without their first ``done`` bytes."""
    for part in parts:
        if done < len(part):
            yield part[done:]
        done = max(done - len(part), 0)


def modified(path: Folder) -> datetime | None:
    """Return when a file was written, in UTC; ``None`` if unknown.

    Raises:
        CheckpointError: the file cannot be found.
    """
    if isinstance(path, UrlPath):
        written = path.modified()
        return written and written.astimezone(UTC)
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def open_file(folder: Folder, path: str) -> OpenFile:
    """Open a file within a folder.

    Raises:
        OSError: there is no such file, or it cannot be reached.
    """
    return (folder / path).opened() if isinstance(folder, UrlPath) else LocalFile(folder, path)


def read_whole(folder: Folder, path: str, most_bytes: int) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: there is no such file, or it is longer than ``most_bytes``.
    """
    file = open_file(folder, path)
    try:
        if file.num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} B")
        content = mmap.mmap(-1, in_blocks(file.num_bytes + 1))  # whole blocks, at least one
        fill(file, [memoryview(content)], 0, file.num_bytes)
        return content[: file.num_bytes]
    finally:
        file.close()
