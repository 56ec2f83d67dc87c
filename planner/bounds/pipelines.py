"""Necessary conditions on pipelines: the twin of :mod:`.conditions` for pipeline stages.

Layers are divided evenly among stages. Everything else is open, as without stages, and the variables are the same. With
rounds, the weights of a chunk serve all micro-batches at a time, and its gradients leave once. These conditions hold
for every stage s of p:

- *work*: an iteration lasts at least as long as any lane or resource of a rank needs for its work, with what is sent to
  other stages. The first forward of stage s waits for the forwards of the chunks before its first one, and their
  backwards follow its last backward. In between it computes all its micro-batches. If gradients of weights come after
  backward ([Note: Zero bubble] in :mod:`planner.models.zero_bubble`), the last ``s + 1`` of the stage may come
  meanwhile, and micro-batches pass other stages without them. With rounds, the device adds the gradients of all
  micro-batches but the first to those that are there.
- *the first micro-batch* passes all chunks forward, and then all of them backward. Whatever it passes on is sent first,
  and the next chunk waits for that. When it comes back from the first chunk, the others still have to.
- *windows*: with clipping, no update starts before all gradients of all stages are there. After the last unit of a
  stage is updated and is on the device, its forward comes. Then the first micro-batch passes the chunks behind the last
  chunk of the stage, there and back, and only then comes the first backward of the stage. Of the other micro-batches,
  only those that may wait there have passed its last chunk by then. After its last backward, the last micro-batch
  passes the chunks before its first one. The same is true of any later stage r: the first micro-batch comes from stage
  s to its last chunk, and then r does all that follows its first backward. And the first micro-batch comes back through
  all chunks. Windows of the first chunk alone are longer where updates are few: no forward of a stage comes before it,
  so behind it comes all that the stage, or a later one, computes; of the first chunk itself, what all but the first
  micro-batch do, since one unit of it is the last to be updated.
- *streamed state*, with rounds, is stored in the window of all updates but for what is in slots then: these are always
  there ([Note: Static slots]), so they count with all memory. State whose new weights are fetched is stored with them,
  before they come from the host: no slot saves that.
- *memory*: in the order of :func:`planner.lowering.compute.turns`, it holds the activations of ``min(p - s,
  micro-batches)`` micro-batches of its last round when its first backward begins, and all of the rounds before; and
  weights and state that are resident. Between the passages of two micro-batches it holds the weights that it keeps in
  slots from one to the next. With rounds, a chunk's weights stay for all micro-batches, each in a slot of its own, and
  so do those of chunks before that are kept until backward. When the last micro-batch comes back to a chunk, the sum of
  the chunk's gradients is there, with the gradients of chunks behind that stay for updates, and the activations of all
  chunks before. A node's host holds the rest of all stages that its ranks have.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from planner.bounds.loads import Load, label
from planner.bounds.memory import STATE_SLOT, offloaded, saved_activations, weights_or_gradients
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import ROOM, TIME, LinearProgram, Sum
from planner.bounds.windows import returning
from planner.bounds.work import load_of
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Place
from planner.graph import Unit
from planner.lowering.stages import deal
from planner.schedule.tasks import Lane, Op, Phase, Task, Tier
from planner.setup import Setup
from planner.simulate.prediction import capacities

Chunk = Sequence[Sequence[Unit]]
# An expression of so many terms gets a variable, if several rows have it.
_LONG = 5


def pipelined(setup: Setup, cost: CostModel, *, few: bool = False) -> LinearProgram:
    """Return the conditions of an iteration of a pipeline; see :func:`planner.bounds.conditions.conditions`.

    With ``few``, they are those of each stage alone, without what is sent, added or stored. A search starts from their
    optimum: from the optimum of all it did not find faster plans.
    """
    given = setup.given
    on = Placement(setup, cost, few=few)
    chunks = deal(setup.units, given.pipeline_parallel, given.pipeline_rounds)
    stages, rests, hosts = range(given.pipeline_parallel), list[Sum](), list[Sum]()
    for number in stages:
        rests.append(_shared(on, f"rest of stage {number}", _work(on, chunks, number)))
        if few and given.clip:
            _windows(on, chunks, number, rests)
        hosts.append(_memory(on, chunks[number :: given.pipeline_parallel], number))
    if not few:
        there, back = _passing(on, chunks, forward_only=True), _shared(on, "back", _back(on, chunks))
        there.plus(Sum(("", _hops_s(on, chunks, range(1, len(chunks)), Lane.SEND))))
        on.program.at_least("work: the first micro-batch, there and back", Sum((TIME, 1.0)), there.plus(back))
        for number in stages if given.clip else ():
            _windows(on, chunks, number, rests, back)
    for counts in sorted(cost.stages_on_nodes):
        held = Sum()
        for host, ranks in zip(hosts, counts, strict=True):
            held.plus(host, ranks / capacities(cost)[Tier.HOST])
        on.program.at_least(f"memory: hosts of {counts} ranks of each stage", Sum((ROOM[Tier.HOST], 1.0)), held)
    return on.program


def computing(setup: Setup, cost: CostModel) -> dict[str, float]:
    """Return what each condition on computing and issuing proves alone, in seconds, by the name of its row.

    That is what it proves if nothing is computed again. So it needs no variables, and takes a small part of the time.
    """
    on = Placement(dataclasses.replace(setup, units=()), cost)
    chunks = deal(setup.units, setup.given.pipeline_parallel, setup.given.pipeline_rounds)
    for number in range(setup.given.pipeline_parallel):
        _work(on, chunks, number)
    wanted = tuple(f"work: {lane} of stage" for lane in (Lane.COMPUTE, Lane.LAUNCH))
    return {row.name: row.least for row in on.program.rows if row.name.startswith(wanted)}


def _shared(on: Placement, name: str, expression: Sum) -> Sum:
    """Return a variable that is at least an expression of all units, so that the rows which share it stay short."""
    if on.few or len(expression) < _LONG:  # with few, each is in one row
        return expression
    low, high = -on.program.highest(Sum().plus(expression, -1.0)), on.program.highest(expression)
    variable = Sum((on.program.variable(name, low, high), 1.0))
    on.program.at_least(name, variable, expression)
    return variable


def _work(on: Placement, chunks: Sequence[Chunk], number: int) -> Sum:
    """Add the conditions on a stage's work.

    Returns:
        The seconds from when the first micro-batch has passed the stage's last chunk forward until all gradients are
        there.
    """
    count, num_stages = on.given.num_micro_batches, on.given.pipeline_parallel
    own, before, behind = chunks[number::num_stages], chunks[:number], chunks[len(chunks) - num_stages + number + 1 :]
    total = load_of(on, [segment for chunk in own for segment in chunk])
    _sent(on, total, chunks, number)
    adds = _adds(on)
    for unit in (unit for chunk in own for segment in chunk for unit in segment if adds):
        for op in (Op.BACKWARD, Op.WEIGHT_GRADIENT):
            for key, amount in on.loads.adding(unit, op).items():
                total[key].plus(amount, count - 1.0)
    forth_s, back_s = (_hops_s(on, chunks, range(1, number + 1), lane) for lane in (Lane.SEND, Lane.SEND_BACK))
    own_s, after_s = count * _later_s(on, own) + (count - 1) * _adding_s(on, own, Op.WEIGHT_GRADIENT), 0.0
    if number:  # some of its own may come at last, those of its first chunk behind others, and the first stage's do
        left = (min(max(number + 1 - turn * count, 0), count) for turn in range(len(own)))
        each_s = [_later_s(on, [chunk]) + _adding_s(on, [chunk], Op.WEIGHT_GRADIENT) for chunk in own]
        after_s = sum(times * chunk_s for times, chunk_s in zip(left, each_s, strict=True))
        after_s -= _later_s(on, chunks[:1])
    for key, load in total.items():
        needs = Sum().plus(load, 1.0 / on.loads.capacity[key])
        if key is Lane.COMPUTE:
            alone = Sum().plus(needs).plus(_passing(on, before, forward_only=True)).plus(Sum(("", forth_s)))
            needs.plus(_passing(on, before)).plus(Sum(("", forth_s + back_s + _adding_s(on, before) - after_s)))
            if own_s:
                on.program.at_least(f"work: {label(key)} of stage {number} alone", Sum((TIME, 1.0)), alone)
        on.program.at_least(f"work: {label(key)} of stage {number}", Sum((TIME, 1.0)), needs)
    rest = _passing(on, own, backward_only=True, times=count).plus(_passing(on, before, backward_only=True))
    rest.plus(_passing(on, behind)).plus(Sum(("", own_s - after_s)))
    rest.plus(Sum(("", back_s + _adding_s(on, before) + (count - 1) * _adding_s(on, own))))
    there = range(len(chunks) - len(behind), len(chunks))
    rest.plus(Sum(*(("", _hops_s(on, chunks, there, lane)) for lane in (Lane.SEND, Lane.SEND_BACK))))
    return rest.plus(_passing(on, own[-1:], forward_only=True, times=count - min(num_stages - number, count)))


def _adds(on: Placement) -> bool:
    """Return whether the last micro-batch adds its gradients to those of the first one, on the device."""
    return on.given.pipeline_rounds > 1 and on.given.num_micro_batches > 1 and not on.few


def _back(on: Placement, chunks: Sequence[Chunk]) -> Sum:
    """Return the seconds in which the first micro-batch comes back through all chunks, and the others through one."""
    count = on.given.num_micro_batches
    back = _passing(on, chunks, backward_only=True)
    back.plus(Sum(("", _hops_s(on, chunks, range(1, len(chunks)), Lane.SEND_BACK))))
    back.plus(Sum(("", (count - 1) * _adding_s(on, chunks[:1]))))
    return back.plus(_passing(on, chunks[:1], backward_only=True, times=count - 1))


def _windows(
    on: Placement, chunks: Sequence[Chunk], number: int, rests: Sequence[Sum], back: Sum | None = None
) -> None:
    """Add the conditions on the time from a stage's updates to the backwards of its own, and of the stages behind."""
    num_stages = on.given.pipeline_parallel
    own, last = chunks[number::num_stages], len(chunks) - num_stages
    stored = _stored(on, own, number) if on.given.pipeline_rounds > 1 and not on.few else ()
    updates = _needed(on, own, stored[-1:], f"updates of stage {number}")
    passed = Sum()
    for behind in range(number, number + 1 if on.few else num_stages):
        if behind > number:
            passed.plus(_reached(on, chunks, last + behind))
        for key, needs in updates.items():
            name = f"window: updates of stage {number} by {label(key)} before the backwards of stage {behind}"
            on.program.at_least(name, Sum((TIME, 1.0)), Sum().plus(needs).plus(passed).plus(rests[behind]))
    if back is None:
        return
    for key, needs in updates.items():
        name = f"window: updates of stage {number} by {label(key)}, and the first micro-batch back"
        on.program.at_least(name, Sum((TIME, 1.0)), Sum().plus(needs).plus(passed).plus(back))
    if on.given.pipeline_rounds == 1:
        return
    updates, count = _needed(on, own[:1], stored[:1], f"first updates of stage {number}"), on.given.num_micro_batches
    passed = _passing(on, own[:1], forward_only=True, times=-1)
    for behind in range(number, num_stages):
        *others, final = chunks[behind::num_stages]
        passed.plus(_reached(on, chunks, behind) if behind > number else {})
        forth = _passing(on, others, forward_only=True, times=count).plus(_passing(on, [final], forward_only=True))
        if behind > number:  # it has passed the first one
            forth.plus(_passing(on, others[:1], forward_only=True), -1.0)
            forth.plus(_passing(on, own[:1], forward_only=True))
        for key, needs in updates.items():
            name = f"window: first updates of stage {number} by {label(key)} before all that stage {behind} computes"
            on.program.at_least(name, Sum((TIME, 1.0)), Sum().plus(needs).plus(passed).plus(forth).plus(rests[behind]))


def _reached(on: Placement, chunks: Sequence[Chunk], chunk: int) -> Sum:
    """Return the seconds in which the first micro-batch passes a chunk that follows another one forward."""
    passed = _passing(on, chunks[chunk : chunk + 1], forward_only=True)
    return passed.plus(Sum(("", _hops_s(on, chunks, [chunk], Lane.SEND))))


def _needed(on: Placement, chunks: Iterable[Chunk], stored: Iterable[str], name: str) -> Load:
    """Return the seconds that the updates of chunks need of each lane and resource, with state that is stored."""
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    storing: Load = defaultdict(Sum)
    for share in stored:
        on.loads.copy(storing, Resource.LINK_UP, device_bytes, Sum((share, 1.0)))
    needed: Load = defaultdict(Sum)
    units = (unit for chunk in chunks for segment in chunk for unit in segment)
    for load in (storing, *(returning(on, unit) for unit in units)):
        for key, amount in load.items():
            needed[key].plus(amount, 1.0 / on.loads.capacity[key])
    return {key: _shared(on, f"{name} by {label(key)}", needs) for key, needs in needed.items()}


def _stored(on: Placement, chunks: Sequence[Chunk], number: int) -> tuple[str, str]:
    """Return variables: what a stage has stored of streamed state when its first chunk and when all is updated.

    They are multiples of the memory of a device. What has new weights that are fetched has been stored: they come from
    there. What else is not stored is in slots.
    """
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    everything, fetched, of_first = Sum(), Sum(), Sum()
    for turn, unit in ((turn, u) for turn, chunk in enumerate(chunks) for segment in chunk for u in segment):
        if not unit.num_params:
            continue
        everything.plus(on.state_out(unit), 1.0 / device_bytes)
        if unit.forward and (away := on.away(unit)):
            both = on.program.variable(f"{unit.name}: streamed and fetched")
            streamed = Sum((f"{unit.name}:{Place.STREAM}", 1.0)).plus(away).plus(Sum(("", -1.0)))
            on.program.at_least(f"{unit.name}: streamed and fetched", Sum((both, 1.0)), streamed)
            num_bytes = on.given.placed_state_bytes_per_param(unit)
            num_bytes += 0 if on.given.weight_in_state else on.weight_bytes
            fetched[both] = num_bytes * on.given.placed_params(unit) / device_bytes
            if not turn:
                of_first[both] = fetched[both]
    high = on.program.highest(everything)
    first, stored = (on.program.variable(f"{name} stored by stage {number}", 0.0, high) for name in ("first", "all"))
    slots = Sum((f"{STATE_SLOT}s of stage {number}", -1.0))
    on.program.at_least(f"state of stage {number} is stored or in slots", Sum((stored, 1.0)), everything.plus(slots))
    on.program.at_least(f"state of stage {number} with what is fetched", Sum((stored, 1.0)), fetched)
    on.program.at_least(f"state of the first chunk of stage {number}", Sum((first, 1.0)), of_first)
    return first, stored


def _sent(on: Placement, total: Load, chunks: Sequence[Chunk], number: int) -> None:
    """Add what a stage sends to others: forward what the next chunk is given, and back the gradients of its own."""
    own = range(number, len(chunks), on.given.pipeline_parallel)
    for lane, given in (
        (Lane.SEND, [chunk + 1 for chunk in own if chunk + 1 < len(chunks)]),
        (Lane.SEND_BACK, [chunk for chunk in own if chunk]),
    ):
        for chunk in given:
            on.loads.charge(total, _send(on, chunks, chunk, lane), Sum(("", float(on.given.num_micro_batches))))


def _send(on: Placement, chunks: Sequence[Chunk], chunk: int, lane: Lane) -> Task:
    """Return the task that sends what a chunk is given, or the gradients of that back."""
    sender = (chunk - (lane is Lane.SEND)) % on.given.pipeline_parallel
    num_bytes = -(-chunks[chunk][0][0].given_bytes // on.given.tensor_parallel)
    return Task(0, lane, Op.SEND, Phase.FORWARD, stage=sender, num_bytes=num_bytes)


def _hops_s(on: Placement, chunks: Sequence[Chunk], given: Iterable[int], lane: Lane) -> float:
    """Return the seconds in which one micro-batch is sent to some chunks, or its gradients back from them, in turn."""
    if on.few:
        return 0.0
    prices = (on.cost.price(_send(on, chunks, chunk, lane)) for chunk in given if chunks[chunk][0][0].given_bytes)
    return sum(price.latency_s + price.duration_s for price in prices)


def _later_s(on: Placement, chunks: Iterable[Chunk]) -> float:
    """Return the seconds in which stages make the gradients of weights of one micro-batch that backward leaves."""
    units = [unit for chunk in chunks for segment in chunk for unit in segment if unit.weight_gradients]
    return sum(on.loads.computing(unit, Op.WEIGHT_GRADIENT)[Lane.COMPUTE][""] for unit in units)


def _adding_s(on: Placement, chunks: Iterable[Chunk], op: Op = Op.BACKWARD) -> float:
    """Return the seconds in which passes through chunks add gradients to those of earlier micro-batches."""
    units = [unit for chunk in chunks for segment in chunk for unit in segment] if _adds(on) else []
    return sum(on.loads.adding(unit, op)[Lane.COMPUTE][""] for unit in units)


def _passing(
    on: Placement, chunks: Iterable[Chunk], *, backward_only: bool = False, forward_only: bool = False, times: int = 1
) -> Sum:
    """Return the seconds that one micro-batch needs to pass chunks, one after another; or so many of them, each."""
    found = Sum()
    for chunk in chunks:
        forward, backward = _passage(on, chunk)
        found.plus({} if backward_only else forward, times).plus({} if forward_only else backward, times)
    return found


def _passage(on: Placement, chunk: Chunk) -> tuple[Sum, Sum]:
    """Return the seconds in which one micro-batch passes a chunk forward, and backward."""
    known = on.passages.get(name := chunk[0][0].segment)
    if known is None:
        forward, backward = Sum(), Sum()
        for segment in chunk:
            again = [(way, op) for end, op in AGAIN if (way := f"{segment[0].segment}:{end}") in on.program.boxes]
            for unit in segment:
                forward[""] += on.loads.computing(unit, Op.FORWARD)[Lane.COMPUTE][""]
                for way, op in (("", Op.BACKWARD), *again):
                    backward[way] += on.loads.computing(unit, op)[Lane.COMPUTE][""]
        known = on.passages[name] = forward, _shared(on, f"back through {name} and what follows in its chunk", backward)
    return known


def _memory(on: Placement, chunks: Sequence[Chunk], number: int) -> Sum:
    """Add the conditions on the memory of a stage's devices; return what one of its ranks holds on its host."""
    given, count = on.given, on.given.num_micro_batches
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    in_flight = [*[count] * (len(chunks) - 1), min(given.pipeline_parallel - number, count)]
    passages = [(segment, times) for chunk, times in zip(chunks, in_flight, strict=True) for segment in chunk]
    resident, host = _resident(on, [unit for segment, _ in passages for unit in segment])
    if given.pipeline_rounds > 1 and not on.few:
        resident.plus(Sum((on.program.variable(f"{STATE_SLOT}s of stage {number}"), device_bytes)))
        resident.plus(Sum((_slots(on, chunks, number, device_bytes), device_bytes)))
    at_first = Sum().plus(resident)
    for segment, times in passages:
        at_first.plus(saved_activations(on, segment), float(times))
    there = offloaded(on.program, passages, device_bytes, f" of stage {number}")
    for tier, held in ((Tier.GPU, at_first), (Tier.HOST, host)):
        held.plus(Sum((there[tier], device_bytes)) if there else {})
    rows = [(f"device of stage {number} at its first backward", at_first)]
    if given.pipeline_rounds > 1 and not on.few:
        rows += [
            (f"device of stage {number} at the last backward of its chunk {turn}", Sum().plus(resident).plus(held))
            for turn, held in enumerate(_at_last_backwards(on, chunks) if count > 1 else ())
        ]
    else:
        between = Sum().plus(resident) if given.pipeline_rounds == 1 else at_first
        for unit in (unit for segment, _ in passages for unit in segment):
            kept = {name: times for gap, times in on.gaps() if (name := f"{unit.name}:kept {gap}") in on.program.boxes}
            between.plus(kept, unit.stored_bytes(on.weight_bytes) / sum(times for _, times in on.gaps()))
        if between is not at_first:
            rows.append((f"device of stage {number} between micro-batches", between))
    for name, held in rows:
        needs = Sum().plus(held, 1.0 / device_bytes)
        on.program.at_least(f"memory: {name}", Sum((ROOM[Tier.GPU], 1.0)), needs)
    return host


def _slots(on: Placement, chunks: Sequence[Chunk], number: int, unit_bytes: float) -> str:
    """Return a variable: the memory of a stage's parameter slots, in multiples of ``unit_bytes``; with rounds.

    Slots are static. While micro-batches pass a chunk, all of its weights that are not resident are in slots of their
    own. So are those of earlier chunks that are kept from forward to backward.
    """
    units = [[u for segment in chunk for u in segment if f"{u.name}:fills" in on.program.boxes] for chunk in chunks]
    shares = {unit.name: unit.stored_bytes(on.weight_bytes) / unit_bytes for of_chunk in units for unit in of_chunk}
    slots = on.program.variable(f"slots of stage {number}", 0.0, sum(shares.values()))
    kept = Sum()
    for turn, of_chunk in enumerate(units):
        needs = Sum().plus(kept)
        for unit in of_chunk:
            needs.plus(Sum(("", 1.0)) if on.given.gathers(unit) else on.away(unit), shares[unit.name])
            kept[f"{unit.name}:kept at last"] += shares[unit.name]
        on.program.at_least(f"slots of stage {number} for its chunk {turn}", Sum((slots, 1.0)), needs)
    on.program.at_least(f"slots of stage {number} for what is kept", Sum((slots, 1.0)), kept)
    return slots


def _at_last_backwards(on: Placement, chunks: Sequence[Chunk]) -> Iterator[Sum]:
    """Yield the bytes that a stage's device holds when the last micro-batch comes back to each of its chunks.

    These are the activations of that micro-batch, those of all micro-batches in the chunks before, the chunk's
    gradients, which have added up on the device since the first one, and those of the chunks behind that stay there
    for updates. Gradients of weights that come later come when activations may have gone.
    """
    before = Sum()
    staying = [_staying(on, chunk) for chunk in chunks]
    for turn, chunk in enumerate(chunks):
        units = [unit for segment in chunk for unit in segment]
        held = Sum(("", float(on.weight_bytes * sum(unit.num_params for unit in units))))
        if not any(unit.weight_gradients for unit in units):
            held.plus(before)
            for segment in chunk:
                held.plus(saved_activations(on, segment))
        for behind in staying[turn + 1 :] if on.given.clip else ():
            held.plus(behind)
        for segment in chunk:
            before.plus(saved_activations(on, segment), float(on.given.num_micro_batches))
        yield held


def _staying(on: Placement, chunk: Chunk) -> Sum:
    """Return the bytes of a chunk's gradients that stay on the device until they are used."""
    held = Sum()
    for unit in (unit for segment in chunk for unit in segment if unit.num_params):
        num_bytes = float(on.weight_bytes * on.given.placed_params(unit))
        held.plus(Sum((f"{unit.name}:{Place.GPU}", num_bytes), (f"{unit.name}:stays", num_bytes)))
    return held


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
