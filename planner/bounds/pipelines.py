"""Necessary conditions on pipelines: the twin of :mod:`.conditions` for pipeline stages.

Layers are divided evenly among stages, and activations stay on the devices. Which segments are recomputed is open, and
so is where weights and state are. Two conditions hold for every stage s of p:

- *work*: its first forward waits for the forwards of the chunks before its first one, and their backwards follow its
  last backward. In between it computes all its micro-batches. Its host issues their kernels.
- *windows*: with clipping, no update starts before all gradients are there. After the last unit of a stage is updated,
  its forward comes, and only then any backward of the stage: each micro-batch passes all of the stage before. So the
  updates of a stage, and the copies of streamed state to it, come before all of its backwards.
- *memory*: in the order of :func:`planner.lowering.compute.turns`, it holds the activations of ``min(p - s,
  micro-batches)`` micro-batches of its last round when its first backward begins, and all of the rounds before; and
  state that is updated there. The host of all of a node's ranks holds the rest.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from planner.bounds.loads import Load, Loads, label
from planner.bounds.program import OVERRUN, ROOM, TIME, LinearProgram, Sum
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Place
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
    repeats = setup.given.num_micro_batches
    lanes = {lane: [_pass(chunk, cost, lane) for chunk in dealt] for lane in (Lane.COMPUTE, Lane.LAUNCH)}
    loads = Loads(cost, setup.given)
    room = {tier: Sum((ROOM[tier], 1.0)).plus(overrun) for tier in (Tier.GPU, Tier.HOST)}
    for number in range(num_stages):
        for lane, passes in lanes.items():
            needs = _all(passes[number::num_stages], repeats)
            for before in passes[:number] if lane is Lane.COMPUTE else ():  # a host issues before its device may begin
                needs.plus(before)
            program.at_least(f"work: {lane} of stage {number}", Sum((TIME, 1.0)), needs)
        chunks = dealt[number::num_stages]
        _updates_and_memory(program, loads, setup, number, chunks, room)
    return program


def _updates_and_memory(
    program: LinearProgram, loads: Loads, setup: Setup, number: int, chunks: list[Chunk], room: Mapping[Tier, Sum]
) -> None:
    """Add the conditions on a stage's windows and memory."""
    cost, given, repeats = loads.cost, setup.given, setup.given.num_micro_batches
    units = [unit for chunk in chunks for part in chunk for unit in part if unit.num_params]
    updates = _updates(program, loads, units, setup)
    in_flight = [*[repeats] * (len(chunks) - 1), min(setup.given.pipeline_parallel - number, repeats)]
    held, on_host = Sum(), Sum()
    for chunk, count in zip(chunks, in_flight, strict=True):
        held.plus(_saved_activations(chunk), float(count))
    for unit in units:
        state_bytes, weight_bytes = (
            each * given.placed_params(unit)
            for each in (given.placed_state_bytes_per_param(unit), given.precision.weight_bytes)
        )
        there = state_bytes + (0 if given.precision.master_is_weight else weight_bytes)
        held.plus(Sum((f"{unit.name}:{Place.GPU}", there)))
        # And gradients, or weights whose place they take.
        on_host.plus(Sum((f"{unit.name}:{Place.CPU}", state_bytes + weight_bytes)))
        on_host.plus(Sum((f"{unit.name}:{Place.STREAM}", state_bytes)))
    capacity = capacities(cost)
    needs = Sum().plus(held, 1.0 / capacity[Tier.GPU])
    program.at_least(f"memory: device of stage {number} at its first backward", room[Tier.GPU], needs)
    needs = Sum().plus(on_host, cost.ranks_per_node / capacity[Tier.HOST])
    program.at_least(f"memory: host of stage {number}", room[Tier.HOST], needs)
    backwards = _all([_pass(chunk, cost, Lane.COMPUTE, forward=False) for chunk in chunks], repeats)
    for key, load in updates.items() if setup.given.clip else ():
        needs = Sum().plus(load, 1.0 / loads.capacity[key]).plus(backwards)
        name = f"window: updates by {label(key)} before the backwards of stage {number}"
        program.at_least(name, Sum((TIME, 1.0)), needs)


def _all(passes: Iterable[Sum], repeats: int) -> Sum:
    """Return the sum of passes of all micro-batches."""
    found = Sum()
    for own in passes:
        found.plus(own, float(repeats))
    return found


def _updates(program: LinearProgram, loads: Loads, units: list[Unit], setup: Setup) -> Load:
    """Add variables for where units are updated; return the load of updates, and of bringing streamed state."""
    total: Load = defaultdict(Sum)
    places = [place for place in Place if place is not Place.NVME or setup.storage == "nvme"]
    for unit in units:
        of = {place: (program.variable(f"{unit.name}:{place}"), 1.0) for place in places}
        program.at_least(f"{unit.name}: updated somewhere", Sum(*of.values()), Sum(("", 1.0)), equal=True)
        if unit.forward:
            on_device = (Place.GPU, Place.STREAM)
            loads.update(total, unit, Lane.GPU_UPDATE, Sum(*(of[place] for place in on_device)))
            loads.update(total, unit, Lane.CPU, Sum(*(of[place] for place in places if place not in on_device)))
            streamed_bytes = setup.given.placed_state_bytes_per_param(unit) * setup.given.placed_params(unit)
            loads.copy(total, Resource.LINK_DOWN, streamed_bytes, Sum(of[Place.STREAM]))
    return total


def _pass(chunk: Chunk, cost: CostModel, lane: Lane, *, forward: bool = True) -> Sum:
    """Return the seconds that a chunk of one micro-batch, backward and forward, occupies a device or its host."""

    def takes_s(kernels: Kernels) -> float:
        if lane is Lane.COMPUTE:
            return cost.compute_s(kernels)
        # A CPU issues and computes in turn.
        return cost.profile.device.issue_s.value * num_kernels(kernels) if cost.asynchronous else 0.0

    found = Sum()
    for segment in chunk:
        found[""] += sum(takes_s(unit.forward) * forward + takes_s(unit.backward) for unit in segment)
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
