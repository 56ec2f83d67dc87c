"""The simulator's kernel, compiled by numba. Imported by :mod:`planner.simulate.kernel` when first needed.

Every lane has at most one task under way, so all state is per lane, and each moment at which something happens costs
O(lanes). A running task keeps the time at which it will end, and that is recomputed only when its speed changes: no
rounding residue builds up, and at every moment at least one task gets further, so rounding cannot stall the clock.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from planner.simulate.system import Floats, Ints

_P = ParamSpec("_P")
_T = TypeVar("_T")

_WAITING, _LATENCY, _RUNNING = 0, 1, 2
_SAME = 1 + 1e-12  # resources that fill up within this factor of one another fill up together
_NOT_YET = -1.0


def _jit(function: Callable[_P, _T]) -> Callable[_P, _T]:
    # The kernel allocates nothing, and without _nrt=False it would spend nine tenths of its time counting references to
    # the arrays it is given. Inlining halves the rest.
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "forceinline": True, "_nrt": False}
    return cast("Callable[_P, _T]", numba.njit(**options)(function))


class Tasks(NamedTuple):
    """What the kernel reads and writes per task; see :class:`planner.simulate.system.FluidSystem`."""

    latency_s: Floats
    duration_s: Floats
    pred_ptr: Ints
    pred: npt.NDArray[np.int32]
    next_in_lane: npt.NDArray[np.int32]
    start_s: Floats
    end_s: Floats


class Uses(NamedTuple):
    """What tasks use, and scratch space per resource."""

    ptr: Ints
    resource: npt.NDArray[np.int32]
    rate: Floats
    capacity: Floats
    num_users: Ints
    room: Floats  # capacity that tasks whose speed is settled leave
    load: Floats  # what the others would use at full speed
    touched: Ints  # last moment at which the running tasks that use it changed


class Lanes(NamedTuple):
    """State of each lane; ``head`` is the task under way or next, -1 when there is none left."""

    head: npt.NDArray[np.int32]
    state: npt.NDArray[np.int8]
    next_pred: Ints  # position of the first predecessor of the head not known to have ended
    event_s: Floats  # when the latency or the task ends; infinite while waiting
    work_s: Floats  # work left at since_s
    since_s: Floats
    speed: Floats
    touched: Ints  # last moment at which its speed had to be solved
    members: npt.NDArray[np.int32]  # scratch: tasks to solve
    speeds: Floats  # scratch: their speeds


@_jit
def fill(members: npt.NDArray[np.int32], uses: Uses, speeds: Floats) -> None:
    """Write max-min fair ``speeds`` of the tasks ``members``, taken to be all that run on the resources they use."""
    _count_users(members, uses)
    speeds[:] = _NOT_YET
    level, num_rising = 0.0, len(members)
    while num_rising > 0:
        _weigh(members, uses, speeds)
        lowest = 1.0
        for m, i in enumerate(members):
            if speeds[m] == _NOT_YET:
                lowest = min(lowest, _limit(i, uses))
        level = max(level, lowest)
        for m, i in enumerate(members):
            if speeds[m] == _NOT_YET and (level >= 1.0 or _limit(i, uses) <= level * _SAME):
                speeds[m] = level
                num_rising -= 1


@_jit
def _count_users(members: npt.NDArray[np.int32], uses: Uses) -> None:
    for i in members:
        for k in range(uses.ptr[i], uses.ptr[i + 1]):
            uses.num_users[uses.resource[k]] = 0
    for i in members:
        for k in range(uses.ptr[i], uses.ptr[i + 1]):
            uses.num_users[uses.resource[k]] += 1


@_jit
def _weigh(members: npt.NDArray[np.int32], uses: Uses, speeds: Floats) -> None:
    """Sum up load and room, afresh: subtracting what has settled would leave rounding residue behind."""
    for i in members:
        for k in range(uses.ptr[i], uses.ptr[i + 1]):
            r = uses.resource[k]
            uses.load[r] = 0.0
            uses.room[r] = uses.capacity[r, min(uses.num_users[r], uses.capacity.shape[1]) - 1]
    for m, i in enumerate(members):
        for k in range(uses.ptr[i], uses.ptr[i + 1]):
            if speeds[m] == _NOT_YET:
                uses.load[uses.resource[k]] += uses.rate[k]
            else:
                uses.room[uses.resource[k]] -= speeds[m] * uses.rate[k]


@_jit
def _limit(task: int, uses: Uses) -> float:
    """Return the speed at which the first resource of a rising task is full."""
    lowest = np.inf
    for k in range(uses.ptr[task], uses.ptr[task + 1]):
        r = uses.resource[k]
        lowest = min(lowest, uses.room[r] / uses.load[r])
    return lowest


@_jit
def _touch(task: int, uses: Uses, moment: int) -> None:
    for k in range(uses.ptr[task], uses.ptr[task + 1]):
        uses.touched[uses.resource[k]] = moment


@_jit
def _is_touched(task: int, uses: Uses, moment: int) -> bool:
    found = False
    for k in range(uses.ptr[task], uses.ptr[task + 1]):
        found = found or uses.touched[uses.resource[k]] == moment
    return found


@_jit
def _run_or_end(lane: int, lanes: Lanes, tasks: Tasks, uses: Uses, now_s: float, moment: int) -> None:
    """Let the head of a lane, its latency paid, run; or end it if there is no work."""
    task = lanes.head[lane]
    if tasks.duration_s[task] == 0.0:
        _end(lane, lanes, tasks, now_s)
        return
    lanes.state[lane] = _RUNNING
    lanes.event_s[lane] = np.inf
    lanes.work_s[lane] = tasks.duration_s[task]
    lanes.since_s[lane] = now_s
    lanes.speed[lane] = 0.0
    lanes.touched[lane] = moment
    _touch(task, uses, moment)


@_jit
def _end(lane: int, lanes: Lanes, tasks: Tasks, now_s: float) -> None:
    task = lanes.head[lane]
    tasks.end_s[task] = now_s
    lanes.state[lane] = _WAITING
    lanes.event_s[lane] = np.inf
    following = tasks.next_in_lane[task]
    lanes.head[lane] = following
    if following >= 0:
        lanes.next_pred[lane] = tasks.pred_ptr[following]


@_jit
def _start(lanes: Lanes, tasks: Tasks, uses: Uses, now_s: float, moment: int) -> None:
    """Start all that can start now, and end at once what has neither latency nor work."""
    moved = True
    while moved:
        moved = False
        for lane in range(len(lanes.head)):
            while lanes.head[lane] >= 0 and lanes.state[lane] == _WAITING:
                task = lanes.head[lane]
                k = lanes.next_pred[lane]
                while k < tasks.pred_ptr[task + 1] and tasks.end_s[tasks.pred[k]] != _NOT_YET:
                    k += 1
                lanes.next_pred[lane] = k
                if k < tasks.pred_ptr[task + 1]:
                    break
                tasks.start_s[task] = now_s
                if tasks.latency_s[task] > 0.0:
                    lanes.state[lane] = _LATENCY
                    lanes.event_s[lane] = now_s + tasks.latency_s[task]
                else:
                    _run_or_end(lane, lanes, tasks, uses, now_s, moment)
                    moved = moved or lanes.state[lane] == _WAITING


@_jit
def _solve(lanes: Lanes, uses: Uses, now_s: float, moment: int) -> None:
    """Solve again the speeds of running tasks that are joined, through resources, to a change at this moment."""
    grew = True
    while grew:
        grew = False
        for lane in range(len(lanes.head)):
            if lanes.state[lane] == _RUNNING and lanes.touched[lane] != moment:
                task = lanes.head[lane]
                if _is_touched(task, uses, moment):
                    lanes.touched[lane] = moment
                    _touch(task, uses, moment)
                    grew = True
    num_members = 0
    for lane in range(len(lanes.head)):
        if lanes.state[lane] == _RUNNING and lanes.touched[lane] == moment:
            lanes.members[num_members] = lanes.head[lane]
            num_members += 1
    speeds = lanes.speeds[:num_members]
    fill(lanes.members[:num_members], uses, speeds)
    m = 0
    for lane in range(len(lanes.head)):
        if lanes.state[lane] == _RUNNING and lanes.touched[lane] == moment:
            speed = speeds[m]
            m += 1
            if speed != lanes.speed[lane]:
                lanes.work_s[lane] = max(lanes.work_s[lane] - lanes.speed[lane] * (now_s - lanes.since_s[lane]), 0.0)
                lanes.since_s[lane] = now_s
                lanes.speed[lane] = speed
                lanes.event_s[lane] = now_s + lanes.work_s[lane] / speed if speed > 0.0 else np.inf


@_jit
def run(lanes: Lanes, tasks: Tasks, uses: Uses) -> int:
    """Run all tasks, filling ``tasks.start_s`` and ``tasks.end_s``; return the number of moments at which any moved.

    Tasks that can never end keep an ``end_s`` of -1.
    """
    now_s, moment = 0.0, 0
    while True:
        _start(lanes, tasks, uses, now_s, moment)
        _solve(lanes, uses, now_s, moment)
        now_s = np.inf
        for lane in range(len(lanes.head)):
            now_s = min(now_s, lanes.event_s[lane])
        if now_s == np.inf:
            return moment
        moment += 1
        for lane in range(len(lanes.head)):
            if lanes.event_s[lane] <= now_s:
                if lanes.state[lane] == _LATENCY:
                    _run_or_end(lane, lanes, tasks, uses, now_s, moment)
                else:
                    _touch(lanes.head[lane], uses, moment)
                    _end(lane, lanes, tasks, now_s)


@_jit
def link_lanes(lane: npt.NDArray[np.int32], head: npt.NDArray[np.int32], following: npt.NDArray[np.int32]) -> None:
    """Write the next task in the same lane as each task, -1 for the last, and the first of each lane to ``head``."""
    head[:] = -1
    for i in range(len(lane) - 1, -1, -1):
        following[i] = head[lane[i]]
        head[lane[i]] = i
