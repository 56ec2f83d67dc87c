"""Checkpoints of training under a plan: everything that it needs to go on as if it had not stopped."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, final

from executor.chance import rng_state
from executor.checkpoint import (
    Checkpoint,
    CheckpointEngine,
    CheckpointError,
    DamagedError,
    Files,
    Flusher,
    Outcome,
    Store,
)
from executor.checkpoint.store import step_of
from executor.prepare import OffloadedOptimizer
from executor.restoring import restore

_PATIENCE_S = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """What training goes on from.

    Attributes:
        path: folder of the checkpoint; ``None`` if there was none, and training begins at the beginning.
        step: iterations behind it.
        refused: why newer checkpoints were passed over.
        extra: what it has beside the model and the optimizer.
    """

    path: Path | None = None
    step: int = 0
    refused: tuple[str, ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@final
class Checkpoints:
    """Makes checkpoints of a prepared model and its optimizer, and brings them back.

    Args:
        optimizer: what ``prepare`` returned, for a session with room for checkpoints.
        folder: where checkpoints go; all ranks give the same, on a file system that they share.
        keep: the newest that stay, at least two.
        tell: is called with how each one ended, in another thread.
        files: what writes.

    Raises:
        ValueError: the session was made without room for checkpoints.
        CheckpointError: the folder cannot be used.
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        folder: Path,
        *,
        keep: int = 2,
        tell: Callable[[Outcome], None] = lambda _outcome: None,
        files: Files | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._session = session = optimizer.session
        if session.snapshots is None:
            raise ValueError("the session has no room for checkpoints; give it checkpoint_buffer_bytes")
        self.store = Store(folder, files)
        self._flusher = Flusher(self.store.files, session.snapshots.ring, patience_s=_PATIENCE_S)
        member = session.member()
        self._engine = CheckpointEngine(
            session.snapshots, self.store, self._flusher, keep=keep, member=member, tell=tell
        )
        session.snapshots.engine = self._engine
        self._rank = member.rank

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint between two iterations; it is taken during the next one, and written beside training.

        All ranks do so together.

        Args:
            step: iterations of training behind the present state.
            extra: what else is to be kept, as plain JSON (an LR scheduler's ``state_dict()``, the place in the data).

        Raises:
            OutOfOrderError: in the middle of an iteration.
            CheckpointError: one was begun here already.
        """
        self._session.check_between_iterations()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        steps = {parameter.share.name: parameter.step for _, parameter in self._session.parameters()}
        own = {
            "optimizer": self._optimizer.entry.stock.__name__,
            "groups": groups,
            "steps": steps,
            "rng": rng_state(),
            **(extra or {}),
        }
        self._engine.begin(step, self._session.iteration, own)

    def finish(self) -> None:
        """Wait until checkpoints that have begun are durable, or have failed; between iterations."""
        self.take_rest()
        self._engine.wait()

    def take_rest(self) -> None:
        """Take what has not been taken of checkpoints that have begun, without an iteration; between iterations."""
        self._session.synchronize()
        self._engine.take_rest()

    def resume(self) -> Resumed:
        """Bring back the newest checkpoint that is whole, see :func:`restore`; all ranks do so together.

        It is read once: what is found to be damaged on the way, by any rank, is passed over.

        Raises:
            CheckpointError: it is of another model or optimizer, or none is whole: the model's weights are lost then.
        """
        refused: list[str] = []
        for path in self._candidates():
            failure, extra = None, {}
            try:
                with Checkpoint(path) as checkpoint:
                    extra = restore(self._optimizer, checkpoint)
            except DamagedError as error:
                failure = str(error)
            if not self._session.mean(float(failure is not None)):
                return Resumed(path, checkpoint.manifest.step, tuple(refused), extra)
            refused.append(failure or f"{path}: another rank cannot read its part")
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.store.root} is whole: {'; '.join(refused)}; bring one back from elsewhere, or "
                "begin again in another folder"
            )
        return Resumed()

    def _candidates(self) -> Iterator[Path]:
        """Yield the folders of checkpoints that rank 0 sees, newest first; all ranks do so together."""
        steps = iter([step_of(path) for path in self.store.folders()] if self._rank == 0 else ())
        while (step := self._session.of_first(next(steps, -1))) >= 0:
            yield self.store.folder(step)

    def close(self) -> None:
        """Give up what has not been taken, wait for the rest, and end the threads. Closing twice is allowed."""
        self._engine.close()
        if self._session.snapshots is not None:
            self._session.snapshots.engine = None
        self._flusher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()
