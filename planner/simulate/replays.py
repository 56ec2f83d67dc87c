"""A schedule with given durations instead of prices: nothing is shared, only the waiting is simulated."""

import dataclasses

import numpy as np
import numpy.typing as npt

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.timeline import Timeline
from planner.simulate.kernel import simulate
from planner.simulate.machine import SimulatedMachine

Seconds = npt.NDArray[np.float64]

# Iterations to simulate, and to skip at the beginning, until the effect of the start is gone.
_NUM, _FIRST = 9, 4


class Replays:
    """Simulates one schedule with many sets of durations; its arrays are built once.

    Args:
        schedule: the schedule.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        machine = SimulatedMachine(schedule, [Price(0.0, 0.0)] * schedule.num_tasks, dict.fromkeys(Resource, 1.0))
        self._system = machine.system(_NUM)

    def period_s(self, durations_s: Seconds) -> float:
        """Return the seconds per iteration if tasks have these durations.

        Args:
            durations_s: float64[num_tasks], seconds.
        """
        result = simulate(dataclasses.replace(self._system, duration_s=np.tile(durations_s, _NUM)))
        shape = (_NUM, self.schedule.num_tasks)
        timeline = Timeline(self.schedule, result.start_s.reshape(shape), result.end_s.reshape(shape))
        return (timeline.begin_s(_NUM - 1) - timeline.begin_s(_FIRST)) / (_NUM - 1 - _FIRST)
