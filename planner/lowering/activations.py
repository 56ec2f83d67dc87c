"""The pass that takes activations off the device between forward and backward.

[Note: Offloaded activations] What only products can make leaves the device right behind its unit's forward, and is
back just before its segment's backward, which makes the rest again. Both ways the look-ahead is bounded: forward runs
at most ``num_activation_slots`` segments ahead of what leaves, and what comes back at most that many ahead of backward.
On the host every unit has a place of its own. What only passes on to NVMe, or from there, goes through a ring of slots,
each for a segment: as many slots as that look-ahead. The same ring serves both ways, as queues are first-in first-out:
when the first segment comes back, the last one has been written.
"""

from collections.abc import Mapping

from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.program import Draft, Keys, LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Phase

Segment = list[LoweredUnit]
OFFLOADS = frozenset({"offload", "offload-nvme"})


class OffloadRooms:
    """The memory that offloaded activations leave to.

    Attributes:
        on_host, on_nvme: bytes for each unit whose activations end there, by name.
        num_slots, slot_bytes: of the ring on the host that those on NVMe pass through.
        slot_of: for each unit of those, its segment's slot, both ways.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions) -> None:
        decided = decisions.units
        self.on_host = {unit.name: unit.swap_bytes for unit in units if decided[unit.name].activations == "offload"}
        evicted = [s for s in segments(units) if decided[s[0].name].activations == "offload-nvme"]
        self.on_nvme = {unit.name: unit.swap_bytes for segment in evicted for unit in segment}
        self.slot_bytes = max((sum(unit.swap_bytes for unit in segment) for segment in evicted), default=0)
        self.num_slots = min(decisions.num_activation_slots, len(evicted))
        self.slot_of = {unit.name: i % self.num_slots for i, segment in enumerate(evicted) for unit in segment}


def activations(program: Program) -> None:
    """Offload and reload the activations of every segment for which that was decided, in every micro-batch."""
    leaving = [segment for segment in program.segments if segment[0].activations in OFFLOADS]
    for micro_batch in range(program.decisions.num_micro_batches if leaving else 0):
        evicts = _leave(program, leaving, micro_batch)
        _return(program, leaving[::-1], evicts, micro_batch)


def _leave(program: Program, leaving: list[Segment], micro_batch: int) -> dict[str, Draft]:
    """Add what moves activations off the device; return what writes them to NVMe, by unit."""
    count = program.decisions.num_activation_slots
    left: list[Draft] = []  # the last task of each segment
    evicted: list[Draft] = []
    evicts: dict[str, Draft] = {}
    for segment in leaving:
        segment[0].forwards[micro_batch].after += _at(left, count)
        goes_on = segment[0].activations == "offload-nvme"
        for unit in segment:
            forward = unit.forwards[micro_batch]
            offload = _move(program, forward, Lane.ACTIVATION_OUT, Op.OFFLOAD, unit, (forward.key,))
            unit.offloads.append(offload)
            if goes_on:
                offload.after += _at(evicted, count)
                evicts[unit.name] = _move(program, forward, Lane.NVME_WRITE, Op.EVICT, unit, (offload.key,))
        left.append(offload)
        if goes_on:
            evicted.append(evicts[unit.name])
    return evicts


def _return(program: Program, leaving: list[Segment], evicts: Mapping[str, Draft], micro_batch: int) -> None:
    """Add what moves activations back, the last segment first."""
    count = program.decisions.num_activation_slots
    last_forward = program.units[-1].forwards[micro_batch]
    used: list[Draft] = []  # the last backward of each segment
    passed: list[Draft] = []  # the last reload that frees a host buffer
    for segment in leaving:
        ahead = used[-count] if len(used) >= count else last_forward
        for unit in segment:
            source = unit.offloads[micro_batch]
            if evict := evicts.get(unit.name):
                freed = _at(passed, count) or (last_forward.key,)
                source = _move(program, ahead, Lane.NVME_READ, Op.RECALL, unit, (evict.key, *freed))
            reload = _move(program, ahead, Lane.ACTIVATION_IN, Op.RELOAD, unit, (source.key, ahead.key))
            unit.reloads.append(reload)
            unit.agains[micro_batch].after += (reload.key,)
        used.append(segment[0].backwards[micro_batch])
        if evict:
            passed.append(reload)


def _at(done: list[Draft], count: int) -> Keys:
    """Return what was done ``count`` segments ago: lanes are first-in first-out, so all before it was too."""
    return (done[-count].key,) if len(done) >= count else ()


def _move(program: Program, anchor: Draft, lane: Lane, op: Op, unit: LoweredUnit, after: Keys) -> Draft:
    """Add a move of a unit's activations, issued behind a compute task of the same micro-batch."""
    phase = Phase.FORWARD if op in {Op.OFFLOAD, Op.EVICT} else Phase.BACKWARD
    draft = program.draft(lane, op, phase, unit, anchor.micro_batch, after)
    draft.num_bytes = unit.unit.swap_bytes
    program.behind[anchor.key].append(draft)
    return draft
