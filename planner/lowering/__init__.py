"""Lowering: from decisions to the schedule they imply, as a tuple of named passes.

``lower`` needs no hardware profile: a schedule states physical amounts, and :mod:`planner.costs.model` prices them for
one machine. So the executor lowers a plan by itself and runs exactly what was simulated.
"""

from collections.abc import Callable

from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.activations import activations
from planner.lowering.compute import compute, launch
from planner.lowering.gradients import gradients
from planner.lowering.memory import memory
from planner.lowering.parameters import Slots, assign_slots, parameters
from planner.lowering.pipeline import stage_decisions, stages
from planner.lowering.program import Program
from planner.lowering.snapshots import snapshots
from planner.lowering.updates import updates
from planner.schedule.schedule import Schedule

PASSES: tuple[Callable[[Program], None], ...] = (compute, parameters, activations, gradients, updates, launch, memory)


def lower(
    units: tuple[Unit, ...], decisions: Decisions, *, asynchronous: bool, takes_snapshots: bool = False
) -> Schedule:
    """Return the schedule of one iteration.

    Args:
        units: the model's units in forward order, for the decided micro-batch.
        decisions: what was chosen for them.
        asynchronous: whether the device runs apart from the thread that issues its work (a GPU does).
        takes_snapshots: whether state can be taken for checkpoints on the way, see [Note: Snapshots].

    Raises:
        ValueError: the decisions do not fit the units.
    """
    program = Program(units, decisions)
    if decisions.pipeline_parallel > 1:
        merged = stages(units, decisions)
        program = Program(merged, stage_decisions(merged, decisions))
    for run in PASSES:
        if run is not launch or asynchronous:
            run(program)
    if takes_snapshots:
        snapshots(program)
    return program.number(f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)")


def slots(units: tuple[Unit, ...], decisions: Decisions) -> Slots:
    """Return the slots that ``lower`` assigns to the units that are not resident."""
    return assign_slots(Program(units, decisions))


__all__ = ["PASSES", "lower", "slots", "stages"]
