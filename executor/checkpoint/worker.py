"""A background thread that works on the newest of what it is given."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

from executor.checkpoint.files.flusher import lower_thread_priority

_T = TypeVar("_T")


@final
class Worker(Generic[_T]):
    """A thread of lowest priority. It works on one item, and one more waits. A newer item replaces the one that waits.

    Args:
        name: name of the thread.
        work: works on an item, and returns for how long the thread rests afterwards, in seconds.
        at_end: called when the thread ends.
    """

    def __init__(self, name: str, work: Callable[[_T], float], at_end: Callable[[], None]) -> None:
        self._work = work
        self._at_end = at_end
        self._changed = threading.Condition()  # guards the fields below
        self._under_way: _T | None = None
        self._waiting: _T | None = None
        self._num_callers = 0  # that wait until everything is done
        self._is_closed = False
        self._rests_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, item: _T) -> _T | None:
        """Work on an item after the current one, unless a newer one is submitted first; return the replaced item."""
        with self._changed:
            replaced, self._waiting = self._waiting, item
            self._changed.notify_all()
        return replaced

    def wait(self, deadline_s: float) -> bool:
        """Wait without rest until all work is done, or ``time.monotonic()`` is ``deadline_s``; return whether it is."""
        with self._changed:
            self._num_callers += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: self._under_way is None and self._waiting is None, max(deadline_s - time.monotonic(), 0)
                )
            finally:
                self._num_callers -= 1
                self._rests_until_s = 0.0

    def close(self, patience_s: float) -> _T | None:
        """End the thread when all work is done; return the item on which it still works after ``patience_s``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(patience_s)
        return self._under_way if self._thread.is_alive() else None

    def _run(self) -> None:
        lower_thread_priority()
        while (item := self._next()) is not None:
            rest_s = 0.0
            try:
                rest_s = self._work(item)
            finally:
                with self._changed:
                    self._rests_until_s = time.monotonic() + rest_s
                    self._under_way = None
                    self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._at_end()

    def _next(self) -> _T | None:
        with self._changed:
            rest_s = max(self._rests_until_s - time.monotonic(), 0.0)
            self._changed.wait_for(lambda: self._is_closed or self._num_callers or not self._rests_until_s, rest_s)
            self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
            self._under_way, self._waiting = self._waiting, None
            return self._under_way
