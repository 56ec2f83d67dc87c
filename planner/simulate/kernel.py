"""The simulator: the results of ``benchmarks/simulator/reference.py``, at millions of tasks per second."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.simulate.state import ENDED, NUM_COUNTS, Ints32, Lanes, Resources, State, Tasks
from planner.simulate.system import Floats, FluidSystem


@dataclasses.dataclass(frozen=True, eq=False)
class TaskTimes:
    """Start and end of every task of a system.

    Attributes:
        start_s: float64[n], when each task left its queue; its latency follows.
        end_s: float64[n], when each task ended.
        num_events: times after 0 at which a latency or a task ended.
    """

    start_s: Floats
    end_s: Floats
    num_events: int

    @property
    def makespan_s(self) -> float:
        """The time of the last end; the simulation begins at 0."""
        return float(self.end_s.max(initial=0.0))


def simulate(system: FluidSystem) -> TaskTimes:
    """Run a system in virtual time.

    Raises:
        ValueError: a task can never end, because a resource that it uses has capacity 0.
    """
    from planner.simulate.loaded import kernel_for  # noqa: PLC0415 - loads LLVM, and not all commands simulate

    state = _state(system, np.empty(system.num_lanes, dtype=np.int32))
    num_events = kernel_for(state)(state)
    start_s, end_s = state.tasks.start_s, state.tasks.end_s
    if state.counts[ENDED] < system.num_tasks:
        raise system.never_ends(int(np.argmax((end_s < 0) & (start_s >= 0))))
    return TaskTimes(start_s, end_s, num_events)


def solve_speeds(system: FluidSystem, running: Sequence[int]) -> Floats:
    """Return the speeds, float64[len(running)] in [0, 1], of these tasks while no others run."""
    from planner.simulate.loaded import kernel_for  # noqa: PLC0415 - as above

    state = _state(system, np.array(running, dtype=np.int32))
    kernel_for(state)(state, only_heads=True)
    return state.lanes.speed


def _state(system: FluidSystem, head: Ints32) -> State:
    """Return the kernel's state, in memory that the kernel initialises itself, because calls from here are slow."""
    num_tasks, num_lanes, num_resources = system.num_tasks, len(head), len(system.capacity)
    num_entries = num_lanes * system.max_uses
    empty, i32, i64 = np.empty, np.int32, np.int64
    tasks = Tasks(
        lane=system.lane,
        latency_s=system.latency_s,
        duration_s=system.duration_s,
        weight=system.weight,
        pred_ptr=system.pred_ptr,
        pred=system.pred,
        use_ptr=system.use_ptr,
        use_resource=system.use_resource,
        use_rate=system.use_rate,
        next_in_lane=empty(num_tasks, i32),
        waiting=empty(num_tasks, i32),
        start_s=empty(num_tasks),
        end_s=empty(num_tasks),
    )
    lanes = Lanes(
        head=head,
        state=empty(num_lanes, np.int8),
        next_pred=empty(num_lanes, i64),
        next_waiting=empty(num_lanes, i32),
        event_s=empty(num_lanes),
        work_s=empty(num_lanes),
        since_s=empty(num_lanes),
        speed=empty(num_lanes),
        new_speed=empty(num_lanes),
        solved=empty(num_lanes, i64),
        heap=empty(num_lanes, i32),
        place=empty(num_lanes, i32),
        ready=empty(num_lanes, i32),
        members=empty(num_lanes, i32),
        rate=empty(num_entries),
        following=empty(num_entries, i32),
        preceding=empty(num_entries, i32),
    )
    resources = Resources(
        capacity=system.capacity,
        first=empty(num_resources, i32),
        num_users=empty(num_resources, i64),
        crowded=empty(num_resources, np.bool_),
        room=empty(num_resources),
        load=empty(num_resources),
        changed_at=empty(num_resources, i64),
        changed=empty(num_resources, i32),
    )
    return State(tasks, lanes, resources, empty(NUM_COUNTS, i64))
