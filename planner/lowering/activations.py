"""The pass that takes activations off the device between forward and backward.

[Note: Offloaded activations] What only products can make leaves the device right behind its unit's forward, and is
back just before its segment's backward, which makes the rest again. Both ways the look-ahead is bounded: forward runs
at most ``num_activation_slots`` segments ahead of what leaves, and what comes back at most that many ahead of backward.
On the host every unit has a place of its own. What only passes on to NVMe, or from there, goes through a ring of slots,
each for a segment: as many slots as that look-ahead. The same ring serves both ways, as queues are first-in first-out:
when the first segment comes back, the last one has been written.
"""

from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.compute import AGAIN
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

Segment = list[Unit]


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
    leaving = [s for s in program.segments if program.decisions.units[s[0].name].offloads]
    for micro_batch in range(program.decisions.num_micro_batches if leaving else 0):
        _leave(program, leaving, micro_batch)
        _return(program, leaving[::-1], micro_batch)


def evicts(program: Program, segment: Segment) -> bool:
    """Return whether a segment's activations go on to NVMe."""
    return program.decisions.units[segment[0].name].activations == "offload-nvme"


def _leave(program: Program, leaving: list[Segment], micro_batch: int) -> None:
    count = program.decisions.num_activation_slots
    left: list[str] = []  # the last task of each segment
    evicted: list[str] = []
    for segment in leaving:
        first = program.drafts[f"{Op.FORWARD}:{segment[0].name}:{micro_batch}"]
        first.after += _at(left, count)
        for unit in segment:
            forward = f"{Op.FORWARD}:{unit.name}:{micro_batch}"
            offload = _move(program, forward, Lane.ACTIVATION_OUT, Op.OFFLOAD, unit, micro_batch)
            offload.after = [forward]
            if evicts(program, segment):
                offload.after += _at(evicted, count)
                evict = _move(program, forward, Lane.NVME_WRITE, Op.EVICT, unit, micro_batch)
                evict.after = [offload.key]
        left.append(offload.key)
        if evicts(program, segment):
            evicted.append(evict.key)


def _return(program: Program, leaving: list[Segment], micro_batch: int) -> None:
    count = program.decisions.num_activation_slots
    last_forward = f"{Op.FORWARD}:{program.units[-1].name}:{micro_batch}"
    used: list[str] = []  # the last backward of each segment
    passed: list[str] = []  # the last reload that frees a host buffer
    for segment in leaving:
        again = AGAIN[program.decisions.units[segment[0].name].activations]
        ahead = _at(used, count) or [last_forward]
        for unit in segment:
            source = f"{Op.OFFLOAD}:{unit.name}:{micro_batch}"
            if evicts(program, segment):
                recall = _move(program, ahead[0], Lane.NVME_READ, Op.RECALL, unit, micro_batch)
                recall.after = [f"{Op.EVICT}:{unit.name}:{micro_batch}", *(_at(passed, count) or [last_forward])]
                source = recall.key
            reload = _move(program, ahead[0], Lane.ACTIVATION_IN, Op.RELOAD, unit, micro_batch)
            reload.after = [source, *ahead]
            program.drafts[f"{again}:{unit.name}:{micro_batch}"].after.append(reload.key)
        used.append(f"{Op.BACKWARD}:{segment[0].name}:{micro_batch}")
        if evicts(program, segment):
            passed.append(reload.key)


def _at(done: list[str], count: int) -> list[str]:
    """Return what was done ``count`` segments ago: lanes are first-in first-out, so all before it was too."""
    return [done[-count]] if len(done) >= count else []


def _move(program: Program, anchor: str, lane: Lane, op: Op, unit: Unit, micro_batch: int) -> Draft:
    phase = Phase.FORWARD if op in {Op.OFFLOAD, Op.EVICT} else Phase.BACKWARD
    draft = Draft(f"{op}:{unit.name}:{micro_batch}", lane, op, phase, unit.name, micro_batch)
    draft.num_bytes = unit.swap_bytes
    program.behind[anchor].append(program.add(draft))
    return draft
