"""Notices that another rank has failed, so that nobody waits for it for ever.

[Note: Failed ranks] A rank that raises says so in the store that joined the ranks; the others look there several times
a second. One that is killed says nothing: where it runs beside us (one process namespace) the operating system tells
at once that its process has ended, elsewhere its sign of life in the store stays the same for too long. Whoever waits
for a collective is then told who failed, and why if it could say so. A collective that breaks first waits for that
explanation, as a closed connection names nobody.

[Note: Ranks apart] A rank that does something else than the others (evaluates alone, or has a batch less) waits for
what never comes, and so do they, though none has failed. So each says with its sign of life what it waits for
(:attr:`Watchdog.waits_for`). Where all wait, nothing moves on any, and they wait for different things, that is told.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol, final

_PERIOD_S: Final = 0.2  # between two looks for what other ranks have said
SILENCE_S: Final = 30.0
"""A rank on another machine that gives no sign of life for so long is taken for dead."""

LANE_THREAD: Final = "lane "
"""What the names of lanes' threads begin with: a caller who waits is in another."""

_FAILED: Final = "failed"


class RankError(ConnectionError):
    """Another rank has failed or is gone, and this one cannot go on without it."""


class Store(Protocol):
    """What the watch needs of a ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, once it has been set."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have been set."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        """Set a value if it is the expected one, or not there."""
        ...


@final
class Watchdog:
    """Watches the other ranks from a thread of its own, and tells them if this one fails.

    Args:
        store: joins the ranks; nobody else uses its keys.
        rank, size: this rank, and how many there are.
        silence_s: see :data:`SILENCE_S`.

    Attributes:
        waits_for: returns what this rank does while it waits for others, empty if it does not wait now, and a number
            that grows with whatever ends on it. Called in the watch's thread.
    """

    def __init__(self, store: Store, rank: int, size: int, *, silence_s: float = SILENCE_S) -> None:
        self._store = store
        self._rank = rank
        self._silence_s = silence_s
        self._heartbeat_period_s = min(silence_s / 5, 2.0)  # between two heartbeats of life
        self.waits_for: Callable[[], tuple[str, int]] = lambda: ("", 0)
        self._waits: Mapping[int, str] = {}  # what each rank waits for, and that it is so since then
        self._still_since_s = time.monotonic()
        self._failure: RankError | None = None
        self._failed = threading.Event()
        self._leaving = threading.Event()
        self._on_failure: Callable[[RankError], None] = lambda _error: None
        here = _namespace()
        store.set(f"process {rank}", f"{here} {os.getpid()}")
        self._others = [other for other in range(size) if other != rank]
        self._process: dict[int, int] = {}  # of other ranks
        self._handles: dict[int, int] = {}  # file descriptor of a rank's process -> rank
        for other in self._others:
            *place, process = store.get(f"process {other}").decode().split()
            self._process[other] = int(process)
            if here and " ".join(place) == here:
                with contextlib.suppress(OSError):  # it may be gone already: then its silence will tell
                    self._handles[os.pidfd_open(int(process))] = other
        self._thread = threading.Thread(target=self._run, name="watch of other ranks", daemon=True)

    def start(self, on_failure: Callable[[RankError], None]) -> None:
        """Begin; ``on_failure`` is called once, in the watch's own thread, if another rank fails."""
        self._on_failure = on_failure
        self._thread.start()

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            RankError: it names the rank, and says why if that is known.
        """
        if self._failure is not None:
            raise self._failure

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the first failure of all counts."""
        if isinstance(error, RankError) or self._leaving.is_set():
            return
        with contextlib.suppress(Exception):  # without the store there is nobody to tell
            self._store.compare_set(_FAILED, "", f"{self._rank} failed: {type(error).__name__}: {error}")

    def explain(self, error: Exception) -> RankError:
        """Return why a collective has failed, once that is known, or what it said itself if nobody says more."""
        if self._failed.wait(self._silence_s + 2 * self._heartbeat_period_s):
            assert self._failure is not None
            return self._failure
        return RankError(f"ranks can no longer reach each other: {error}")

    def stop(self, *, together: bool) -> None:
        """Stop watching, and tell the others, if all leave ``together``, that this is right. Twice is allowed."""
        if not self._leaving.is_set():
            self._leaving.set()
            with contextlib.suppress(Exception):  # whoever served the store may have left before
                if together:
                    self._store.set(f"left {self._rank}", "")
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                self._thread.join()
            for handle in self._handles:
                os.close(handle)
            self._handles.clear()

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
                late = number > 0 and time.monotonic() - heartbeat_s > self._silence_s / 2  # we have slept, not they
                heartbeat_s, number = time.monotonic(), number + 1
                doing, num_ended = self.waits_for()
                own = f"{num_ended} {doing}" if doing else ""
                self._store.set(f"heartbeat {self._rank}", f"{number} {own}")
                found = {other: self._heartbeat(other) for other in self._others}
                for other in self._others:
                    if late or found[other] != heartbeats[other]:
                        heartbeats[other], heard_s[other] = b"" if late else found[other], heartbeat_s
                    elif heartbeat_s - heard_s[other] > self._silence_s and not self._has_left(other):
                        self._fail(f"{other} has given no sign of life for {self._silence_s:g} s")
                        return
                if reason := self._deadlock(own, {} if late else found, heartbeat_s):
                    self._fail(reason)
                    return
            except Exception as error:  # noqa: BLE001 - whatever the store raises, it is no more
                if not self._leaving.is_set():
                    self._fail(self._dead_process() or f"0 is gone, or whoever served the store of the ranks: {error}")
                return

    def _deadlock(self, own: str, heartbeats: Mapping[int, bytes], now_s: float) -> str:
        """Return in words that all ranks wait, and for different things, if that is so since long."""
        waits = {other: sign.decode().partition(" ")[2] for other, sign in heartbeats.items()} | {self._rank: own}
        if waits != self._waits or not all(waits.values()):
            self._waits, self._still_since_s = waits, now_s
        if now_s - self._still_since_s <= self._silence_s:
            return ""
        return describe_mismatch({rank: words.partition(" ")[2] for rank, words in waits.items()})

    def _fail(self, reason: str) -> None:
        self._failure = RankError(f"rank {reason}")
        self._failed.set()
        self._on_failure(self._failure)

    def _reported_failure(self) -> str | None:
        """Return the first failure that a rank has told, unless it is our own."""
        if not self._store.check([_FAILED]):
            return None
        reason = self._store.get(_FAILED).decode()
        return None if reason.startswith(f"{self._rank} ") else reason

    def _dead_process(self) -> str | None:
        """Return which process beside us has ended without having left."""
        if not self._handles:
            return None
        poll = select.poll()
        for handle in self._handles:
            poll.register(handle, select.POLLIN)
        for handle, _ in poll.poll(0):
            other = self._handles.pop(handle)
            os.close(handle)
            if not self._has_left(other):
                with contextlib.suppress(Exception):  # its last word, if it had one
                    if said := self._reported_failure():
                        return said
                return f"{other} (process {self._process[other]}) has ended without a word: it was killed, or crashed"
        return None

    def _heartbeat(self, other: int) -> bytes:
        key = f"heartbeat {other}"
        return self._store.get(key) if self._store.check([key]) else b""

    def _has_left(self, other: int) -> bool:
        try:
            return self._store.check([f"left {other}"])
        except Exception:  # noqa: BLE001 - the store went with it
            return self._leaving.is_set()


def describe_mismatch(doing: Mapping[int, str]) -> str:
    """Return in words that ranks do different things, for an error about a rank; empty if they do not.

    Args:
        doing: what each rank does.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, words in sorted(doing.items()):
        ranks_of.setdefault(words, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    (first, *_), (other, *_) = list(ranks_of.values())[:2]
    return (
        f"{first} is in {doing[first]}, and rank {other} in {doing[other]}, where each waits for all ranks: let them "
        "iterate, clip, evaluate, save and close together, with as many batches each; what comes of it may be for one"
    )


def _namespace() -> str:
    """Return what two processes have in common if each can see the other by its number; empty where that is unknown."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""
