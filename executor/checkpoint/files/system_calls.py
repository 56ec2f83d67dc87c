"""System calls of checkpoints, one per method, so that tests can make each one fail, hang or lose its effect.

Written data survives the end of the process, but not a loss of power. Bytes of a file are durable only
after its ``fsync``, and names in a folder only after that folder's ``fsync``. The code does not rely on the order in
which a file system writes data back by itself.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from executor.direct_io import BLOCK_BYTES

_LARGEST_WRITE_BYTES: Final = 1 << 30  # Linux truncates writes above 2 GiB


class CheckpointError(OSError):
    """A checkpoint cannot be written or read."""


class DamagedError(CheckpointError):
    """A checkpoint is damaged: it differs from what was written. Another checkpoint may be whole."""


class Files:
    """The operating system's own files."""

    def make_folder(self, path: Path) -> None:
        """Make a new folder."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Make a new file, and return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def reuse(self, path: Path) -> int:
        """Open an existing file to overwrite it, and return its descriptor."""
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def allocate(self, fd: int, num_bytes: int) -> None:
        """Allocate the space of a file, so that a full drive raises an error now, not in the middle."""
        os.posix_fallocate(fd, 0, num_bytes)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write, and return the number of written bytes, which may be fewer than given."""
        return os.pwrite(fd, data[:_LARGEST_WRITE_BYTES], offset)

    def truncate(self, fd: int, num_bytes: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, num_bytes)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and length durable. If this raises, their state is unknown."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a folder within its parent. Raises OSError if the new name is taken."""
        os.rename(old, new)  # noqa: PTH104 - must fail if the target is a folder that is not empty

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def write_all(files: Files, fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data``. A write that is cut short continues after its last whole block.

    Raises:
        OSError: the first error of a write; ``ENOSPC`` if a write writes less than a block.
    """
    done = 0
    while done < len(data):
        count = files.write(fd, data[done:], offset + done)
        whole = count if done + count == len(data) else count // BLOCK_BYTES * BLOCK_BYTES
        if whole <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += whole


def remove_tree(files: Files, folder: Path) -> None:
    """Remove a folder and its files. Another process may remove some of them at the same time."""
    with contextlib.suppress(FileNotFoundError):
        for entry in sorted(folder.iterdir()):
            if entry.is_dir():
                remove_tree(files, entry)
            else:
                with contextlib.suppress(FileNotFoundError):
                    files.remove(entry)
        files.remove_folder(folder)
