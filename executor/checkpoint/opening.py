"""Files that are read, wherever they are."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, final

from executor.checkpoint.files import CheckpointError
from executor.checkpoint.flusher import Buffer
from executor.checkpoint.urls import UrlFile, UrlPath
from executor.direct import go_direct

Folder = Path | UrlPath
"""Where a checkpoint is: in a folder, or at a URL."""


class Opened(Protocol):
    """A file that is read."""

    @property
    def num_bytes(self) -> int:
        """Its length."""
        ...

    def read(self, out: Buffer, offset: int) -> int:
        """Read from a byte on, and return how many there were: perhaps not all. Whole blocks are asked for.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def close(self) -> None:
        """Close it."""
        ...


@final
class LocalFile:
    """A file that is read past the page cache, where that is possible."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self._fd).st_size
        go_direct(self._fd, probes=False)

    def read(self, out: Buffer, offset: int) -> int:
        """See :class:`Opened`."""
        return os.preadv(self._fd, [out.data], offset)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


def modified(path: Folder) -> datetime | None:
    """Return when a file was written, in UTC; ``None`` if that is not known.

    Raises:
        CheckpointError: it cannot be found.
    """
    if isinstance(path, UrlPath):
        written = path.modified()
        return written and written.astimezone(UTC)
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def open_file(path: Folder) -> Opened:
    """Open a file for reading.

    Raises:
        CheckpointError: it cannot be.
    """
    if isinstance(path, UrlPath):
        return UrlFile(path)
    try:
        return LocalFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
