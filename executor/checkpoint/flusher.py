"""Threads that hash and write what is in a bounded number of buffers.

They call nothing but xxh3 and ``pwrite`` for long, both of which let go of Python's interpreter lock: training, which
launches kernels from Python, is not held up by them.
"""

import dataclasses
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Self, final

import numpy as np
import numpy.typing as npt
import xxhash

from executor.checkpoint.files import CheckpointError, Files, write_all
from executor.direct import in_blocks

CHUNK_BYTES: Final = 8 << 20
"""Bytes of one write: smaller ones are slower past the page cache, and larger ones only take memory."""

_LEAST_PRIORITY: Final = 19  # of "nice"

Buffer = npt.NDArray[np.uint8]


def checksum(data: Any) -> str:
    """Return the xxh3 (64 bits) of bytes, in hexadecimal digits."""
    digits: str = xxhash.xxh3_64_hexdigest(data)
    return digits


def yield_cores() -> None:
    """Let the calling thread run where no other would: what is written in the background shall cost training nothing.

    Only where threads have priorities of their own (Linux).
    """
    if sys.platform.startswith("linux"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)


def ring_of(num_buffers: int, chunk_bytes: int = CHUNK_BYTES) -> Buffer:
    """Return memory for buffers, uint8 ``[num_buffers, chunk_bytes]``, that begin at whole blocks."""
    memory = mmap.mmap(-1, num_buffers * chunk_bytes)
    ring: Buffer = np.ndarray((num_buffers, chunk_bytes), np.uint8, memory)
    return ring


@dataclasses.dataclass(slots=True)
class _Work:
    fd: int
    buffer: Buffer
    length: int  # of what is in it
    skip: int  # bytes at its beginning that are hashed, and not written
    offset: int  # in the file, of its first byte
    keep: Callable[[str], None]
    done: "Pending"


@final
class Pending:
    """What is under way for one file, and what went wrong with it."""

    def __init__(self) -> None:
        self.num_open = 0
        self.failure: OSError | None = None


@final
class Flusher:
    """Threads that write what is in a ring of buffers.

    Args:
        files: what writes.
        ring: uint8 ``[num_buffers, chunk_bytes]``, whole blocks: see :func:`ring_of`.
        num_threads: that write at once.
        patience_s: longest wait for a buffer or a write; a drive that does not answer must not stop training.
    """

    def __init__(self, files: Files, ring: Buffer, num_threads: int = 2, patience_s: float = 60.0) -> None:
        assert ring.shape[1] == in_blocks(ring.shape[1])
        self.files = files
        self.chunk_bytes = ring.shape[1]
        self._patience_s = patience_s
        self._changed = threading.Condition()  # guards all below
        self._free = list(ring)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint {i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def take(self, done: Pending) -> Buffer:
        """Return a free buffer; waits until there is one.

        Raises:
            CheckpointError: a write of the same file has failed, or none has ended for too long.
        """
        with self._changed:
            self._wait(lambda: bool(self._free) or done.failure is not None, "buffer")
            if done.failure is not None:
                raise done.failure
            buffer: Buffer = self._free.pop()
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Give a buffer up that was taken and is not to be written."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(
        self, done: Pending, fd: int, buffer: Buffer, length: int, offset: int, keep: Callable[[str], None], skip: int
    ) -> None:
        """Hash the first ``length`` bytes of a buffer, write all but the first ``skip``, and free it.

        Args:
            done: of the file.
            fd: of the file.
            buffer: taken from here.
            length: bytes in it; what is written is rounded up to whole blocks, with zeros.
            offset: in the file, of the buffer's first byte.
            keep: is called with the checksum, in the thread that writes.
            skip: bytes, whole blocks.
        """
        with self._changed:
            done.num_open += 1
        self._work.put(_Work(fd, buffer, length, skip, offset, keep, done))

    def wait(self, done: Pending) -> None:
        """Wait until all that was submitted for a file is written.

        Raises:
            CheckpointError: some of it could not be, or none has ended for too long.
        """
        with self._changed:
            self._wait(lambda: not done.num_open, "write")
            if done.failure is not None:
                raise done.failure

    def close(self) -> None:
        """End the threads, after what they have. Closing twice is allowed."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(self._patience_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Wait as long as something ends from time to time."""
        deadline_s = time.monotonic() + self._patience_s
        while not ready():
            before = len(self._free)
            if not self._changed.wait(max(deadline_s - time.monotonic(), 0)):
                raise CheckpointError(
                    f"no {what} has ended for {self._patience_s:g} s: the drive does not keep up, or does not answer; "
                    "this checkpoint is given up"
                )
            if len(self._free) > before:
                deadline_s = time.monotonic() + self._patience_s

    def _run(self) -> None:
        yield_cores()
        while (work := self._work.get()) is not None:
            failure: OSError | None = None
            try:
                if work.done.failure is None:
                    self._flush(work)
            except OSError as error:
                failure = error
            with self._changed:
                work.done.failure = work.done.failure or failure
                work.done.num_open -= 1
                self._free.append(work.buffer)
                self._changed.notify_all()

    def _flush(self, work: _Work) -> None:
        work.keep(checksum(work.buffer[: work.length]))
        end = in_blocks(work.length)
        work.buffer[work.length : end] = 0
        if end > work.skip:
            write_all(self.files, work.fd, work.buffer[work.skip : end].data, work.offset + work.skip)
