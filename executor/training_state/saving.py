"""Checkpoints of training under a plan. Resumed training gives the same bits as uninterrupted training."""

import contextlib
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from executor.checkpoint.engine import CheckpointEngine, Outcome
from executor.checkpoint.files.flusher import Flusher
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError, Files
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.places.place import candidates, parse_name
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.training_state.restoring import restore
from executor.training_state.rng_state import rng_state

_PATIENCE_S = 60.0
_SHARED_S = 5.0  # longest until a file that another node has written is seen


@dataclasses.dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint from which training resumes.

    Attributes:
        path: path of the checkpoint; ``None`` if there was none, so that training starts from the beginning.
        step: iterations that it contains.
        refused: why newer checkpoints were skipped.
        extra: state that was saved beside the model and the optimizer.
    """

    path: Folder | None = None
    step: int = 0
    refused: tuple[str, ...] = ()
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@final
class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Saves checkpoints of a prepared model and its optimizer, and restores them.

    Args:
        optimizer: the optimizer that ``prepare`` returned, for a session with buffers for checkpoints.
        levels: places of checkpoints, fastest first. Training writes to the first level, a folder that all ranks share.
            Each further level gets copies from the level above, of the steps that are multiples of its interval.
        on_outcome: called in another thread with the outcome of each checkpoint on each level.
        files: system calls that write into folders.

    Raises:
        ValueError: the session has no buffers for checkpoints, or the levels are not consistent.
        CheckpointError: a place cannot be used, has no room, or is not shared by all nodes.
    """

    def __init__(
        self,
        optimizer: OffloadedOptimizer,
        *levels: Level,
        on_outcome: Callable[[Outcome], None] = lambda _outcome: None,
        files: Files | None = None,
    ) -> None:
        check_prepared(optimizer)
        self._optimizer = optimizer
        self._session = session = optimizer.session
        if session.runtime.snapshots is None:
            raise ValueError("the session has no buffers for checkpoints; pass checkpoint_buffer_bytes to prepare()")
        rank, size = session.collectives.rank, session.collectives.size
        nonce = session.collectives.broadcast(secrets.randbits(32))  # the same on all ranks
        self._rank = rank
        self.levels = Levels(levels, on_outcome, files=files, is_first=rank == 0)
        if size > 1:
            try:
                self._check_shared(nonce)
            except BaseException:
                self.levels.close()
                raise
        place = self.levels.fastest
        self._flusher = Flusher(place.files, session.runtime.snapshots.ring, patience_s=_PATIENCE_S)
        self._engine = CheckpointEngine(
            session.runtime.snapshots,
            place,
            self._flusher,
            rank=rank,
            size=size,
            nonce=f"{nonce:08x}" if size > 1 else "",
            is_lost=session.collectives.has_failed,
            on_outcome=self.levels.report,
        )
        session.runtime.snapshots.engine = self._engine
        num_bytes = round(session.collectives.mean(self._engine.num_bytes) * size)
        if rank == 0:
            try:
                self.levels.check_room(num_bytes)
            except CheckpointError:
                self.close()
                raise

    def _check_shared(self, nonce: int) -> None:
        """Check that all ranks see the same places, by a mark of rank 0 in each.

        Raises:
            CheckpointError: a place is another one on another node.
        """
        collectives, places = self._session.collectives, self.levels.places
        with contextlib.ExitStack() as marks:
            for place in places if self._rank == 0 else ():
                marks.enter_context(place.marked(nonce))
            collectives.broadcast(nonce)  # after it, all marks are there
            deadline_s = time.monotonic() + _SHARED_S
            while (unseen := [not place.has_mark(nonce) for place in places]) != [False] * len(places):
                if time.monotonic() > deadline_s:
                    break
                time.sleep(0.1)
            missing = collectives.means(np.array(unseen, float))
        if lacking := [place.place for place, share in zip(places, missing, strict=True) if share]:
            raise CheckpointError(
                f"{lacking[0]} is not the same on all nodes: give a folder on a file system that all nodes share, and "
                "after it such folders or URLs"
            )

    def save(self, step: int, extra: Mapping[str, Any] | None = None) -> None:
        """Begin a checkpoint between two iterations.

        Tasks of the next iteration take it, and it is written during training.

        All ranks call this together.

        Args:
            step: iterations of training that the current state contains.
            extra: other state to save, as plain JSON (an LR scheduler's ``state_dict()``, the position in the data).

        Raises:
            OutOfOrderError: in the middle of an iteration.
            CheckpointError: a checkpoint was already begun after this iteration.
        """
        self._session.runtime.check_idle()
        self._session.runtime.check_has_weights()
        self._session.runtime.check_unparked()
        if self._optimizer.entry.numbers:
            self._session.synchronize()  # because updates set them
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        names = [[self._session.name_of(p) for p in group["params"]] for group in self._optimizer.param_groups]
        parameters = [parameter for _, parameter in self._session.runtime.state.by_name.values()]
        steps = {parameter.shard.name: parameter.step for parameter in parameters}
        shared = {p.shard.name: list(p.shard.whole_shape) for p in parameters if not p.shard.is_whole}
        own = {
            "optimizer": self._optimizer.entry.torch_class.__name__,
            "groups": groups,
            "parameters": names,
            "steps": steps,
            "numbers": {parameter.shard.name: parameter.numbers.get(parameter.step, ()) for parameter in parameters},
            "shapes": shared,
            "rng": rng_state(),
            **(extra or {}),
        }
        self._engine.begin(step, self._session.iteration, own)

    def finish(self) -> None:
        """Wait until all checkpoints that have begun are durable or have failed. Call it between iterations."""
        self.take_remaining()
        self._engine.wait()

    def settle(self) -> None:
        """Wait as :meth:`finish` does, and until old checkpoints on the first level are verified and removed."""
        self.finish()
        self.levels.settle()

    def take_remaining(self) -> None:
        """Take the rest of all checkpoints that have begun, now instead of in the next iteration."""
        self._session.synchronize()
        self._engine.take_remaining()

    def promote_newest(self, patience_s: float) -> None:
        """Copy the newest checkpoint to all levels, and wait at most ``patience_s``. Call :meth:`finish` first.

        If a copy has not ended by then, or at Ctrl-C, it is abandoned and reported.
        """
        self.levels.promote_newest(patience_s)

    def resume(self) -> Resumed:
        """Restore the newest whole checkpoint, see :func:`restore`. All ranks call this together.

        Each checkpoint is read only once. If any rank finds damage in it, it is skipped.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer, or no checkpoint is whole. In the second
                case the model's weights are lost.
        """
        there, refused = candidates(self.levels.places) if self._rank == 0 else ([], [])
        path, lost = None, False
        for path in self._found_by_rank_0(there):
            failure = f"{path}: another rank cannot read its part"
            with contextlib.ExitStack() as stack:
                try:
                    checkpoint = stack.enter_context(Checkpoint(path))
                    opened = True
                except DamagedError as error:
                    failure, opened = str(error), False
                if not self._session.collectives.any(not opened):  # restore() begins with collectives
                    try:
                        extra = restore(self._optimizer, checkpoint)
                        restored = True
                    except DamagedError as error:
                        failure, restored = str(error), False
                    if not self._session.collectives.any(not restored):
                        return Resumed(path, checkpoint.manifest.step, tuple(refused), extra)
                    lost = True
            refused.append(failure)
        if path is not None:
            none_whole = CheckpointError(
                f"no checkpoint is whole: {'; '.join(refused)}; copy one from a backup, or start training again with "
                "another place for checkpoints"
            )
            if lost:  # parts of several are there now
                self._session.runtime.fail("resume()", none_whole)
            raise none_whole
        return Resumed(refused=tuple(refused))

    def _found_by_rank_0(self, there: Sequence[tuple[int, Folder]]) -> Iterator[Folder]:
        """Yield the checkpoints that rank 0 has found. All ranks call this together."""
        found = iter([(level, *(parse_name(folder.name) or (0, 0))) for level, folder in there])
        while True:
            level, step, nonce = (self._session.collectives.broadcast(value) for value in next(found, (-1, 0, 0)))
            if level < 0:
                return
            yield self.levels.places[level].folder(step, nonce)

    def close(self) -> None:
        """Abandon unfinished snapshots and copies to other levels, and wait for files that are being written.

        Closing twice is allowed.
        """
        self._engine.close()
        if self._session.runtime.snapshots is not None:
            self._session.runtime.snapshots.engine = None
        self._flusher.close()
        self.levels.close()

    def __exit__(self, *_exc_info: object) -> None:
        self.close()
