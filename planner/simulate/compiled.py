"""The simulator's kernel, compiled by numba. Imported only to compile it; see :mod:`.loaded`.

An event costs time in proportion to what it changes, not to the size of the system. A waiting lane is looked at again
only when the task that it waits for ends. The next event comes off a heap of the running lanes. Speeds are solved again
only for tasks that a *crowded* resource connects to a change; a resource is crowded if it cannot serve all its users at
full speed. A running task stores the time of its end, which changes only with its speed. So rounding errors do not
build up, at least one task advances at every event, and rounding cannot stall the clock.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np

from planner.simulate.state import CHANGED, ENDED, HEAP, MEMBERS, NONE, READY, Lanes, Resources, State, Tasks
from planner.simulate.system import Ints

_P = ParamSpec("_P")
_T = TypeVar("_T")

_WAITING, _LATENCY, _RUNNING = 0, 1, 2
_SAME = 1 + 1e-12  # resources that fill up within this factor of one another fill up together
_NOT_YET = -1.0
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}


def _jit(function: Callable[_P, _T]) -> Callable[_P, _T]:
    # The kernel allocates nothing. Without _nrt=False it would spend nine tenths of its time on counting references to
    # its arrays. Inlining halves the rest.
    return cast("Callable[_P, _T]", numba.njit(**_OPTIONS, forceinline=True)(function))


@_jit
def _reset(state: State) -> None:
    tasks, lanes, resources, counts = state
    tasks.waiting[:] = NONE
    tasks.start_s[:] = _NOT_YET
    tasks.end_s[:] = _NOT_YET
    lanes.state[:] = _WAITING
    lanes.solved[:] = NONE
    lanes.place[:] = NONE
    resources.first[:] = NONE
    resources.num_users[:] = 0
    resources.crowded[:] = False
    resources.changed_at[:] = NONE
    counts[:] = 0


@_jit
def _link_lanes(tasks: Tasks, lanes: Lanes) -> None:
    """Make the first task of each lane its head, and find each task's successor in its lane."""
    lanes.head[:] = NONE
    for i in range(len(tasks.lane) - 1, -1, -1):
        tasks.next_in_lane[i] = lanes.head[tasks.lane[i]]
        lanes.head[tasks.lane[i]] = i


@_jit
def _set_event(lane: int, time_s: float, lanes: Lanes, counts: Ints) -> None:
    """Insert a lane into the heap, or move it to its place."""
    place = lanes.place[lane]
    if place == NONE:
        place = counts[HEAP]
        counts[HEAP] += 1
    lanes.event_s[lane] = time_s
    while place > 0:
        above = lanes.heap[(place - 1) >> 1]
        if lanes.event_s[above] <= time_s:
            break
        lanes.heap[place] = above
        lanes.place[above] = place
        place = (place - 1) >> 1
    while 2 * place + 1 < counts[HEAP]:
        child = 2 * place + 1
        if child + 1 < counts[HEAP] and lanes.event_s[lanes.heap[child + 1]] < lanes.event_s[lanes.heap[child]]:
            child += 1
        below = lanes.heap[child]
        if lanes.event_s[below] >= time_s:
            break
        lanes.heap[place] = below
        lanes.place[below] = place
        place = child
    lanes.heap[place] = lane
    lanes.place[lane] = place


@_jit
def _pop_event(lanes: Lanes, counts: Ints) -> int:
    """Remove the lane of the earliest event from the heap."""
    lane: int = lanes.heap[0]
    lanes.place[lane] = NONE
    counts[HEAP] -= 1
    if counts[HEAP] > 0:
        last = lanes.heap[counts[HEAP]]
        lanes.place[last] = 0
        _set_event(last, lanes.event_s[last], lanes, counts)
    return lane


@_jit
def _note_change(resource: int, resources: Resources, counts: Ints, moment: int) -> None:
    if resources.changed_at[resource] != moment:
        resources.changed_at[resource] = moment
        resources.changed[counts[CHANGED]] = resource
        counts[CHANGED] += 1


@_jit
def _run_head(lane: int, state: State, now_s: float, moment: int) -> None:
    """Run the head of a lane after its latency: it becomes a user of its resources."""
    tasks, lanes, resources, counts = state
    task = lanes.head[lane]
    lanes.state[lane] = _RUNNING
    lanes.work_s[lane] = tasks.duration_s[task]
    lanes.since_s[lane] = now_s
    lanes.speed[lane] = _NOT_YET
    lanes.solved[lane] = moment
    lanes.members[counts[MEMBERS]] = lane
    counts[MEMBERS] += 1
    entry = lane * (len(lanes.rate) // len(lanes.head))
    for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
        resource = tasks.use_resource[k]
        second = resources.first[resource]
        lanes.rate[entry] = tasks.use_rate[k]
        lanes.following[entry] = second
        lanes.preceding[entry] = NONE
        if second != NONE:
            lanes.preceding[second] = entry
        resources.first[resource] = entry
        resources.num_users[resource] += 1
        _note_change(resource, resources, counts, moment)
        entry += 1


@_jit
def _release(lane: int, state: State, moment: int) -> None:
    """Remove the head of a lane from the users of its resources."""
    tasks, lanes, resources, counts = state
    task = lanes.head[lane]
    entry = lane * (len(lanes.rate) // len(lanes.head))
    for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
        resource = tasks.use_resource[k]
        before, after = lanes.preceding[entry], lanes.following[entry]
        if before == NONE:
            resources.first[resource] = after
        else:
            lanes.following[before] = after
        if after != NONE:
            lanes.preceding[after] = before
        resources.num_users[resource] -= 1
        _note_change(resource, resources, counts, moment)
        entry += 1


@_jit
def _push_ready(lane: int, lanes: Lanes, counts: Ints) -> None:
    lanes.ready[counts[READY]] = lane
    counts[READY] += 1


@_jit
def _end_head(lane: int, state: State, now_s: float) -> None:
    """End the head of a lane. The next task in the lane, and tasks that wait for this one, may now start."""
    tasks, lanes, _, counts = state
    task = lanes.head[lane]
    tasks.end_s[task] = now_s
    counts[ENDED] += 1
    following = tasks.next_in_lane[task]
    lanes.state[lane] = _WAITING
    lanes.head[lane] = following
    if following != NONE:
        lanes.next_pred[lane] = tasks.pred_ptr[following]
        _push_ready(lane, lanes, counts)
    waiting = tasks.waiting[task]
    while waiting != NONE:
        _push_ready(waiting, lanes, counts)
        waiting = lanes.next_waiting[waiting]


@_jit
def _start(state: State, now_s: float, moment: int) -> None:
    """Start all tasks that can start now, run those after their latency, and end tasks without work at once."""
    tasks, lanes, _, counts = state
    while counts[READY] > 0:
        counts[READY] -= 1
        lane = lanes.ready[counts[READY]]
        task = lanes.head[lane]
        if lanes.state[lane] == _WAITING:
            k, stop = lanes.next_pred[lane], tasks.pred_ptr[task + 1]
            while k < stop and tasks.end_s[tasks.pred[k]] != _NOT_YET:
                k += 1
            if k < stop:  # look again when that predecessor has ended
                lanes.next_pred[lane] = k + 1
                lanes.next_waiting[lane] = tasks.waiting[tasks.pred[k]]
                tasks.waiting[tasks.pred[k]] = lane
                continue
            tasks.start_s[task] = now_s
            if tasks.latency_s[task] > 0.0:
                lanes.state[lane] = _LATENCY
                _set_event(lane, now_s + tasks.latency_s[task], lanes, counts)
                continue
        if tasks.duration_s[task] == 0.0:
            _end_head(lane, state, now_s)
        else:
            _run_head(lane, state, now_s, moment)


@_jit
def _capacity(resource: int, resources: Resources) -> float:
    column = min(resources.num_users[resource], resources.capacity.shape[1]) - 1
    amount: float = resources.capacity[resource, column]
    return amount


@_jit
def _is_crowded(resource: int, lanes: Lanes, resources: Resources) -> bool:
    demand = 0.0  # computed anew: additions and subtractions would leave rounding errors
    entry = resources.first[resource]
    while entry != NONE:
        demand += lanes.rate[entry]
        entry = lanes.following[entry]
    return demand > _capacity(resource, resources)


@_jit
def _collect(state: State, moment: int) -> None:
    """Add to the members all running tasks that crowded resources connect to a change at this event.

    A resource that serves all its users at full speed slows nobody, so changes do not spread through it. A change
    matters to its users only if it is or was crowded.
    """
    tasks, lanes, resources, counts = state
    num_changed, counts[CHANGED] = counts[CHANGED], 0
    for i in range(num_changed):
        resource = resources.changed[i]
        was_crowded = resources.crowded[resource]
        resources.crowded[resource] = _is_crowded(resource, lanes, resources)
        if was_crowded or resources.crowded[resource]:
            resources.changed[counts[CHANGED]] = resource
            counts[CHANGED] += 1
    width = len(lanes.rate) // len(lanes.head)
    i = 0
    while i < counts[CHANGED]:
        entry = resources.first[resources.changed[i]]
        while entry != NONE:
            lane = entry // width
            if lanes.solved[lane] != moment:
                lanes.solved[lane] = moment
                lanes.members[counts[MEMBERS]] = lane
                counts[MEMBERS] += 1
                task = lanes.head[lane]
                for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
                    if resources.crowded[tasks.use_resource[k]]:
                        _note_change(tasks.use_resource[k], resources, counts, moment)
            entry = lanes.following[entry]
        i += 1
    counts[CHANGED] = 0


@_jit
def _weigh(state: State) -> None:
    """Sum up load and room anew: subtracting settled tasks would leave rounding errors."""
    tasks, lanes, resources, counts = state
    for m in range(counts[MEMBERS]):
        task = lanes.head[lanes.members[m]]
        for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
            resource = tasks.use_resource[k]
            if resources.crowded[resource]:
                resources.load[resource] = 0.0
                resources.room[resource] = _capacity(resource, resources)
    for m in range(counts[MEMBERS]):
        lane = lanes.members[m]
        task = lanes.head[lane]
        for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
            if lanes.new_speed[lane] == _NOT_YET:
                resources.load[tasks.use_resource[k]] += tasks.weight[task] * tasks.use_rate[k]
            else:
                resources.room[tasks.use_resource[k]] -= lanes.new_speed[lane] * tasks.use_rate[k]


@_jit
def _limit(task: int, tasks: Tasks, resources: Resources) -> float:
    """Return the level at which a rising task reaches full speed, or the first of its resources is full."""
    lowest: float = 1.0 / tasks.weight[task]
    for k in range(tasks.use_ptr[task], tasks.use_ptr[task + 1]):
        resource = tasks.use_resource[k]
        if resources.crowded[resource]:
            lowest = min(lowest, resources.room[resource] / resources.load[resource])
    return lowest


@_jit
def _fill(state: State) -> None:
    """Write the weighted max-min fair speeds of the members. Nobody else uses the resources that limit them."""
    tasks, lanes, resources, counts = state
    for m in range(counts[MEMBERS]):
        lanes.new_speed[lanes.members[m]] = _NOT_YET
    level, num_rising = 0.0, counts[MEMBERS]
    while num_rising > 0:
        _weigh(state)
        lowest = np.inf
        for m in range(counts[MEMBERS]):
            if lanes.new_speed[lanes.members[m]] == _NOT_YET:
                lowest = min(lowest, _limit(lanes.head[lanes.members[m]], tasks, resources))
        level = max(level, lowest)
        for m in range(counts[MEMBERS]):
            lane = lanes.members[m]
            task = lanes.head[lane]
            if lanes.new_speed[lane] == _NOT_YET and _limit(task, tasks, resources) <= level * _SAME:
                weight = tasks.weight[task]
                lanes.new_speed[lane] = 1.0 if 1.0 / weight <= level else min(weight * level, 1.0)
                num_rising -= 1


@_jit
def _solve(state: State, now_s: float, moment: int) -> None:
    """Solve the speeds that may have changed at this event, and move the ends of those tasks."""
    _collect(state, moment)
    _fill(state)
    lanes, counts = state.lanes, state.counts
    for m in range(counts[MEMBERS]):
        lane = lanes.members[m]
        speed, before = lanes.new_speed[lane], lanes.speed[lane]
        if speed != before:
            if before > 0.0:
                lanes.work_s[lane] = max(lanes.work_s[lane] - before * (now_s - lanes.since_s[lane]), 0.0)
            lanes.since_s[lane] = now_s
            lanes.speed[lane] = speed
            _set_event(lane, now_s + lanes.work_s[lane] / speed if speed > 0.0 else np.inf, lanes, counts)
    counts[MEMBERS] = 0


@_jit
def _run(state: State) -> None:
    tasks, lanes, _, counts = state
    _reset(state)
    _link_lanes(tasks, lanes)
    for lane in range(len(lanes.head)):
        if lanes.head[lane] != NONE:
            lanes.next_pred[lane] = tasks.pred_ptr[lanes.head[lane]]
            _push_ready(lane, lanes, counts)
    now_s, moment = 0.0, 0
    while True:
        _start(state, now_s, moment)
        _solve(state, now_s, moment)
        if counts[HEAP] == 0 or lanes.event_s[lanes.heap[0]] == np.inf:
            return
        now_s = lanes.event_s[lanes.heap[0]]
        moment += 1
        while counts[HEAP] > 0 and lanes.event_s[lanes.heap[0]] <= now_s:
            lane = _pop_event(lanes, counts)
            if lanes.state[lane] == _LATENCY:
                _push_ready(lane, lanes, counts)
            else:
                _release(lane, state, moment)
                _end_head(lane, state, now_s)


def kernel(state: State) -> int:
    """Run all tasks, filling ``start_s`` and ``end_s``; return the number of those that have ended."""
    _run(state)
    num_ended: int = state.counts[ENDED]
    return num_ended


def compile_kernel(state: State) -> tuple[str, bytes]:
    """Compile the kernel for this machine and for the array types of a state.

    Returns:
        The kernel's symbol, and the object file.
    """
    # Without a Python wrapper, the code refers to nothing of Python's or numba's.
    alone: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    dispatcher = numba.njit(**_OPTIONS, **alone)(kernel)
    signature = (numba.typeof(state),)  # type: ignore[no-untyped-call]
    dispatcher.compile(signature)
    compiled = dispatcher.overloads[signature]
    *_, (code, _) = compiled.library.serialize_using_object_code()
    return compiled.fndesc.llvm_func_name, code
