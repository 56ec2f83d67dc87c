"""Necessary conditions on pipelines: the twin of :mod:`.conditions` for pipeline stages.

Layers are divided evenly among stages. Everything else is open, as without stages, and the variables are the same. With
rounds, the weights of a chunk serve all micro-batches at a time, and its gradients leave once. These conditions hold
for every stage s of p:

- *work*: an iteration lasts at least as long as any lane or resource of a rank needs for its work, with what is sent to
  other stages. The first forward of stage s waits for the forwards of the chunks before its first one, and their
  backwards follow its last backward. In between it computes all its micro-batches. If gradients of weights come after
  backward ([Note: Zero bubble] in :mod:`planner.models.zero_bubble`), the last ``s + 1`` of the stage may come
  meanwhile, and micro-batches pass other stages without them.
- *windows*: with clipping, no update starts before all gradients of all stages are there. After the last unit of a
  stage is updated and is on the device, its forward comes. Then the first micro-batch passes the chunks behind the last
  chunk of the stage, there and back, and only then comes the first backward of the stage. Of the other micro-batches,
  only those that may wait there have passed its last chunk by then. After its last backward, the last micro-batch
  passes the chunks before its first one.
- *memory*: in the order of :func:`planner.lowering.compute.turns`, it holds the activations of ``min(p - s,
  micro-batches)`` micro-batches of its last round when its first backward begins, and all of the rounds before; and
  weights and state that are resident. Between the passages of two micro-batches it holds the weights that it keeps in
  slots from one to the next; with rounds, from forward to backward, so at the first backward. A node's host holds the
  rest of all stages that its ranks have.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.bounds.loads import Load, label
from planner.bounds.memory import offloaded, saved_activations, weights_or_gradients
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import ROOM, TIME, LinearProgram, Sum
from planner.bounds.windows import returning
from planner.bounds.work import load_of
from planner.costs.model import CostModel
from planner.decisions import Place
from planner.graph import Unit
from planner.lowering.stages import deal
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.setup import Setup
from planner.simulate.prediction import capacities

Chunk = Sequence[Sequence[Unit]]


def pipelined(setup: Setup, cost: CostModel, limit_s: float) -> LinearProgram:
    """Return the conditions of an iteration of a pipeline; see :func:`planner.bounds.conditions.conditions`."""
    given = setup.given
    on = Placement(setup, cost, limit_s, repeats=1 if given.pipeline_rounds > 1 else None)
    chunks = deal(setup.units, given.pipeline_parallel, given.pipeline_rounds)
    hosts = []
    for number in range(given.pipeline_parallel):
        _work_and_windows(on, chunks, number)
        hosts.append(_memory(on, chunks[number :: given.pipeline_parallel], number))
    for counts in sorted(cost.stages_on_nodes):
        held = Sum()
        for host, ranks in zip(hosts, counts, strict=True):
            held.plus(host, ranks / capacities(cost)[Tier.HOST])
        on.program.at_least(f"memory: hosts of {counts} ranks of each stage", Sum((ROOM[Tier.HOST], 1.0)), held)
    return on.program


def _work_and_windows(on: Placement, chunks: Sequence[Chunk], number: int) -> None:
    """Add the conditions on a stage's work, and on the time from the updates to its backwards."""
    count, num_stages = on.given.num_micro_batches, on.given.pipeline_parallel
    own, before, behind = chunks[number::num_stages], chunks[:number], chunks[len(chunks) - num_stages + number + 1 :]
    segments = [segment for chunk in own for segment in chunk]
    total = load_of(on, segments)
    _sent(on, total, chunks, number)
    own_s, after_s = _later_s(on, own), 0.0
    if number:  # some of its own may come at last, those of its first chunk behind others, and the first stage's do
        left = (min(max(number + 1 - turn * count, 0), count) for turn in range(len(own)))
        after_s = sum(times * _later_s(on, [chunk]) for times, chunk in zip(left, own, strict=True))
        after_s -= _later_s(on, chunks[:1])
    for key, load in total.items():
        needs = Sum().plus(load, 1.0 / on.loads.capacity[key])
        if key is Lane.COMPUTE:
            alone = Sum().plus(needs).plus(_passing(on, before, forward_only=True))
            needs.plus(_passing(on, before)).plus(Sum(("", -after_s)))
            if own_s:
                on.program.at_least(f"work: {label(key)} of stage {number} alone", Sum((TIME, 1.0)), alone)
        on.program.at_least(f"work: {label(key)} of stage {number}", Sum((TIME, 1.0)), needs)
    if not on.given.clip:
        return
    rest = _passing(on, own, backward_only=True, times=count).plus(_passing(on, before, backward_only=True))
    rest.plus(_passing(on, behind)).plus(Sum(("", count * own_s - after_s)))
    rest.plus(_passing(on, own[-1:], forward_only=True, times=count - min(num_stages - number, count)))
    updates: Load = defaultdict(Sum)
    for unit in (unit for segment in segments for unit in segment):
        for key, load in returning(on, unit).items():
            updates[key].plus(load, 1.0 / on.loads.capacity[key])
    for key, needs in updates.items():
        name = f"window: updates by {label(key)} before the backwards of stage {number}"
        on.program.at_least(name, Sum((TIME, 1.0)), needs.plus(rest))


def _sent(on: Placement, total: Load, chunks: Sequence[Chunk], number: int) -> None:
    """Add what a stage sends to others: forward what the next chunk is given, and back the gradients of its own."""
    own = range(number, len(chunks), on.given.pipeline_parallel)
    for lane, given in (
        (Lane.SEND, [chunk + 1 for chunk in own if chunk + 1 < len(chunks)]),
        (Lane.SEND_BACK, [chunk for chunk in own if chunk]),
    ):
        for num_bytes in (-(-chunks[chunk][0][0].given_bytes // on.given.tensor_parallel) for chunk in given):
            send = Task(0, lane, Op.SEND, Phase.FORWARD, stage=number, num_bytes=num_bytes)
            on.loads.charge(total, send, Sum(("", float(on.given.num_micro_batches))))


def _later_s(on: Placement, chunks: Iterable[Chunk]) -> float:
    """Return the seconds in which stages make the gradients of weights of one micro-batch that backward leaves."""
    units = [unit for chunk in chunks for segment in chunk for unit in segment if unit.weight_gradients]
    return sum(on.loads.computing(unit, Op.WEIGHT_GRADIENT)[Lane.COMPUTE][""] for unit in units)


def _passing(
    on: Placement, chunks: Iterable[Chunk], *, backward_only: bool = False, forward_only: bool = False, times: int = 1
) -> Sum:
    """Return the seconds that one micro-batch needs to pass chunks, one after another; or so many of them, each."""
    found = Sum()
    for segment in (segment for chunk in chunks for segment in chunk):
        ways = [("", Op.FORWARD)] if not backward_only else []
        if not forward_only:
            ways.append(("", Op.BACKWARD))
            ways += [(name, op) for way, op in AGAIN if (name := f"{segment[0].segment}:{way}") in on.program.boxes]
        for name, op in ways:
            found[name] += times * sum(on.loads.computing(unit, op)[Lane.COMPUTE][""] for unit in segment)
    return found


def _memory(on: Placement, chunks: Sequence[Chunk], number: int) -> Sum:
    """Add the conditions on the memory of a stage's devices; return what one of its ranks holds on its host."""
    given, count = on.given, on.given.num_micro_batches
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    in_flight = [*[count] * (len(chunks) - 1), min(given.pipeline_parallel - number, count)]
    passages = [(segment, times) for chunk, times in zip(chunks, in_flight, strict=True) for segment in chunk]
    resident, host = _resident(on, [unit for segment, _ in passages for unit in segment])
    at_first = Sum().plus(resident)
    for segment, times in passages:
        at_first.plus(saved_activations(on, segment), float(times))
    there = offloaded(on.program, passages, device_bytes, f" of stage {number}")
    for tier, held in ((Tier.GPU, at_first), (Tier.HOST, host)):
        held.plus(Sum((there[tier], device_bytes)) if there else {})
    between = Sum().plus(resident)
    for unit in (unit for segment, _ in passages for unit in segment):
        kept = {name: times for gap, times in on.gaps() if (name := f"{unit.name}:kept {gap}") in on.program.boxes}
        scale = unit.stored_bytes(on.weight_bytes) / sum(times for _, times in on.gaps())
        (at_first if given.pipeline_rounds > 1 else between).plus(kept, scale)
    rows = [(f"device of stage {number} at its first backward", at_first)]
    if given.pipeline_rounds == 1:
        rows.append((f"device of stage {number} between micro-batches", between))
    for name, held in rows:
        needs = Sum().plus(held, 1.0 / device_bytes)
        on.program.at_least(f"memory: {name}", Sum((ROOM[Tier.GPU], 1.0)), needs)
    return host


def _resident(on: Placement, units: Iterable[Unit]) -> tuple[Sum, Sum]:
    """Return the bytes that a stage always holds on a device, and on its host."""
    device, host, weight_bytes = Sum(), Sum(), on.weight_bytes
    saved_bytes = on.given.resident_weight_bytes_per_param
    for unit in (unit for unit in units if unit.num_weights):
        own = on.own_bytes(unit) if on.given.gathers(unit) else unit.stored_bytes(weight_bytes)
        device.plus(Sum(("", 1.0)).plus(on.away(unit), -1.0), own)
        if not unit.num_params:
            continue
        shard, state_bytes = on.given.placed_params(unit), on.given.placed_state_bytes_per_param(unit)
        device[f"{unit.name}:{Place.GPU}"] += (state_bytes - saved_bytes) * shard
        for place in (Place.CPU, Place.STREAM):
            host[f"{unit.name}:{place}"] += state_bytes * shard
        host[weights_or_gradients(on, unit)] += float(weight_bytes * shard)
    return device, host
