"""The pass that offloads saved activations between forward and backward.

[Note: Offloaded activations] Outputs of products leave the device right after their unit's forward, and return just
before their segment's backward, which recomputes the rest. The look-ahead is bounded: forward runs at most
``num_activation_slots`` segments ahead of the offloads, and reloads run at most that many segments ahead of backward.
On the host every unit has its own memory. Activations on their way to NVMe, or back, go through a ring of slots of one
segment each, as many as the look-ahead. The same ring serves both directions, because queues are first-in first-out:
when the first segment comes back, the last one has been written.
"""

from collections.abc import Mapping

from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.program import LoweredUnit, Program
from planner.schedule.tasks import Draft, Keys, Lane, Op, Phase

Segment = list[LoweredUnit]


class OffloadRooms:
    """The memory for offloaded activations.

    Attributes:
        on_host, on_nvme: bytes by the name of the unit, for units whose activations are offloaded there.
        num_slots, slot_bytes: the ring on the host through which activations for NVMe pass.
        slot_of: for each unit with activations on NVMe, the slot of its segment.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions) -> None:
        decided = decisions.units
        ways = {unit.name: decided[unit.name].activations for unit in units}
        self.on_host = {unit.name: unit.swap_bytes for unit in units if ways[unit.name] == "offload"}
        evicted = [s for s in segments(units) if decided[s[0].name].activations == "offload-nvme"]
        self.on_nvme = {unit.name: unit.swap_bytes for segment in evicted for unit in segment}
        self.slot_bytes = max((sum(unit.swap_bytes for unit in segment) for segment in evicted), default=0)
        self.num_slots = min(decisions.num_activation_slots, len(evicted))
        self.slot_of = {unit.name: i % self.num_slots for i, segment in enumerate(evicted) for unit in segment}


def activations(program: Program) -> None:
    """Offload and reload activations in every micro-batch, of all segments whose decision says so."""
    leaving = [segment for segment in program.segments if segment[0].moved_bytes is not None]
    for micro_batch in range(program.decisions.num_micro_batches if leaving else 0):
        evicts = _leave(program, leaving, micro_batch)
        _return(program, leaving[::-1], evicts, micro_batch)


def _leave(program: Program, leaving: list[Segment], micro_batch: int) -> dict[str, Draft]:
    """Add the tasks that offload activations; return those that write to NVMe, by unit."""
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
    """Add the tasks that reload activations, the last segment first."""
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
    """Return the key of the task ``count`` segments ago. Lanes are first-in first-out, so earlier ones ended too."""
    return (done[-count].key,) if len(done) >= count else ()


def _move(program: Program, anchor: Draft, lane: Lane, op: Op, unit: LoweredUnit, after: Keys) -> Draft:
    """Add a copy of a unit's activations, issued right after a compute task of the same micro-batch."""
    phase = Phase.FORWARD if op in {Op.OFFLOAD, Op.EVICT} else Phase.BACKWARD
    draft = program.draft(lane, op, phase, unit, anchor.micro_batch, after)
    draft.num_bytes = unit.moved_bytes or 0
    program.behind[anchor.key].append(draft)
    return draft
