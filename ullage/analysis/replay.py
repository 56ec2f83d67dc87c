"""Replay measured durations in the simulator. What still differs from the run is not an error of the cost model."""

from collections.abc import Sequence

import numpy as np

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run

_ITERATIONS = 5
_STEADY = 3


def replay(measured: Timeline, iterations: Sequence[int], schedule: Schedule | None = None) -> float:
    """Simulate a schedule with measured durations and nothing shared; return its period over the measured one.

    Of the iterations the fastest third is taken: those in which no other program took the cores between two tasks.

    Args:
        measured: an execution.
        iterations: which of its iterations to read; each must have been measured as a whole, with its successor.
        schedule: walked in place of the one that was executed, with the same tasks.

    Raises:
        ValueError: ``iterations`` is empty.
    """
    if not iterations:
        raise ValueError("no steady iteration was measured; run more iterations")
    fastest = sorted(iterations, key=measured.period_s)[: max(len(iterations) // 3, 1)]
    durations_s = np.median((measured.end_s - measured.start_s)[fastest], axis=0)
    prices = [Price(0.0, float(duration_s)) for duration_s in durations_s]
    simulated = run(schedule or measured.schedule, prices, dict.fromkeys(Resource, 1.0), _ITERATIONS)
    return simulated.period_s(_STEADY) / float(np.median([measured.period_s(i) for i in fastest]))
