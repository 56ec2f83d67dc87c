"""The schedule: what happens in one iteration, as plain data.

[Note: Semantics] A lane runs its tasks first-in first-out, in issue order. A task starts when its lane is free and
the tasks it comes after have ended; while it runs it shares resources; it ends when its work is done. Nothing else
orders tasks: reuse of memory and the host's own issue delay are tasks and dependencies too, never habits of whatever
executes the schedule. The issue order is the order of ``Schedule.tasks``, and a task may only come after tasks that
were issued earlier (or in the previous iteration), so a valid schedule cannot deadlock.

Work is stated in physical amounts (bytes, parameters, a unit's forward), never in seconds: the same schedule is
priced by :mod:`planner.costs.model` for simulation, and executed as it is.
"""

import dataclasses
import functools
import itertools
import json
import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

SCHEMA_VERSION = 1


class Op(StrEnum):
    """What a task does. The unit, the pieces and the amounts say to what."""

    FORWARD = "forward"  # compute one unit's forward
    RECOMPUTE = "recompute"  # compute it again inside backward
    BACKWARD = "backward"
    FETCH = "fetch"  # parameters: host -> slot on the device
    GATHER = "gather"  # parameters: all-gather of the ranks' shards
    SCATTER = "scatter"  # gradients: reduce-scatter over the ranks
    FLUSH = "flush"  # gradients: device -> host
    PASS = "pass"  # a pass over host memory (scaling, casting) in engines that do not fuse it into the update
    CLIP = "clip"  # gradient norm over everything, clip coefficient: a barrier
    UPDATE = "update"  # optimizer step of one subgroup, where the lane says
    LOAD = "load"  # optimizer state and gradient: host -> device
    STORE = "store"  # optimizer state: device -> host
    UPLOAD = "upload"  # updated parameters: host -> device
    READ = "read"  # parameters, or state that is checkpointed: NVMe -> host
    SPILL = "spill"  # gradients: host -> NVMe
    SWAP_IN = "swap-in"  # optimizer state, and the gradient if it was spilled: NVMe -> host
    SWAP_OUT = "swap-out"  # optimizer state, and updated parameters that live there: host -> NVMe
    OFFLOAD = "offload"  # activations: device -> host
    EVICT = "evict"  # activations: host -> NVMe
    RECALL = "recall"  # activations: NVMe -> host
    RELOAD = "reload"  # activations: host -> device
    REMAKE = "remake"  # compute again, inside backward, what is cheap to make from offloaded activations
    ISSUE = "issue"  # the host's own time to issue what follows on the device
    RECEIVE = "receive"  # the host's own time around an exchange between pipeline stages
    SEND = "send"  # between pipeline stages: activations, their gradients, the gradient of tied embeddings
    STEP = "step"  # the training loop's own work from the norm to the next forward: step(), scheduler, data
    LOOP = "loop"  # what a script does between iterations: logging, data, waiting for the device
    CREATE = "create"  # the files of a checkpoint
    TOUCH = "touch"  # new host memory that a checkpoint is copied to: page faults
    SNAPSHOT = "snapshot"  # state that is checkpointed: device -> host
    WRITE = "write"  # a copy of it, or host-resident state itself: host -> storage
    PROMOTE = "promote"  # a whole checkpoint: storage -> slower storage
    VERIFY = "verify"  # it is read again there
    GATE = "gate"  # what is not written yet of state that is about to change is copied, or waited for


class Phase(StrEnum):
    """The part of an iteration that a task belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    LOOP = "loop"  # between iterations


class Lane(StrEnum):
    """What runs tasks one after another."""

    COMPUTE = "compute"  # forward and backward: the device's main stream, or the calling thread
    GPU_UPDATE = "gpu-update"  # optimizer steps on the device, a second stream
    H2D = "h2d"  # parameters in
    D2H = "d2h"  # gradients out
    STATE_IN = "state-in"  # optimizer state to the device: its own stream, so that it never delays a parameter
    STATE_OUT = "state-out"
    CPU = "cpu"  # the worker team that updates on the host
    COLLECTIVE = "collective"
    SEND = "send"  # activations to the next pipeline stage
    SEND_BACK = "send-back"  # their gradients to the previous one
    LAUNCH = "launch"  # the host thread that issues kernels
    SNAPSHOT = "snapshot"  # copies of state for a checkpoint, and the thread that asks for them
    STAGING = "staging"  # threads that prepare host memory for them
    WRITE = "write"  # threads that write them to storage
    PROMOTION = "promotion"  # the thread that brings checkpoints to slower storage
    RETENTION = "retention"  # the thread that reads them again, so that older ones may go
    GATE = "gate"  # waits for them before state changes
    ACTIVATION_IN = "activation-in"  # activations back to the device: never behind a parameter that waits for its slot
    ACTIVATION_OUT = "activation-out"
    NVME_READ = "nvme-read"  # parameters and activations from NVMe to the host
    NVME_WRITE = "nvme-write"  # activations to NVMe
    NVME_STATE_IN = "nvme-state-in"  # optimizer state: its own queue, so that it never delays a parameter
    NVME_STATE_OUT = "nvme-state-out"  # optimizer state and spilled gradients


class Tier(StrEnum):
    """A place with a capacity and a bandwidth."""

    GPU = "gpu"  # the device's memory; the bounded arena where there is no GPU
    HOST = "host"
    NVME = "nvme"


class MemoryClass(StrEnum):
    """What bytes are for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    WORKSPACE = "workspace"
    CHECKPOINT = "checkpoint"  # copied, and not yet written


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one lane.

    Attributes:
        index: position in the issue order.
        lane, op, phase: see the enums.
        unit: name of the unit it works on, or ``""`` for the whole model.
        micro_batch: which forward+backward of the iteration it belongs to.
        piece: index of the subgroup within the unit, or -1 for the whole unit.
        num_bytes: bytes copied, gathered, scattered or passed over; 0 otherwise.
        num_params: parameters that this rank updates, or whose squared gradients it sums (``FLUSH``); 0 otherwise.
        num_kernels: kernels that the host issues (``ISSUE``); 0 otherwise.
        num_tensors: parameter tensors that the host goes through (``STEP``); 0 otherwise.
        num_modules: modules whose hooks the host runs (``ISSUE``); 0 otherwise.
        slot: slot that is filled, on the device (``FETCH``, ``GATHER``, ``LOAD``) or in a ring of host buffers
            (``READ``, ``SWAP_IN``), or -1.
        stage: pipeline stage whose rank it belongs to; every stage has lanes and resources of its own.
        pinned: for copies, whether the host side is pinned memory (the copy is then asynchronous and fast).
        stalls: for copies, whether the device computes nothing meanwhile.
        after: indices of tasks of the same iteration that must have ended; all smaller than ``index``.
        after_previous: indices of tasks of the previous iteration that must have ended.
    """

    index: int
    lane: Lane
    op: Op
    phase: Phase
    unit: str = ""
    micro_batch: int = 0
    piece: int = -1
    num_bytes: int = 0
    num_params: int = 0
    num_kernels: int = 0
    num_tensors: int = 0
    num_modules: int = 0
    slot: int = -1
    pinned: bool = True
    stalls: bool = False
    stage: int = 0
    after: tuple[int, ...] = ()
    after_previous: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """A readable name, such as ``update layers.3.mlp#2``."""
        piece = f"#{self.piece}" if self.piece >= 0 else ""
        micro_batch = f" mb{self.micro_batch}" if self.micro_batch else ""
        return f"{self.op} {self.unit or 'model'}{piece}{micro_batch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """Bytes held on a tier from the start of one task to the end of another.

    ``first`` and ``last`` are task indices; both ``None`` means held all the time. A buffer whose ``last`` is issued
    before its ``first`` is carried over into the next iteration. It is held by a rank of its pipeline ``stage``.
    """

    tier: Tier
    memory_class: MemoryClass
    num_bytes: int
    label: str
    first: int | None = None
    last: int | None = None
    stage: int = 0


class Work(Protocol):
    """What a task does, and for whom: all that a price depends on. See :class:`Task`."""

    @property
    def lane(self) -> Lane: ...  # noqa: D102 - see Task
    @property
    def op(self) -> Op: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def micro_batch(self) -> int: ...  # noqa: D102
    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def num_params(self) -> int: ...  # noqa: D102
    @property
    def num_kernels(self) -> int: ...  # noqa: D102
    @property
    def num_tensors(self) -> int: ...  # noqa: D102
    @property
    def num_modules(self) -> int: ...  # noqa: D102
    @property
    def pinned(self) -> bool: ...  # noqa: D102
    @property
    def stalls(self) -> bool: ...  # noqa: D102
    @property
    def stage(self) -> int: ...  # noqa: D102


class Held(NamedTuple):
    """Buffers without their labels, column by column, see :class:`Buffer`; -1 for the ends of what is always held."""

    tier: Sequence[Tier]
    memory_class: Sequence[MemoryClass]
    num_bytes: Sequence[int]
    first: Sequence[int] | Ints
    last: Sequence[int] | Ints
    stage: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Indices of other tasks, of each of n tasks.

    Attributes:
        indices: int64[...], one task after another.
        counts: int64[n], how many each has.
    """

    indices: Ints
    counts: Ints

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], count: int) -> Self:
        """Make them from so many rows."""
        listed = list(rows)
        counts = np.array(list(map(len, listed)), np.int64)
        assert len(counts) == count
        return cls(np.array(list(itertools.chain.from_iterable(listed)), np.int64), counts)

    def sorted(self) -> Self:
        """Return the same with every row in order, each index once."""
        count = len(self.counts)
        row = np.repeat(np.arange(count), self.counts)
        pairs = np.sort(row * count + self.indices)  # numpy's unique hashes them first, which takes longer
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]
        return type(self)(pairs % count, np.bincount(pairs // count, minlength=count))

    def tuples(self) -> list[tuple[int, ...]]:
        """Return them task by task."""
        listed, ends = self.indices.tolist(), np.cumsum(self.counts).tolist()
        return [tuple(listed[begin:end]) for begin, end in itertools.pairwise((0, *ends))]


LANES, TIERS, MEMORY_CLASSES = tuple(Lane), tuple(Tier), tuple(MemoryClass)
_LANE_NUMBERS = {lane: number for number, lane in enumerate(LANES)}
_TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}
_CLASS_NUMBERS = {memory_class: number for number, memory_class in enumerate(MEMORY_CLASSES)}
# Where a task's price depends on its unit: on its kernels, or on how its parameters are divided.
_OF_UNITS = frozenset({Lane.COMPUTE, Lane.COLLECTIVE})
_amounts = operator.attrgetter(
    "lane",
    "op",
    "num_bytes",
    "num_params",
    "num_kernels",
    "num_tensors",
    "num_modules",
    "pinned",
    "stalls",
    "stage",
)


def kind_of(work: Work) -> tuple[Hashable, ...]:
    """Return all that a price depends on: what is equal here has one price under any prices."""
    amounts = _amounts(work)
    # Kernels and parts of parameters are the unit's; of micro-batches the first is alone in adding to nothing.
    return (amounts, work.micro_batch > 0, work.unit if amounts[0] in _OF_UNITS else "")


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A schedule as arrays: all that simulating it, and adding up what it holds, needs of tasks and buffers.

    Attributes:
        works: what tasks do; what is of one kind stands here once.
        kinds: of each of them, see :func:`kind_of`.
        work: int64[n], which of ``works`` each of n tasks does.
        lane: int64[n], ``stage * len(LANES)`` and the position of the lane in :data:`LANES`.
        after, num_after: int64[...] and int64[n], the indices of each task's predecessors, one task after another, and
            how many each has.
        after_previous, num_after_previous: likewise in the previous iteration.
        first_forward: the task with which an iteration begins; ``None`` if nothing is computed.
        tier, memory_class: int64[m], of each of m buffers, the position in :data:`TIERS` and :data:`MEMORY_CLASSES`.
        num_bytes, first, last, stage: int64[m], of each buffer; -1 for the ends of what is always held.
    """

    works: Sequence[Work]
    kinds: Sequence[Hashable]
    work: Ints
    lane: Ints
    after: Ints
    num_after: Ints
    after_previous: Ints
    num_after_previous: Ints
    first_forward: int | None
    tier: Ints
    memory_class: Ints
    num_bytes: Ints
    first: Ints
    last: Ints
    stage: Ints

    @classmethod
    def of(
        cls,
        tasks: Sequence[Work],
        after: Rows,
        after_previous: Rows,
        held: Held,
    ) -> Self:
        """Make them from what tasks do, whom they come after, and what is held."""
        numbers, works = dict[tuple[Hashable, ...], int](), list[Work]()
        number_of = list[int]()
        amounts_of, of_units, number_for = _amounts, _OF_UNITS, numbers.setdefault
        for task in tasks:  # kind_of, but for the call
            amounts = amounts_of(task)
            kind = (amounts, task.micro_batch > 0, task.unit if amounts[0] in of_units else "")
            if (number := number_for(kind, len(works))) == len(works):
                works.append(task)
            number_of.append(number)
        work = np.array(number_of, np.int64)
        lane = np.array([each.stage * len(LANES) + _LANE_NUMBERS[each.lane] for each in works], np.int64)
        first_forward = next((i for i, task in enumerate(tasks) if task.op is Op.FORWARD), None)
        tier, memory_class, *columns = held
        return cls(
            works,
            list(numbers),
            work,
            lane[work],
            after.indices,
            after.counts,
            after_previous.indices,
            after_previous.counts,
            first_forward,
            np.array([_TIER_NUMBERS[t] for t in tier], np.int64),
            np.array([_CLASS_NUMBERS[c] for c in memory_class], np.int64),
            *(np.array(column, np.int64) for column in columns),
        )

    @functools.cached_property
    def always_held(self) -> Ints:
        """Bytes that are held all the time, int64[tiers, stages]; with no buffers there are no stages."""
        always = self.first < 0
        held = np.zeros((len(TIERS), int(self.stage.max(initial=-1)) + 1), np.int64)
        np.add.at(held, (self.tier[always], self.stage[always]), self.num_bytes[always])
        return held

    @functools.cached_property
    def moved(self) -> tuple[int, int]:
        """Bytes that tasks move in an iteration, and parameters that the CPU updates."""
        counts = np.bincount(self.work, minlength=len(self.works)).tolist()
        num_bytes = sum(count * work.num_bytes for count, work in zip(counts, self.works, strict=True))
        updated = ((count, work) for count, work in zip(counts, self.works, strict=True) if work.lane is Lane.CPU)
        return num_bytes, sum(count * work.num_params for count, work in updated)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(self))
        return sum(field.nbytes for field in fields if isinstance(field, np.ndarray))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of one iteration in issue order, and the memory they hold.

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
        """Return a schedule whose tasks and buffers are made, and validated, when they are first looked at.

        A search simulates hundreds of schedules of a thousand tasks, and for that needs their arrays only.

        Args:
            arrays: of the schedule.
            make: returns its tasks and buffers.
            name: its description.
        """
        made = cls.__new__(cls)
        vars(made).update(arrays=arrays, description=name, _make=make)
        return made

    def __getattr__(self, name: str) -> Any:
        """Make tasks and buffers, if that was deferred."""
        if name not in {"tasks", "buffers"} or "_make" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        tasks, buffers = vars(self).pop("_make")()
        vars(self).update(tasks=tasks, buffers=buffers)
        validate(self)
        return vars(self)[name]

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The same as arrays."""
        tasks, buffers, count = self.tasks, self.buffers, len(self.tasks)
        held = Held(
            [b.tier for b in buffers],
            [b.memory_class for b in buffers],
            [b.num_bytes for b in buffers],
            [_end(b.first) for b in buffers],
            [_end(b.last) for b in buffers],
            [b.stage for b in buffers],
        )
        after, after_previous = (t.after for t in tasks), (t.after_previous for t in tasks)
        return Arrays.of(tasks, Rows.of(after, count), Rows.of(after_previous, count), held)

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

    def to_text(self) -> str:
        """Return one line per task: ``12 h2d  fetch layers.3.mlp  33.55 MB  after 9,11  -> slot 2``."""
        return "\n".join(_line(task) for task in self.tasks)

    def to_json(self) -> str:
        """Return a JSON document from which :meth:`from_json` makes an equal schedule."""
        return json.dumps(
            {
                "schema_version": SCHEMA_VERSION,
                "description": self.description,
                "tasks": [_drop_defaults(task) for task in self.tasks],
                "buffers": [_drop_defaults(buffer) for buffer in self.buffers],
            },
            separators=(",", ":"),
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, another schema version, or tasks that break the rules of :func:`validate`.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION:
            found = data.get("schema_version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"schedule has schema_version {found}, expected {SCHEMA_VERSION}; lower the plan again")
        try:
            return cls(
                tasks=tuple(_task(entry) for entry in data["tasks"]),
                buffers=tuple(_buffer(entry) for entry in data["buffers"]),
                description=data["description"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a schedule: {error}") from error


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


def _task(entry: Mapping[str, Any]) -> Task:
    values = dict(entry)
    for key in ("after", "after_previous"):
        values[key] = tuple(values.get(key, ()))
    values |= {"lane": Lane(entry["lane"]), "op": Op(entry["op"]), "phase": Phase(entry["phase"])}
    return Task(**values)


def _buffer(entry: Mapping[str, Any]) -> Buffer:
    kinds = {"tier": Tier(entry["tier"]), "memory_class": MemoryClass(entry["memory_class"])}
    return Buffer(**{**entry, **kinds})
