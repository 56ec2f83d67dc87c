"""Lowering: from decisions to the schedule they imply, as a tuple of named passes.

``lower`` needs no hardware profile: a schedule states physical amounts, and :mod:`planner.costs.model` prices them for
one machine. So the executor lowers a plan by itself and runs exactly what was simulated.
"""

import functools
from collections.abc import Callable
from typing import Final

from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.activations import activations
from planner.lowering.compute import compute, launch
from planner.lowering.gradients import gradients
from planner.lowering.launches import agreed, exchanges, launches
from planner.lowering.memory import memory
from planner.lowering.parameters import Slots, assign_slots, parameters
from planner.lowering.program import Program
from planner.lowering.sends import sends
from planner.lowering.snapshots import snapshots
from planner.lowering.stages import lower_stages, units_apart
from planner.lowering.updates import updates
from planner.schedule.schedule import Schedule

Pass = Callable[[Program], None]
PASSES: Final[tuple[Pass, ...]] = (
    compute,
    parameters,
    activations,
    gradients,
    updates,
    sends,
    launch,
    launches,
    memory,
)


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
        passes: what makes the tasks; by default :data:`PASSES`, for each stage of a pipeline.
        asynchronous: whether the device runs apart from the thread that issues its work (a GPU does).
        takes_snapshots: whether state can be taken for checkpoints on the way, see [Note: Snapshots].

    Raises:
        ValueError: the decisions do not fit the units.
    """
    assert passes or type(decisions) is Decisions, "decisions of another kind have passes of their own"
    if decisions.pipeline_parallel > 1 and passes is None:
        return lower_stages(units, decisions, PASSES, asynchronous=asynchronous, takes_snapshots=takes_snapshots)
    program = Program(units, decisions, asynchronous=asynchronous)
    for run in passes or PASSES:
        run(program)
    if takes_snapshots:
        snapshots(program)
    return program.number(f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)")


def slots(units: tuple[Unit, ...], decisions: Decisions) -> Slots:
    """Return the slots that ``lower`` assigns to the units that are not resident."""
    return assign_slots(Program(units, decisions))


@functools.singledispatch
def stages(decisions: Decisions, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return the units that have prices: the given ones, or those that the stages of a pipeline have of them.

    Decisions of other engines may have units of their own.
    """
    return units_apart(units, decisions) if decisions.pipeline_parallel > 1 else units


__all__ = ["PASSES", "Pass", "agreed", "exchanges", "lower", "slots", "stages"]
