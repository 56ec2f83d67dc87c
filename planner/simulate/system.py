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
from collections.abc import Sequence
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
            column also holds for more. Positive.
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

    def __post_init__(self) -> None:
        for name, dtype in dtypes_of(FluidSystem).items():
            view: npt.NDArray[Any] = np.ascontiguousarray(getattr(self, name), dtype=dtype).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        self._check()

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.lane)

    @functools.cached_property
    def num_lanes(self) -> int:
        """Number of lanes, including unused ones below the highest."""
        return int(self.lane.max(initial=-1)) + 1

    def _check(self) -> None:
        """Check the rules above: the kernel, which is machine code, looks at no index twice."""
        for name in ("lane", "latency_s", "duration_s", "weight"):
            assert getattr(self, name).shape == (self.num_tasks,), name
        for name, least in (("lane", 0), ("latency_s", 0), ("duration_s", 0)):
            assert _holds(getattr(self, name), least), name
        for name in ("weight", "use_rate", "capacity"):
            assert _holds(getattr(self, name), np.nextafter(0, 1)), name
        assert self.capacity.ndim == 2
        assert self.use_rate.shape == self.use_resource.shape
        # Predecessors are issued earlier. With lanes in issue order, this alone rules out cycles, also through a lane.
        assert ((self.pred >= 0) & (self.pred < self._owners(self.pred_ptr, self.pred))).all(), "pred"
        owner = self._owners(self.use_ptr, self.use_resource)
        assert ((self.use_resource >= 0) & (self.use_resource < len(self.capacity))).all(), "use_resource"
        assert ((np.diff(self.use_resource) > 0) | (np.diff(owner) > 0)).all(), "use_resource ascends"

    def _owners(self, pointers: Ints, values: npt.NDArray[Any]) -> Ints:
        """Return the task of each entry of the array that checked pointers point into."""
        sizes = np.diff(pointers)
        assert pointers.shape == (self.num_tasks + 1,)
        assert pointers[0] == 0
        assert pointers[-1] == len(values)
        assert (sizes >= 0).all()
        return np.repeat(np.arange(self.num_tasks), sizes)


def _holds(values: npt.NDArray[Any], least: float) -> bool:
    """Return whether all values are finite, and at least so large."""
    return bool((np.isfinite(values) & (values >= least)).all())


def capacity_rows(capacity: Sequence[Capacity]) -> Floats:
    """Return capacities in the form of :class:`FluidSystem`, float64[r, k]."""
    rows = [list(row) if isinstance(row, Sequence) else [row] for row in capacity]
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
