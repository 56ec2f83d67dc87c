"""The fast simulator: the same answers as :mod:`planner.simulate.reference`, millions of tasks per second."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.simulate.system import Floats, FluidSystem

if TYPE_CHECKING:
    from planner.simulate.compiled import Ints32, State


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """When every task of a system ran.

    Attributes:
        start_s: float64[n], when each task left its queue; its latency comes after that.
        end_s: float64[n].
        num_events: moments after 0 at which a latency or a task ended.
    """

    start_s: Floats
    end_s: Floats
    num_events: int

    @property
    def makespan_s(self) -> float:
        """Time from the beginning, 0, to the last end."""
        return float(self.end_s.max(initial=0.0))


def simulate(system: FluidSystem) -> Simulation:
    """Run a system in virtual time.

    Raises:
        StuckError: a task can never end, because a resource that it uses has capacity 0.
    """
    from planner.simulate import compiled  # noqa: PLC0415 - numba takes long to import, and not all commands simulate

    head, next_in_lane = np.empty(system.num_lanes, dtype=np.int32), np.empty(system.num_tasks, dtype=np.int32)
    compiled.link_lanes(system.lane, head, next_in_lane)
    state = _state(system, head, next_in_lane)
    num_events = compiled.run(state)
    tasks = state.tasks
    if len(stuck := np.flatnonzero((tasks.end_s < 0) & (tasks.start_s >= 0))):  # started, but not ended
        raise system.never_ends(int(stuck[0]))
    return Simulation(tasks.start_s, tasks.end_s, num_events)


def solve_speeds(system: FluidSystem, running: Sequence[int]) -> Floats:
    """Return the speeds, float64[len(running)] in [0, 1], that these tasks have while exactly they are running."""
    from planner.simulate import compiled  # noqa: PLC0415 - as above

    state = _state(system, np.array(running, dtype=np.int32), np.empty(0, dtype=np.int32))
    compiled.run_heads(state)
    return state.lanes.speed


def _state(system: FluidSystem, head: "Ints32", next_in_lane: "Ints32") -> "State":
    """Return the state before anything has happened, with these tasks at the heads of the lanes."""
    from planner.simulate import compiled  # noqa: PLC0415 - as above

    count, num_lanes, num_resources = system.num_tasks, len(head), len(system.capacity)
    width = int(np.diff(system.use_ptr).max(initial=0))
    tasks = compiled.Tasks(
        latency_s=system.latency_s,
        duration_s=system.duration_s,
        weight=system.weight,
        pred_ptr=system.pred_ptr,
        pred=system.pred,
        use_ptr=system.use_ptr,
        use_resource=system.use_resource,
        use_rate=system.use_rate,
        next_in_lane=next_in_lane,
        waiting=np.full(count, -1, dtype=np.int32),
        start_s=np.full(count, -1.0),
        end_s=np.full(count, -1.0),
    )
    lanes = compiled.Lanes(
        head=head,
        state=np.zeros(num_lanes, dtype=np.int8),
        next_pred=np.append(system.pred_ptr, 0)[head],  # 0 for lanes without tasks
        next_waiting=np.empty(num_lanes, dtype=np.int32),
        event_s=np.empty(num_lanes),
        work_s=np.empty(num_lanes),
        since_s=np.empty(num_lanes),
        speed=np.empty(num_lanes),
        new_speed=np.empty(num_lanes),
        solved=np.full(num_lanes, -1, dtype=np.int64),
        heap=np.empty(num_lanes, dtype=np.int32),
        place=np.full(num_lanes, -1, dtype=np.int32),
        ready=np.empty(num_lanes, dtype=np.int32),
        members=np.empty(num_lanes, dtype=np.int32),
        rate=np.empty(num_lanes * width),
        following=np.empty(num_lanes * width, dtype=np.int32),
        preceding=np.empty(num_lanes * width, dtype=np.int32),
    )
    resources = compiled.Resources(
        capacity=system.capacity,
        first=np.full(num_resources, -1, dtype=np.int32),
        num_users=np.zeros(num_resources, dtype=np.int64),
        crowded=np.zeros(num_resources, dtype=np.bool_),
        room=np.empty(num_resources),
        load=np.empty(num_resources),
        changed_at=np.full(num_resources, -1, dtype=np.int64),
        changed=np.empty(num_resources, dtype=np.int32),
    )
    return compiled.State(tasks, lanes, resources, np.zeros(compiled.NUM_COUNTS, dtype=np.int64))
