"""The simulator, slow and obvious, and its input as Python objects. Tests compare the fast kernel with it.

See [Note: Fluid sharing] in :mod:`planner.simulate.system`.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from planner.simulate.system import Capacity, Floats, FluidSystem, capacity_rows, pointers

Number = float | Fraction


class FluidTask(NamedTuple):
    """One task, as :func:`built` takes it.

    Attributes:
        lane: number of its lane, from 0.
        duration_s: its time alone at full speed, without latency.
        latency_s: paid first, without using resources.
        after: indices of its predecessors, all issued earlier.
        uses: amount per second at full speed, by resource; amounts of 0 are omitted.
        weight: how fast its speed rises when it competes; 1 for work in the foreground.
    """

    lane: int
    duration_s: float
    latency_s: float = 0.0
    after: Sequence[int] = ()
    uses: Mapping[int, float] = {}
    weight: float = 1.0


def built(tasks: Iterable[FluidTask], capacity: Sequence[Capacity] = ()) -> FluidSystem:
    """Return a system of Python objects.

    Args:
        tasks: in issue order.
        capacity: of each resource.
    """
    listed = list(tasks)
    uses = [sorted((r, rate) for r, rate in task.uses.items() if rate != 0) for task in listed]
    flat = list(itertools.chain.from_iterable(uses))
    return FluidSystem(
        lane=np.array([task.lane for task in listed], dtype=np.int32),
        latency_s=np.array([task.latency_s for task in listed]),
        duration_s=np.array([task.duration_s for task in listed]),
        weight=np.array([task.weight for task in listed]),
        pred_ptr=pointers([len(task.after) for task in listed]),
        pred=np.array([p for task in listed for p in task.after], dtype=np.int32),
        use_ptr=pointers([len(use) for use in uses]),
        use_resource=np.array([r for r, _ in flat], dtype=np.int32),
        use_rate=np.array([rate for _, rate in flat]),
        capacity=capacity_rows(capacity),
    )


def predecessors(system: FluidSystem, task: int) -> list[int]:
    """Return the indices of a task's predecessors."""
    found: list[int] = system.pred[system.pred_ptr[task] : system.pred_ptr[task + 1]].tolist()
    return found


def uses_of(system: FluidSystem, task: int) -> dict[int, float]:
    """Return a task's use of each resource, in amount per second at full speed."""
    part = slice(system.use_ptr[task], system.use_ptr[task + 1])
    return dict(zip(system.use_resource[part].tolist(), system.use_rate[part].tolist(), strict=True))


def max_min_speeds(
    uses: Sequence[Mapping[int, Number]],
    capacity: Sequence[Sequence[Number]],
    weights: Sequence[Number],
    number: Callable[[float], Number] = float,
) -> list[Number]:
    """Return the weighted max-min fair speeds, in [0, 1], of tasks that all run at once.

    Args:
        uses: for each task, its use of each resource at full speed.
        capacity: for each resource, its capacity with 1, 2, ... users; the last entry also holds for more.
        weights: for each task, how fast its speed rises.
        number: the type for the calculation: ``float``, or ``Fraction`` for exact results.
    """
    users = Counter(r for use in uses for r in use)
    room = {r: capacity[r][min(users[r], len(capacity[r])) - 1] for r in users}
    speeds = [number(0)] * len(uses)
    rising = set(range(len(uses)))
    while rising:
        load = {r: sum(weights[i] * uses[i][r] for i in sorted(rising) if r in uses[i]) for r in users}
        to_full_resource = {r: room[r] / load[r] for r in users if load[r] > 0}
        to_full_speed = {i: (1 - speeds[i]) / weights[i] for i in rising}
        step = min([*to_full_speed.values(), *to_full_resource.values()])
        full = {r for r in to_full_resource if to_full_resource[r] == step}
        fast = {i for i in rising if to_full_speed[i] == step}
        for r in to_full_resource:
            room[r] = number(0) if r in full else max(room[r] - step * load[r], number(0))
        for i in rising:
            speeds[i] = number(1) if i in fast else speeds[i] + step * weights[i]
        rising = {i for i in rising - fast if not full & uses[i].keys()}
    return speeds


def simulate_reference(system: FluidSystem, number: Callable[[float], Number] = float) -> tuple[Floats, Floats]:
    """Return when each task leaves its queue (before its latency) and when it ends, in seconds: two float64[n].

    Args:
        system: the system to simulate.
        number: type to calculate with: ``float``, or ``Fraction`` for exact times (rounded only when returned).
    """
    after = [predecessors(system, i) for i in range(system.num_tasks)]
    uses = [{r: number(a) for r, a in uses_of(system, i).items()} for i in range(system.num_tasks)]
    capacity = [[number(c) for c in row] for row in system.capacity.tolist()]
    weights = [number(w) for w in system.weight.tolist()]
    latency_left = [number(x) for x in system.latency_s.tolist()]
    work_left = [number(x) for x in system.duration_s.tolist()]
    queues = _queues(system)
    start: dict[int, Number] = {}
    end: dict[int, Number] = {}
    now = number(0)
    while True:
        moved = True
        while moved:  # an end lets others start, and a task without work ends at its start
            moved = False
            for queue in queues:
                head = queue[0] if queue else -1
                if queue and head not in start and all(p in end for p in after[head]):
                    start[head] = now
                    moved = True
                if head in start and latency_left[head] == work_left[head] == 0:
                    end[queue.popleft()] = now
                    moved = True
        if len(end) == system.num_tasks:
            return _array(start), _array(end)

        started = [queue[0] for queue in queues if queue and queue[0] in start]
        running = [i for i in started if latency_left[i] == 0]
        speeds = max_min_speeds([uses[i] for i in running], capacity, [weights[i] for i in running], number)
        speed = dict(zip(running, speeds, strict=True))
        left = {i: _time_left(latency_left[i], work_left[i], speed.get(i)) for i in started}
        step = min(left.values())
        now += step
        for i in started:
            if i in speed:
                work_left[i] = number(0) if left[i] == step else max(work_left[i] - speed[i] * step, number(0))
            else:
                latency_left[i] = number(0) if left[i] == step else latency_left[i] - step


def _queues(system: FluidSystem) -> list[deque[int]]:
    queues: list[deque[int]] = [deque() for _ in range(system.num_lanes)]
    for i, lane in enumerate(system.lane.tolist()):
        queues[lane].append(i)
    return queues


def _time_left(latency_left: Number, work_left: Number, speed: Number | None) -> Number:
    if speed is None:
        return latency_left
    return work_left / speed


def _array(times: Mapping[int, Number]) -> Floats:
    return np.array([float(times[i]) for i in range(len(times))], dtype=np.float64)
