"""What memory holds while a schedule is walked, and which tasks are ordered; see ``hazards.py``."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

from cases import as_rival

from planner.decisions import Decisions, Place
from planner.graph import Unit, segments
from planner.lowering import slots
from planner.lowering.activations import OffloadRooms
from planner.lowering.storage import spill_rooms
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from ullage.rivals.decisions import GradientPath

Node = tuple[int, int]  # iteration, task
Ordered = Callable[[Node, Node], bool]  # whether the first has ended before the second starts
NUM_ITERATIONS = 3


def ordered_by_rules(schedule: Schedule, num_iterations: int = NUM_ITERATIONS, *, fifo: bool = True) -> Ordered:
    """Return what holds under any timing: the transitive closure of dependencies and (if ``fifo``) lanes."""
    count = len(schedule.tasks)
    before: list[int] = []  # bit sets
    last_in_lane: dict[Lane, int] = {}
    for iteration in range(num_iterations):
        for task in schedule.tasks:
            direct = [iteration * count + i for i in task.after]
            if iteration:
                direct += [(iteration - 1) * count + i for i in task.after_previous]
            if fifo and task.lane in last_in_lane:
                direct.append(last_in_lane[task.lane])
            last_in_lane[task.lane] = len(before)
            mine = 0
            for node in direct:
                mine |= before[node] | 1 << node
            before.append(mine)
    return lambda a, b: bool(before[b[0] * count + b[1]] >> (a[0] * count + a[1]) & 1)


def ordered_in(timeline: Timeline) -> Ordered:
    """Return what holds in one timeline."""
    start_s, end_s = timeline.start_s.tolist(), timeline.end_s.tolist()
    return lambda a, b: end_s[a[0]][a[1]] <= start_s[b[0]][b[1]]


class WalkedMemory:
    """What all memory holds, and who touched it last."""

    def __init__(self, schedule: Schedule, units: tuple[Unit, ...], decisions: Decisions, ordered: Ordered) -> None:
        self.schedule, self.decisions, self.ordered = schedule, as_rival(decisions), ordered
        path = self.decisions.gradient_path
        self.on_device = path is GradientPath.ON_DEVICE
        self.units = {unit.name: unit for unit in units}
        self.slot_of = slots(units, decisions).of_unit
        rooms = OffloadRooms(units, decisions)
        self.passage, self.room_of, self.turn_of = rooms.slot_of, rooms.name, rooms.turn_of
        self.spill_room = spill_rooms(units, decisions)[1] if path is GradientPath.ONCE else {}
        self.position = {unit.name: i for segment in segments(units) for i, unit in enumerate(segment)}
        self.gathers = {name for name, unit in self.units.items() if decisions.gathers(unit)}
        self.regathers = {name for name, unit in self.units.items() if decisions.regathers(unit)}
        self.replicated = {name for name, unit in self.units.items() if decisions.replicas(unit) > 1}
        # By unit, whose backward makes a part of its gradient, with each tile.
        self.contributors: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for unit in units:
            for name in (unit.name, *unit.shared_units):
                if self.units[name].num_params:
                    self.contributors[name] |= {(unit.name, tile) for tile in range(unit.num_tiles)}
        self.found: list[str] = []
        self.memory: dict[Hashable, Any] = {}
        self.writer: dict[Hashable, Node] = {}
        self.readers: dict[Hashable, list[Node]] = defaultdict(list)
        self.node: Node = (0, 0)
        self.updated: Counter[tuple[int, str, int]] = Counter()
        self.flushes: dict[tuple[int, str, int], list[Node]] = defaultdict(list)  # of one backward, scatter included

    # -- memory ---------------------------------------------------------------------------------------------------

    def read(self, place: Hashable, default: Any = None) -> Any:
        """Return what some memory holds."""
        if place in self.writer:
            self._after(self.writer[place], place, "reads, but may not come after the write of")
        self.readers[place].append(self.node)
        return self.memory.get(place, default)

    def write(self, place: Hashable, value: Any) -> None:
        """Change what some memory holds."""
        if place in self.writer:
            self._after(self.writer[place], place, "overwrites, but may not come after the write of")
        for reader in self.readers.pop(place, []):
            self._after(reader, place, "overwrites, but may not come after the read of")
        self.memory[place], self.writer[place] = value, self.node

    def _after(self, other: Node, place: Hashable, what: str) -> None:
        if other != self.node and not self.ordered(other, self.node):
            self.found.append(f"race: {self._name(self.node)} {what} {self._name(other)}: {place}")

    def expect(self, value: Any, wanted: Any, what: str) -> None:
        if value != wanted:
            self.found.append(f"value: {self._name(self.node)} finds {what} {value}, not {wanted}")

    def _name(self, node: Node) -> str:
        task = self.schedule.tasks[node[1]]
        return f"{task.index} {task.name} ({task.lane}, iteration {node[0]})"

    # -- who is where ---------------------------------------------------------------------------------------------

    def places(self, unit: str) -> tuple[Place, ...]:
        return self.decisions.units[unit].update

    def host_pieces(self, unit: str) -> list[int]:
        return [p for p, place in enumerate(self.places(unit)) if self.decisions.flushes(unit, place)]

    def stays(self, unit: str) -> bool:
        """Whether a part of a unit's gradient is updated on the device without having left it."""
        return not all(self.decisions.flushes(unit, place) for place in self.places(unit))

    def fetched(self, unit: str) -> bool:
        return self.decisions.units[unit].fetched

    def on_nvme(self, unit: str) -> bool:
        return self.decisions.units[unit].params == "nvme"
