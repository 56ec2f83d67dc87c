"""Asynchronous checkpoints: the schedule takes pieces of state before their updates, and other threads write them.

A checkpoint begins between two iterations. At that moment only small values (step counts, RNG state) are
copied, so the training loop does not wait. Tasks of the schedule take the tensors during the next iteration ([Note:
Snapshots] in :mod:`planner.lowering.snapshots`). Tensors on a device are copied, in chunks, into buffers that the
flusher's threads hash and write. Tensors in host memory are leased to these threads. An update waits until its own
piece is copied or written, so all pieces are of the same step. A copy waits for a free buffer, so memory is bounded.
After the last piece, another thread makes the files durable and gives the checkpoint its name. A failure loses the
checkpoint, but never stops training.
"""

import contextlib
import dataclasses
import functools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from executor.checkpoint.divided import Agreement, NodePlaces
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.files.timeouts import SLOWEST_BYTES_PER_S, TimeLimited, timeout_error
from executor.checkpoint.files.writer import Flusher, Lease, ShardWriter, lower_thread_priority
from executor.checkpoint.format.layout import ITEM_BYTES, layout
from executor.checkpoint.format.manifest import Manifest, TensorRecord, tensors_of
from executor.checkpoint.places.folder import joined_folder
from executor.checkpoint.source import MODEL_FOLDER, OPTIMIZER_FOLDER, Key, Source, _path, boxes_of, files_of, runs_of

_END_S: Final = 10.0  # longest wait for threads to end
_PATIENCE_S: Final = 120.0  # longest time that rank 0 and the other ranks wait for each other


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a checkpoint.

    Attributes:
        step: step of the checkpoint.
        path: its folder; ``None`` if it failed, and on ranks other than 0.
        error: why it failed, or why older checkpoints could not be removed; ``None`` if there was no error.
        blocked_s: time that copies waited for buffers, and updates for leases.
        latency_s: time from the beginning of the checkpoint until it was durable.
        level: index of its level. The fastest level is 0.
        begin_s: ``time.monotonic()`` at its beginning.
    """

    step: int
    path: Folder | None
    error: str | None
    blocked_s: float
    latency_s: float
    level: int = 0
    begin_s: float = dataclasses.field(default_factory=time.monotonic, repr=False)

    def on_level(self, level: int, path: Folder | None, error: str | None = None) -> "Outcome":
        """Return the outcome of its copy on a slower level, which has ended now."""
        return Outcome(self.step, path, error, 0.0, time.monotonic() - self.begin_s, level, self.begin_s)


@final
class CheckpointEngine:
    """Takes and writes checkpoints.

    Args:
        here: places of this node. Training writes into the first.
        nonce: of this run, the same on all ranks.
        on_outcome: called with each outcome, in the thread that made the checkpoint durable.
    """

    def __init__(
        self,
        source: Source,
        here: NodePlaces,
        flusher: Flusher,
        *,
        nonce: str,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        self._source = source
        self._here, self._place, self._peers = here, here.local(0), here.peers
        self._flusher = flusher
        self._nonce = nonce
        self._on_outcome = on_outcome
        self._in_time = TimeLimited()
        states = {state for key in source.slices for state in source.keys(key)}
        self._runs: dict[tuple[Key, int], list[tuple[int, int, int]]] = {}  # by piece and grain
        for grain in {source.grain(state) for state in states}:
            held = boxes_of(source, grain)
            for key, slices in source.slices.items():
                self._runs[key, grain] = runs_of((whole.of_blocks(grain) for whole in slices), held)
        entries = files_of(source, self._peers.rank)
        self._layouts = {path: layout(tuple(of_file)) for path, of_file in entries.items()}
        self._captures: dict[int, _Capture] = {}  # checkpoints that the schedule is taking, by turn
        self._leases: dict[Key, tuple[_Capture, list[Lease]]] = {}  # leases of pieces that have not been released
        self._lock = threading.Condition()  # guards the fields below
        self._open_ones: list[_Capture] = []
        self._work: queue.SimpleQueue[_Capture | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoint commit", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's files of a checkpoint."""
        return sum(made.num_bytes for made in self._layouts.values())

    def begin(self, step: int, turn: int, extra: Mapping[str, Any]) -> None:
        """Begin the checkpoint of a step, between two iterations.

        If an earlier checkpoint hangs, abandon this one at once.

        Args:
            step: iterations of training that the checkpoint contains.
            turn: number of the next iteration, whose tasks take the pieces.
            extra: other state of this rank, as plain JSON.

        Raises:
            CheckpointError: a checkpoint was already begun for this turn.
            ValueError: ``extra`` is not plain JSON.
        """
        if turn in self._captures:
            raise CheckpointError(
                f"the checkpoint of step {self._captures[turn].step} was already begun after this iteration; begin at "
                "most one after each iteration"
            )
        try:
            text = json.dumps(extra, allow_nan=False)  # copies the values now
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"a checkpoint's extra values must be plain JSON (finite numbers, text, lists, dictionaries): {error}"
            ) from error
        agreement = Agreement(self._here, turn, _PATIENCE_S)
        capture = _Capture(step, text, list(self._source.slices), agreement, time.monotonic())
        with self._lock:
            hangs = any(capture.begin_s - one.taken_s > self._longest_s for one in self._open_ones)
            if not hangs:
                self._captures[turn] = capture
                self._open_ones.append(capture)
        if hangs:  # this one could not be committed either, and would fill the drive
            capture.error = timeout_error(self._longest_s)
            self._tell(capture)
            self._on_outcome(self._outcome(capture, None))

    def take(self, key: Key, turn: int) -> None:
        """Take a piece, if a checkpoint was begun for this turn. Call :meth:`release` before the piece changes.

        Take pieces in the order of the source. This never raises: a failure ends the checkpoint.
        """
        capture = self._captures.get(turn)
        if capture is None:
            return
        assert capture.left[0] == key, f"{key} came when {capture.left[0]} was expected"
        if capture.error is None:
            begin_s = time.monotonic()
            capture.error = CheckpointError("taking a piece was interrupted")  # until all of the piece is taken
            capture.left.pop(0)
            try:
                self._open(capture)
                self._append(capture, key)
                capture.error = None
            except OSError as error:
                capture.error = error
                self._tell(capture)
            capture.blocked_s += time.monotonic() - begin_s
        else:
            capture.left.pop(0)
        if not capture.left:
            self._hand_over(turn, capture)

    def _hand_over(self, turn: int, capture: "_Capture") -> None:
        """Let the other thread end a checkpoint. Calling it twice is allowed."""
        capture.taken_s = time.monotonic()
        self._captures.pop(turn, None)
        self._work.put(capture)

    def release(self, key: Key, *, may_copy: bool = True) -> None:
        """Wait until a piece may change. This never raises: a failure ends the checkpoint.

        With ``may_copy``, unwritten data is copied into free buffers.
        """
        if key not in self._leases:
            return
        capture, leases = self._leases[key]
        begin_s = time.monotonic()
        with contextlib.suppress(CheckpointError):  # its files have failed too
            self._flusher.end_leases(leases, may_copy=may_copy)
        capture.blocked_s += time.monotonic() - begin_s
        self._leases.pop(key, None)  # only now: another thread may wait for the same piece

    def take_remaining(self) -> None:
        """Take and release all remaining pieces, between iterations. If that is interrupted, abandon the checkpoint."""
        for turn, capture in sorted(self._captures.items()):
            try:
                while capture.left:
                    self.take(capture.left[0], turn)
            except BaseException:  # tasks of the next iteration would go on with other pieces than were taken
                capture.error = capture.error or CheckpointError("taking its pieces was interrupted")
                self._hand_over(turn, capture)
                raise
        self._release_all()

    def wait(self) -> None:
        """Wait until all completely taken checkpoints have ended. Abandon those that hang."""
        with self._lock:
            while self._open_ones:
                before = list(self._open_ones), self._flusher.num_ended
                ended = self._lock.wait_for(lambda: not self._open_ones, self._longest_s)
                if not ended and before == (self._open_ones, self._flusher.num_ended):
                    lost, self._open_ones = self._open_ones, []
                    break
            else:
                return
        for capture in lost:
            capture.error = timeout_error(self._longest_s)
            self._on_outcome(self._outcome(capture, None))

    @property
    def _longest_s(self) -> float:
        """Longest time without progress. It allows for other ranks' parts, and for writing back the page cache."""
        return _PATIENCE_S + self._flusher.patience_s + self.num_bytes / SLOWEST_BYTES_PER_S

    def close(self) -> None:
        """Abandon incomplete checkpoints, finish the others, and end the thread. Closing twice is allowed."""
        while self._captures:
            _, capture = self._captures.popitem()
            capture.error = capture.error or CheckpointError("training ended before all its pieces were taken")
            self._work.put(capture)
        self._release_all()
        self._work.put(None)
        self.wait()
        self._thread.join(_END_S)

    def _release_all(self) -> None:
        for key in list(self._leases):
            self.release(key, may_copy=False)  # waits for all

    def _open(self, capture: "_Capture") -> None:
        """Make the files when the first piece is taken. In :meth:`begin`, the training loop would wait for that."""
        if capture.is_open:
            return
        patience_s = self._flusher.patience_s + (0.0 if self._peers.is_leader else _PATIENCE_S)
        capture.draft, capture.writers = self._in_time.do(
            lambda: self._opened(capture.step), lambda opened: self._abandon(*opened), patience_s
        )
        capture.is_open = True

    def _opened(self, step: int) -> tuple[Path | None, dict[str, ShardWriter]]:
        folders = (MODEL_FOLDER, OPTIMIZER_FOLDER)
        draft = self._place.begin(step, folders, self._nonce) if self._peers.is_leader else None
        folder = draft or joined_folder(
            self._place.root, step, folders, self._nonce, _PATIENCE_S, self._peers.has_failed
        )
        writers: dict[str, ShardWriter] = {}
        try:
            for path, made in self._layouts.items():
                writers[path] = ShardWriter(self._flusher, folder, path, made)
        except OSError:
            self._abandon(draft, writers)
            raise
        return draft, writers

    def _append(self, capture: "_Capture", key: Key) -> None:
        leases: list[Lease] = []
        self._leases[key] = capture, leases  # set first, so that leases from before a failure are in it
        for state, values in zip(self._source.keys(key), self._source.tensors(key), strict=True):
            value_bytes = ITEM_BYTES[self._source.dtype(state)]
            for index, start, stop in self._runs[key, self._source.grain(state)]:
                held = values[value_bytes * start : value_bytes * stop]
                writer = capture.writers[_path(state, self._peers.rank, index)]
                if isinstance(held, np.ndarray):
                    leases += writer.lease(held)
                else:
                    writer.append(held, self._source.copy)

    def _run(self) -> None:
        lower_thread_priority()
        while (capture := self._work.get()) is not None:
            if capture.has_ended:
                continue
            capture.has_ended = True
            try:
                self._end(capture)
            finally:
                with self._lock:
                    if capture in self._open_ones:
                        self._open_ones.remove(capture)
                    self._lock.notify_all()

    def _end(self, capture: "_Capture") -> None:
        path = None
        try:
            if capture.error is not None:
                raise capture.error
            path = self._finish(capture)
        except OSError as error:
            capture.error = error
            self._abandon(capture.draft, capture.writers)
            self._tell(capture)
        with self._lock:
            if capture not in self._open_ones:
                return  # it has been abandoned and reported
        self._on_outcome(self._outcome(capture, path))

    def _outcome(self, capture: "_Capture", path: Path | None) -> Outcome:
        reason = None if capture.error is None else str(capture.error)
        latency_s = time.monotonic() - capture.begin_s
        return Outcome(capture.step, path, reason, capture.blocked_s, latency_s, begin_s=capture.begin_s)

    def _finish(self, capture: "_Capture") -> Path | None:
        files = tuple(writer.finish() for writer in capture.writers.values())
        part = Manifest(step=capture.step, files=files, tensors=self._tensors, extra=json.loads(capture.extra))
        return capture.agreement.complete(part, capture.draft)

    @functools.cached_property
    def _tensors(self) -> dict[str, TensorRecord]:
        return tensors_of(list(self._layouts.values()))

    def _abandon(self, draft: Path | None, writers: Mapping[str, ShardWriter]) -> None:
        for writer in writers.values():
            writer.abandon()
        if draft is not None:
            self._place.abandon(draft.name)

    def _tell(self, capture: "_Capture") -> None:
        """Tell the other ranks that this one has failed: they need not wait."""
        capture.agreement.fail(str(capture.error))


@dataclasses.dataclass(eq=False, slots=True)
class _Capture:
    step: int
    extra: str
    left: list[Key]
    agreement: Agreement
    begin_s: float
    taken_s: float = math.inf  # when the last piece was taken
    draft: Path | None = None  # the folder, on the leader of a node
    writers: dict[str, ShardWriter] = dataclasses.field(default_factory=dict)
    is_open: bool = False  # whether the rank's files are made; it may have none
    error: OSError | None = None
    has_ended: bool = False
    blocked_s: float = 0.0
