"""A schedule with given durations instead of prices: nothing is shared, only the waiting is simulated."""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.timeline import Timeline
from planner.simulate.kernel import simulate
from planner.simulate.machine import system_of

Seconds = npt.NDArray[np.float64]

# Iterations to simulate, and to skip at the beginning, until the effect of the start is gone.
_NUM, _FIRST = 9, 4


def replayed(schedule: Schedule) -> Callable[[Seconds], float]:
    """Return a function from durations of a schedule's tasks, float64[num_tasks] in seconds, to those per iteration.

    The schedule's arrays are built once, for many sets of durations.
    """
    free, shape = [Price(0.0, 0.0)] * schedule.num_tasks, (_NUM, schedule.num_tasks)
    system = system_of(schedule, free, dict.fromkeys(Resource, 1.0), _NUM)

    def period_s(durations_s: Seconds) -> float:
        result = simulate(dataclasses.replace(system, duration_s=np.tile(durations_s, _NUM)))
        timeline = Timeline(schedule, result.start_s.reshape(shape), result.end_s.reshape(shape))
        return (timeline.begin_s(_NUM - 1) - timeline.begin_s(_FIRST)) / (_NUM - 1 - _FIRST)

    return period_s
