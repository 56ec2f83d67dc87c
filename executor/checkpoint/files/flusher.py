"""Threads that hash and write what is in a bounded number of buffers, or in memory that is lent to them.

They call nothing but xxh3 and ``pwrite`` for long, both of which let go of Python's interpreter lock: training, which
launches kernels from Python, is not held up by them.

[Note: Loans] State in host memory is not copied: its owner lends it, goes on, and settles the loan before it changes
what it has lent. By then it is written, as a rule. What no thread has begun with is copied where there is a buffer, the
last first, while the threads write the first; for the rest the owner waits. Only whole blocks of the file can be
written from where they are: what is before and behind them goes into a buffer of the same chunk, where room is left for
what is lent.
"""

import collections
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Self, final

import numpy as np
import numpy.typing as npt
import xxhash

from executor.checkpoint.files.patience import no_answer
from executor.checkpoint.files.system_calls import CheckpointError, Files, write_all
from executor.direct_io import BLOCK_BYTES, in_blocks, pages

CHUNK_BYTES: Final = 4 << 20
"""Bytes of one write: smaller ones are slower past the page cache, and larger ones only take memory."""

NUM_WRITERS: Final = 12
"""Threads that write: while some make checksums, as many as drives do well with keep them busy."""

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
    return pages(num_buffers * chunk_bytes).reshape(num_buffers, chunk_bytes)


@final
class Pending:
    """What is under way for one file, and what went wrong with it."""

    def __init__(self) -> None:
        self.num_open = 0
        self.failure: OSError | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Chunk:
    """Bytes of a file that are hashed and written together, in a buffer of the ring or lent, part by part.

    Attributes:
        done: of their file.
        fd: of the file.
        offset: in the file, of the first.
        keep: is called with the checksum, in the thread that writes.
        skip: bytes at the beginning that are hashed and not written, whole blocks.
        length: how many there are; what is written is rounded up to whole blocks, with zeros.
        buffer: has each byte that is not lent, at its own place; ``None`` while all are.
        loans: in the order of the file.
        is_submitted: whether it is complete.
        has_begun: whether a thread has begun with it: loans stay where they are then.
    """

    done: Pending
    fd: int
    offset: int
    keep: Callable[[str], None]
    skip: int = 0
    length: int = 0
    buffer: Buffer | None = None
    loans: list["Loan"] = dataclasses.field(default_factory=list)
    is_submitted: bool = False
    has_begun: bool = False

    def lend(self, data: Buffer) -> "Loan":
        """Let whole blocks, from a block on, be written from where they are."""
        assert self.length % BLOCK_BYTES == 0 == len(data) % BLOCK_BYTES
        loan = Loan(self, self.length, data)
        self.loans.append(loan)
        self.length += len(data)
        return loan

    def parts(self) -> Iterator[tuple[int, Buffer]]:
        """Yield where each part begins in the chunk, and its bytes; the last is filled up to whole blocks."""
        begin = 0
        for loan in self.loans:
            if loan.is_lent:
                if begin < loan.begin:
                    yield begin, self._own[begin : loan.begin]
                yield loan.begin, loan.data
                begin = loan.begin + len(loan.data)
        if begin < self.length:
            yield begin, self._own[begin : in_blocks(self.length)]

    @property
    def _own(self) -> Buffer:
        assert self.buffer is not None
        return self.buffer


@dataclasses.dataclass(eq=False, slots=True)
class Loan:
    """A part of a chunk that is somebody else's memory.

    Attributes:
        chunk: which.
        begin: where, in the chunk.
        data: whole blocks.
        is_lent: whether they may not change yet.
        is_moving: whether somebody is copying them into the chunk's buffer.
    """

    chunk: Chunk
    begin: int
    data: Buffer
    is_lent: bool = True
    is_moving: bool = False


@final
class Flusher:
    """Threads that write what is in a ring of buffers, or lent.

    Args:
        files: what writes.
        ring: uint8 ``[num_buffers, chunk_bytes]``, whole blocks: see :func:`ring_of`.
        num_threads: that write at once.
        patience_s: longest wait for a buffer or a write; a drive that does not answer must not stop training.

    Attributes:
        files, patience_s: the same.
        chunk_bytes: of each buffer.
    """

    def __init__(self, files: Files, ring: Buffer, num_threads: int = NUM_WRITERS, patience_s: float = 60.0) -> None:
        assert ring.shape[1] == in_blocks(ring.shape[1])
        self.files = files
        self.chunk_bytes: int = ring.shape[1]
        self.patience_s = patience_s
        lock = threading.Lock()  # guards all below
        self._changed = threading.Condition(lock)  # something has ended, or memory is free
        self._submitted = threading.Condition(lock)  # there is something to do, or nothing more will come
        self._free = list(ring)
        self._queue: collections.deque[Chunk] = collections.deque()
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

    def furnish(self, chunk: Chunk) -> None:
        """Give a chunk a buffer, if it has none; waits until there is one.

        Raises:
            CheckpointError: a write of the same file has failed, or none has ended for too long.
        """
        with self._changed:
            self._wait(lambda: bool(chunk.buffer is not None or self._free or chunk.done.failure))
            if chunk.done.failure is not None:
                raise chunk.done.failure
            self._furnish(chunk)

    def submit(self, chunk: Chunk) -> None:
        """Hash and write a chunk, after what was submitted before; then free its buffer."""
        with self._changed:
            chunk.done.num_open += 1
            chunk.is_submitted = True
            if not _is_moving(chunk):
                self._queue.append(chunk)
                self._submitted.notify()

    def drop(self, chunk: Chunk) -> None:
        """Give a chunk up that was not submitted."""
        with self._changed:
            self._changed.wait_for(lambda: not _is_moving(chunk))
            self._free_memory(chunk)

    def settle(self, loans: Sequence[Loan], *, in_haste: bool) -> None:
        """Wait until nobody reads what was lent, see [Note: Loans].

        Args:
            loans: what was lent.
            in_haste: copy what can be, as the owner has something else to do.

        Raises:
            CheckpointError: nothing has ended for too long; their files have failed then, and what is lent may change.
        """

        def movable() -> Loan | None:
            return next((loan for loan in reversed(loans) if in_haste and self._can_move(loan)), None)

        with self._changed:
            try:
                while any(loan.is_lent for loan in loans):
                    self._wait(lambda: movable() is not None or not any(loan.is_lent for loan in loans))
                    if (loan := movable()) is not None:
                        self._move(loan)
            except CheckpointError as error:
                for loan in loans:
                    loan.chunk.done.failure = loan.chunk.done.failure or error
                raise

    def _can_move(self, loan: Loan) -> bool:
        has_room = bool(self._free) or loan.chunk.buffer is not None
        return loan.is_lent and not loan.is_moving and not loan.chunk.has_begun and has_room

    def _move(self, loan: Loan) -> None:
        """Copy what is lent into the chunk's buffer, without the lock meanwhile; no thread begins with the chunk."""
        chunk = loan.chunk
        buffer = self._furnish(chunk)
        if chunk in self._queue:
            self._queue.remove(chunk)
        loan.is_moving = True
        self._changed.release()
        try:
            np.copyto(buffer[loan.begin : loan.begin + len(loan.data)], loan.data)
        finally:
            self._changed.acquire()
        loan.is_moving = loan.is_lent = False
        if chunk.is_submitted and not _is_moving(chunk):
            self._queue.appendleft(chunk)  # a buffer is worth more than memory that was lent
            self._submitted.notify()
        self._changed.notify_all()

    def _furnish(self, chunk: Chunk) -> Buffer:
        if chunk.buffer is None:
            chunk.buffer = self._free.pop()
        return chunk.buffer

    def _free_memory(self, chunk: Chunk) -> None:
        """Let the chunk's buffer be another's, and what was lent change."""
        if chunk.buffer is not None:
            self._free.append(chunk.buffer)
            chunk.buffer = None
        for loan in chunk.loans:
            loan.is_lent = False
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
            self._submitted.notify_all()
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
        while (chunk := self._next()) is not None:
            failure: OSError | None = None
            try:
                if chunk.done.failure is None:
                    self._flush(chunk)
            except OSError as error:
                failure = error
            with self._changed:
                chunk.done.failure = chunk.done.failure or failure
                chunk.done.num_open -= 1
                self._num_ended += 1
                self._free_memory(chunk)

    def _next(self) -> Chunk | None:
        """Wait for something to do; ``None``: there will be nothing more."""
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
        chunk.keep(digest.hexdigest())
        for begin, data in chunk.parts():
            if (skip := max(chunk.skip - begin, 0)) < len(data):
                write_all(self.files, chunk.fd, data[skip:].data, chunk.offset + begin + skip)


def _is_moving(chunk: Chunk) -> bool:
    return any(loan.is_moving for loan in chunk.loans)
