"""Jobs: a process for each question that is not in the cache, at most one per core; visitors who ask the same share it.

A job ends when the last who waits for it is gone. Visitors take turns, and none has all workers.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import multiprocessing
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from typing import Any, Final

from ullage.web import worker
from ullage.web.question import Question

_FORKS: Final = multiprocessing.get_context("forkserver")
_LAST: Final = (b'{"result"', b'{"error"')
_PLAN: Final = b'{"plan"'


class _Turns:
    """Gives workers to visitors in turns.

    Args:
        num_workers: how many there are.
        most_each: most workers that one visitor has at once. A visitor without a name, who is the only one, has all.
    """

    def __init__(self, num_workers: int, most_each: int) -> None:
        self.num_free, self.most_each = num_workers, most_each
        self.has: collections.Counter[str] = collections.Counter()
        self.waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}  # the visitor whose turn is next first

    @contextlib.asynccontextmanager
    async def one(self, visitor: str) -> AsyncIterator[None]:
        """Wait for a worker, and give it back at the end."""
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(visitor, collections.deque()).append(turn)
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.num_free += 1
                self.has -= collections.Counter([visitor])  # which forgets visitors who have none
            self._give()

    def must_wait(self, visitor: str) -> bool:
        """Return whether a question of a visitor would wait now."""
        return not self.num_free or not self._may(visitor)

    def _may(self, visitor: str) -> bool:
        return not visitor or self.has[visitor] < self.most_each

    def _give(self) -> None:
        while self.num_free and (able := [*filter(self._may, self.waiting)]):
            visitor = min(able, key=self.has.__getitem__)
            own = self.waiting.pop(visitor)
            turn = own.popleft()
            if own:
                self.waiting[visitor] = own  # behind all others
            if not turn.done():
                self.num_free -= 1
                self.has[visitor] += 1
                turn.set_result(None)


@dataclasses.dataclass(eq=False)
class _Job:
    """A question that is being answered: who asked it first, the lines so far, and how many wait for more."""

    visitor: str
    lines: list[bytes] = dataclasses.field(default_factory=list)
    more: asyncio.Condition = dataclasses.field(default_factory=asyncio.Condition)
    done: bool = False
    waiting: int = 0
    task: "asyncio.Task[None] | None" = None

    async def add(self, line: bytes, *, last: bool = False) -> None:
        async with self.more:
            self.lines.append(line)
            self.done = self.done or last
            self.more.notify_all()


class Jobs:
    """Answers questions.

    Args:
        num_workers: jobs at once. One visitor has at most all but one of them.
        memory_bytes, cpu_s: address space and seconds of processor time that each may take.
        most_waiting: questions that may wait for a worker; further ones are refused.
        most_each: likewise, of one visitor.
        most_s: seconds that a job may take.
        cache_bytes: most bytes of results to keep.
    """

    def __init__(
        self,
        num_workers: int = 0,
        memory_bytes: int = 4 << 30,
        cpu_s: int = 240,
        most_waiting: int = 64,
        most_each: int = 8,
        most_s: float = 300.0,
        cache_bytes: int = 1 << 26,
    ) -> None:
        self.num_workers = num_workers or len(os.sched_getaffinity(0))
        self.memory_bytes, self.cpu_s, self.most_s, self.cache_bytes = memory_bytes, cpu_s, most_s, cache_bytes
        self.most_waiting, self.most_each = most_waiting, most_each
        self.num_running = self.num_started = 0
        self._turns = _Turns(self.num_workers, max(1, self.num_workers - 1))
        self._threads = ThreadPoolExecutor(2 * self.num_workers)
        self._running: dict[str, _Job] = {}
        self._cache: collections.OrderedDict[str, bytes] = collections.OrderedDict()
        self._processes: Any = multiprocessing.get_context("spawn")

    def warm(self) -> None:
        """Begin to import what jobs are forked with. Until it is there, they are new interpreters, which are slower."""

        def start() -> None:
            _FORKS.set_forkserver_preload(["ullage.web.preloaded"])
            process = _FORKS.Process(target=os.getpid)
            with contextlib.suppress(OSError, EOFError):  # the page ends meanwhile
                process.start()  # returns when everything is imported
                process.join()
                self._processes = _FORKS

        threading.Thread(target=start, daemon=True).start()

    @property
    def is_warm(self) -> bool:
        """Whether jobs begin with everything imported."""
        return self._processes is _FORKS

    async def lines(self, kind: str, asked: Question, visitor: str = "") -> AsyncGenerator[bytes, None]:
        """Yield the lines of an answer as they come; see :mod:`ullage.web.worker`.

        Args:
            kind: what is asked.
            asked: the question.
            visitor: who asks; empty on a page that only one visitor has.

        Raises:
            asyncio.QueueFull: too many questions are waiting.
        """
        key = asked.key(kind)
        if (found := self._cached(key)) is not None:
            yield found
            return
        job = self._running.get(key)
        if job is None:
            if len(self._running) >= self.num_workers + self.most_waiting:
                raise asyncio.QueueFull("many visitors ask at once; try again in a minute")
            if visitor and sum(job.visitor == visitor for job in self._running.values()) >= self.most_each:
                words = f"{self.most_each} questions from your address are not answered yet; wait for them"
                raise asyncio.QueueFull(words)
            job = self._running[key] = _Job(visitor)
            job.task = asyncio.create_task(self._work(job, key, kind, asked))
        job.waiting += 1
        try:
            at = 0
            while not (job.done and at == len(job.lines)):
                async with job.more:
                    while at == len(job.lines):
                        await job.more.wait()
                yield job.lines[at]
                at += 1
        finally:
            job.waiting -= 1
            if not job.waiting and not job.done:
                assert job.task is not None
                job.task.cancel()
                if self._running.get(key) is job:
                    del self._running[key]

    async def _work(self, job: _Job, key: str, kind: str, asked: Question) -> None:
        last = _error("the page was stopped; ask again")
        try:
            if self._turns.must_wait(job.visitor):
                await job.add(b'{"progress": "waiting for other questions"}')
            async with self._turns.one(job.visitor):
                last = await self._answered(job, kind, asked)
            if last.startswith(b'{"result"'):
                self._keep(key, last)
        finally:
            if self._running.get(key) is job:
                del self._running[key]
            with contextlib.suppress(asyncio.CancelledError):
                await job.add(last, last=True)

    async def _answered(self, job: _Job, kind: str, asked: Question) -> bytes:
        """Return the last line of a new process; hand on those before it."""
        ours, theirs = self._processes.Pipe(duplex=False)
        if not self.is_warm:
            await job.add(b'{"progress": "the page has just started; its first answers take longer"}')
        known = self._cached(asked.key("plan")) if kind != "plan" else None
        plan = None if known is None else json.loads(known)["result"]
        args = (kind, asked, plan, self.memory_bytes, self.cpu_s, theirs)
        process = self._processes.Process(target=worker.run, args=args, daemon=True)
        loop = asyncio.get_running_loop()
        self.num_running += 1
        self.num_started += 1
        try:
            starting = loop.run_in_executor(self._threads, process.start)
            try:
                await asyncio.shield(starting)
            finally:
                await starting  # also after a cancellation, so that the process is known and can be ended
            theirs.close()
            async with asyncio.timeout(self.most_s):
                while True:
                    line = await loop.run_in_executor(self._threads, _received, ours)
                    if line is None:
                        return _error("this question takes more memory or time than the page may take; ask for less")
                    if line.startswith(_LAST):
                        return line
                    if line.startswith(_PLAN):
                        self._keep(asked.key("plan"), json.dumps({"result": json.loads(line)["plan"]}).encode())
                    else:
                        await job.add(line)
        except TimeoutError:
            return _error(f"this question takes longer than {self.most_s:.0f} s; ask for less, or install Ullage")
        finally:
            self.num_running -= 1
            _end(process)

    def _cached(self, key: str) -> bytes | None:
        if key in self._cache:
            self._cache.move_to_end(key)
        return self._cache.get(key)

    def _keep(self, key: str, line: bytes) -> None:
        self._cache[key] = line
        while sum(map(len, self._cache.values())) > self.cache_bytes:
            self._cache.popitem(last=False)

    async def close(self) -> None:
        """End all jobs."""
        for job in list(self._running.values()):
            if job.task is not None:
                job.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await job.task
        self._threads.shutdown(wait=False, cancel_futures=True)


def _received(pipe: "connection.Connection[Any, Any]") -> bytes | None:
    """Return the next line; ``None`` if the process has ended."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return None


def _end(process: Any) -> None:
    if process.pid is not None:
        process.kill()
        process.join()


def _error(words: str) -> bytes:
    return json.dumps({"error": words}).encode()
