"""The pass that offloads saved activations between forward and backward.

[Note: Offloaded activations] Outputs of products leave the device right after their unit's forward, and return just
before their segment's backward, which recomputes the rest. The look-ahead is bounded: forward runs at most
``num_activation_slots`` segments ahead of the offloads, and reloads run at most that many segments ahead of backward.
On the host every unit has its own memory. Activations on their way to NVMe, or back, go through a ring of slots of one
segment each, as many as the look-ahead. The same ring serves both directions, because queues are first-in first-out:
when the first segment comes back, the last one has been written. Where tiles pass a segment one after another ([Note:
Breadth order] in :mod:`planner.lowering.compute`), all of this is said of a tile's passage through a segment.
"""

from collections.abc import Mapping

from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.program import Keys, LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Phase, Task

Segment = list[LoweredUnit]
Passage = tuple[Segment, int]  # with its tile


def room_name(unit: str, tile: int) -> str:
    """Return the name of the memory of a tile's offloaded activations in a unit."""
    return f"{unit} tile {tile}" if tile else unit


class OffloadRooms:
    """The memory for offloaded activations; names are those of :func:`room_name`.

    Attributes:
        on_host, on_nvme: bytes by name, of units whose activations are offloaded there.
        through: the names of each passage of a tile through a segment whose activations go on to NVMe, in forward
            order.
        num_slots, slot_bytes: the ring on the host through which activations for NVMe pass.
        slot_of: for each name with activations on NVMe, the slot of its passage.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions) -> None:
        decided = decisions.units
        ways = {unit.name: decided[unit.name].activations for unit in units}
        passages = [
            (ways[segment[0].name], {room_name(unit.name, tile): unit.swap_bytes for unit in segment})
            for segment in segments(units)
            for tile in range(segment[0].num_tiles)
        ]
        evicted = [rooms for way, rooms in passages if way == "offload-nvme"]
        self.on_host = {name: size for way, rooms in passages if way == "offload" for name, size in rooms.items()}
        self.on_nvme = {name: num_bytes for rooms in evicted for name, num_bytes in rooms.items()}
        self.through = [list(rooms) for rooms in evicted]
        self.slot_bytes = max((sum(rooms.values()) for rooms in evicted), default=0)
        self.num_slots = min(decisions.num_activation_slots, len(evicted))
        self.slot_of = {name: i % self.num_slots for i, rooms in enumerate(evicted) for name in rooms}


def activations(program: Program) -> None:
    """Offload and reload activations in every micro-batch, of all segments whose decision says so."""
    leaving = [
        (segment, tile)
        for segment in program.segments
        if segment[0].moved_bytes is not None
        for tile in range(segment[0].unit.num_tiles)
    ]
    for micro_batch in range(program.decisions.num_micro_batches if leaving else 0):
        evicts = _leave(program, leaving, micro_batch)
        _return(program, leaving[::-1], evicts, micro_batch)


def _leave(program: Program, leaving: list[Passage], micro_batch: int) -> dict[str, Task]:
    """Add the tasks that offload activations; return those that write to NVMe, by :func:`room_name`."""
    count = program.decisions.num_activation_slots
    left: list[Task] = []  # the last task of each passage
    evicted: list[Task] = []
    evicts: dict[str, Task] = {}
    for segment, tile in leaving:
        segment[0].forwards[segment[0].there(micro_batch, tile)].after += _at(left, count)
        goes_on = segment[0].activations == "offload-nvme"
        for unit in segment:
            forward = unit.forwards[unit.there(micro_batch, tile)]
            offload = _move(program, forward, Lane.ACTIVATION_OUT, Op.OFFLOAD, unit, tile, (forward.index,))
            unit.offloads.append(offload)
            if goes_on:
                offload.after += _at(evicted, count)
                name = room_name(unit.name, tile)
                evicts[name] = _move(program, forward, Lane.NVME_WRITE, Op.EVICT, unit, tile, (offload.index,))
        left.append(offload)
        if goes_on:
            evicted.append(evicts[name])
    return evicts


def _return(program: Program, leaving: list[Passage], evicts: Mapping[str, Task], micro_batch: int) -> None:
    """Add the tasks that reload activations, the last segment and tile first."""
    count, final = program.decisions.num_activation_slots, program.units[-1]
    last_forward = final.forwards[final.there(micro_batch, final.unit.num_tiles - 1)]
    used: list[Task] = []  # the last backward of each passage
    passed: list[Task] = []  # the last reload that frees a host buffer
    for segment, tile in leaving:
        ahead = used[-count] if len(used) >= count else last_forward
        for unit in segment:
            source = unit.offloads[unit.there(micro_batch, tile)]
            if evict := evicts.get(room_name(unit.name, tile)):
                freed = _at(passed, count) or (last_forward.index,)
                source = _move(program, ahead, Lane.NVME_READ, Op.RECALL, unit, tile, (evict.index, *freed))
            reload = _move(program, ahead, Lane.ACTIVATION_IN, Op.RELOAD, unit, tile, (source.index, ahead.index))
            unit.reloads.append(reload)
            unit.agains[unit.back(micro_batch, tile)].after += (reload.index,)
        used.append(segment[0].backwards[segment[0].back(micro_batch, tile)])
        if evict:
            passed.append(reload)


def _at(done: list[Task], count: int) -> Keys:
    """Return the key of the task ``count`` passages ago. Lanes are first-in first-out, so earlier ones ended too."""
    return (done[-count].index,) if len(done) >= count else ()


def _move(program: Program, anchor: Task, lane: Lane, op: Op, unit: LoweredUnit, tile: int, after: Keys) -> Task:
    """Add a copy of a unit's activations, issued right after a compute task of the same micro-batch."""
    phase = Phase.FORWARD if op in {Op.OFFLOAD, Op.EVICT} else Phase.BACKWARD
    draft = program.draft(lane, op, phase, unit, anchor.micro_batch, after, tile=tile)
    draft.num_bytes = unit.moved_bytes or 0
    program.behind[anchor.index].append(draft)
    return draft
