"""Reads new checkpoints again beside training, and removes old ones.

[Note: Read again] Retention counts on what was read again and found whole, and reading takes the drive from writes that
training may wait for. So one thread reads, one checkpoint at a time and the newest each time; those that came meanwhile
but the newest go unread, once there are enough that were read. Where checkpoints are far apart all are read, and the
newest stay. No more than :data:`READING_SHARE` of the time goes into reading: where there is a checkpoint at every
iteration, the next one would wait for the drive.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, final

from executor.checkpoint.files.flusher import lower_thread_priority
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.places.retention import LEAST_KEPT, AbstractStore

READING_SHARE: Final = 1 / 8
"""Of the thread's time that it reads, at most; the planner counts on that."""

PATIENCE_S: Final = 60.0
"""Longest wait for a checkpoint to be read at the end of training."""


@final
class RetentionThread:
    """Keeps the newest checkpoints of a place.

    Args:
        store: the place.
        keep: how many stay, see [Note: Read again]; :data:`executor.checkpoint.places.retention.LEAST_KEPT` at least.
    """

    def __init__(self, store: AbstractStore, keep: int) -> None:
        self._store = store
        self._keep = keep
        self._changed = threading.Condition()  # guards what follows
        self._made: tuple[Folder, Callable[[str], None]] | None = None  # that has not been read
        self._is_reading = False
        self._is_closed = False
        self._num_waiting = 0  # that want it all read now
        self._idle_until_s = 0.0  # nothing is read before
        self._thread = threading.Thread(target=self._run, name="checkpoint retention", daemon=True)
        self._thread.start()

    def made(self, folder: Folder, tell: Callable[[str], None]) -> None:
        """Read a checkpoint when that before has been, unless a newer one comes first; then remove what may go.

        Args:
            folder: of the checkpoint, the newest.
            tell: is called with what went wrong, if anything does.
        """
        with self._changed:
            self._made = folder, tell
            self._changed.notify_all()
        self._thin(tell)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until the newest one has been read and the rest removed, but not for longer than that."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._made is None and not self._is_reading, patience_s)
            self._num_waiting -= 1
            self._idle_until_s = 0.0

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the thread after what is under way, but do not wait for longer than that. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(patience_s)

    def _thin(self, tell: Callable[[str], None]) -> None:
        try:
            self._store.thin(self._keep)
        except CheckpointError as error:
            tell(f"older ones could not be removed: {error}")

    def _run(self) -> None:
        lower_thread_priority()
        num_whole = 0
        while (made := self._next()) is not None:
            folder, tell = made
            begin_s = time.monotonic()
            try:
                with self._store.held(folder):
                    num_whole += self._store.read_again(folder)
                self._thin(tell)
            finally:
                with self._changed:
                    if num_whole >= max(self._keep, LEAST_KEPT):  # until then nothing can be removed
                        self._idle_until_s = begin_s + (time.monotonic() - begin_s) / READING_SHARE
                    self._is_reading = False
                    self._changed.notify_all()
        with contextlib.suppress(OSError):  # else the next run takes them
            self._store.tidy()

    def _next(self) -> tuple[Folder, Callable[[str], None]] | None:
        with self._changed:
            self._changed.wait_for(self._is_hurried, max(self._idle_until_s - time.monotonic(), 0.0))
            self._changed.wait_for(lambda: self._made is not None or self._is_closed)
            made, self._made = self._made, None
            self._is_reading = made is not None
            return made

    def _is_hurried(self) -> bool:
        return self._is_closed or bool(self._num_waiting) or not self._idle_until_s
