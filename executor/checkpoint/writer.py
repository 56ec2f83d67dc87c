"""Writes one file of a checkpoint, value behind value, in bounded memory."""

import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np

from executor.checkpoint.files import CheckpointError, write_all
from executor.checkpoint.flusher import Buffer, Flusher, Pending, Work
from executor.checkpoint.layout import Layout
from executor.checkpoint.manifest import FileRecord
from executor.direct import BLOCK_BYTES, NO_ROOM, alignment_bytes, in_blocks

CopyChunk = Callable[[Buffer, Any], None]
"""Copies bytes into a part of a buffer."""


@final
class ShardWriter:
    """A file that is being written.

    Values are given in the order of the layout. What has been given may change at once: it is in a buffer, or written.
    What has been lent may change when the loan has been settled ([Note: Loans] in :mod:`executor.checkpoint.flusher`).

    Args:
        flusher: writes.
        folder: of the checkpoint, existing.
        path: of the file, within it.
        layout: of the file.

    Raises:
        CheckpointError: there is no room, or no permission.
    """

    def __init__(self, flusher: Flusher, folder: Path, path: str, layout: Layout) -> None:
        self.layout = layout
        self.path = path
        self._full_path = folder / path
        self._flusher = flusher
        self._files = flusher.files
        self._done = Pending()
        self._checksums: dict[int, str] = {}
        self._fd: int | None = None
        self._buffer: Buffer | None = None
        self._end = 0  # of what has been given
        try:
            self._fd = self._open()
            self._files.allocate(self._fd, in_blocks(layout.num_bytes))
            self._alignment_bytes = alignment_bytes(self._fd, writes=True)
        except OSError as error:
            self.abandon()
            raise self._error(error) from error
        self._put(np.frombuffer(layout.header, np.uint8), np.copyto)

    def _open(self) -> int:
        """Make the file, or take that of an old checkpoint, which is none from now on ([Note: Spares])."""
        try:
            return self._files.create(self._full_path)
        except FileExistsError:
            fd = self._files.reuse(self._full_path)
        try:
            write_all(self._files, fd, memoryview(bytes(BLOCK_BYTES)), 0)  # no header, no file of tensors
        except OSError:
            self._files.close(fd)
            raise
        return fd

    def append(self, values: Any, copy: CopyChunk = np.copyto) -> None:
        """Write the next bytes.

        Args:
            values: flat, of bytes; they are cut into slices.
            copy: is called with a part of a buffer and such a slice, and returns when it has been copied.

        Raises:
            CheckpointError: some write has failed, or none has ended for too long.
        """
        self._put(values, copy)

    def lend(self, values: Buffer) -> list[Work]:
        """Write the next bytes from where they are, if transfers can begin there, and copies of the rest.

        Returns:
            What is lent: :meth:`Flusher.settle` it before values change.

        Raises:
            CheckpointError: some write has failed, or none has ended for too long.
        """
        chunk_bytes, loans = self._flusher.chunk_bytes, []
        while len(values):
            room = chunk_bytes - self._end % chunk_bytes
            if room == chunk_bytes <= len(values) and values.ctypes.data % self._alignment_bytes == 0:
                if self._done.failure is not None:
                    raise self._error(self._done.failure)
                self._end += chunk_bytes
                loans.append(self._submit(values[:chunk_bytes], is_lent=True))
            else:
                self._put(values[:room], np.copyto)
            values = values[room:]
        return loans

    def finish(self) -> FileRecord:
        """Make the file whole and durable, the header last; return what the manifest says of it.

        Raises:
            CheckpointError: something could not be written.
        """
        assert self._end == self.layout.num_bytes, f"{self.path}: {self._end} of {self.layout.num_bytes} bytes came"
        self._submit_buffer()
        try:
            self._flusher.wait(self._done)
            self._write_header()
            assert self._fd is not None
            self._files.truncate(self._fd, self.layout.num_bytes)
            self._files.sync(self._fd)
            self._close()
        except OSError as error:
            raise self._error(error) from error
        checksums = tuple(self._checksums[i] for i in range(len(self._checksums)))
        return FileRecord(
            path=self.path,
            num_bytes=self.layout.num_bytes,
            chunk_bytes=self._flusher.chunk_bytes,
            checksums=checksums,
        )

    def abandon(self) -> None:
        """Stop writing; the file stays as it is. Abandoning twice, or after the end, is allowed."""
        if self._buffer is not None:
            self._flusher.give_back(self._buffer)
            self._buffer = None
        if self._fd is not None:
            with contextlib.suppress(OSError):  # that is why it is abandoned, perhaps
                self._flusher.wait(self._done)
            if not self._done.num_open:  # else a write hangs, and the number may not become another file's
                self._close()

    def _close(self) -> None:
        assert self._fd is not None
        fd, self._fd = self._fd, None
        self._files.close(fd)

    def _put(self, values: Any, copy: CopyChunk) -> None:
        chunk_bytes = self._flusher.chunk_bytes
        while len(values):
            if self._buffer is None:
                try:
                    self._buffer = self._flusher.take(self._done)
                except OSError as error:
                    raise self._error(error) from error
            at = self._end % chunk_bytes
            count = min(chunk_bytes - at, len(values))
            copy(self._buffer[at : at + count], values[:count])
            values = values[count:]
            self._end += count
            if self._end % chunk_bytes == 0:
                self._submit_buffer()

    def _submit_buffer(self) -> None:
        if self._buffer is not None:
            self._submit(self._buffer)
            self._buffer = None

    def _submit(self, data: Buffer, *, is_lent: bool = False) -> Work:
        """Have the last chunk written, but for the header."""
        assert self._fd is not None
        chunk = (self._end - 1) // self._flusher.chunk_bytes
        offset = chunk * self._flusher.chunk_bytes
        skip = min(max(len(self.layout.header) - offset, 0), self._flusher.chunk_bytes)
        keep = self._checksums.__setitem__
        work = Work(
            self._done, self._fd, data, self._end - offset, offset, lambda digits: keep(chunk, digits), skip, is_lent
        )
        self._flusher.submit(work)
        return work

    def _write_header(self) -> None:
        """Write it from memory of its own: who waited for a buffer here could keep others from giving theirs back."""
        assert self._fd is not None
        memory = mmap.mmap(-1, len(self.layout.header))
        memory[:] = self.layout.header
        write_all(self._files, self._fd, memoryview(memory), 0)

    def _error(self, error: OSError) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        where = f"{self._full_path}: {error.strerror}"
        if error.errno in NO_ROOM:
            made = CheckpointError(f"{where}; it needs {self.layout.num_bytes:,} B: make room, or keep fewer")
        else:
            made = CheckpointError(f"{where}; this checkpoint is given up")
        made.errno = error.errno
        return made
