"""Conditions on windows: updates and their copies fit between the last backward and the next forward."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from planner.bounds.loads import Key, Load, label
from planner.bounds.memory import STATE_BUFFERS, STATE_SLOT, Rings
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import NEVER_S, TIME, Sum
from planner.costs.resources import Resource
from planner.decisions import Place
from planner.graph import Unit
from planner.schedule.tasks import Lane, Op, Tier
from planner.simulate.prediction import capacities

Beside = tuple[Sequence[Load], Rings]
# The most units at which windows end, and at which they begin, evenly spaced. Each pair is a row.
_NUM_ENDS, _NUM_BEGINNINGS = 24, 8


def windows(on: Placement, held: Sequence[Sum], rings: Rings) -> None:
    """Add the conditions on windows to a placement's program that has those on memory, of which these are a part."""
    leaving = [_leaving(on, unit) for unit in on.units]
    returned = [returning(on, unit) for unit in on.units]
    forward_s, backward_s, again = [], [], []
    for unit in on.units:
        num_tiles = float(unit.num_tiles)
        forward_s.append(num_tiles * on.loads.computing(unit, Op.FORWARD)[Lane.COMPUTE][""])
        backward_s.append(num_tiles * on.loads.computing(unit, Op.BACKWARD)[Lane.COMPUTE][""])
        ways = [(f"{unit.segment}:{way}", op) for way, op in AGAIN if f"{unit.segment}:{way}" in on.program.boxes]
        takes_s = ((name, num_tiles * on.loads.computing(unit, op)[Lane.COMPUTE][""]) for name, op in ways)
        again.append(Sum(*takes_s))
    everything = Sum(("", on.repeats * (sum(forward_s) + sum(backward_s))))
    again_s = on.chain("again", again)
    if again_s:
        everything[again_s[-1]] += float(on.repeats)

    forward_until_s, backward_until_s = (
        list(itertools.accumulate(each_s, initial=0.0)) for each_s in (forward_s, backward_s)
    )

    def between(end: int, begin: int) -> Sum:
        """Return the computing from the first forward of ``end`` to the last backward of ``begin``."""
        rest = Sum().plus(everything).plus({"": forward_until_s[end] + backward_until_s[begin]}, -1.0)
        return rest.plus({again_s[begin - 1]: 1.0}, -1.0) if begin and again_s else rest

    ends, beginnings = (_spread(len(on.units), most) for most in (_NUM_ENDS, _NUM_BEGINNINGS))
    if not on.given.waits_for_norm:
        both = [_added(out, back) for out, back in zip(leaving, returned, strict=True)]
        spans = _longest(on, "update", both, ends)
        _through_nvme(on, spans)
        for i, span in spans.items():
            needs = between(i, i).plus({span: 1.0})
            on.program.at_least(f"window: updates of units 0 to {i}", Sum((TIME, 1.0)), needs)
        return
    nothing: Load = {}
    coming = [nothing, *(on.coming(unit) for unit in on.units[:-1])]  # copies for the next backward
    after = _longest(on, "update", returned, ends)
    before = _longest(on, "leave", leaving, beginnings, (coming, rings))
    _through_nvme(on, after)
    _written_before_backward(on, before, between)
    for i in ends:
        for j in beginnings:
            needs = between(i, j).plus(Sum((after[i], 1.0), (before[j], 1.0)))
            name = f"window: updates of units 0 to {i} once gradients of 0 to {j} have left"
            on.program.at_least(name, Sum((TIME, 1.0)), needs)
    starts = {segment[0].segment: on.position[segment[0].name] for segment in on.segments}
    for i in beginnings:
        stored = _stored_before(on, i, held[i])
        start = starts[on.units[i].segment]
        earlier = Sum(("", sum(forward_s) + sum(backward_s[i + 1 :])), *(((again_s[-1], 1.0),) if again_s else ()))
        earlier.plus({again_s[start - 1]: 1.0} if start and again_s else {}, -1.0)
        for j in (j for j in beginnings if j <= i):
            needs = between(0, j).plus(earlier, -1.0).plus(Sum((stored, 1.0), (before[j], 1.0)))
            name = f"window: all updates before the backward of {i}, once gradients of 0 to {j} have left"
            on.program.at_least(name, Sum((TIME, 1.0)), needs)


def _stored_before(on: Placement, position: int, held: Mapping[str, float]) -> str:
    """Return a variable: the time of all updates, and of storing the state that does not fit at a backward."""
    span = on.program.variable(f"updated and stored before the backward of {position}", 0.0, NEVER_S)
    last = len(on.units) - 1
    stored = _stored(on, last, held)
    for key in (Resource.LINK_UP, Resource.LINK, Resource.DRAM):
        updates = f"update by {label(key)}, 0 to {last}"
        needs = Sum((updates, 1.0)) if updates in on.program.boxes else Sum()
        needs.plus(stored, on.loads.per_byte(Resource.LINK_UP, key))
        name = f"updated and stored before the backward of {position} by {label(key)}"
        on.program.at_least(name, Sum((span, 1.0)), needs)
    return span


def _leaving(on: Placement, unit: Unit) -> Load:
    """Return the load of moving one micro-batch's gradients to where they are used."""
    load: Load = defaultdict(Sum)
    if unit.num_params:
        num_bytes = on.weight_bytes * on.given.placed_params(unit)
        on.loads.copy(load, Resource.LINK_UP, num_bytes, on.leaves(unit))
        if on.given.replicas(unit) > 1:
            on.loads.scatter(load, unit, Sum(("", 1.0)))
    return load


def _longest(
    on: Placement, what: str, loads: Sequence[Load], ends: Sequence[int], beside: Beside = ((), {})
) -> dict[int, str]:
    """Return variables by last unit: at least the time that any lane or resource needs for units 0 to that one.

    Args:
        on: the placement.
        what: a part of the variables' names.
        loads: the load of each unit.
        ends: the last units.
        beside: the load of other copies in the meantime, of each unit; and the slots, whose parameters need none.
    """
    others, rings = beside
    found = {i: on.program.variable(f"{what} of 0 to {i}", 0.0, NEVER_S) for i in ends}
    keys = sorted({key for load in (*loads, *others) for key in load}, key=label)
    for key in keys:
        if key is Resource.DEVICE:  # it computes meanwhile
            continue
        alone = _sums(on, f"{what} by {label(key)}", loads, key, ends)
        coming = _sums(on, f"{what} beside, by {label(key)}", others, key, ends) if others else {}
        in_slots = _in_slots(on, rings, key) if others else Sum()
        for i, variable in alone.items():
            name = f"{what} of 0 to {i} by {label(key)}"
            on.program.at_least(name, Sum((found[i], 1.0)), Sum((variable, 1.0)))
            if coming:
                needs = Sum((variable, 1.0), (coming[i], 1.0)).plus(in_slots, -1.0)
                on.program.at_least(f"{name}, with what comes", Sum((found[i], 1.0)), needs)
            if what == "update" and key in {Resource.LINK_UP, Resource.LINK, Resource.DRAM}:
                needs = Sum((variable, 1.0)).plus(
                    _stored(on, i, {"always held": 1.0}), on.loads.per_byte(Resource.LINK_UP, key)
                )
                name = f"update of 0 to {i} by {label(key)}, with what is stored"
                on.program.at_least(name, Sum((found[i], 1.0)), needs)
    return found


def _sums(on: Placement, what: str, loads: Sequence[Load], key: Key, ends: Sequence[int]) -> dict[int, str]:
    """Return variables by last unit: the seconds of a lane or resource that units 0 to that one need."""
    pieces = itertools.pairwise((-1, *ends))
    amounts = []
    for last, end in pieces:
        amount = Sum()
        for load in loads[last + 1 : end + 1]:
            amount.plus(load.get(key, {}), 1.0 / on.loads.capacity[key])
        amounts.append(amount)
    return dict(zip(ends, on.chain(what, amounts, ends), strict=True))


def _in_slots(on: Placement, rings: Rings, key: Key) -> Sum:
    """Return the seconds of copies for parameters that slots can hold instead."""
    held = Sum()
    for ring, (size, units) in rings.items():
        most = max(on.program.highest(on.coming(unit).get(key, {})) for unit in units)
        held[ring] += most / on.loads.capacity[key] / size
    return held


def _through_nvme(on: Placement, spans: Mapping[int, str]) -> None:
    """Add rows: state and weights on NVMe are read and written within the spans, except for what buffers hold."""
    if not on.stores(nvme=True):
        return
    for key, needs in _storage_needs(on, list(spans)).items():
        for i, span in spans.items():
            on.program.at_least(f"state of 0 to {i} by {label(key)}", Sum((span, 1.0)), needs[i])


def _written_before_backward(on: Placement, before: Mapping[int, str], between: Callable[[int, int], Sum]) -> None:
    """Add rows: state is through NVMe, and activations that wait there are written, when the last backward begins.

    No forward begins before the first unit is updated, so all of it happens after gradients have left.
    """
    evicted, last = "offloaded activations on nvme", len(on.units) - 1
    if evicted not in on.program.boxes or not on.units[0].num_params:
        return
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    written: Load = defaultdict(Sum)
    on.loads.storage(written, Resource.NVME_WRITE, device_bytes, Sum((evicted, 1.0)))
    for key, needs in _storage_needs(on, [last]).items():
        needs[last].plus(written.get(key, {}), 1.0 / on.loads.capacity[key])
        for j, left in before.items():
            name = f"window: through NVMe by {label(key)} before the last backward, once gradients of 0 to {j} left"
            needed = between(last + 1, j).plus(needs[last]).plus({left: 1.0})
            on.program.at_least(name, Sum((TIME, 1.0)), needed)


def _storage_needs(on: Placement, ends: Sequence[int]) -> dict[Key, dict[int, Sum]]:
    """Return the seconds of drives for state and weights of units 0 to each end, from updates to the next forward.

    A buffer may hold state that was read before, or that is written later; weights are written with their state,
    and are read again for the forward.
    """
    device_bytes = float(capacities(on.cost)[Tier.GPU])
    weight_bytes = 0 if on.given.weight_in_state else on.weight_bytes
    weights_share = weight_bytes / min(map(on.given.placed_state_bytes_per_param, on.units))  # the most of any unit
    amounts: dict[Resource, list[Sum]] = {Resource.NVME_READ: [], Resource.NVME_WRITE: []}
    for unit in on.units:
        shard = on.given.placed_params(unit)
        share = shard * on.given.placed_state_bytes_per_param(unit) / device_bytes
        weights = Sum((f"{unit.name}:onnvme", shard * weight_bytes / device_bytes))
        there = f"{unit.name}:onnvme" in on.program.boxes
        for direction, sums in amounts.items():
            amount = Sum((f"{unit.name}:{Place.NVME}", share)) if unit.num_params else Sum()
            read = direction is Resource.NVME_READ and f"{unit.name}:reads" not in on.program.boxes
            sums.append(amount.plus(weights) if there and not read else amount)
    found: dict[Key, dict[int, Sum]] = defaultdict(lambda: {i: Sum() for i in ends})
    for direction, sums in amounts.items():
        buffer_share = 1.0 + (weights_share if direction is Resource.NVME_WRITE else 0.0)
        each: Load = defaultdict(Sum)
        on.loads.storage(each, direction, device_bytes, Sum(("", 1.0)))
        what = f"through NVMe by {label(direction)}"
        known = [f"{what}, 0 to {i}" for i in range(len(sums))]
        so_far = known if known[0] in on.program.boxes else on.chain(what, sums)
        for key in (direction, Resource.NVME):
            needs_s = each[key][""] / on.loads.capacity[key]
            for i in ends:
                found[key][i].plus(Sum((so_far[i], needs_s), (STATE_BUFFERS, -needs_s * buffer_share)))
    return found


def _stored(on: Placement, last: int, held: Mapping[str, float]) -> Sum:
    """Return the bytes of streamed state of units 0 to ``last`` that do not fit beside the share ``held``."""
    memory = float(capacities(on.cost)[Tier.GPU])
    return Sum((f"streamed, 0 to {last}", memory), (STATE_SLOT, -memory), ("", -memory)).plus(held, memory)


def returning(on: Placement, unit: Unit) -> Load:
    """Return the load of a unit's update, and of moving its result to where it is used next."""
    load: Load = defaultdict(Sum)
    if unit.num_params:
        on.updates(load, unit)
        num_bytes = on.weight_bytes * on.given.placed_params(unit)
        on.loads.copy(load, Resource.LINK_DOWN, num_bytes, Sum((f"{unit.name}:upload", 1.0)))
        if unit.forward:
            on.comes(load, unit)
        if (on.given.gathers(unit) and unit.forward) or on.given.regathers(unit):
            on.gathered(load, unit)
    return load


def _added(one: Load, other: Load) -> Load:
    total: Load = defaultdict(Sum)
    for load in (one, other):
        for key, amount in load.items():
            total[key].plus(amount)
    return total


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` numbers below ``count``, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
