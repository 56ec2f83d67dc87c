"""Lowering of other engines: the planner's passes, and those in which an engine differs."""

import functools

from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering import Pass
from planner.lowering import lower as lower_with
from planner.lowering import stages as units_of
from planner.lowering.compute import compute, lay_in_turn
from planner.lowering.program import Program
from planner.schedule.schedule import Schedule
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.megatrain import lay_blocks
from ullage.rivals.engines.roundpipe import lay_by_layer
from ullage.rivals.passes import stages
from ullage.rivals.passes.computing import activations, add_copies, launch, loop, note_amounts, parameters
from ullage.rivals.passes.gradients import gradients
from ullage.rivals.passes.memory import memory
from ullage.rivals.passes.updates import updates


def lower(
    units: tuple[Unit, ...], decisions: Decisions, *, asynchronous: bool, takes_snapshots: bool = False
) -> Schedule:
    """Return the schedule of one iteration of any engine, ours too; see :func:`planner.lowering.lower`.

    Raises:
        ValueError: the decisions do not fit the units.
    """
    passes = None
    if isinstance(decisions, RivalDecisions):
        passes = passes_of(decisions)
        if decisions.pipeline_parallel > 1:
            units = stages.merged(units, decisions)
            decisions = stages.stage_decisions(units, decisions)
    return lower_with(units, decisions, passes, asynchronous=asynchronous, takes_snapshots=takes_snapshots)


@units_of.register
def _(decisions: RivalDecisions, units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """Return the units that other engines lower, one for each stage."""
    return stages.merged(units, decisions)


def passes_of(decisions: RivalDecisions) -> tuple[Pass, ...]:
    """Return the passes of another engine."""
    differing = (parameters, activations, gradients, updates, launch, memory)
    return (
        functools.partial(note_amounts, decisions),
        functools.partial(compute, lay=functools.partial(_lay, decisions)),
        *(functools.partial(each, decisions) for each in differing),
        *((add_copies,) if decisions.dtensors else ()),
        *((loop,) if decisions.loop else ()),
    )


def _lay(decisions: RivalDecisions, program: Program) -> None:
    """Append forwards and backwards to the spine, in the engine's order."""
    if decisions.pipeline_parallel > 1:
        stages.lay(program)
    elif decisions.layer_by_layer:
        lay_by_layer(decisions, program)
    elif decisions.recompute_block:
        lay_blocks(decisions.recompute_block, program)
    else:
        lay_in_turn(program)
