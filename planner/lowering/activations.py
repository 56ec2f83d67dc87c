"""The pass that offloads saved activations between forward and backward.

[Note: Offloaded activations] Outputs of products leave the device right after their unit's forward, and return just
before their segment's backward, which recomputes the rest. The look-ahead is bounded: forward runs at most
``num_activation_slots`` segments ahead of the offloads, and reloads run at most that many segments ahead of backward.
On the host every unit has its own memory, as often as micro-batches are in flight there: one, but in a pipeline.
Activations on their way to NVMe, or back, go through a ring of slots of one segment each, as many as the look-ahead.
The same ring serves both directions, and what takes a slot waits for what had it before. Where tiles pass a segment one
after another ([Note: Breadth order] in :mod:`planner.lowering.compute`), all of this is said of a tile's passage
through a segment.

In a pipeline, reloads for a backward may begin while the stage runs the forward of another micro-batch before it, but
not those from NVMe: that forward needs the slots of the ring.
"""

from collections.abc import Sequence

from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.compute import turns_of
from planner.lowering.program import Keys, LoweredUnit, Program, rounds_of
from planner.schedule.tasks import Lane, Op, Phase, Task

Segment = list[LoweredUnit]
Passage = tuple[Segment, int]  # with its tile


class OffloadRooms:
    """The memory for offloaded activations: rooms, each with a name.

    Attributes:
        turn_of: the round of every unit.
        on_host, on_nvme: bytes by name, of units whose activations are offloaded there.
        through: the names of each passage of a tile through a segment whose activations go on to NVMe, in forward
            order, for one micro-batch in flight after another.
        num_slots, slot_bytes: the ring on the host through which activations for NVMe pass.
        slot_of: for each name with activations on NVMe, the slot of its passage.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions) -> None:
        decided = decisions.units
        ways = {unit.name: decided[unit.name].activations for unit in units}
        self.turn_of = dict(zip((unit.name for unit in units), rounds_of(units, decisions), strict=True))
        self._num_in_flight = num_in_flight(decisions)
        passages = [
            (ways[segment[0].name], {self.name(unit.name, flight, tile): unit.swap_bytes for unit in segment})
            for flight in range(max(self._num_in_flight))
            for segment in segments(units)
            if flight < self._num_in_flight[self.turn_of[segment[0].name]]
            for tile in range(segment[0].num_tiles)
        ]
        evicted = [rooms for way, rooms in passages if way == "offload-nvme"]
        self.on_host = {name: size for way, rooms in passages if way == "offload" for name, size in rooms.items()}
        self.on_nvme = {name: num_bytes for rooms in evicted for name, num_bytes in rooms.items()}
        self.through = [list(rooms) for rooms in evicted]
        self.slot_bytes = max((sum(rooms.values()) for rooms in evicted), default=0)
        self.num_slots = min(decisions.num_activation_slots, len(evicted))
        self.slot_of = {name: i % self.num_slots for i, rooms in enumerate(evicted) for name in rooms}

    def name(self, unit: str, micro_batch: int, tile: int = 0) -> str:
        """Return the name of the memory of a tile's offloaded activations in a unit."""
        flight = micro_batch % self._num_in_flight[self.turn_of[unit]]
        return unit + (f" micro-batch {flight}" if flight else "") + (f" tile {tile}" if tile else "")


def num_in_flight(decisions: Decisions) -> list[int]:
    """Return the most micro-batches between forward and backward, by round; see :func:`.compute.turns`."""
    count = decisions.num_micro_batches
    return [count] * len(decisions.round_starts) + [min(decisions.num_forwards_ahead, count)]


def activations(program: Program) -> None:
    """Offload and reload activations in every micro-batch, of all segments whose decision says so."""
    if all(unit.moved_bytes is None for unit in program.units):
        return
    decisions, moves, in_flight = program.decisions, _Moves(program), 0
    for op, turn, micro_batch in turns_of(decisions):
        if op is Op.WEIGHT_GRADIENT:
            continue
        passages = [
            (segment, tile)
            for segment in program.rounds[turn]
            if segment[0].moved_bytes is not None
            for tile in range(segment[0].unit.num_tiles)
        ]
        last = program.rounds[turn][-1][-1]
        end = last.forwards[last.there(micro_batch, last.unit.num_tiles - 1)]
        if op is Op.FORWARD:
            moves.leave(passages, micro_batch, end)
        else:
            moves.come_back(passages[::-1], micro_batch, end)
        in_flight += 1 if op is Op.FORWARD else -1
        if not in_flight:
            moves.forget()


class _Moves:
    """Adds the copies, forward after backward as the spine has them."""

    def __init__(self, program: Program) -> None:
        self._program, self._count = program, program.decisions.num_activation_slots
        self._rooms = OffloadRooms(program.model, program.decisions)
        self._evicts: dict[str, Task] = {}  # by room
        self.forget()

    def forget(self) -> None:
        """Nothing is in flight: whatever follows waits for all of this anyway."""
        self._left: list[Task] = []  # the last offload of each passage
        self._used: list[Task] = []  # the last backward of each passage
        self._taken: dict[int, Task] = {}  # what last wrote or read each slot of the ring

    def leave(self, passages: Sequence[Passage], micro_batch: int, end: Task) -> None:
        """Offload what a forward has saved; ``end`` is its last task."""
        for segment, tile in passages:
            segment[0].forwards[segment[0].there(micro_batch, tile)].after += _at(self._left, self._count)
            slot = self._slot(segment, micro_batch, tile)
            before = self._taken.get(slot)
            for unit in segment:
                forward = unit.forwards[unit.there(micro_batch, tile)]
                offload = self._move(forward, Lane.ACTIVATION_OUT, Op.OFFLOAD, unit, micro_batch, tile, forward)
                unit.offloads.append(offload)
                if slot >= 0:
                    offload.after += (before.index,) if before else ()
                    evict = self._move(forward, Lane.NVME_WRITE, Op.EVICT, unit, micro_batch, tile, offload)
                    self._evicts[self._rooms.name(unit.name, micro_batch, tile)] = self._taken[slot] = evict
            self._left.append(offload)
        self._latest = end

    def come_back(self, passages: Sequence[Passage], micro_batch: int, end: Task) -> None:
        """Reload what a backward needs, the last passage first; ``end`` is the last task of its forward."""
        for segment, tile in passages:
            slot = self._slot(segment, micro_batch, tile)
            since = end if slot < 0 else self._latest
            used = self._used[-self._count] if len(self._used) >= self._count else self._latest
            ahead = max(used, since, key=lambda task: task.index)  # on the spine, keys count in order
            before = self._taken.get(slot)
            for unit in segment:
                source = unit.offloads[unit.there(micro_batch, tile)]
                if slot >= 0:
                    freed = before if before and before.op is Op.RELOAD else self._latest
                    evict = self._evicts[self._rooms.name(unit.name, micro_batch, tile)]
                    source = self._move(ahead, Lane.NVME_READ, Op.RECALL, unit, micro_batch, tile, evict, freed)
                    source.after += (before.index,) if before and before.index not in source.after else ()
                reload = self._move(ahead, Lane.ACTIVATION_IN, Op.RELOAD, unit, micro_batch, tile, source, ahead)
                unit.reloads.append(reload)
                unit.agains[unit.back(micro_batch, tile)].after += (reload.index,)
            self._used.append(segment[0].backwards[segment[0].back(micro_batch, tile)])
            if slot >= 0:
                self._taken[slot] = reload

    def _slot(self, segment: Segment, micro_batch: int, tile: int) -> int:
        """Return the slot of the ring that a passage takes; -1 if its activations stay on the host."""
        return self._rooms.slot_of.get(self._rooms.name(segment[0].name, micro_batch, tile), -1)

    def _move(
        self, anchor: Task, lane: Lane, op: Op, unit: LoweredUnit, micro_batch: int, tile: int, *after: Task
    ) -> Task:
        """Add a copy of a unit's activations, issued right after a compute task."""
        phase = Phase.FORWARD if op in {Op.OFFLOAD, Op.EVICT} else Phase.BACKWARD
        draft = self._program.draft(lane, op, phase, unit, micro_batch, tuple(t.index for t in after), tile=tile)
        draft.num_bytes = unit.moved_bytes or 0
        self._program.behind[anchor.index].append(draft)
        return draft


def _at(done: list[Task], count: int) -> Keys:
    """Return the key of the task ``count`` passages ago. Lanes are first-in first-out, so earlier ones ended too."""
    return (done[-count].index,) if len(done) >= count else ()
