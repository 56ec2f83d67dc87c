"""Copies checkpoints from one place to another, in the background.

[Note: Promotion] Every chunk of a copy is checked three times: when it is read, just before it is written, and when it
is read again in its new place, before the copy gets its name. During a copy, retention does not remove the source. Each
place copies one checkpoint at a time, and one more may wait. A newer checkpoint replaces the one that waits, which is
then not copied. A failure loses that checkpoint in that place, and nothing else.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, final

from executor.checkpoint.engine import Outcome
from executor.checkpoint.files.flusher import Buffer, lower_thread_priority
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.format.manifest import FileRecord
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.retention import AbstractStore, in_use, step_of

_END_S: Final = 10.0  # longest wait for a thread to end; one that hangs is left running


def promote(source: Checkpoint, store: AbstractStore, check: Callable[[], None] = lambda: None) -> Folder:
    """Copy a checkpoint to another place and verify the copy; return its folder.

    Args:
        source: the checkpoint.
        store: the place. If it has the same checkpoint already, nothing is copied.
        check: called before every chunk. If it raises, the copy ends.

    Raises:
        CheckpointError: the source is damaged, the place cannot be written, or it has another checkpoint of that step.
            No file of the copy is left.
    """
    manifest = source.manifest
    for folder in store.folders():
        if step_of(folder) == manifest.step and _has_copy(folder, source, check):
            return folder
    copy = store.begin_copy(manifest)
    try:
        for record in manifest.files:
            copy.write(record, _chunks(source, record, check))
        _verify(Checkpoint(copy.folder, manifest), check)
        return copy.commit(manifest)
    except BaseException:
        copy.abandon()
        raise


def _has_copy(folder: Folder, source: Checkpoint, check: Callable[[], None]) -> bool:
    try:
        there = Checkpoint(folder)
        _verify(there, check)
    except CheckpointError:  # damaged; or raised by ``check``, which raises again below
        check()
        return False
    if there.manifest.digest != source.manifest.digest:
        raise CheckpointError(in_use(folder))
    return True


def _verify(checkpoint: Checkpoint, check: Callable[[], None]) -> None:
    for record in checkpoint.manifest.files:
        for _ in _chunks(checkpoint, record, check):
            pass


def _chunks(checkpoint: Checkpoint, record: FileRecord, check: Callable[[], None]) -> Iterator[Buffer]:
    for chunk in checkpoint.chunks(record):
        check()
        yield chunk


@dataclasses.dataclass(frozen=True, slots=True)
class PromotionRequest:
    """A checkpoint to copy.

    Attributes:
        step: step of the checkpoint.
        folder: its folder.
        store: the store that has it.
        always: whether levels copy it even if their interval is not due.
        begin_s: time of its first submission.
    """

    step: int
    folder: Folder
    store: AbstractStore
    always: bool
    begin_s: float


@final
class Promoter:
    """Copies checkpoints to one level, in a thread of lowest priority. See [Note: Promotion].

    Args:
        keep: number of checkpoints to retain there, see :meth:`AbstractStore.prune`.
        on_outcome: called with each outcome, in any thread.
        forward: called with the request for the level below. Its source is this level's copy, or the original if that
            copy failed.
    """

    def __init__(
        self,
        level: int,
        store: AbstractStore,
        keep: int,
        on_outcome: Callable[[Outcome], None],
        forward: Callable[[PromotionRequest], None],
    ) -> None:
        self._level = level
        self._store = store
        self._keep = keep
        self._on_outcome = on_outcome
        self._forward = forward
        self._last: PromotionRequest | None = None  # the last one that was copied here
        self._changed = threading.Condition()  # guards the fields below
        self._under_way: PromotionRequest | None = None
        self._waiting: PromotionRequest | None = None
        self._end: str | None = None  # why copying has ended
        self._thread = threading.Thread(target=self._run, name=f"checkpoint level {level}", daemon=True)
        self._thread.start()

    def submit(self, request: PromotionRequest) -> None:
        """Copy a checkpoint after the current one, unless a newer one is submitted first."""
        with self._changed:
            overtaken, self._waiting = self._waiting, request
            self._changed.notify_all()
        if overtaken is not None and overtaken.step != request.step:
            self._fail(
                overtaken,
                f"step {request.step} replaced it before it was copied, because this level is too slow; give the "
                "level a longer interval",
            )
            self._forward(overtaken)

    def wait(self, deadline_s: float) -> bool:
        """Wait until all copies have ended, or ``time.monotonic()`` is ``deadline_s``; return whether they have."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._under_way is None and self._waiting is None, max(deadline_s - time.monotonic(), 0)
            )

    def close(self, why: str) -> None:
        """Abandon the current copy, for the reason ``why``, and end the thread. Closing twice is allowed."""
        with self._changed:
            self._end = self._end or why
            self._changed.notify_all()
        self._thread.join(_END_S)
        if self._thread.is_alive() and self._under_way is not None:
            self._fail(self._under_way, f"{why}; the place has not answered for {_END_S:g} s")

    def _run(self) -> None:
        lower_thread_priority()
        while (request := self._next()) is not None:
            try:
                self._forward(self._process(request))
            finally:
                with self._changed:
                    self._under_way = None
                    self._changed.notify_all()
        with contextlib.suppress(OSError):  # the next run removes them
            self._store.remove_spares()

    def _process(self, request: PromotionRequest) -> PromotionRequest:
        """Copy a checkpoint and report the outcome; return the request for the level below."""
        try:
            folder = self._copy(request)
        except Exception as error:  # noqa: BLE001 - drivers raise any error, and only this copy may fail
            self._fail(request, str(error) or type(error).__name__)
            return request
        outcome = Outcome(request.step, folder, None, 0.0, time.monotonic() - request.begin_s, self._level)
        self._on_outcome(outcome)
        try:
            self._store.prune(self._keep)
        except OSError as error:
            self._on_outcome(dataclasses.replace(outcome, error=f"older checkpoints could not be removed: {error}"))
        self._last = dataclasses.replace(request, folder=folder, store=self._store)
        return self._last

    def _next(self) -> PromotionRequest | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._end is not None)
            self._under_way, self._waiting = self._waiting, None
            return self._under_way

    def _copy(self, request: PromotionRequest) -> Folder:
        if self._last is not None and self._last.step == request.step:
            return self._last.folder
        self._check()
        with request.store.reading(request.folder):
            if request.folder not in request.store.folders():
                raise CheckpointError(
                    f"{request.folder} was removed for newer checkpoints before it was copied: keep more there, or "
                    "give this level a longer interval"
                )
            with Checkpoint(request.folder) as source:
                folder = promote(source, self._store, self._check)
        self._store.mark_whole(folder)
        return folder

    def _check(self) -> None:
        if self._end is not None:
            raise CheckpointError(self._end)

    def _fail(self, request: PromotionRequest, why: str) -> None:
        latency_s = time.monotonic() - request.begin_s
        self._on_outcome(Outcome(request.step, None, f"not in {self._store.place}: {why}", 0.0, latency_s, self._level))
