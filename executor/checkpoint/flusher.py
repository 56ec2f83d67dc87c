"""Threads that hash and write what is in a bounded number of buffers, or in memory that is lent to them.

They call nothing but xxh3 and ``pwrite`` for long, both of which let go of Python's interpreter lock: training, which
launches kernels from Python, is not held up by them.

[Note: Loans] State in host memory is not copied: its owner lends it, goes on, and settles the loan before it changes
what it has lent. By then it is written, as a rule. What no thread has begun with is copied where a buffer is free, the
last first, while the threads write the first; for the rest the owner waits.
"""

import collections
import dataclasses
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, final

import numpy as np
import numpy.typing as npt
import xxhash

from executor.checkpoint.files import CheckpointError, Files, write_all
from executor.checkpoint.patience import no_answer
from executor.direct import in_blocks

CHUNK_BYTES: Final = 4 << 20
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


@final
class Pending:
    """What is under way for one file, and what went wrong with it."""

    def __init__(self) -> None:
        self.num_open = 0
        self.failure: OSError | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """Bytes that are to be hashed and written.

    Attributes:
        done: of their file.
        fd: of the file.
        data: where they are: a buffer of the ring, or what is lent.
        length: how many they are; what is written is rounded up to whole blocks, with zeros.
        offset: in the file, of the first.
        keep: is called with the checksum, in the thread that writes.
        skip: bytes at the beginning that are hashed and not written, whole blocks.
        is_lent: whether ``data`` is somebody else's, and may not change yet.
        is_queued: whether no thread has begun with it.
    """

    done: Pending
    fd: int
    data: Buffer
    length: int
    offset: int
    keep: Callable[[str], None]
    skip: int = 0
    is_lent: bool = False
    is_queued: bool = False


@final
class Flusher:
    """Threads that write what is in a ring of buffers, or lent.

    Args:
        files: what writes.
        ring: uint8 ``[num_buffers, chunk_bytes]``, whole blocks: see :func:`ring_of`.
        num_threads: that write at once: while one makes checksums, others keep the drive busy.
        patience_s: longest wait for a buffer or a write; a drive that does not answer must not stop training.

    Attributes:
        files, patience_s: the same.
        chunk_bytes: of each buffer.
    """

    def __init__(self, files: Files, ring: Buffer, num_threads: int = 4, patience_s: float = 60.0) -> None:
        assert ring.shape[1] == in_blocks(ring.shape[1])
        self.files = files
        self.chunk_bytes = ring.shape[1]
        self.patience_s = patience_s
        self._changed = threading.Condition()  # guards all below
        self._free = list(ring)
        self._queue: collections.deque[Work] = collections.deque()
        self._num_ended = 0
        self._hung_at = -1  # what it was when nothing had ended for too long
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"checkpoint {i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_ended(self) -> int:
        """Writes that have ended so far: while this grows the drive answers."""
        return self._num_ended

    def take(self, done: Pending) -> Buffer:
        """Return a free buffer; waits until there is one.

        Raises:
            CheckpointError: a write of the same file has failed, or none has ended for too long.
        """
        with self._changed:
            self._wait(lambda: bool(self._free) or done.failure is not None)
            if done.failure is not None:
                raise done.failure
            buffer: Buffer = self._free.pop()
            return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Give a buffer up that was taken and is not to be written."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def submit(self, work: Work) -> None:
        """Hash and write something, after what was submitted before; then free its buffer."""
        with self._changed:
            work.done.num_open += 1
            work.is_queued = True
            self._queue.append(work)
            self._changed.notify_all()

    def settle(self, loans: Sequence[Work]) -> None:
        """Wait until nobody reads what was lent, see [Note: Loans].

        Raises:
            CheckpointError: nothing has ended for too long; their files have failed then, and what is lent may change.
        """

        def copied() -> Work | None:
            return next((loan for loan in reversed(loans) if loan.is_lent and loan.is_queued and self._free), None)

        with self._changed:
            try:
                while any(loan.is_lent for loan in loans):
                    self._wait(lambda: copied() is not None or not any(loan.is_lent for loan in loans))
                    if (loan := copied()) is not None:
                        self._copy(loan)
            except CheckpointError as error:
                for loan in loans:
                    loan.done.failure = loan.done.failure or error
                raise

    def _copy(self, loan: Work) -> None:
        """Move what is lent into a buffer, without the lock meanwhile."""
        buffer = self._free.pop()
        self._queue.remove(loan)
        loan.is_queued = False
        self._changed.release()
        try:
            np.copyto(buffer[: loan.length], loan.data[: loan.length])
        finally:
            self._changed.acquire()
        loan.data, loan.is_lent, loan.is_queued = buffer, False, True
        self._queue.appendleft(loan)  # a buffer is worth more than memory that was lent
        self._changed.notify_all()

    def wait(self, done: Pending) -> None:
        """Wait until all that was submitted for a file is written.

        Raises:
            CheckpointError: some of it could not be, or none has ended for too long.
        """
        with self._changed:
            self._wait(lambda: not done.num_open)
            if done.failure is not None:
                raise done.failure

    def close(self) -> None:
        """End the threads, after what they have. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            deadline_s = time.monotonic() + (0.0 if self._hung_at == self._num_ended else self.patience_s)
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait as long as something ends from time to time; not at all while nothing has since it was last too long."""
        num_ended = -1

        def goes_on() -> bool:
            return ready() or self._num_ended > num_ended

        while not ready():
            num_ended = self._num_ended
            hangs = self._hung_at == num_ended
            if not self._changed.wait_for(goes_on, 0.0 if hangs else self.patience_s):
                self._hung_at = num_ended
                raise no_answer(self.patience_s)

    def _run(self) -> None:
        yield_cores()
        while (work := self._next()) is not None:
            failure: OSError | None = None
            try:
                if work.done.failure is None:
                    self._flush(work)
            except OSError as error:
                failure = error
            with self._changed:
                work.done.failure = work.done.failure or failure
                work.done.num_open -= 1
                self._num_ended += 1
                if not work.is_lent:
                    self._free.append(work.data)
                work.is_lent = False
                self._changed.notify_all()

    def _next(self) -> Work | None:
        """Wait for something to do; ``None``: there will be nothing more."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue) or self._is_closed)
            if not self._queue:
                return None
            work = self._queue.popleft()
            work.is_queued = False
            return work

    def _flush(self, work: Work) -> None:
        work.keep(checksum(work.data[: work.length]))
        end = in_blocks(work.length)
        if end > work.length:
            work.data[work.length : end] = 0
        if end > work.skip:
            write_all(self.files, work.fd, work.data[work.skip : end].data, work.offset + work.skip)
