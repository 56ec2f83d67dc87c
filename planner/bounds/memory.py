"""Conditions on memory: of the device at every backward, of the host and its drives all the time.

At the last unit's backward all saved activations of the segments before it are somewhere. Those that are kept are on
the device. Offloaded ones are still on the device, on the host, or, if evicted, on NVMe. A copy in progress occupies
two places, which only takes more memory.

State on NVMe passes through host buffers. A buffer holds a subgroup from its read to its write. So
when updates may begin, at most the buffers' bytes of state have been read, and when all updates have ended, at most the
buffers' bytes are still to be written.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import RING, ROOM, LinearProgram, Sum
from planner.decisions import Place
from planner.graph import Unit
from planner.lowering.workspace import least_workspace_bytes
from planner.schedule.tasks import Tier
from planner.simulate.prediction import capacities

STATE_SLOT = "state slot"
STATE_BUFFERS = "state in host buffers"

Rings = dict[str, tuple[float, list[Unit]]]
"""Rings of parameter slots, by variable: the share of device memory of one slot, and the units that use it."""


def memory(on: Placement) -> tuple[list[Sum], Rings]:
    """Add the conditions on memory to a placement's program.

    Returns:
        The share of device memory in use at the first backward of every unit, and the rings of parameter slots.
    """
    capacity = capacities(on.cost)
    device_bytes = float(capacity[Tier.GPU])
    passages = [(segment, segment[0].num_tiles) for segment in on.segments[:-1]]
    activations = offloaded(on.program, passages, device_bytes)
    there = Sum(*((activations[tier], 1.0) for tier in activations if tier is Tier.GPU))
    at_backwards, rings = _device_memory(on, device_bytes, there)
    host, nvme = (
        Sum(*((activations[tier], device_bytes) for tier in activations if tier is where))
        for where in (Tier.HOST, Tier.NVME)
    )
    if on.stores(nvme=True):
        host.plus(Sum((_state_buffers(on, device_bytes), device_bytes)))
    for unit in (unit for unit in on.units if unit.num_params):
        shard = on.given.placed_params(unit)
        name = unit.name
        for place in (Place.CPU, Place.STREAM):
            host[f"{name}:{place}"] += on.given.placed_state_bytes_per_param(unit) * shard
        host[weights_or_gradients(on, unit)] += float(on.weight_bytes * shard)
        fp8 = on.given.fp8_if_moved(unit)
        host.plus(on.fetched(unit), float(fp8.host_bytes if fp8 else 0))
        versions = on.given.num_state_versions
        state_bytes = versions * on.given.placed_state_bytes_per_param(unit) * shard
        nvme.plus(on.share(unit, Place.NVME), float(state_bytes))
        if not on.given.weight_in_state:
            nvme.plus(on.share(unit, "onnvme"), float(versions * on.weight_bytes * shard))
    for unit in (unit for unit in on.units if unit.frozen):
        for held, where in ((host, "host"), (nvme, "onnvme")):
            held.plus(on.share(unit, where), float(on.given.frozen_shard_bytes(unit)))
    ranks = on.cost.ranks_per_node
    for tier, held in ((Tier.HOST, host), (Tier.NVME, nvme)):
        if capacity[tier] and held:
            room = Sum((ROOM[tier], 1.0))
            on.program.at_least(f"memory: {tier}", room, Sum().plus(held, ranks / capacity[tier]))
    return at_backwards, rings


def _state_buffers(on: Placement, unit_bytes: float) -> str:
    """Return the bytes of host buffers for state on NVMe, as multiples of ``unit_bytes``: at least one subgroup."""
    shards = {unit.name: on.given.placed_params(unit) for unit in on.units if unit.num_params}
    trained = [unit for unit in on.units if unit.num_params]
    everything = sum(on.given.placed_state_bytes_per_param(unit) * shards[unit.name] for unit in trained) / unit_bytes
    buffers = on.program.variable(STATE_BUFFERS, 0.0, everything)
    for unit in trained:
        mean = (
            on.given.placed_state_bytes_per_param(unit)
            * shards[unit.name]
            / len(on.given.placed_subgroups(unit))
            / unit_bytes
        )
        one = Sum((f"{unit.name}:{Place.NVME}", mean))
        on.program.at_least(f"{unit.name}: fits the host buffers", Sum((buffers, 1.0)), one)
    return buffers


def _device_memory(on: Placement, capacity: float, offloaded_there: Sum) -> tuple[list[Sum], Rings]:
    """Add a condition for the backward of every unit; at the last unit's, offloaded activations count too."""
    program, scale, room = on.program, 1.0 / capacity, ROOM[Tier.GPU]
    held_always, rings = _always(on, scale)
    always = program.variable("always held", 0.0, program.highest(held_always))
    program.at_least("always held", Sum((always, 1.0)), held_always, equal=True)
    before = [Sum().plus(saved_activations(on, segment), scale) for segment in on.segments]
    saved = on.chain("activations", before)
    resident = on.chain("resident gradients", (_resident_gradient(on, unit, scale) for unit in on.units))
    state = (Sum().plus(on.state_out(unit), scale) if unit.num_params else Sum() for unit in on.units)
    on.chain("streamed", state)
    at_backwards: list[Sum] = []
    for number, segment in enumerate(on.segments):
        inside = 0.0
        for unit in segment:
            inside += unit.saved_bytes
            held, position = Sum((always, 1.0)).plus({saved[number - 1]: 1.0} if number else {}), len(at_backwards)
            computes = (unit.fp8_twin if on.given.fp8_if_moved(unit) else None) or unit
            workspace_bytes = least_workspace_bytes(computes, on.weight_bytes)
            held[""] += (inside + workspace_bytes + on.weight_bytes * unit.num_params) * scale
            if f"{segment[0].segment}:recompute" in program.boxes and segment[0].operators[0].copies_input:
                held[f"{segment[0].segment}:recompute"] += segment[0].activation_output_bytes * scale
            name = f"memory: device at the backward of {unit.name}"
            held.plus(offloaded_there if unit is on.units[-1] else {})
            if on.given.clip:  # gradients of the units behind it; after the first micro-batch, of all others
                held.plus(Sum((resident[-1], 1.0), (resident[position], -1.0)))
            at_backwards.append(Sum().plus(held))
            if on.given.clip and on.repeats > 1 and position:
                held[resident[position - 1]] += 1.0
            program.at_least(name, Sum((room, 1.0)), held)
    return at_backwards, rings


def _rings(on: Placement, scale: float) -> tuple[Sum, Rings]:
    """Return the share of memory that parameter slots take: see [Note: Static slots].

    There is a ring for each size of units, with slots for the unit that computes and for the units that are kept.
    """
    by_size: dict[str, list[Unit]] = defaultdict(list)
    for unit in on.units:
        if f"{unit.name}:fills" in on.program.boxes:
            by_size[unit.size_name].append(unit)
    held, rings = Sum(), Rings()
    for size_name, units in by_size.items():
        size = units[0].stored_bytes(on.weight_bytes) * scale
        least = {unit.name: min(size, _fp8_slot_bytes(on, unit, size / scale) * scale) for unit in units}
        ring = on.program.variable(f"{RING}{size_name}", 0.0, size * len(units))
        held[ring] = 1.0
        rings[ring] = (min(least.values()), units)
        held_between = {
            gap: on.chain(f"{ring} kept {gap}", (Sum((f"{unit.name}:kept {gap}", least[unit.name])) for unit in units))
            for gap, _ in on.gaps()
        }
        for i, unit in enumerate(units):
            needed = Sum(("", size)) if on.given.gathers(unit) else Sum().plus(on.away(unit), size)
            needed.plus(on.moved_in_fp8(unit), least[unit.name] - size)
            at_last = Sum().plus(needed).plus({held_between["at last"][i - 1]: 1.0} if i else {})
            on.program.at_least(f"{ring} at the backward of {unit.name}", Sum((ring, 1.0)), at_last)
            if on.repeats > 1:
                earlier = needed.plus({held_between["before"][i - 1]: 1.0} if i else {})
                earlier.plus(Sum((held_between["between"][-1], 1.0), (held_between["between"][i], -1.0)))
                on.program.at_least(f"{ring} at an earlier backward of {unit.name}", Sum((ring, 1.0)), earlier)
    return held, rings


def _fp8_slot_bytes(on: Placement, unit: Unit, own_bytes: float) -> float:
    """Return the bytes of a slot for a unit that is fetched in fp8, or its own bytes if it never is."""
    fp8 = on.given.fp8_if_moved(unit)
    return fp8.slot_bytes + unit.frozen_bytes(on.weight_bytes) if fp8 else own_bytes


def _resident_gradient(on: Placement, unit: Unit, scale: float) -> Sum:
    if not unit.num_params:
        return Sum()
    num_bytes = on.weight_bytes * on.given.placed_params(unit) * scale
    return Sum((f"{unit.name}:{Place.GPU}", num_bytes), (f"{unit.name}:stays", num_bytes))


def _always(on: Placement, scale: float) -> tuple[Sum, Rings]:
    """Return the share of memory that resident parameters, resident state and slots take, and the rings of slots."""
    held, rings = _rings(on, scale)
    saved_bytes = on.given.resident_weight_bytes_per_param
    largest = max(on.given.placed_params(unit) for unit in on.units)
    most_bytes = max(map(on.given.placed_state_bytes_per_param, on.units))
    slot = on.program.variable(STATE_SLOT, 0.0, most_bytes * largest * scale)
    held[slot] += 1.0
    for unit in (unit for unit in on.units if unit.num_weights):
        own = on.own_bytes(unit) if on.given.gathers(unit) else unit.stored_bytes(on.weight_bytes)
        held.plus(Sum(("", 1.0)).plus(on.away(unit), -1.0), own * scale)
        if not unit.num_params:
            continue
        shard = on.given.placed_params(unit)
        state_bytes = on.given.placed_state_bytes_per_param(unit)
        held[f"{unit.name}:{Place.GPU}"] += (state_bytes - saved_bytes) * shard * scale
        # The largest streamed subgroup is at least as large as the mean.
        mean = shard / len(on.given.placed_subgroups(unit))
        streamed = Sum((f"{unit.name}:{Place.STREAM}", on.given.placed_state_bytes_per_param(unit) * mean * scale))
        on.program.at_least(f"{unit.name}: fits the state slot", Sum((slot, 1.0)), streamed)
    return held, rings


def weights_or_gradients(on: Placement, unit: Unit) -> str:
    """Return the share of a unit's parameters whose weight or gradient is on the host [Note: In place]."""
    program, name = on.program, unit.name
    served, spilled, stored = (on.share(unit, place) for place in ("host", "spill", "onnvme"))
    gradients = on.leaves(unit).plus(spilled, -1.0)
    there = program.variable(f"{name}:there", 0.0, 2.0)
    if not on.given.weight_in_state:
        if on.repeats > 1:
            gradients.plus(served)
        weights = Sum((f"{name}:upload", 1.0)).plus(served)
        program.at_least(f"{name}: weights on the host", Sum((there, 1.0)), weights)
        if spilled and stored:
            elsewhere = weights.plus(stored).plus(spilled, -1.0)
            program.at_least(f"{name}: weights, or gradients of those on NVMe", Sum((there, 1.0)), elsewhere)
    elif spilled:  # the host has weights of state on NVMe, and gradients of other state
        elsewhere = Sum().plus(stored, -1.0).plus(on.leaves(unit))
        program.at_least(f"{name}: weights of state on NVMe", Sum((there, 1.0)), elsewhere)
    program.at_least(f"{name}: gradients on the host", Sum((there, 1.0)), gradients)
    return there


def saved_activations(on: Placement, segment: Sequence[Unit]) -> Sum:
    """Return the bytes of a segment's activations while a later one computes backward."""
    num_tiles, name = float(segment[0].num_tiles), segment[0].segment
    saved = num_tiles * sum(unit.saved_bytes for unit in segment)
    held = Sum(("", saved))
    for way, _ in AGAIN:
        if (variable := f"{name}:{way}") in on.program.boxes:
            rest = num_tiles * segment[0].activation_output_bytes if way == "recompute" else 0.0
            held[variable] = rest - saved
    return held


def offloaded(
    program: LinearProgram, passages: Iterable[tuple[Sequence[Unit], int]], unit_bytes: float, where: str = ""
) -> dict[Tier, str]:
    """Add variables for the offloaded activations on each tier, in multiples of ``unit_bytes``; return them by tier.

    Args:
        program: the program to extend.
        passages: segments, each with the number of times that its activations are there.
        unit_bytes: the unit of the variables.
        where: ends the names of variables and rows.
    """
    everything, evicted = Sum(), Sum()
    for segment, count in passages:
        moved = count * sum(unit.swap_bytes for unit in segment) / unit_bytes
        for way, sums in (("offload", (everything,)), ("evict", (everything, evicted))):
            if (name := f"{segment[0].segment}:{way}") in program.boxes:
                for terms in sums:
                    terms[name] += moved
    if not everything:
        return {}
    tiers = (Tier.GPU, Tier.HOST, *((Tier.NVME,) if evicted else ()))
    high = program.highest(everything)
    found = {tier: program.variable(f"offloaded activations on {tier}{where}", 0.0, high) for tier in tiers}
    program.at_least(
        f"offloaded activations are somewhere{where}", Sum(*((name, 1.0) for name in found.values())), everything
    )
    if evicted:
        program.at_least(f"evicted activations alone are on NVMe{where}", evicted, Sum((found[Tier.NVME], 1.0)))
    return found
