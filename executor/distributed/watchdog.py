"""A watchdog that detects failed ranks, so that no rank waits for them for ever.

[Note: Failed ranks] If a rank raises an error, it reports the error in the rendezvous store of the ranks. The other
ranks read the store several times a second. If a rank is killed, it reports nothing. If it ran on this machine, in the
same process namespace, the operating system reports at once that its process has ended. On other machines, its
heartbeat in the store stops changing. Then every thread that waits for a collective raises an error that names the
failed rank, and the reason if known. If a collective fails first, its thread waits for that reason, because a closed
connection names no rank.

If a rank makes another call than the others (it evaluates alone, or has one batch less), all
ranks wait for collectives that never complete, although none has failed. So each heartbeat names the call in which its
rank waits (:attr:`Watchdog.waits_for`), in this session or another one of its process, or the collective of the user's
own in which it may wait, such as a barrier beside a save on rank 0 alone. If all ranks wait, in different calls, and no
task ends on any rank, that is an error: after :data:`SILENCE_S`, or :data:`_OWN_CALLS` times as long if one waits in a
collective of the user's, which may last.

A rank that has not come yet has no heartbeat. If it fails before, it reports that too
(:func:`executor.distributed.meeting.missed`). It may load weights, or it may have ended: then no
launcher notices, if its exit code was 0. So ranks that wait for it look at the processes that their own parent has
started. If none of them is left that could be the missing rank, that is an error after :data:`SILENCE_S`. Ranks on
other nodes look there, and report it.
"""

import contextlib
import datetime as dt
import os
import select
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, final

import torch.distributed as dist

_PERIOD_S: Final = 0.2  # between two reads of the store
SILENCE_S: Final = 30.0
"""A rank on another machine counts as dead if its heartbeat has not changed for this long."""

TIMEOUT: Final = dt.timedelta(minutes=30)
"""Longest wait for a rank that is only slow (it may write a checkpoint). Failures end waiting much earlier."""

LANE_THREAD: Final = "lane "
"""Prefix of the names of lane threads. All other threads are the caller's."""

_OWN_CALLS: Final = 4
_EXECUTOR: Final = str(Path(__file__).parents[1])
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")  # all processes on one machine share it, and no others
_FAILED: Final = "failed"
_OWN: Final = "torch.distributed."  # and the name of a function: a collective of the user's own
_TOGETHER: Final = "make all ranks prepare equally often, and end together"


class RankError(ConnectionError):
    """Another rank has failed or ended, and this rank cannot continue without it."""


_WAITS: Final[list[Callable[[], tuple[str, int]]]] = []
"""What this process may wait for now, in any session or in ``prepare``, as :attr:`Watchdog.waits_for` says it."""


@final
class Watchdog:
    """Watches the other ranks in a thread, and reports to them if this one fails.

    All ranks construct it at the same time. As a context, it watches until the end, and reports an error that leaves
    it.

    Args:
        store: shared by the ranks; nothing else uses its keys.
        silence_s: see :data:`SILENCE_S`.

    Attributes:
        waits_for: returns the call in which this rank waits, in words (empty if it does not wait), and the number of
            tasks and collectives that have ended. Called in the watchdog's thread.

    Raises:
        RankError: a rank has ended before it came here; see [Note: Failed ranks].
    """

    def __init__(
        self, store: dist.distributed_c10d.Store, rank: int, size: int, *, silence_s: float = SILENCE_S
    ) -> None:
        self._store = store
        self._rank = rank
        self._silence_s = silence_s
        self._heartbeat_period_s = min(silence_s / 5, 2.0)
        self.waits_for: Callable[[], tuple[str, int]] = lambda: ("", 0)
        self._waits: Mapping[int, str] = {}  # the call in which each rank waits
        self._still_since_s = time.monotonic()
        self._failure: RankError | None = None
        self._is_known = threading.Event()  # why ranks fail; or that this one does, or leaves, so that nobody says why
        self._leaving = threading.Event()
        self._on_failure: Callable[[RankError], None] = lambda _error: None
        self._others = [other for other in range(size) if other != rank]
        self._num_exchanges = 0
        here = _namespace()
        places = [place.rpartition(" ") for place in self.exchange(f"{here} {os.getpid()}")]
        self._process = {other: int(places[other][2]) for other in self._others}
        self._handles: dict[int, int] = {}  # file descriptor of a rank's process -> rank
        for other, process in self._process.items():
            if here and places[other][0] == here:
                with contextlib.suppress(OSError):  # its process may have ended already: then its heartbeat is missing
                    self._handles[os.pidfd_open(process)] = other
        self._thread = threading.Thread(target=self._run, name="rank watchdog", daemon=True)

    def __enter__(self) -> Self:
        self.start(self._on_failure)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:
            self.report_failure(error)
        self.stop(on_all_ranks=error is None)

    def start(self, on_failure: Callable[[RankError], None]) -> None:
        """Start the thread. If another rank fails, the thread calls ``on_failure`` once."""
        self._on_failure = on_failure
        self._thread.start()
        _WAITS.append(self._waits_here)

    @property
    def has_failed(self) -> bool:
        """Whether another rank is known to have failed."""
        return self._failure is not None

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RankError: a rank has failed. The error names it, and the reason if known.
        """
        if self._failure is not None:
            raise self._failure

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, in the order of ranks. They pass through the store, without a process group.

        Raises:
            RankError: a rank has failed, or is missing.
        """
        self._num_exchanges += 1
        keys = [f"exchange {self._num_exchanges} of {rank}" for rank in range(len(self._others) + 1)]
        begin_s = time.monotonic()
        _WAITS.append(_meets)
        try:
            self._store.set(keys[self._rank], text)
            while absent := [rank for rank, key in enumerate(keys) if not self._store.check([key])]:
                self.check()
                waited_s = time.monotonic() - begin_s
                self._check_missing(absent, [key for rank, key in enumerate(keys) if rank not in absent], waited_s)
                time.sleep(min(waited_s / 10 + 1e-3, 1.0))
            return [self._store.get(key).decode() for key in keys]
        except RankError:
            raise
        except (RuntimeError, OSError) as error:
            if self._num_exchanges > 1:  # the thread watches, and knows more
                raise self.explain(error) from error
            raise RankError(f"ranks can no longer reach each other: {error}") from error
        finally:
            _WAITS.remove(_meets)

    def report_failure(self, error: BaseException) -> None:
        """Report that this rank has failed. Only the first report of any rank counts."""
        self._is_known.set()
        if not self._leaving.is_set():
            report_to(self._store, self._rank, error)

    def explain(self, error: Exception) -> RankError:
        """Return why a collective failed: another rank's reason if it becomes known, or the collective's own error."""
        self._is_known.wait(self._silence_s + 2 * self._heartbeat_period_s)
        return self._failure or RankError(f"ranks can no longer reach each other: {error}")

    def stop(self, *, on_all_ranks: bool) -> None:
        """Stop watching. With ``on_all_ranks``, tell the others that this is no failure. Stopping twice is allowed."""
        if not self._leaving.is_set():
            self._leaving.set()
            self._is_known.set()
            with contextlib.suppress(ValueError):  # not started
                _WAITS.remove(self._waits_here)
            with contextlib.suppress(Exception):  # the process that serves the store may have ended
                if on_all_ranks:
                    self._store.set(f"left {self._rank}", "")
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            for handle in self._handles:
                os.close(handle)
            self._handles.clear()

    def _check_missing(self, absent: Sequence[int], keys: Sequence[str], waited_s: float) -> None:
        """Raise if a rank that has not come has failed, or cannot come any more; warn if it is late.

        See [Note: Failed ranks].

        Args:
            absent: ranks that have not come.
            keys: keys of the texts of the others.
            waited_s: how long this rank has waited.
        """
        if waited_s > TIMEOUT.total_seconds():
            raise RankError(f"rank {absent[0]} has not come for {waited_s:.0f} s; {_TOGETHER}")
        if self._num_exchanges > 1:
            return  # the thread watches
        if reported := self._reported_failure():
            raise RankError(f"rank {reported}")
        if waited_s <= self._silence_s:
            return
        here = _namespace()
        places = [self._store.get(key).decode().rpartition(" ") for key in keys]
        ranks_here = {int(process) for place, _, process in places if place == here}
        started_here = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
        late = f"{absent[0]} has not come to prepare() for {self._silence_s:g} s"
        if here and len(ranks_here) < started_here and not _siblings() - ranks_here:
            late += f", and its process has ended: if its own output does not say why, {_TOGETHER}"
            self._store.compare_set(_FAILED, "", late)
            raise RankError(f"rank {late}")
        warnings.warn(f"rank {late}; the others wait for it", RuntimeWarning, stacklevel=2)

    def _run(self) -> None:
        heartbeats, heard_s = dict.fromkeys(self._others, b""), dict.fromkeys(self._others, time.monotonic())
        number, heartbeat_s = 0, 0.0
        while not self._leaving.wait(_PERIOD_S):
            try:
                if reason := self._reported_failure() or self._dead_process():
                    self._fail(reason)
                    return
                if time.monotonic() - heartbeat_s < self._heartbeat_period_s:
                    continue
                since_s = time.monotonic() - heartbeat_s
                late = number > 0 and since_s > self._silence_s / 2  # this process was suspended, not the others
                heartbeat_s, number = time.monotonic(), number + 1
                doing, num_ended = self._waits_now()
                own = f"{num_ended} {doing}" if doing else ""
                self._store.set(f"heartbeat {self._rank}", f"{number} {own}")
                found = {other: self._heartbeat(other) for other in self._others}
                for other in self._others:
                    if late or found[other] != heartbeats[other]:
                        heartbeats[other], heard_s[other] = b"" if late else found[other], heartbeat_s
                    elif heartbeat_s - heard_s[other] > self._silence_s and not self._has_left(other):
                        self._fail(f"{other} has sent no heartbeat for {self._silence_s:g} s")
                        return
                if reason := self._deadlock(own, {} if late else found, heartbeat_s):
                    self._fail(reason)
                    return
            except Exception as error:  # noqa: BLE001 - any error means that the store is gone
                if not self._leaving.is_set():
                    self._fail(
                        self._dead_process() or f"0, or the process that served the ranks' store, has ended: {error}"
                    )
                return

    def _waits_here(self) -> tuple[str, int]:
        return self.waits_for()

    def _waits_now(self) -> tuple[str, int]:
        doing, num_ended = self.waits_for()
        doing = doing or _own_collective()
        return (doing, num_ended) if doing else _other_model() or ("", num_ended)

    def _deadlock(self, own: str, heartbeats: Mapping[int, bytes], now_s: float) -> str:
        """Return, in words, that all ranks have waited in different calls for too long; otherwise an empty text."""
        waits = {other: sign.decode().partition(" ")[2] for other, sign in heartbeats.items()} | {self._rank: own}
        if waits != self._waits or not all(waits.values()):
            self._waits, self._still_since_s = waits, now_s
        has_own = any(_OWN in words for words in waits.values())
        if now_s - self._still_since_s <= self._silence_s * (_OWN_CALLS if has_own else 1):
            return ""
        return describe_mismatch({rank: words.partition(" ")[2] for rank, words in waits.items()})

    def _fail(self, reason: str) -> None:
        with contextlib.suppress(Exception):  # the store may be gone; else the others say the same
            self._store.compare_set(_FAILED, "", reason)
        self._failure = RankError(f"rank {reason}")
        self._is_known.set()
        self._on_failure(self._failure)

    def _reported_failure(self) -> str | None:
        """Return the first failure that was reported, unless it is this rank's own."""
        if not self._store.check([_FAILED]):
            return None
        reason = self._store.get(_FAILED).decode()
        return None if reason.startswith(f"{self._rank} failed: ") else reason

    def _dead_process(self) -> str | None:
        """Return, in words, which process on this machine has ended without stopping its watchdog, or ``None``."""
        if not self._handles:
            return None
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(0):
            other = self._handles.pop(handle)
            os.close(handle)
            if not self._has_left(other):
                process = f"{other} (process {self._process[other]}) has ended"
                try:  # the rank may have reported its failure
                    reported = self._reported_failure()
                except Exception:  # noqa: BLE001 - any error means that the store is gone
                    return f"{process}, and with it the store that would say why; see its own output"
                return reported or f"{process} without reporting why: it was killed, or crashed"
        return None

    def _heartbeat(self, other: int) -> bytes:
        key = f"heartbeat {other}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _has_left(self, other: int) -> bool:
        try:
            return self._store.check([f"left {other}"])
        except Exception:  # noqa: BLE001 - the store ended with that process
            return self._leaving.is_set()


def report_to(store: dist.distributed_c10d.Store, rank: int, error: BaseException) -> None:
    """Report in a store of a :class:`Watchdog` that a rank has failed. Only the first report of any rank counts."""
    if not isinstance(error, RankError):
        with contextlib.suppress(Exception):  # the store may be gone
            store.compare_set(_FAILED, "", f"{rank} failed: {type(error).__name__}: {error}")


def describe_mismatch(doing: Mapping[int, str]) -> str:
    """Return, in words, that ranks are in different calls, to follow the word "rank"; empty if they are not."""
    ranks_of: dict[str, list[int]] = {}
    for rank, words in sorted(doing.items()):
        ranks_of.setdefault(words, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    (first, *_), (other, *_) = list(ranks_of.values())[:2]
    return (
        f"{first} is in {doing[first]}, and rank {other} in {doing[other]}, and each waits for all ranks: make all "
        "ranks iterate, clip, evaluate, save and close together, with equally many batches; other code may run on "
        "one rank alone"
    )


def _meets() -> tuple[str, int]:
    return "prepare()", 0


def _other_model() -> tuple[str, int] | None:
    """Return what this process waits for with another model, as :attr:`Watchdog.waits_for` does."""
    found = (waits() for waits in _WAITS)
    return next(((f"{doing} of another model", num_ended) for doing, num_ended in found if doing), None)


def _own_collective() -> str:
    """Return the function of ``torch.distributed`` in which the main thread is; empty if in none, or for a session."""
    frame, found = sys._current_frames().get(threading.main_thread().ident or 0), ""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_EXECUTOR):
            return ""
        if frame.f_code.co_filename == dist.distributed_c10d.__file__:
            found = f"{_OWN}{frame.f_code.co_name}()"
        frame = frame.f_back
    return found


def this_machine() -> str:
    """Return a name that all processes on this machine share, and no others."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else os.uname().nodename


def _siblings() -> set[int]:
    """Return the numbers of the running processes that this one's parent has started, itself among them."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if int(parent) == os.getppid() and state not in "ZX":
                found.add(int(stat.parent.name))
    return found


def _namespace() -> str:
    """Return a text that is equal for processes that see each other's process numbers; empty if unknown."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        return f"{this_machine()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
