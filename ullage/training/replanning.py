"""Plan the same request again during training, with a profile fitted to measurements."""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from executor.prepare import OffloadedOptimizer, check_prepared
from planner.fitting.refit import Refit, refit
from planner.plan.document import Plan, describe
from planner.plan.planning import InfeasibleError, make_plan
from planner.schedule.tasks import Tier
from planner.schedule.timeline import Timeline
from ullage.analysis.simulation import chosen_request
from ullage.output.formatting import si
from ullage.training.out_of_memory import reporting_out_of_memory
from ullage.training.preparing import link_bytes_per_s

MARGIN: Final = 0.05
"""The plan changes only if the new plan is predicted to be faster by more than this fraction."""
_WARM_UP: Final = 3  # first iterations of a session, which include first touches, compilation and metering
_MOST_READ: Final = 20  # number of latest iterations to read
_NOTHING: Final = "null"


@dataclasses.dataclass(frozen=True)
class Replanned:
    """The result of planning again.

    Attributes:
        before: the executed plan.
        after: the best plan on the fitted profile; ``None`` if the search found none that can be executed.
        refit: the fitted profile, with the predicted and measured times of ``before``.
        switched: whether training now continues under ``after``.
        file_bytes: size of the file that the state passed through.
    """

    before: Plan
    after: Plan | None
    refit: Refit
    switched: bool = False
    file_bytes: int = 0

    @property
    def is_faster(self) -> bool:
        """Whether the fitted profile predicts the new plan to be faster by more than :data:`MARGIN`."""
        return self.after is not None and self.after.prediction.iteration_s < (1 - MARGIN) * self.refit.predicted_s

    @property
    def host_bytes(self) -> int:
        """Peak host memory over the executed plans. Changing the plan does not add to it."""
        plans = [self.before, *([self.after] if self.switched and self.after else [])]
        uses = [use for plan in plans if (use := plan.prediction.memory.get(Tier.HOST))]
        return max((use.peak_bytes for use in uses), default=0)

    def __str__(self) -> str:
        """Return the decision and its reason in one line."""
        now = f"{si(self.refit.predicted_s, 's')} per iteration at measured rates"
        if self.after is None:
            return f"planned again: {now}; the search found no other plan that can be executed, so the plan stays"
        change = self.after.prediction.iteration_s / self.refit.predicted_s - 1
        found = f"planned again: {now}, {si(self.after.prediction.iteration_s, 's')} by a new plan ({change:+.1%})"
        if not self.switched:
            return f"{found}; not faster by more than {MARGIN:.0%}, so the plan stays"
        return (
            f"{found}; changed to it: the state passed through a file of {si(self.file_bytes, 'B')}, and the host held "
            f"at most the {si(self.host_bytes, 'B')} of one plan"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data: seconds, bytes, and the decisions of each plan in words."""

        def plain(plan: Plan) -> dict[str, Any]:
            return {"decided": describe(plan.decisions, plan.units()), "predicted_s": plan.prediction.iteration_s}

        return {
            "words": str(self),
            "switched": self.switched,
            "margin": MARGIN,
            "slower": self.refit.slower,
            "before": plain(self.before)
            | {"predicted_again_s": self.refit.predicted_s, "measured_s": self.refit.measured_s},
            "after": plain(self.after) if self.after else None,
            "file_bytes": self.file_bytes,
            "host_bytes": self.host_bytes,
        }


def replan(optimizer: OffloadedOptimizer, on_change: Callable[[], object] = lambda: None) -> Replanned:
    """Plan again with measured rates, and change to the new plan if it is faster. Call it between two iterations.

    The whole training state continues: weights, optimizer state and RNG state. It passes through one file per node in
    ``storage_dir`` (or the system's temporary folder), so that memory never holds two plans. Losses and weights are the
    same as without the change. With more than two ranks they may differ by the order of sums over ranks, which the
    plan's ZeRO stage decides. All ranks call it together and use the mean of their times.

    Args:
        optimizer: what ``prepare`` returned. If the plan changes, its ``plan`` and ``session`` are new ones.
        on_change: called before the plan changes. Close the checkpoints there, and make others afterwards.

    Returns:
        The result; ``str()`` of it is the result in words.

    Raises:
        ValueError: the plan has pipeline stages, too few complete iterations were recorded, or checkpoints are open
            when the plan changes.
        StorageError: there is no room for the file; nothing has changed.
        OutOfMemoryError: there is not enough memory for the new plan; training can continue under the old one.
    """
    check_prepared(optimizer)
    if optimizer.pipeline is not None:
        raise ValueError("the plan has pipeline stages, for which no other plan is made; train on under it")
    session = optimizer.session
    found = plan_again(optimizer.plan, session.mean_timeline(), session.collectives.broadcast_text)
    after = found.after
    if after is None or not session.collectives.broadcast(torch.tensor(found.is_faster, device="cpu")):
        return found
    on_change()
    if session.runtime.snapshots is not None and session.runtime.snapshots.engine is not None:
        raise ValueError("checkpoints are open, of the plan that ends now; close them in on_change=, and make others")
    options = dataclasses.replace(session.options, link_bytes_per_s=link_bytes_per_s(after))
    with reporting_out_of_memory(after):
        folder = options.storage_dir or Path(tempfile.gettempdir())
        file_bytes = optimizer.switch_plan(after.units(), after.decisions, options, folder)
    optimizer.plan = after
    return dataclasses.replace(found, switched=True, file_bytes=file_bytes)


def plan_again(
    plan: Plan, measured: Timeline, made_by_first: Callable[[Callable[[], str]], str] = lambda make: make()
) -> Replanned:
    """Fit a plan's profile to measurements of its run, and plan again. The plan does not change yet.

    Args:
        plan: the executed plan.
        measured: timeline of a session from its first iteration; with several ranks, their mean.
        made_by_first: runs a function on rank 0 and returns its text on all ranks. Otherwise searches on different
            machines could find different plans, and the ranks would wait for each other.

    Raises:
        ValueError: too few complete iterations were measured.
    """
    found = refit(plan.hardware, plan.units(), plan.decisions, measured, _steady(measured))
    text = made_by_first(lambda: _planned_again(plan, found))
    return Replanned(plan, None if text == _NOTHING else Plan.model_validate_json(text), found)


def _planned_again(plan: Plan, found: Refit) -> str:
    try:
        after = make_plan(
            dataclasses.replace(chosen_request(plan), storage=plan.constraints.storage, hardware=found.profile)
        )
    except InfeasibleError:  # the executed plan fits, so this search only failed to find it
        return _NOTHING
    return _NOTHING if after.decisions.pipeline_parallel > 1 else after.to_json()


def _steady(measured: Timeline) -> Sequence[int]:
    """Return the latest iterations that were measured completely, and the next one too."""
    whole = [not bool(np.isnan(end_s).any()) for end_s in measured.end_s]
    steady = [i for i in range(_WARM_UP, measured.num_iterations - 1) if whole[i] and whole[i + 1]]
    if not steady:
        raise ValueError(
            f"{measured.num_iterations} recorded iterations are too few to plan again; train {_WARM_UP + 2} first"
        )
    return steady[-_MOST_READ:]
