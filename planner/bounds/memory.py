"""Conditions on memory: of the device at every backward, of the host and its drives all the time."""

from collections import defaultdict
from collections.abc import Sequence

from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import RING, ROOM, Sum
from planner.bounds.storage import STATE_BUFFERS, offloaded
from planner.decisions import Place
from planner.graph import Unit
from planner.lowering.workspace import least_workspace_bytes
from planner.schedule.tasks import Tier
from planner.simulate.prediction import capacities

STATE_SLOT = "state slot"


class Memory:
    """Adds the conditions on memory to a placement's program.

    Attributes:
        held: the share of device memory in use at the first backward of every unit.
        rings: rings of parameter slots, by variable: the share of memory of one slot, and the units that use it.
    """

    def __init__(self, on: Placement) -> None:
        self.on = on
        self.held: list[Sum] = []
        self.rings: dict[str, tuple[float, list[Unit]]] = {}
        self._memory()

    def _memory(self) -> None:
        capacity = capacities(self.on.cost)
        device_bytes = float(capacity[Tier.GPU])
        passages = [(segment, segment[0].num_tiles) for segment in self.on.segments[:-1]]
        activations = offloaded(self.on.program, passages, device_bytes)
        self._device_memory(device_bytes, Sum(*((activations[tier], 1.0) for tier in activations if tier is Tier.GPU)))
        host, nvme = (
            Sum(*((activations[tier], device_bytes) for tier in activations if tier is where))
            for where in (Tier.HOST, Tier.NVME)
        )
        if self.on.stores(nvme=True):
            host.plus(Sum((self._state_buffers(device_bytes), device_bytes)))
        for unit in (unit for unit in self.on.units if unit.num_params):
            shard = self.on.given.placed_params(unit)
            name = unit.name
            for place in (Place.CPU, Place.STREAM):
                host[f"{name}:{place}"] += self.on.given.placed_state_bytes_per_param(unit) * shard
            host[weights_or_gradients(self.on, unit)] += float(self.on.weight_bytes * shard)
            fp8 = self.on.given.fp8_if_moved(unit)
            host.plus(self.on.fetched(unit), float(fp8.host_bytes if fp8 else 0))
            on_nvme = Sum((f"{name}:{Place.NVME}", 1.0)) if self.on.stores(nvme=True) else Sum()
            versions = self.on.given.num_state_versions
            nvme.plus(on_nvme, float(versions * self.on.given.placed_state_bytes_per_param(unit) * shard))
            weights_there = f"{name}:onnvme"
            if weights_there in self.on.program.boxes and not self.on.given.precision.weight_in_state:
                nvme[weights_there] += float(versions * self.on.weight_bytes * shard)
        for unit in (unit for unit in self.on.units if unit.frozen):
            for held, where in ((host, f"{unit.name}:host"), (nvme, f"{unit.name}:onnvme")):
                if where in self.on.program.boxes:
                    held[where] += float(self.on.given.frozen_shard_bytes(unit))
        ranks = self.on.cost.ranks_per_node
        for tier, held in ((Tier.HOST, host), (Tier.NVME, nvme)):
            if capacity[tier] and held:
                room = Sum((ROOM[tier], 1.0))
                self.on.program.at_least(f"memory: {tier}", room, Sum().plus(held, ranks / capacity[tier]))

    def _state_buffers(self, unit_bytes: float) -> str:
        """Return the bytes of host buffers for state on NVMe, as multiples of ``unit_bytes``: at least one subgroup."""
        shards = {unit.name: self.on.given.placed_params(unit) for unit in self.on.units if unit.num_params}
        trained = [unit for unit in self.on.units if unit.num_params]
        everything = (
            sum(self.on.given.placed_state_bytes_per_param(unit) * shards[unit.name] for unit in trained) / unit_bytes
        )
        buffers = self.on.program.variable(STATE_BUFFERS, 0.0, everything)
        for unit in trained:
            mean = (
                self.on.given.placed_state_bytes_per_param(unit)
                * shards[unit.name]
                / len(self.on.given.placed_subgroups(unit))
                / unit_bytes
            )
            one = Sum((f"{unit.name}:{Place.NVME}", mean))
            self.on.program.at_least(f"{unit.name}: fits the host buffers", Sum((buffers, 1.0)), one)
        return buffers

    def _device_memory(self, capacity: float, offloaded_there: Sum) -> None:
        """Add a condition for the backward of every unit; at the last unit's, offloaded activations count too."""
        program, scale, room = self.on.program, 1.0 / capacity, ROOM[Tier.GPU]
        held_always = self._always(scale)
        always = program.variable("always held", 0.0, program.highest(held_always))
        program.at_least("always held", Sum((always, 1.0)), held_always, equal=True)
        before = [Sum().plus(saved_activations(self.on, segment), scale) for segment in self.on.segments]
        saved = self.on.chain("activations", before)
        resident = self.on.chain("resident gradients", (self._resident_gradient(unit, scale) for unit in self.on.units))
        state = (Sum().plus(self.on.state_out(unit), scale) if unit.num_params else Sum() for unit in self.on.units)
        self.on.chain("streamed", state)
        position = 0
        for number, segment in enumerate(self.on.segments):
            inside = 0.0
            for unit in segment:
                inside += unit.saved_bytes
                held = Sum((always, 1.0)).plus({saved[number - 1]: 1.0} if number else {})
                computes = (unit.fp8_twin if self.on.given.fp8_if_moved(unit) else None) or unit
                workspace_bytes = least_workspace_bytes(computes, self.on.weight_bytes)
                held[""] += (inside + workspace_bytes + self.on.weight_bytes * unit.num_params) * scale
                if f"{segment[0].segment}:recompute" in program.boxes and segment[0].operators[0].copies_input:
                    held[f"{segment[0].segment}:recompute"] += segment[0].activation_output_bytes * scale
                name = f"memory: device at the backward of {unit.name}"
                held.plus(offloaded_there if unit is self.on.units[-1] else {})
                if self.on.given.clip:  # gradients of the units behind it; after the first micro-batch, of all others
                    held.plus(Sum((resident[-1], 1.0), (resident[position], -1.0)))
                self.held.append(Sum().plus(held))
                if self.on.given.clip and self.on.repeats > 1 and position:
                    held[resident[position - 1]] += 1.0
                program.at_least(name, Sum((room, 1.0)), held)
                position += 1

    def _rings(self, scale: float) -> Sum:
        """Return the share of memory that parameter slots take: see [Note: Static slots].

        There is a ring for each size of units, with slots for the unit that computes and for the units that are kept.
        """
        rings: dict[str, list[Unit]] = defaultdict(list)
        for unit in self.on.units:
            if f"{unit.name}:fills" in self.on.program.boxes:
                rings[unit.size_name].append(unit)
        held = Sum()
        for size_name, units in rings.items():
            size = units[0].stored_bytes(self.on.weight_bytes) * scale
            least = {unit.name: min(size, self._fp8_slot_bytes(unit, size / scale) * scale) for unit in units}
            ring = self.on.program.variable(f"{RING}{size_name}", 0.0, size * len(units))
            held[ring] = 1.0
            self.rings[ring] = (min(least.values()), units)
            held_between = {
                gap: self.on.chain(
                    f"{ring} kept {gap}", (Sum((f"{unit.name}:kept {gap}", least[unit.name])) for unit in units)
                )
                for gap, _ in self.on.gaps()
            }
            for i, unit in enumerate(units):
                needed = Sum(("", size)) if self.on.given.gathers(unit) else Sum().plus(self.on.away(unit), size)
                needed.plus(self.on.moved_in_fp8(unit), least[unit.name] - size)
                at_last = Sum().plus(needed).plus({held_between["at last"][i - 1]: 1.0} if i else {})
                self.on.program.at_least(f"{ring} at the backward of {unit.name}", Sum((ring, 1.0)), at_last)
                if self.on.repeats > 1:
                    earlier = needed.plus({held_between["before"][i - 1]: 1.0} if i else {})
                    earlier.plus(Sum((held_between["between"][-1], 1.0), (held_between["between"][i], -1.0)))
                    self.on.program.at_least(f"{ring} at an earlier backward of {unit.name}", Sum((ring, 1.0)), earlier)
        return held

    def _fp8_slot_bytes(self, unit: Unit, own_bytes: float) -> float:
        """Return the bytes of a slot for a unit that is fetched in fp8, or its own bytes if it never is."""
        fp8 = self.on.given.fp8_if_moved(unit)
        return fp8.slot_bytes + unit.frozen_bytes(self.on.weight_bytes) if fp8 else own_bytes

    def _resident_gradient(self, unit: Unit, scale: float) -> Sum:
        if not unit.num_params:
            return Sum()
        num_bytes = self.on.weight_bytes * self.on.given.placed_params(unit) * scale
        return Sum((f"{unit.name}:{Place.GPU}", num_bytes), (f"{unit.name}:stays", num_bytes))

    def _always(self, scale: float) -> Sum:
        """Return the share of memory that resident parameters, resident state and slots take."""
        held = self._rings(scale)
        saved_bytes = self.on.given.resident_weight_bytes_per_param
        largest = max(self.on.given.placed_params(unit) for unit in self.on.units)
        most_bytes = max(map(self.on.given.placed_state_bytes_per_param, self.on.units))
        slot = self.on.program.variable(STATE_SLOT, 0.0, most_bytes * largest * scale)
        held[slot] += 1.0
        for unit in (unit for unit in self.on.units if unit.num_weights):
            own = self.on.own_bytes(unit) if self.on.given.gathers(unit) else unit.stored_bytes(self.on.weight_bytes)
            held.plus(Sum(("", 1.0)).plus(self.on.away(unit), -1.0), own * scale)
            if not unit.num_params:
                continue
            shard = self.on.given.placed_params(unit)
            state_bytes = self.on.given.placed_state_bytes_per_param(unit)
            held[f"{unit.name}:{Place.GPU}"] += (state_bytes - saved_bytes) * shard * scale
            # The largest streamed subgroup is at least as large as the mean.
            mean = shard / len(self.on.given.placed_subgroups(unit))
            streamed = Sum(
                (f"{unit.name}:{Place.STREAM}", self.on.given.placed_state_bytes_per_param(unit) * mean * scale)
            )
            self.on.program.at_least(f"{unit.name}: fits the state slot", Sum((slot, 1.0)), streamed)
        return held


def weights_or_gradients(on: Placement, unit: Unit) -> str:
    """Return the share of a unit's parameters whose weight or gradient is on the host [Note: In place]."""
    program, name = on.program, unit.name
    served = {f"{name}:host": 1.0} if f"{name}:host" in program.boxes else {}
    gradients = on.leaves(unit)
    if f"{name}:spill" in program.boxes:
        gradients[f"{name}:spill"] -= 1.0
    there = program.variable(f"{name}:there", 0.0, 2.0)
    if not on.given.precision.weight_in_state:
        if on.repeats > 1:
            gradients.plus(served)
        weights = Sum((f"{name}:upload", 1.0)).plus(served)
        program.at_least(f"{name}: weights on the host", Sum((there, 1.0)), weights)
        if f"{name}:spill" in program.boxes and f"{name}:onnvme" in program.boxes:
            elsewhere = weights.plus(Sum((f"{name}:onnvme", 1.0), (f"{name}:spill", -1.0)))
            program.at_least(f"{name}: weights, or gradients of those on NVMe", Sum((there, 1.0)), elsewhere)
    elif f"{name}:spill" in program.boxes:  # the host has weights of state on NVMe, and gradients of other state
        elsewhere = Sum((f"{name}:onnvme", -1.0)) if f"{name}:onnvme" in program.boxes else Sum()
        elsewhere = elsewhere.plus(on.leaves(unit))
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
