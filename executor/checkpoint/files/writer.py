"""Writes files of a checkpoint sequentially, in bounded memory.

Threads hash and write, from a few buffers or from leased memory. They spend most of their time in xxh3 and ``pwrite``,
which release Python's interpreter lock. So they hardly delay training, which launches kernels from Python.

State in host memory is usually not copied. Its owner leases it to the threads, continues, and ends the
lease before it changes the memory. By then, the data has usually been written. If no thread has begun to write some
data, it is copied into free buffers, the last part first, while the threads write the first parts. The owner waits for
the rest. Only whole blocks of the file can be written from leased memory. The bytes before and after these blocks go
into a buffer of the same chunk, with a gap for the leased bytes.
"""

import collections
import contextlib
import dataclasses
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt
import xxhash

from executor.checkpoint.files.system_calls import CheckpointError, Files, write_all
from executor.checkpoint.files.timeouts import timeout_error
from executor.checkpoint.format.layout import FileLayout
from executor.checkpoint.format.manifest import FileRecord
from executor.direct_io import BLOCK_BYTES, DISK_FULL_ERRNOS, alignment_bytes, in_blocks, pages
from planner.checkpoints.policy import CHUNK_BYTES, NUM_THREADS

_LEAST_PRIORITY: Final = 19  # nice value

_LEAST_LEASED: Final = 1 / 64  # of a chunk; copying fewer bytes takes less time than a separate write

Buffer = npt.NDArray[np.uint8]

CopyChunk = Callable[[Buffer, Any], None]
"""Copies bytes into a part of a buffer."""


def lower_thread_priority() -> None:
    """Give the calling thread the lowest priority, so that background work does not slow training down.

    It does nothing outside Linux, where threads have no priority of their own.
    """
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)


def ring_of(num_buffers: int, chunk_bytes: int = CHUNK_BYTES) -> Buffer:
    """Return buffers, uint8 ``[num_buffers, chunk_bytes]``, aligned to blocks."""
    return pages(num_buffers * chunk_bytes).reshape(num_buffers, chunk_bytes)


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """Bytes of a file that are hashed and written together. Each part is in a buffer of the ring, or leased.

    Attributes:
        file: the file.
        offset: offset of the first byte in the file.
        skip: number of bytes at the beginning, in whole blocks, that are hashed but not written.
        length: number of bytes. Writes are padded with zeros to whole blocks.
        buffer: all bytes that are not leased, each at its own position; ``None`` while all bytes are leased.
        leases: in the order of the file.
        is_submitted: whether it is complete.
        has_begun: whether a thread has begun to write it. From then on, leases are not copied.
    """

    file: "ShardWriter"
    offset: int
    skip: int = 0
    length: int = 0
    buffer: Buffer | None = None
    leases: list["Lease"] = dataclasses.field(default_factory=list)
    is_submitted: bool = False
    has_begun: bool = False

    def lease(self, data: Buffer) -> "Lease":
        """Add whole blocks that are written straight from their memory."""
        assert self.length % BLOCK_BYTES == 0 == len(data) % BLOCK_BYTES
        lease = Lease(self, self.length, data)
        self.leases.append(lease)
        self.length += len(data)
        return lease

    def parts(self) -> Iterator[tuple[int, Buffer]]:
        """Yield each part's position in the chunk, and its bytes. The last part is padded to whole blocks."""
        begin = 0
        for lease in self.leases:
            if lease.is_leased:
                if begin < lease.begin:
                    yield begin, self._own[begin : lease.begin]
                yield lease.begin, lease.data
                begin = lease.begin + len(lease.data)
        if begin < self.length:
            yield begin, self._own[begin : in_blocks(self.length)]

    @property
    def _own(self) -> Buffer:
        assert self.buffer is not None
        return self.buffer


@dataclasses.dataclass(eq=False, slots=True)
class Lease:
    """A part of a chunk in its owner's memory.

    Attributes:
        chunk: the chunk that it is a part of.
        begin: position in the chunk.
        data: whole blocks.
        is_leased: whether the owner must not change the data yet.
        is_copying: whether it is being copied into the chunk's buffer.
    """

    chunk: Chunk
    begin: int
    data: Buffer
    is_leased: bool = True
    is_copying: bool = False


@final
class Flusher(contextlib.AbstractContextManager["Flusher"]):
    """Threads that write from a ring of buffers, or from leases.

    Args:
        files: system calls that write.
        ring: uint8 ``[num_buffers, chunk_bytes]``, whole blocks: see :func:`ring_of`.
        num_threads: number of threads.
        patience_s: longest wait for a buffer or a write. A drive that does not answer must not stop training.

    Attributes:
        files, patience_s: the arguments.
        chunk_bytes: size of each buffer.
        num_ended: number of writes that have ended. It grows while the drive answers.
    """

    def __init__(self, files: Files, ring: Buffer, num_threads: int = NUM_THREADS, patience_s: float = 60.0) -> None:
        assert ring.shape[1] == in_blocks(ring.shape[1])
        self.files = files
        self.chunk_bytes: int = ring.shape[1]
        self.patience_s = patience_s
        lock = threading.Lock()  # guards all fields below
        self._changed = threading.Condition(lock)  # a write or copy has ended, or memory is free
        self._submitted = threading.Condition(lock)  # a chunk is queued, or the flusher is closed
        self._free = list(ring)
        self._queue: collections.deque[Chunk] = collections.deque()
        self.num_ended = 0
        self._hung_at = -1  # num_ended at the last timeout
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint {i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take_buffer(self, chunk: Chunk) -> None:
        """Give a chunk a buffer if it has none, after waiting for a free one.

        Raises:
            CheckpointError: a write of the same file has failed, or no write has ended for too long.
        """
        with self._changed:
            self._wait(lambda: bool(chunk.buffer is not None or self._free or chunk.file.failure))
            if chunk.file.failure is not None:
                raise chunk.file.failure
            self._take_buffer(chunk)

    def submit(self, chunk: Chunk) -> None:
        """Queue a chunk to be hashed and written. Its buffer is freed afterwards."""
        with self._changed:
            chunk.file.num_open += 1
            chunk.is_submitted = True
            if not _is_copying(chunk):
                self._queue.append(chunk)
                self._submitted.notify()

    def drop(self, chunk: Chunk) -> None:
        """Drop a chunk that was not submitted."""
        with self._changed:
            self._changed.wait_for(lambda: not _is_copying(chunk))
            self._free_memory(chunk)

    def end_leases(self, leases: Sequence[Lease], *, may_copy: bool) -> None:
        """Wait until no thread reads leased memory, see the module.

        Args:
            leases: the leases to end.
            may_copy: whether to copy data into free buffers, so that the owner waits less.

        Raises:
            CheckpointError: no write has ended for too long. The files have failed, so leased memory may change.
        """

        def copyable() -> Lease | None:
            return next((lease for lease in reversed(leases) if may_copy and self._can_copy(lease)), None)

        with self._changed:
            try:
                while any(lease.is_leased for lease in leases):
                    self._wait(lambda: copyable() is not None or not any(lease.is_leased for lease in leases))
                    if (lease := copyable()) is not None:
                        self._copy_lease(lease)
            except CheckpointError as error:
                for lease in leases:
                    lease.chunk.file.failure = lease.chunk.file.failure or error
                raise

    def _can_copy(self, lease: Lease) -> bool:
        has_room = bool(self._free) or lease.chunk.buffer is not None
        return lease.is_leased and not lease.is_copying and not lease.chunk.has_begun and has_room

    def _copy_lease(self, lease: Lease) -> None:
        """Copy a lease into its chunk's buffer, without the lock.

        During the copy, no thread begins to write the chunk.
        """
        chunk = lease.chunk
        buffer = self._take_buffer(chunk)
        if chunk in self._queue:
            self._queue.remove(chunk)
        lease.is_copying = True
        self._changed.release()
        try:
            np.copyto(buffer[lease.begin : lease.begin + len(lease.data)], lease.data)
        finally:
            self._changed.acquire()
        lease.is_copying = lease.is_leased = False
        if chunk.is_submitted and not _is_copying(chunk):
            self._queue.appendleft(chunk)  # to the front, because it holds a buffer
            self._submitted.notify()
        self._changed.notify_all()

    def _take_buffer(self, chunk: Chunk) -> Buffer:
        if chunk.buffer is None:
            chunk.buffer = self._free.pop()
        return chunk.buffer

    def _free_memory(self, chunk: Chunk) -> None:
        """Free a chunk's buffer, and end its leases."""
        if chunk.buffer is not None:
            self._free.append(chunk.buffer)
            chunk.buffer = None
        for lease in chunk.leases:
            lease.is_leased = False
        self._changed.notify_all()

    def wait(self, file: "ShardWriter") -> None:
        """Wait until all submitted chunks of a file are written.

        Raises:
            CheckpointError: a write has failed, or no write has ended for too long.
        """
        with self._changed:
            self._wait(lambda: not file.num_open)
            if file.failure is not None:
                raise file.failure

    def close(self) -> None:
        """End the threads after all queued writes. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._submitted.notify_all()
            deadline_s = time.monotonic() + (0.0 if self._hung_at == self.num_ended else self.patience_s)
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready``, as long as writes end in time.

        If none has ended since the last timeout, raise at once.
        """
        num_ended = -1

        def goes_on() -> bool:
            return ready() or self.num_ended > num_ended

        while not ready():
            num_ended = self.num_ended
            hangs = self._hung_at == num_ended
            if not self._changed.wait_for(goes_on, 0.0 if hangs else self.patience_s):
                self._hung_at = num_ended
                raise timeout_error(self.patience_s)

    def _run(self) -> None:
        lower_thread_priority()
        while (chunk := self._next()) is not None:
            failure: OSError | None = None
            try:
                if chunk.file.failure is None:
                    self._flush(chunk)
            except OSError as error:
                failure = error
            with self._changed:
                chunk.file.failure = chunk.file.failure or failure
                chunk.file.num_open -= 1
                self.num_ended += 1
                self._free_memory(chunk)

    def _next(self) -> Chunk | None:
        """Wait for the next chunk; return ``None`` if the flusher is closed and no chunk is left."""
        with self._changed:
            self._submitted.wait_for(lambda: bool(self._queue) or self._is_closed)
            if not self._queue:
                return None
            chunk = self._queue.popleft()
            chunk.has_begun = True
            return chunk

    def _flush(self, chunk: Chunk) -> None:
        if (end := in_blocks(chunk.length)) > chunk.length:
            assert chunk.buffer is not None
            chunk.buffer[chunk.length : end] = 0
        digest = xxhash.xxh3_64()
        for begin, data in chunk.parts():
            digest.update(data[: chunk.length - begin].data)
        chunk.file.checksums[chunk.offset] = digest.hexdigest()
        for begin, data in chunk.parts():
            if (skip := max(chunk.skip - begin, 0)) < len(data):
                write_all(self.files, chunk.file.fd, data[skip:].data, chunk.offset + begin + skip)


def _is_copying(chunk: Chunk) -> bool:
    return any(lease.is_copying for lease in chunk.leases)


@final
class ShardWriter:
    """A file that is being written.

    Values are given in the order of the layout. Appended values are copied, so they may change at once. Leased values
    may change when the lease has ended, see the module.

    Attributes:
        layout, path: as given.
        fd: the descriptor; -1 while the file is not open.
        num_open: number of its chunks that are not written yet.
        checksums: of its chunks, by the offset of their first byte.
        failure: the first error.

    Raises:
        CheckpointError: there is no room, or no permission.
    """

    def __init__(self, flusher: Flusher, folder: Path, path: str, layout: FileLayout) -> None:
        self.layout = layout
        self.path = path
        self._full_path = folder / path
        self._flusher = flusher
        self._files = flusher.files
        self.fd = -1
        self.num_open = 0
        self.checksums: dict[int, str] = {}
        self.failure: OSError | None = None
        self._chunk: Chunk | None = None  # the chunk that is being filled
        self._end = 0  # position of the next byte
        try:
            self.fd = self._open()
            self._files.allocate(self.fd, in_blocks(layout.num_bytes))
            self._alignment_bytes = alignment_bytes(self.fd, writes=True)
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
                if self.failure is not None:
                    raise self._error(self.failure)
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
            self._flusher.wait(self)
            header = mmap.mmap(-1, len(self.layout.header))  # its own memory: to wait for a buffer could be a deadlock
            header[:] = self.layout.header
            write_all(self._files, self.fd, memoryview(header), 0)
            self._files.truncate(self.fd, self.layout.num_bytes)
            self._files.sync(self.fd)
            self._close()
        except OSError as error:
            raise self._error(error) from error
        return FileRecord(
            path=self.path,
            num_bytes=self.layout.num_bytes,
            chunk_bytes=self._flusher.chunk_bytes,
            checksums=tuple(digits for _, digits in sorted(self.checksums.items())),
        )

    def abandon(self) -> None:
        """Stop writing. The file stays incomplete. Abandoning twice, or after :meth:`finish`, is allowed."""
        if self._chunk is not None:
            self._flusher.drop(self._chunk)
            self._chunk = None
        if self.fd >= 0:
            with contextlib.suppress(OSError):  # a failed write may be the reason to abandon the file
                self._flusher.wait(self)
            if not self.num_open:  # else a write hangs, and the descriptor must not be reused
                self._close()

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        self._files.close(fd)

    def _open_chunk(self) -> Chunk:
        """Return the chunk that the next byte belongs to."""
        if self._chunk is None:
            chunk_bytes = self._flusher.chunk_bytes
            offset = self._end // chunk_bytes * chunk_bytes
            skip = min(max(len(self.layout.header) - offset, 0), chunk_bytes)
            self._chunk = Chunk(self, offset, skip)
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
