"""Checkpoints of ``ullage execute``: their content beside the model, and resuming."""

from collections.abc import Sequence
from typing import Final, final

from executor.checkpoint.engine import Outcome
from executor.checkpoint.levels import Level
from executor.prepare import OffloadedOptimizer
from executor.training_state.saving import Checkpoints, Resumed
from planner.models import to_hf_config_dict
from planner.models.captured import CapturedModel
from ullage.training.batches import Batches

PATIENCE_S: Final = 600.0
"""Time that the end of training waits until the last checkpoint is on all levels."""


@final
class Saver:
    """Saves checkpoints of training, each with the position in the data.

    Args:
        optimizer: the prepared optimizer.
        levels: place, interval and number of checkpoints of each level, fastest first.
        batches: the training data.

    Attributes:
        outcomes: results of the checkpoints of this process so far, on every level.

    Raises:
        CheckpointError: a place cannot be used, or another run is writing there.
    """

    def __init__(self, optimizer: OffloadedOptimizer, levels: Sequence[Level], batches: Batches) -> None:
        self.outcomes: list[Outcome] = []
        self._levels = levels
        self._batches = batches
        self._saved_at = 0  # iteration whose state is in a checkpoint, or is the initial state
        self._checkpoints: Checkpoints | None = None
        self.open(optimizer)

    def open(self, optimizer: OffloadedOptimizer) -> None:
        """Save from now on what an optimizer trains."""
        self._optimizer = optimizer
        self._checkpoints = Checkpoints(optimizer, *self._levels, on_outcome=self.outcomes.append)

    def is_due(self, iteration: int) -> bool:
        """Return whether a checkpoint is due before an iteration."""
        return bool(iteration) and iteration % self._levels[0].every == 0

    def save(self, iteration: int) -> None:
        """Begin a checkpoint of the state before an iteration, unless one exists.

        It is copied during the next iteration, or when training ends.
        """
        assert self._checkpoints is not None
        if self._saved_at == iteration and iteration:
            return
        plan = self._optimizer.plan
        config = None if isinstance(plan.model, CapturedModel) else to_hf_config_dict(plan.model)
        extra = {"position": self._batches.position, "config": config, "plan": plan.digest()}
        self._checkpoints.save(iteration, extra)
        self._saved_at = iteration

    def resume(self) -> Resumed:
        """Resume from the newest complete checkpoint on any level, if there is one. All ranks call this together.

        This restores weights, optimizer state, step counts, learning rates, RNG state and the position in the data. The
        checkpoint may be from another plan and another number of ranks.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer.
        """
        assert self._checkpoints is not None
        found = self._checkpoints.resume()
        if found.path is not None:
            self._batches.position = found.extra.get("position", 0)
            self._saved_at = found.step
        return found

    def close(self, *, waits: bool, brings_down: bool = False) -> None:
        """Stop saving. Closing twice is allowed.

        Args:
            waits: wait until pending checkpoints are durable on the first level; otherwise drop them.
            brings_down: also wait until the newest checkpoint is on all levels, for at most :data:`PATIENCE_S`.
        """
        if self._checkpoints is None:
            return
        if waits:
            self._checkpoints.finish()
        if brings_down:
            self._checkpoints.promote_newest(PATIENCE_S)
        self._checkpoints.close(on_all_ranks=waits)
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
