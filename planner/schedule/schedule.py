"""The schedule: the tasks and buffers of one iteration, checked, as JSON and as text."""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self

from planner.schedule.arrays import Arrays, Rows
from planner.schedule.tasks import Buffer, Task

if TYPE_CHECKING:
    import networkx as nx

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of one iteration in issue order, and the memory that they hold.

    Raises:
        ValueError: they break the rules of :func:`validate`.
    """

    tasks: tuple[Task, ...]
    buffers: tuple[Buffer, ...] = dataclasses.field(default_factory=tuple)
    description: str = ""

    def __post_init__(self) -> None:
        validate(self)

    @classmethod
    def deferred(
        cls, arrays: Arrays, make: Callable[[], tuple[tuple[Task, ...], tuple[Buffer, ...]]], name: str
    ) -> Self:
        """Return a schedule that makes and validates its tasks and buffers when they are first read.

        A search simulates hundreds of schedules of a thousand tasks. It needs only their arrays.

        Args:
            arrays: of the schedule.
            make: returns the tasks and buffers.
            name: the schedule's description.
        """
        made = cls.__new__(cls)
        vars(made).update(arrays=arrays, description=name, _make=make)
        return made

    def __getattr__(self, name: str) -> Any:
        """Make tasks and buffers, if they were deferred."""
        if name not in {"tasks", "buffers"} or "_make" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        tasks, buffers = vars(self).pop("_make")()
        vars(self).update(tasks=tasks, buffers=buffers)
        validate(self)
        return vars(self)[name]

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The schedule as arrays."""
        tasks, buffers, count = self.tasks, self.buffers, len(self.tasks)
        return Arrays.of(
            tasks,
            Rows.of((t.after for t in tasks), count),
            Rows.of((t.after_previous for t in tasks), count),
            [b.tier for b in buffers],
            [b.memory_class for b in buffers],
            [b.num_bytes for b in buffers],
            [_end(b.first) for b in buffers],
            [_end(b.last) for b in buffers],
            [b.stage for b in buffers],
        )

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.arrays.work)

    @functools.cached_property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max((work.stage for work in self.arrays.works), default=0)

    @property
    def first_forward(self) -> int | None:
        """Index of the first forward, where an iteration begins; ``None`` if nothing is computed."""
        return self.arrays.first_forward

    def graph(self) -> "nx.DiGraph[int]":
        """Return the tasks of one iteration as a graph: an edge leads from a task to each that waits for it."""
        import networkx as nx  # noqa: PLC0415 - no plan needs it

        graph: nx.DiGraph[int] = nx.DiGraph()
        graph.add_nodes_from(range(self.num_tasks))
        graph.add_edges_from((before, task.index) for task in self.tasks for before in task.after)
        return graph

    def to_text(self) -> str:
        """Return one line per task: ``12 h2d  fetch layers.3.mlp  33.55 MB  after 9,11  -> slot 2``."""
        return "\n".join(_line(task) for task in self.tasks)

    def to_json(self) -> str:
        """Return a JSON document, by which ranks compare their schedules."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "description": self.description,
                "tasks": [_drop_defaults(task) for task in self.tasks],
                "buffers": [_drop_defaults(buffer) for buffer in self.buffers],
            },
            separators=(",", ":"),
        )


def validate(schedule: Schedule) -> None:
    """Check the rules of [Note: Semantics].

    Raises:
        ValueError: naming the first task or buffer that breaks a rule.
    """
    count = len(schedule.tasks)
    for position, task in enumerate(schedule.tasks):
        if task.index != position:
            raise ValueError(f"task {task.name} has index {task.index} at position {position}; number tasks in order")
        if task.after and not 0 <= min(task.after) <= max(task.after) < position:
            bad = [i for i in task.after if not 0 <= i < position]
            raise ValueError(f"task {position} {task.name} comes after {bad}, not issued before it: a cycle or a typo")
        if task.after_previous and not 0 <= min(task.after_previous) <= max(task.after_previous) < count:
            bad = [i for i in task.after_previous if not 0 <= i < count]
            raise ValueError(f"task {position} {task.name} comes after {bad} of the previous iteration: no such task")
        if min(task.num_bytes, task.num_params, task.stage) < 0:
            raise ValueError(f"task {position} {task.name} has a negative amount of work or stage")
    for buffer in schedule.buffers:
        ends = [i for i in (buffer.first, buffer.last) if i is not None]
        if len(ends) == 1 or any(not 0 <= i < count for i in ends):
            raise ValueError(f"buffer {buffer.label} is held from {buffer.first} to {buffer.last}: no such tasks")
        if buffer.num_bytes < 0:
            raise ValueError(f"buffer {buffer.label} has {buffer.num_bytes} bytes; sizes cannot be negative")


def _end(task: int | None) -> int:
    return -1 if task is None else task


def _line(task: Task) -> str:
    lane = f"{task.stage}:{task.lane}" if task.stage else task.lane
    parts = [f"{task.index:5d} {lane:<13} {task.name:<40}"]
    if task.num_bytes:
        parts.append(f"{task.num_bytes / 1e6:.2f} MB" + ("" if task.pinned else " pageable"))
    if task.num_params:
        parts.append(f"{task.num_params / 1e6:.2f} Mparam")
    if task.after:
        parts.append("after " + _indices(task.after))
    if task.after_previous:
        parts.append("after previous " + _indices(task.after_previous))
    if task.slot >= 0:
        parts.append(f"-> slot {task.slot}")
    return "  ".join(parts).rstrip()


def _indices(indices: Iterable[int]) -> str:
    return ",".join(str(i) for i in indices)


def _drop_defaults(item: Task | Buffer) -> dict[str, Any]:
    return {
        field.name: getattr(item, field.name)
        for field in dataclasses.fields(item)
        if field.default is dataclasses.MISSING or getattr(item, field.name) != field.default
    }
