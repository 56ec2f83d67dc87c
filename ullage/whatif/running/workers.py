"""Planning many points at once: processes of this machine that live as long as the study."""

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

from planner.plan.checkpoints import CheckpointRequest
from planner.plan.planning import Request
from ullage.whatif.running.point import Effort, plan_point
from ullage.whatif.study import Result

Task = tuple[str, Request, CheckpointRequest | None]
"""The key of a point, what is asked for, and the failures that checkpoints are chosen for, if any."""

Runner = Callable[[Iterable[Task], Effort], Iterator[tuple[str, Result]]]
"""Takes points, and how much is done for each; yields results by key as they come."""

AHEAD: Final = 2
"""Points queued beyond those in work: enough to keep workers busy, few enough to stop at once."""

# Libraries that would start threads of their own: a worker is one thread, and there are as many as cores.
_ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def num_usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def in_this_process(tasks: Iterable[Task], effort: Effort) -> Iterator[tuple[str, Result]]:
    """Plan one point after the other, here."""
    for key, request, checkpoints in tasks:
        yield key, plan_point(request, effort, checkpoints)


def in_processes(num_workers: int) -> Runner:
    """Return what plans points in so many processes.

    If the caller is interrupted or stops reading results, the processes end at once; unfinished points are lost.
    """

    def run(tasks: Iterable[Task], effort: Effort) -> Iterator[tuple[str, Result]]:
        with _one_thread_each():
            pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _begin_worker)
            todo, running = iter(tasks), dict[Future[Result], str]()
            try:
                while True:
                    for key, request, checkpoints in itertools.islice(todo, num_workers + AHEAD - len(running)):
                        with _interrupts_wait():
                            running[pool.submit(plan_point, request, effort, checkpoints)] = key
                    if not running:
                        break
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        yield running.pop(future), future.result()
            except BrokenProcessPool as error:
                raise MemoryError(
                    "a worker was killed, most likely because memory ran out; the same command with fewer --workers "
                    "goes on from what is done"
                ) from error
            finally:
                _end(pool)

    return run


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.terminate()
    pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Let Ctrl-C wait meanwhile, and block it for good in processes that start meanwhile: they leave it to this one."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()  # elsewhere Python takes no handlers
    # Another thread may receive the signal in spite of this one's mask. The handler always runs in the main thread.
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number)) if is_main else None
    resource_tracker.ensure_running()  # it unblocks signals when it starts
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
    """End when the parent does, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def outlive_nobody() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=outlive_nobody, daemon=True).start()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
