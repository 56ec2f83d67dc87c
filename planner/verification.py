"""Checks a plan without trust in its author: memory and time by simulation, the bound by exact arithmetic."""

import math
from typing import Any

from planner.bounds.certificate import check
from planner.checkpoints.choosing import choose_checkpoints
from planner.checkpoints.interval import CheckpointsError
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Choice
from planner.plan.document import Plan
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import Prediction, predict
from planner.simulate.uncertainty import with_interval

# A simulation is deterministic on one machine. On another machine the last digits of sums may differ.
_RELATIVE = 1e-9


def verify(plan: Plan) -> Prediction:
    """Check that a plan fits in memory, and that its time and its bound are right; return a prediction made anew.

    The check trusts neither the search, nor the solver, nor the numbers in the plan file. It simulates the schedule
    again, and adds up the proofs of the bound in exact arithmetic over conditions that it builds itself.

    Raises:
        ValueError: a statement of the plan is false.
    """
    for kind in plan.others or ():
        _simulated_again(plan.of_rank(kind.first_rank))
    found = _simulated_again(plan)
    _check_checkpoints(plan)
    rivals, decisions = variants(plan.request), plan.decisions
    own = next((rival for rival in rivals if rival.choice == Choice.of(decisions)), None)
    if own is None:
        raise ValueError("the plan's degrees and batch sizes do not match its request; plan again")
    check(plan.certificate, rivals, own, decisions, plan.prediction.iteration_s)
    return found


def _simulated_again(plan: Plan) -> Prediction:
    """Simulate a plan, and compare with what it states; return the new prediction.

    Raises:
        ValueError: a number is another.
    """
    units, decisions = plan.units(), plan.decisions
    cost = CostModel.of(plan.hardware, units, decisions)
    simulation = run_until_steady(plan.schedule(), cost)
    found = predict(units, plan.seq_len, decisions, cost, simulation)
    for tier, use in found.memory.items():
        if use.missing_bytes:
            raise ValueError(
                f"the plan needs {use.peak_bytes} bytes of {tier} memory, not {use.capacity_bytes}; plan again"
            )
        if (stated := plan.prediction.memory.get(tier)) != use:
            peak = stated.peak_bytes if stated else None
            raise ValueError(f"the plan states a peak of {peak} bytes of {tier} memory, but it is {use.peak_bytes}")
    stated_s = plan.prediction.iteration_s
    if abs(found.iteration_s - stated_s) > _RELATIVE * stated_s:
        raise ValueError(f"the plan states {stated_s!r} s per iteration, but it takes {found.iteration_s!r} s")
    return with_interval(found, units, decisions, cost)


def _check_checkpoints(plan: Plan) -> None:
    """Choose the checkpoints of a plan again, and compare."""
    if plan.checkpoints is None:
        return
    try:
        found = choose_checkpoints(plan, plan.checkpoints.request)
    except CheckpointsError as error:
        raise ValueError(f"the plan states checkpoints that cannot be made: {error}") from error
    stated, again = (each.model_dump(mode="json", exclude={"engines"}) for each in (plan.checkpoints, found))
    if differs := _difference(stated, again, "checkpoints"):
        raise ValueError(f"the plan states {differs}")


def _difference(stated: Any, found: Any, name: str) -> str | None:
    """Describe the first difference between two JSON documents, apart from the last digits of numbers."""
    if isinstance(stated, dict) and isinstance(found, dict) and stated.keys() == found.keys():
        parts = ((stated[key], found[key], f"{name}.{key}") for key in stated)
    elif isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        parts = ((a, b, f"{name}[{i}]") for i, (a, b) in enumerate(zip(stated, found, strict=True)))
    else:
        numbers = isinstance(stated, float) and isinstance(found, float)
        same = math.isclose(stated, found, rel_tol=_RELATIVE) if numbers else stated == found
        return None if same else f"{name} {stated}, but it is {found}"
    return next((words for part in parts if (words := _difference(*part))), None)
