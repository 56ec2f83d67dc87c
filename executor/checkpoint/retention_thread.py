"""Verifies new checkpoints during training, and removes old ones.

[Note: Read again] Retention removes old checkpoints only if enough newer ones were read again and verified. But reading
takes bandwidth from writes that training may wait for. So one thread reads one checkpoint at a time, always the newest.
Once enough checkpoints are verified, the unread ones are removed. If intervals are long, all checkpoints are read. The
thread reads for at most :data:`READING_SHARE` of the time. Otherwise, with a checkpoint at every iteration, the next
checkpoint would wait for the drive.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final, final

from executor.checkpoint.files.flusher import lower_thread_priority
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.places.retention import MIN_CHECKPOINTS, AbstractStore

READING_SHARE: Final = 1 / 8
"""Largest share of its time that the thread reads. The planner assumes this value."""

PATIENCE_S: Final = 60.0
"""Longest wait, at the end of training, until a checkpoint has been read."""


@final
class RetentionThread:
    """Retains the newest checkpoints of a place, and removes older ones.

    Args:
        keep: number of checkpoints to retain, see [Note: Read again]; at least
            :data:`executor.checkpoint.places.retention.MIN_CHECKPOINTS`.
    """

    def __init__(self, store: AbstractStore, keep: int) -> None:
        self._store = store
        self._keep = keep
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: tuple[Folder, Callable[[str], None]] | None = None  # the newest checkpoint, not read yet
        self._is_reading = False
        self._is_closed = False
        self._num_waiting = 0  # callers that wait until everything is read
        self._idle_until_s = 0.0  # time before which it does not read
        self._thread = threading.Thread(target=self._run, name="checkpoint retention", daemon=True)
        self._thread.start()

    def submit(self, folder: Folder, on_error: Callable[[str], None]) -> None:
        """Queue the newest checkpoint to be read, instead of one that still waits; then remove old ones."""
        with self._changed:
            self._waiting = folder, on_error
            self._changed.notify_all()
        self._remove_old(on_error)

    def wait(self, patience_s: float = PATIENCE_S) -> None:
        """Wait, at most ``patience_s``, until the newest checkpoint has been read and old ones removed."""
        with self._changed:
            self._num_waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting is None and not self._is_reading, patience_s)
            self._num_waiting -= 1
            self._idle_until_s = 0.0

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """End the thread after its current work; wait at most ``patience_s``. Closing twice is allowed."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(patience_s)

    def _remove_old(self, on_error: Callable[[str], None]) -> None:
        try:
            self._store.remove_old(self._keep)
        except CheckpointError as error:
            on_error(f"older checkpoints could not be removed: {error}")

    def _run(self) -> None:
        lower_thread_priority()
        num_whole = 0
        while (waiting := self._next()) is not None:
            folder, on_error = waiting
            begin_s = time.monotonic()
            try:
                with self._store.reading(folder):
                    num_whole += self._store.read_again(folder)
                self._remove_old(on_error)
            finally:
                with self._changed:
                    if num_whole >= max(self._keep, MIN_CHECKPOINTS):  # until then, nothing can be removed
                        self._idle_until_s = begin_s + (time.monotonic() - begin_s) / READING_SHARE
                    self._is_reading = False
                    self._changed.notify_all()
        with contextlib.suppress(OSError):  # the next run reuses spares
            self._store.remove_spares()

    def _next(self) -> tuple[Folder, Callable[[str], None]] | None:
        with self._changed:
            self._changed.wait_for(self._may_read_now, max(self._idle_until_s - time.monotonic(), 0.0))
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            waiting, self._waiting = self._waiting, None
            self._is_reading = waiting is not None
            return waiting

    def _may_read_now(self) -> bool:
        return self._is_closed or bool(self._num_waiting) or not self._idle_until_s
