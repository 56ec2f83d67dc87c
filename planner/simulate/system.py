"""The input of the simulator: tasks on lanes that share resources, as flat arrays.

[Note: Fluid sharing] A *lane* runs its tasks first-in first-out, in issue order. A task starts when the task before it
in its lane and all its predecessors have ended. First it pays its latency, which uses no resources. Then it *runs* with
a speed in [0, 1]. Its remaining work is at first ``duration_s``, its time alone at full speed, and falls at that speed;
the task ends when none is left. A running task uses ``speed * rate`` of each of its resources. Speeds are weighted
max-min fair (progressive filling, Bertsekas and Gallager, *Data Networks*, 2nd ed., section 6.5.2). A level rises from
0, and with it every task's speed, ``weight * level``. A task stops rising when it has full speed or one of its
resources is full; the others rise on. So the *speed relative to the weight* is shared fairly. Weights matter only if
tasks compete, and only their ratios matter: on a full resource, a task of weight 1/8 beside one of weight 1 gets an
eighth of its speed, plus what the other leaves. The capacity of a resource may depend on the number of its running
users. Results do not depend on the order in which simultaneous events are processed, so there are no ties to break.

Ranks with equal tasks that start together stay together: max-min fair speeds are unique, and exchanging
two ranks does not change the system. So one *representative* of R ranks is exact if it gets 1/R of every shared
resource and the whole of every resource that each rank has alone. If a capacity depends on the number of users, k users
of the representative stand for R * k. The representative is not exact if ranks differ (fewer of them on the last node),
start at different times, or compete with a task that exists only once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Capacity = float | Sequence[float]
"""Amount per second of a resource: one number, or one per number of running users, the last also for more."""


@dataclasses.dataclass(frozen=True, eq=False)
class FluidSystem:
    """Tasks in issue order, and the resources that they share; see [Note: Fluid sharing].

    ``pred[pred_ptr[i]:pred_ptr[i + 1]]`` are the predecessors of task ``i``; its uses are stored in the same way.
    Arrays are stored as contiguous read-only views.

    Attributes:
        lane: int32[n], the lane of each task; lanes are numbered from 0.
        latency_s, duration_s, weight: float64[n]; weights are positive.
        pred_ptr, pred: int64[n + 1] and int32[...]; a predecessor is smaller than the task's own index.
        use_ptr, use_resource, use_rate: int64[n + 1], int32[...] and float64[...]; the resources of a task ascend, and
            rates (amount per second at full speed) are positive.
        capacity: float64[r, k], amount per second of each resource when 1, 2, ..., k running tasks use it; the last
            column also holds for more.
        lane_names, resource_names: names for messages; may be empty.
        task_name: the name of a task from its index, for messages.

    Raises:
        ValueError: a rule above is broken; the message names the first task (or resource) that breaks it.
    """

    lane: npt.NDArray[np.int32]
    latency_s: Floats
    duration_s: Floats
    weight: Floats
    pred_ptr: Ints
    pred: npt.NDArray[np.int32]
    use_ptr: Ints
    use_resource: npt.NDArray[np.int32]
    use_rate: Floats
    capacity: Floats
    lane_names: Sequence[str] = ()
    resource_names: Sequence[str] = ()
    task_name: Callable[[int], str] | None = None

    def __post_init__(self) -> None:
        for name, dtype in dtypes_of(FluidSystem).items():
            view: npt.NDArray[Any] = np.ascontiguousarray(getattr(self, name), dtype=dtype).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        self._check_capacity()
        self._check_tasks()
        self._check_predecessors()
        self._check_uses()

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.lane)

    @functools.cached_property
    def num_lanes(self) -> int:
        """Number of lanes, including unused ones below the highest."""
        return int(self.lane.max(initial=-1)) + 1

    @functools.cached_property
    def max_uses(self) -> int:
        """The largest number of resources of a task."""
        return int(np.diff(self.use_ptr).max(initial=0))

    def predecessors(self, task: int) -> list[int]:
        """Return the indices of a task's predecessors."""
        return [int(p) for p in self.pred[self.pred_ptr[task] : self.pred_ptr[task + 1]]]

    def uses(self, task: int) -> dict[int, float]:
        """Return a task's use of each resource, in amount per second at full speed."""
        part = slice(self.use_ptr[task], self.use_ptr[task + 1])
        return {int(r): float(a) for r, a in zip(self.use_resource[part], self.use_rate[part], strict=True)}

    def describe(self, task: int) -> str:
        """Return a task's name for messages, such as ``task 3 (fetch layers.0) on lane h2d``."""
        lane = int(self.lane[task])
        lane_name = self.lane_names[lane] if 0 <= lane < len(self.lane_names) else str(lane)
        name = f" ({self.task_name(task)})" if self.task_name else ""
        return f"task {task}{name} on lane {lane_name}"

    def describe_resource(self, resource: int) -> str:
        """Return a resource's name for messages, such as ``resource link_down``."""
        named = 0 <= resource < len(self.resource_names)
        return f"resource {self.resource_names[resource] if named else resource}"

    def never_ends(self, task: int) -> ValueError:
        """Return the error for a started task that can never end."""
        empty = [self.describe_resource(r) for r in self.uses(task) if not self.capacity[r].any()]
        reason = f"{empty[0]} has no capacity; give it some" if empty else "it hardly moves; give its resources more"
        return ValueError(f"{self.describe(task)} can never end: {reason}")

    def _check_capacity(self) -> None:
        if self.capacity.ndim != 2 or (len(self.capacity) and not self.capacity.shape[1]):
            raise ValueError(f"capacity has shape {self.capacity.shape}; it needs one row per resource, with columns")
        if (r := _first(~(np.isfinite(self.capacity) & (self.capacity >= 0)).all(axis=1))) is not None:
            raise ValueError(
                f"{self.describe_resource(r)} has capacity {self.capacity[r].tolist()}; give finite numbers, 0 or more"
            )
        positive = self.capacity > 0
        if (r := _first(positive.any(axis=1) & ~positive.all(axis=1))) is not None:
            raise ValueError(
                f"{self.describe_resource(r)} has capacity {self.capacity[r].tolist()}: its users would block one "
                "another for ever; make it positive for every number of users"
            )

    def _check_tasks(self) -> None:
        count = self.num_tasks
        for name in ("lane", "latency_s", "duration_s", "weight"):
            if getattr(self, name).shape != (count,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; expected ({count},), one per task")
        if (task := _first(self.lane < 0)) is not None:
            raise ValueError(f"{self.describe(task)}: number lanes from 0")
        for name in ("latency_s", "duration_s"):
            values = getattr(self, name)
            if (task := _first(~(np.isfinite(values) & (values >= 0)))) is not None:
                raise ValueError(f"{self.describe(task)} has {name} {values[task]}; give a finite number, 0 or more")
        if (task := _first(~(np.isfinite(self.weight) & (self.weight > 0)))) is not None:
            raise ValueError(f"{self.describe(task)} has weight {self.weight[task]}; give a finite number above 0")

    def _check_predecessors(self) -> None:
        owner = self._owners("pred_ptr", self.pred)
        # Predecessors are earlier tasks. With lanes in issue order, this alone rules out cycles, also those through a
        # lane.
        if (k := _first((self.pred < 0) | (self.pred >= owner))) is not None:
            p = int(self.pred[k])
            later = owner[k] <= p < self.num_tasks
            wrong = (
                f"{self.describe(p)}, which is issued later: a cycle" if later else f"task {p}, which does not exist"
            )
            raise ValueError(f"{self.describe(int(owner[k]))} comes after {wrong}; name tasks issued earlier")

    def _check_uses(self) -> None:
        owner = self._owners("use_ptr", self.use_resource)
        if self.use_rate.shape != self.use_resource.shape:
            raise ValueError(f"use_rate has shape {self.use_rate.shape}; expected {self.use_resource.shape}")
        if (k := _first((self.use_resource < 0) | (self.use_resource >= len(self.capacity)))) is not None:
            raise ValueError(
                f"{self.describe(int(owner[k]))} uses resource {self.use_resource[k]}, but there are "
                f"{len(self.capacity)}; give it a capacity"
            )
        if (k := _first(~(np.isfinite(self.use_rate) & (self.use_rate > 0)))) is not None:
            raise ValueError(
                f"{self.describe(int(owner[k]))} uses {self.use_rate[k]} of "
                f"{self.describe_resource(int(self.use_resource[k]))}; give a finite positive rate, or leave it out"
            )
        if (k := _first((np.diff(self.use_resource) <= 0) & (np.diff(owner) == 0))) is not None:
            raise ValueError(
                f"{self.describe(int(owner[k]))} does not list its resources in ascending order, each once"
            )

    def _owners(self, pointer_name: str, values: npt.NDArray[Any]) -> Ints:
        """Check pointers, and return the task of each entry of the array that they point into."""
        pointers: Ints = getattr(self, pointer_name)
        sizes = np.diff(pointers)
        if (
            pointers.shape != (self.num_tasks + 1,)
            or pointers[0] != 0
            or pointers[-1] != len(values)
            or (sizes < 0).any()
        ):
            raise ValueError(f"{pointer_name} must ascend from 0 to {len(values)} in {self.num_tasks + 1} entries")
        return np.repeat(np.arange(self.num_tasks), sizes)


def capacity_rows(capacity: Sequence[Capacity], resource_names: Sequence[str] = ()) -> Floats:
    """Return capacities in the form of :class:`FluidSystem`, float64[r, k].

    Raises:
        ValueError: a resource has no number at all.
    """
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in capacity]
    if empty := [r for r, row in enumerate(rows) if not row]:
        name = resource_names[empty[0]] if resource_names else empty[0]
        raise ValueError(f"resource {name} has no capacity at all; give one number, or one per number of users")
    width = max((len(row) for row in rows), default=1)
    return np.array([row + row[-1:] * (width - len(row)) for row in rows], np.float64).reshape(len(rows), width)


def pointers(sizes: Sequence[int] | Ints) -> Ints:
    """Return int64[n + 1]: the start of each of n consecutive rows, and the end of the last."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


@functools.cache
def dtypes_of(kind: type) -> dict[str, type[np.generic]]:
    """Return the types of a class's arrays, by the names of their fields."""
    arrays = {name: hint for name, hint in get_type_hints(kind).items() if get_origin(hint) is np.ndarray}
    return {name: get_args(get_args(hint)[1])[0] for name, hint in arrays.items()}


def _first(mask: Any) -> int | None:
    """Return the index of the first true entry of a boolean array."""
    return int(np.argmax(mask)) if mask.any() else None
