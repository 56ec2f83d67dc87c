"""Plan many points at once, in processes of this machine that live as long as the study."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, resource_tracker
from typing import Final
from unittest import mock

from ullage.whatif.running.point import Effort, PointRequest
from ullage.whatif.study import Result

Runner = Callable[[Iterable[PointRequest], Effort], Iterator[tuple[str, Result]]]
"""Takes points and the effort for each; yields keys with results in the order in which they finish."""

AHEAD: Final = 2
"""Points queued beyond those being planned: enough to keep workers busy, few enough to stop at once."""

# Libraries that would start threads of their own. A worker has one thread, and there is one worker per core.
_ONE_THREAD: Final = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1"
)


def in_this_process(points: Iterable[PointRequest], effort: Effort) -> Iterator[tuple[str, Result]]:
    """Plan the points one after another in this process."""
    for point in points:
        yield point.key, point.plan(effort)


def in_processes(num_workers: int) -> Runner:
    """Return a function that plans points in ``num_workers`` processes.

    An interruption, or closing the iterator, ends the processes at once. Unfinished points are lost.
    """

    def run(points: Iterable[PointRequest], effort: Effort) -> Iterator[tuple[str, Result]]:
        with mock.patch.dict(os.environ, _ONE_THREAD):
            pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin_worker)
            todo, running = iter(points), dict[Future[Result], str]()
            try:
                while True:
                    for point in itertools.islice(todo, num_workers + AHEAD - len(running)):
                        with _interrupts_delayed():
                            running[pool.submit(point.plan, effort)] = point.key
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            except BrokenProcessPool as error:
                raise MemoryError(
                    "a worker was killed, most likely because memory ran out; run the same command with fewer "
                    "--workers to continue"
                ) from error
            finally:
                _end(pool)

    return run


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_delayed() -> Iterator[None]:
    """Delay Ctrl-C inside the block. Processes that start inside it block Ctrl-C for good and leave it to this one."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # Python accepts handlers only there
    # Another thread may receive the signal, although this thread masks it. The handler always runs in the main thread.
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    resource_tracker.ensure_running()  # start it now, because its start unblocks signals
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.SIG_DFL)
        if came:
            signal.raise_signal(signal.SIGINT)


def _begin_worker() -> None:
    """End this worker when the parent ends, for any reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
