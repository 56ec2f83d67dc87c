"""A trainer's checkpoints: levels, content beside the model, and resuming."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, final

from executor.checkpoint import CheckpointError, Level, Outcome, Store, store_at
from executor.checkpoint.files.lock import RunLock
from executor.prepare import OffloadedOptimizer
from executor.training_state.saving import Checkpoints, Resumed
from planner.checkpoints.policy import LEAST_BUFFER_BYTES
from planner.models import to_hf_config_dict
from planner.models.captured import CapturedModel
from planner.plan.document import Plan
from ullage.training.batches import BatchSource
from ullage.training.levels import MEMORY, memory_folder


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """Options for a trainer's checkpoints.

    Attributes:
        levels: place, interval and number of checkpoints of each level, fastest first. At the end of training, one more
            goes to all levels. The place of the first level is a folder that all ranks share, or ``"memory"``: a folder
            in the host memory of this node, named after user and plan, that outlives the process.
        buffer_bytes: host memory for snapshots that are not written yet.
        patience_s: time that the end of training waits until the last checkpoint is on all levels.
    """

    levels: Sequence[Level]
    buffer_bytes: int = LEAST_BUFFER_BYTES
    patience_s: float = 600.0


class Stateful(Protocol):
    """An object that is saved in a checkpoint beside the model and the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state: numbers, strings, lists and dictionaries."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Load the state that :meth:`state_dict` returned."""
        ...


@final
class CheckpointSaver:
    """Saves a trainer's checkpoints and resumes from them.

    Args:
        plan: the plan at the beginning of training.
        options: options for checkpoints.
        stateful: other objects to save, by name.
        outcomes: list to which the outcome of each checkpoint on each level is appended.
        is_first: whether this is rank 0, which checks that no other run writes there.

    Attributes:
        levels: the levels of the options, with the folder that ``"memory"`` means.

    Raises:
        CheckpointError: a place cannot be used, or another run is writing there.
    """

    def __init__(
        self,
        plan: Plan,
        options: CheckpointOptions,
        stateful: dict[str, Stateful],
        outcomes: list[Outcome],
        *,
        is_first: bool,
    ) -> None:
        self.levels = tuple(
            dataclasses.replace(level, place=memory_folder(plan)) if level.place == MEMORY else level
            for level in options.levels
        )
        for level in self.levels:  # before training, so that a bad place does not waste a run
            store = store_at(level.place)
            if is_first and isinstance(store, Store):  # the lasting lock is taken after the model is made
                RunLock(store.root).close()
        self._options = options
        self._stateful = stateful
        self._outcomes = outcomes
        self._saved_at = 0  # iteration whose state is in a checkpoint, or is the initial state
        self._checkpoints: Checkpoints | None = None

    def open(self, optimizer: OffloadedOptimizer) -> None:
        """Begin to save what an optimizer trains. Raises as :class:`executor.training_state.saving.Checkpoints`."""
        self._checkpoints = Checkpoints(optimizer, *self.levels, on_outcome=self._outcomes.append)

    @property
    def is_open(self) -> bool:
        """Whether checkpoints can be made now."""
        return self._checkpoints is not None

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint is due before an iteration."""
        return bool(iteration) and iteration % self.levels[0].every == 0

    def save(self, plan: Plan, iteration: int, position: int) -> None:
        """Begin a checkpoint of the state before an iteration, unless one exists."""
        assert self._checkpoints is not None
        if self._saved_at == iteration and iteration:
            return
        model = plan.model
        extra = {
            "position": position,
            "stateful": {name: held.state_dict() for name, held in self._stateful.items()},
            "config": None if isinstance(model, CapturedModel) else to_hf_config_dict(model),
            "plan": plan.digest(),
        }
        self._checkpoints.save(iteration, extra)
        self._saved_at = iteration

    def resume(self, batches: BatchSource) -> Resumed:
        """Resume from the newest complete checkpoint on any level. See :meth:`ullage.Trainer.resume`."""
        assert self._checkpoints is not None
        found = self._checkpoints.resume()
        if found.path is None:
            return found
        saved = found.extra.get("stateful", {})
        if "data" in saved and "data" not in self._stateful:
            raise CheckpointError(
                f"{found.path} has a position in --data, which means nothing in other data; continue with the same "
                "--data, or start anew with --weights"
            )
        for name, held in self._stateful.items():
            if name not in saved:
                raise CheckpointError(
                    f"{found.path} has no {name}; it has {', '.join(saved) or 'nothing of that kind'}"
                )
            held.load_state_dict(saved[name])
        batches.sequences.position = found.extra.get("position", 0)
        self._saved_at = found.step
        return found

    def close(self, *, waits: bool, brings_down: bool) -> None:
        """Stop saving. Closing twice is allowed.

        Args:
            waits: wait until pending checkpoints are durable on the first level; otherwise drop them.
            brings_down: also wait until the newest checkpoint is on all levels, for at most ``patience_s``.
        """
        if self._checkpoints is None:
            return
        if waits:
            self._checkpoints.finish()
        if brings_down:
            self._checkpoints.promote_newest(self._options.patience_s)
        self._checkpoints.close()
        self._checkpoints = None


def where_saved(outcomes: Sequence[Outcome]) -> str:
    """Return text that says on which levels the last checkpoint is, and where saving failed."""
    there = [outcome for outcome in outcomes if outcome.path is not None and outcome.error is None]
    if not there:
        return "; ".join(["no new checkpoint", *(outcome.error for outcome in outcomes[-1:] if outcome.error)])
    step = max(outcome.step for outcome in there)
    found = {outcome.level: outcome for outcome in outcomes if outcome.step == step}  # the latest outcome on each level
    places = [str(outcome.path) for _, outcome in sorted(found.items()) if outcome.path is not None]
    failures = [outcome.error for _, outcome in sorted(found.items()) if outcome.error is not None]
    failures += [f"of step {o.step}: {o.error}" for o in outcomes if o.step > step and o.error is not None]
    return "; ".join([f"checkpoint of step {step} in {' and '.join(places)}", *failures])
