"""Necessary conditions on pipelines: the twin of :mod:`.conditions` for pipeline stages.

Layers are divided evenly among stages, and activations stay on the devices. Which segments are recomputed is open, and
so is where weights and state are. Two conditions hold for every stage s of p:

- *work*: its first forward waits for the forwards of the chunks before its first one, and their backwards follow its
  last backward. In between it computes all its micro-batches. Its host issues their kernels.
- *memory*: in the order of :func:`planner.lowering.compute.turns`, it holds the activations of ``min(p - s,
  micro-batches)`` micro-batches of its last round when its first backward begins, and all of the rounds before.
"""

from planner.bounds.program import OVERRUN, ROOM, TIME, LinearProgram, Sum
from planner.costs.model import CostModel
from planner.graph import Unit
from planner.lowering.stages import deal
from planner.models.kernels import Kernels, num_kernels
from planner.schedule.tasks import Lane, Tier
from planner.setup import Setup
from planner.simulate.prediction import capacities

Chunk = list[list[Unit]]


def pipelined(setup: Setup, cost: CostModel, limit_s: float, *, soft: bool) -> LinearProgram:
    """Return the conditions of an iteration of a pipeline; see :func:`planner.bounds.conditions.conditions`."""
    program = LinearProgram(OVERRUN if soft else TIME)
    program.variable(TIME, 0.0, limit_s)
    overrun = Sum((program.variable(OVERRUN, 0.0, 1e6), 1.0)) if soft else Sum()
    for name in ROOM.values():
        program.variable(name, 1.0, 1.0)
    num_stages = setup.given.pipeline_parallel
    dealt = deal(setup.units, num_stages, setup.given.pipeline_rounds)
    for chunk in dealt:
        for segment in chunk:
            if segment[0].can_swap:
                program.variable(f"{segment[0].segment}:recompute")
    lanes = {lane: [_pass(chunk, cost, lane) for chunk in dealt] for lane in (Lane.COMPUTE, Lane.LAUNCH)}
    repeats = setup.given.num_micro_batches
    room = Sum((ROOM[Tier.GPU], 1.0)).plus(overrun)
    for number in range(num_stages):
        for lane, passes in lanes.items():
            needs = Sum()
            for own in passes[number::num_stages]:
                needs.plus(own, float(repeats))
            for before in passes[:number] if lane is Lane.COMPUTE else ():  # a host issues before its device may begin
                needs.plus(before)
            program.at_least(f"work: {lane} of stage {number}", Sum((TIME, 1.0)), needs)
        scale = 1.0 / capacities(cost)[Tier.GPU]
        *before_last, last = dealt[number::num_stages]
        held = Sum().plus(_saved_activations(last), float(min(num_stages - number, repeats)) * scale)
        for chunk in before_last:
            held.plus(_saved_activations(chunk), float(repeats) * scale)
        program.at_least(f"memory: device of stage {number} at its first backward", room, held)
    return program


def _pass(chunk: Chunk, cost: CostModel, lane: Lane) -> Sum:
    """Return the seconds that a chunk of one micro-batch, forward and backward, occupies a device or its host."""

    def takes_s(kernels: Kernels) -> float:
        if lane is Lane.COMPUTE:
            return cost.compute_s(kernels)
        # A CPU issues and computes in turn.
        return cost.profile.device.issue_s.value * num_kernels(kernels) if cost.asynchronous else 0.0

    found = Sum()
    for segment in chunk:
        found[""] += sum(takes_s(unit.forward) + takes_s(unit.backward) for unit in segment)
        if segment[0].can_swap:
            found[f"{segment[0].segment}:recompute"] += sum(takes_s(unit.recompute) for unit in segment)
    return found


def _saved_activations(chunk: Chunk) -> Sum:
    """Return the bytes of one micro-batch's activations."""
    found = Sum()
    for segment in chunk:
        saved = float(sum(unit.saved_bytes for unit in segment))
        found[""] += saved
        if segment[0].can_swap:
            found[f"{segment[0].segment}:recompute"] += segment[0].activation_output_bytes - saved
    return found
