"""Lowering: from decisions to the schedule they imply, as a tuple of named passes.

``lower`` needs no hardware profile: a schedule states physical amounts, and :mod:`planner.costs` prices them for one
machine. So the executor lowers a plan by itself and runs exactly what was simulated.
"""

import itertools
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
from planner.schedule import Schedule

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
    check(units, decisions)
    if decisions.pipeline_parallel > 1:
        units = stages(units, decisions)
        decisions = stage_decisions(units, decisions)
    program = Program(units, decisions)
    for run in PASSES:
        if run is not launch or asynchronous:
            run(program)
    if takes_snapshots:
        snapshots(program)
    return program.number(f"{decisions.policy}: one iteration of {decisions.num_micro_batches} micro-batch(es)")


def slots(units: tuple[Unit, ...], decisions: Decisions) -> Slots:
    """Return the slots that ``lower`` assigns to the units that are not resident."""
    return assign_slots(Program(units, decisions))


def check(units: tuple[Unit, ...], decisions: Decisions) -> None:
    """Check that decisions cover exactly these units and are consistent with them.

    Raises:
        ValueError: naming the unit, the rule and the remedy.
    """
    decided = decisions.units
    names = {unit.name for unit in units}
    if names != decided.keys():
        strange = sorted(names ^ decided.keys())
        raise ValueError(f"decisions and model differ in units {', '.join(strange[:3])}; plan this model again")
    for unit in units:
        choice = decided[unit.name]
        if choice.fetched and decisions.regathers(unit):
            raise ValueError(
                f"unit {unit.name}: with zero_stage {decisions.zero_stage} every rank's host has only the weights that "
                "it updates, and cannot serve the rest; set params to 'gpu' or zero_stage to 3"
            )
        if (want := len(decisions.piece_params(unit))) != len(choice.update):
            raise ValueError(
                f"unit {unit.name} has {want} subgroups of at most {decisions.subgroup_params} parameters, but "
                f"{len(choice.update)} places; give one place per subgroup"
            )
        if choice.activations != "keep" and not unit.recompute:
            verb = "offloaded" if choice.offloads else "recomputed"
            raise ValueError(f"unit {unit.name} cannot be {verb}; set its activations to 'keep'")
    for one, other in itertools.pairwise(units):
        if one.segment == other.segment and decided[one.name].activations != decided[other.name].activations:
            raise ValueError(
                f"segment {one.segment}: all its units must keep, all recompute or all offload their activations"
            )


__all__ = ["PASSES", "check", "lower", "slots", "stages"]
