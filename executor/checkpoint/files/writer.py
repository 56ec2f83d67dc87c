"""Writes one file of a checkpoint sequentially, in bounded memory."""

import contextlib
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from executor.checkpoint.files.flusher import Buffer, Chunk, FileState, Flusher, Lease
from executor.checkpoint.files.system_calls import CheckpointError, write_all
from executor.checkpoint.format.layout import FileLayout
from executor.checkpoint.format.manifest import FileRecord
from executor.direct_io import BLOCK_BYTES, DISK_FULL_ERRNOS, alignment_bytes, in_blocks

CopyChunk = Callable[[Buffer, Any], None]
"""Copies bytes into a part of a buffer."""

_LEAST_LEASED: Final = 1 / 64  # of a chunk; copying fewer bytes takes less time than a separate write


@final
class ShardWriter:
    """A file that is being written.

    Values are given in the order of the layout. Appended values are copied, so they may change at once. Leased values
    may change when the lease has ended ([Note: Leases] in :mod:`executor.checkpoint.files.flusher`).

    Raises:
        CheckpointError: there is no room, or no permission.
    """

    def __init__(self, flusher: Flusher, folder: Path, path: str, layout: FileLayout) -> None:
        self.layout = layout
        self.path = path
        self._full_path = folder / path
        self._flusher = flusher
        self._files = flusher.files
        self._file = FileState()
        self._chunk: Chunk | None = None  # the chunk that is being filled
        self._end = 0  # position of the next byte
        try:
            self._file.fd = self._open()
            self._files.allocate(self._file.fd, in_blocks(layout.num_bytes))
            self._alignment_bytes = alignment_bytes(self._file.fd, writes=True)
        except OSError as error:
            self.abandon()
            raise self._error(error) from error
        self.append(np.frombuffer(layout.header, np.uint8))

    def _open(self) -> int:
        """Make the file, or overwrite a file of an old checkpoint ([Note: Spares])."""
        try:
            return self._files.create(self._full_path)
        except FileExistsError:
            fd = self._files.reuse(self._full_path)
        try:
            write_all(self._files, fd, memoryview(bytes(BLOCK_BYTES)), 0)  # readers reject a file without a header
        except OSError:
            self._files.close(fd)
            raise
        return fd

    def append(self, values: Any, copy: CopyChunk = np.copyto) -> None:
        """Write the next bytes.

        Args:
            values: flat, of bytes. They are cut into slices.
            copy: called with a part of a buffer and a slice of values; returns when the slice has been copied.

        Raises:
            CheckpointError: a write has failed, or no write has ended for too long.
        """
        while len(values):
            chunk = self._open_chunk()
            try:
                self._flusher.take_buffer(chunk)
            except OSError as error:
                raise self._error(error) from error
            assert chunk.buffer is not None
            count = min(self._room, len(values))
            copy(chunk.buffer[chunk.length : chunk.length + count], values[:count])
            chunk.length += count
            self._advance(count)
            values = values[count:]

    def lease(self, values: Buffer) -> list[Lease]:
        """Write the next bytes: aligned parts straight from their memory, and copies of the rest.

        Returns:
            The leases. Call :meth:`Flusher.end_leases` before values change.

        Raises:
            CheckpointError: a write has failed, or no write has ended for too long.
        """
        least_bytes = max(int(_LEAST_LEASED * self._flusher.chunk_bytes), BLOCK_BYTES)
        leases = []
        while len(values):
            begin = min(-self._end % BLOCK_BYTES, len(values))
            end = begin + (min(len(values), self._room) - begin) // BLOCK_BYTES * BLOCK_BYTES
            if end - begin >= least_bytes and values[begin:].ctypes.data % self._alignment_bytes == 0:
                self.append(values[:begin])
                if self._file.failure is not None:
                    raise self._error(self._file.failure)
                leases.append(self._open_chunk().lease(values[begin:end]))
                self._advance(end - begin)
                values = values[end:]
            else:
                count = min(self._room, len(values))
                self.append(values[:count])
                values = values[count:]
        return leases

    @property
    def _room(self) -> int:
        """Bytes up to the end of the chunk."""
        return self._flusher.chunk_bytes - self._end % self._flusher.chunk_bytes

    def finish(self) -> FileRecord:
        """Complete the file, with its header last, and make it durable; return its record for the manifest.

        Raises:
            CheckpointError: the file could not be written.
        """
        assert self._end == self.layout.num_bytes, f"{self.path}: {self._end} of {self.layout.num_bytes} bytes came"
        self._submit_chunk()
        try:
            self._flusher.wait(self._file)
            header = mmap.mmap(-1, len(self.layout.header))  # its own memory: to wait for a buffer could be a deadlock
            header[:] = self.layout.header
            write_all(self._files, self._file.fd, memoryview(header), 0)
            self._files.truncate(self._file.fd, self.layout.num_bytes)
            self._files.sync(self._file.fd)
            self._close()
        except OSError as error:
            raise self._error(error) from error
        return FileRecord(
            path=self.path,
            num_bytes=self.layout.num_bytes,
            chunk_bytes=self._flusher.chunk_bytes,
            checksums=tuple(digits for _, digits in sorted(self._file.checksums.items())),
        )

    def abandon(self) -> None:
        """Stop writing. The file stays incomplete. Abandoning twice, or after :meth:`finish`, is allowed."""
        if self._chunk is not None:
            self._flusher.drop(self._chunk)
            self._chunk = None
        if self._file.fd >= 0:
            with contextlib.suppress(OSError):  # a failed write may be the reason to abandon the file
                self._flusher.wait(self._file)
            if not self._file.num_open:  # else a write hangs, and the descriptor must not be reused
                self._close()

    def _close(self) -> None:
        fd, self._file.fd = self._file.fd, -1
        self._files.close(fd)

    def _open_chunk(self) -> Chunk:
        """Return the chunk that the next byte belongs to."""
        if self._chunk is None:
            chunk_bytes = self._flusher.chunk_bytes
            offset = self._end // chunk_bytes * chunk_bytes
            skip = min(max(len(self.layout.header) - offset, 0), chunk_bytes)
            self._chunk = Chunk(self._file, offset, skip)
        return self._chunk

    def _advance(self, count: int) -> None:
        self._end += count
        if self._end % self._flusher.chunk_bytes == 0:
            self._submit_chunk()

    def _submit_chunk(self) -> None:
        """Submit the open chunk, if there is one."""
        if self._chunk is not None:
            self._flusher.submit(self._chunk)
            self._chunk = None

    def _error(self, error: OSError) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        where = f"{self._full_path}: {error.strerror}"
        if error.errno in DISK_FULL_ERRNOS:
            made = CheckpointError(f"{where}; it needs {self.layout.num_bytes:,} B: make room, or keep fewer")
        else:
            made = CheckpointError(f"{where}; this checkpoint is abandoned")
        made.errno = error.errno
        return made
