"""The fast simulator: the same answers as :mod:`planner.simulate.reference`, millions of tasks per second."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from planner.simulate.system import Floats, FluidSystem, StuckError

if TYPE_CHECKING:
    from planner.simulate.compiled import Uses


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
    """Run a system in virtual time, in O(tasks * lanes).

    Raises:
        StuckError: a task can never end, because a resource that it uses has capacity 0.
    """
    from planner.simulate import compiled  # noqa: PLC0415 - numba takes long to import, and not all commands simulate

    num_lanes = system.num_lanes
    head, next_in_lane = np.empty(num_lanes, dtype=np.int32), np.empty(system.num_tasks, dtype=np.int32)
    compiled.link_lanes(system.lane, head, next_in_lane)
    tasks = compiled.Tasks(
        latency_s=system.latency_s,
        duration_s=system.duration_s,
        pred_ptr=system.pred_ptr,
        pred=system.pred,
        next_in_lane=next_in_lane,
        start_s=np.full(system.num_tasks, -1.0),
        end_s=np.full(system.num_tasks, -1.0),
    )
    lanes = compiled.Lanes(
        head=head,
        state=np.zeros(num_lanes, dtype=np.int8),
        next_pred=np.append(system.pred_ptr, 0)[head],  # 0 for lanes without tasks
        event_s=np.full(num_lanes, np.inf),
        work_s=np.zeros(num_lanes),
        since_s=np.zeros(num_lanes),
        speed=np.zeros(num_lanes),
        touched=np.full(num_lanes, -1, dtype=np.int64),
        members=np.zeros(num_lanes, dtype=np.int32),
        speeds=np.zeros(num_lanes),
    )
    num_events = compiled.run(lanes, tasks, _uses(system))
    if len(stuck := np.flatnonzero((tasks.end_s < 0) & (tasks.start_s >= 0))):  # started, but not ended
        raise StuckError(f"{system.describe(int(stuck[0]))} can never end; give the resources it uses capacity")
    return Simulation(tasks.start_s, tasks.end_s, num_events)


def solve_speeds(system: FluidSystem, running: Sequence[int]) -> Floats:
    """Return the speeds, float64[len(running)] in [0, 1], that these tasks have while exactly they are running."""
    from planner.simulate import compiled  # noqa: PLC0415 - as above

    speeds = np.zeros(len(running))
    compiled.fill(np.array(running, dtype=np.int32), _uses(system), speeds)
    return speeds


def _uses(system: FluidSystem) -> "Uses":
    from planner.simulate import compiled  # noqa: PLC0415 - as above

    num_resources = len(system.capacity)
    return compiled.Uses(
        ptr=system.use_ptr,
        resource=system.use_resource,
        rate=system.use_rate,
        capacity=system.capacity,
        num_users=np.zeros(num_resources, dtype=np.int64),
        room=np.zeros(num_resources),
        load=np.zeros(num_resources),
        touched=np.full(num_resources, -1, dtype=np.int64),
    )
