"""Threads that run kernels on pieces of a range.

Each piece takes the interpreter's lock twice: before its kernel and after it. Whoever trains needs the lock for each
operator, so an executor of the standard library, which takes several locks more for each piece, is not used.

numba's own threading layers are not used: ``workqueue`` aborts the process when two threads enter parallel kernels at
once, and ``omp`` and ``tbb`` need libraries that a machine may not have. Kernels that release the GIL need neither.
"""

import contextlib
import itertools
import operator
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final

GRAIN_ITEMS: Final = 64
"""Pieces are cut at multiples of this: 64 bf16 or 64 float32 are whole cache lines, which no two threads then share."""

PieceFunction = Callable[[int, int], object]
"""Called as ``function(start, stop)``; its result is ignored."""


def pieces(num_items: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cut ``range(num_items)`` into at most ``num_pieces`` contiguous ``(start, stop)``.

    Cuts are at multiples of :data:`GRAIN_ITEMS`; the pieces are equal to within one grain, and none is empty.
    """
    num_grains = -(-num_items // GRAIN_ITEMS)
    cuts = (min(num_grains * i // num_pieces * GRAIN_ITEMS, num_items) for i in range(num_pieces + 1))
    return [(start, stop) for start, stop in itertools.pairwise(cuts) if start < stop]


_End = Callable[[int, BaseException | None], None]
"""Called when a piece has ended, with where it starts and its failure."""

_Pieces = queue.SimpleQueue[tuple[PieceFunction, int, int, _End] | None]


def _work(waiting: _Pieces, inside: threading.local, core: int | None) -> None:
    """Run pieces until there is a ``None``."""
    inside.is_worker = True
    if core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # 0 is the calling thread
    while (piece := waiting.get()) is not None:
        function, start, stop, end = piece
        failure: BaseException | None = None
        try:
            function(start, stop)
        except BaseException as error:  # noqa: BLE001 - whoever waits raises it
            failure = error
        del piece, function  # which refer to the memory of whoever waits
        end(start, failure)
        del end, failure


def _end(waiting: _Pieces, num_threads: int) -> None:
    for _ in range(num_threads):
        waiting.put(None)


class WorkerTeam(contextlib.AbstractContextManager["WorkerTeam"]):
    """A team of threads; any number of threads may :meth:`run` work on it at the same time.

    Args:
        num_threads: number of pieces that run at once. A team of one without ``cores`` works in the caller's thread.
        cores: a core number per thread, to which it is bound; left out, the operating system places the threads. It has
            an effect on Linux only.

    Raises:
        ValueError: no thread, another number of cores than threads, or a core that this process may not use.
    """

    def __init__(self, num_threads: int, cores: Sequence[int] | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}, but a team needs at least 1")
        if cores is not None:
            _check_cores(cores, num_threads)
        self.num_threads = num_threads
        self._closed = False
        self._inside = threading.local()
        self._queue: _Pieces = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if num_threads > 1 or cores is not None:
            self._threads = [
                threading.Thread(
                    target=_work, args=(self._queue, self._inside, core), name=f"update_{number}", daemon=True
                )
                for number, core in enumerate(cores or [None] * num_threads)
            ]
            for thread in self._threads:
                thread.start()
        # So the threads of a team that nobody closes end with it.
        self._end = weakref.finalize(self, _end, self._queue, len(self._threads))

    def run(self, function: PieceFunction, num_items: int) -> None:
        """Call ``function(start, stop)`` on :func:`pieces` of ``range(num_items)`` and wait for all of them.

        Called from inside a piece, it works in that thread: waiting there for a free thread could wait for ever.

        Raises:
            Exception: the first failure in the order of the range, after every piece has ended, so that the caller may
                reuse the memory.
            RuntimeError: the team is closed.
        """
        if self._closed:
            raise RuntimeError("the worker team is closed; make a new one, or run before close()")
        if not self._threads or getattr(self._inside, "is_worker", False):
            if num_items > 0:
                function(0, num_items)
            return
        if not (cuts := pieces(num_items, self.num_threads)):
            return
        num_ended, is_done = itertools.count(1), threading.Lock()
        failures: list[tuple[int, BaseException]] = []
        is_done.acquire()  # until the last piece ends

        def end(start: int, failure: BaseException | None) -> None:
            if failure is not None:
                failures.append((start, failure))
            if next(num_ended) == len(cuts):
                is_done.release()

        for start, stop in cuts:
            self._queue.put((function, start, stop, end))
        is_done.acquire()
        if failures:
            raise min(failures, key=operator.itemgetter(0))[1]

    def close(self) -> None:
        """Wait for running pieces and end the threads. Closing twice is allowed."""
        self._closed = True
        self._end()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def _check_cores(cores: Sequence[int], num_threads: int) -> None:
    if len(cores) != num_threads:
        raise ValueError(f"cores {list(cores)} for {num_threads} threads: name one core per thread, or leave cores out")
    if hasattr(os, "sched_getaffinity"):
        allowed = os.sched_getaffinity(0)
        if not allowed.issuperset(cores):
            raise ValueError(
                f"this process may not use cores {sorted(set(cores) - allowed)}; choose from {sorted(allowed)}"
            )
