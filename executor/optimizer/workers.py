"""Threads that run kernels on pieces of a range.

numba's own threading layers are not used: ``workqueue`` aborts the process when two threads enter parallel kernels at
once, and ``omp`` and ``tbb`` need libraries that a machine may not have. Kernels that release the GIL need neither.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Final, Self

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
    return [(start, stop) for start, stop in pairwise(cuts) if start < stop]


class WorkerTeam:
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
        self._pool: ThreadPoolExecutor | None = None
        if num_threads > 1 or cores is not None:
            self._pool = ThreadPoolExecutor(num_threads, "update", self._enter, (iter(cores or ()),))

    def _enter(self, cores: Iterator[int]) -> None:
        self._inside.is_worker = True
        core = next(cores, None)
        if core is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # 0 is the calling thread

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
        if self._pool is None or getattr(self._inside, "is_worker", False):
            if num_items > 0:
                function(0, num_items)
            return
        futures = [self._pool.submit(function, start, stop) for start, stop in pieces(num_items, self.num_threads)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """Wait for running pieces and end the threads. Closing twice is allowed."""
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

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
