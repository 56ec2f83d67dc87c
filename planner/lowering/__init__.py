"""Lowering: from decisions to the schedule they imply, as a tuple of named passes.

``lower`` needs no hardware profile: a schedule states physical amounts, and :mod:`planner.costs.model` prices them for
one machine. So the executor lowers a plan by itself and runs exactly what was simulated.
"""

import functools
from collections.abc import Callable
from typing import Final

from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering import pipeline
from planner.lowering.activations import activations
from planner.lowering.compute import compute, launch
from planner.lowering.gradients import gradients
from planner.lowering.launches import exchanges, launches
from planner.lowering.memory import memory
from planner.lowering.parameters import Slots, assign_slots, parameters
from planner.lowering.program import Program
from planner.lowering.snapshots import snapshots
from planner.lowering.stages import is_apart, lower_stages, units_apart
from planner.lowering.updates import updates
from planner.schedule.schedule import Schedule

Pass = Callable[[Program], None]
PASSES: Final[tuple[Pass, ...]] = (compute, parameters, activations, gradients, updates, launch, launches, memory)
PIPELINE: Final[tuple[Pass, ...]] = (
    functools.partial(compute, lay=pipeline.lay),
    pipeline.gradients,
    updates,
    pipeline.launch,
    memory,
)
"""The passes of a pipeline: everything stays on the devices."""


def lower(
    units: tuple[Unit, ...],
    decisions: Decisions,
    passes: tuple[Pass, ...] | None = None,
    *,
    asynchronous: bool,
    takes_snapshots: bool = False,
) -> Schedule:
    """Return the schedule of one iteration.

    Args:
        units: the model's units in forward order, for the decided micro-batch.
        decisions: what was chosen for them.
        passes: what makes the tasks; by default :data:`PASSES`, or :data:`PIPELINE` if there are several stages.
        asynchronous: whether the device runs apart from the thread that issues its work (a GPU does).
        takes_snapshots: whether state can be taken for checkpoints on the way, see [Note: Snapshots].

    Raises:
        ValueError: the decisions do not fit the units.
    """
    assert passes or type(decisions) is Decisions, "decisions of another kind have passes of their own"
    if passes is None and is_apart(decisions):
        return lower_stages(units, decisions, PASSES, asynchronous=asynchronous, takes_snapshots=takes_snapshots)
    model, own = pipeline.stages(units, decisions), decisions
    if decisions.pipeline_parallel > 1:
        own = pipeline.stage_decisions(model, decisions)
    program = Program(model, own, asynchronous=asynchronous)
    for run in passes or (PIPELINE if decisions.pipeline_parallel > 1 else PASSES):
        run(program)
    if takes_snapshots:
        snapshots(program)
    return program.number(f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)")


def slots(units: tuple[Unit, ...], decisions: Decisions) -> Slots:
    """Return the slots that ``lower`` assigns to the units that are not resident."""
    return assign_slots(Program(units, decisions))


def stages(units: tuple[Unit, ...], decisions: Decisions) -> tuple[Unit, ...]:
    """Return the units that ``lower`` lowers: the given ones, or those that a pipeline has of its stages."""
    return units_apart(units, decisions) if is_apart(decisions) else pipeline.stages(units, decisions)


__all__ = ["PASSES", "PIPELINE", "Pass", "exchanges", "lower", "slots", "stages"]
