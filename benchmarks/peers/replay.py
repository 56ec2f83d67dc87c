"""Replay measured durations in the simulator. Differences that remain are not errors of the cost model."""

from collections.abc import Sequence

import numpy as np

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run

_ITERATIONS = 5
_STEADY = 3


def replay(measured: Timeline, iterations: Sequence[int], schedule: Schedule | None = None) -> float:
    """Simulate a schedule with measured durations and no sharing; return the simulated period over the measured one.

    Only the fastest third of the iterations counts, in which no other program took the cores between two tasks.

    Args:
        measured: the timeline of an execution.
        iterations: iterations to read; each must be measured completely, and the next one too.
        schedule: a schedule with the same tasks to simulate in place of the executed one.

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
