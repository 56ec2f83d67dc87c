"""What one schedule takes at least, however its tasks come to share: the last step between a proof and a simulation.

[Note: Order bound] Two things hold for a schedule whatever runs beside what. A resource gives no more than it has, so
an iteration lasts at least its work. And no task is faster than alone: if nothing were shared, none would start later
(a start is a maximum of ends), and the iteration would take the longest chain of waits, along dependencies and lanes,
for each iteration that it spans. That is what simulating the schedule without any resource finds.
"""

import dataclasses
from collections import defaultdict

from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.schedule.schedule import Schedule
from planner.simulate.machine import Simulation, run
from planner.simulate.steady import find_cycle

# Iterations that are simulated in search of a cycle. Without sharing, one that is not seen soon is never needed.
_NUM_ITERATIONS = (4, 16)


def order_bound_s(schedule: Schedule, cost: CostModel) -> float:
    """Return what an iteration of a schedule takes at least, in seconds; see [Note: Order bound]."""
    prices, capacity = cost.prices(schedule), cost.capacities()
    work: dict[tuple[Resource, int], float] = defaultdict(float)
    for task, price in zip(schedule.tasks, prices, strict=True):
        for resource, rate in price.uses:
            work[resource, task.stage] += rate * price.duration_s / capacity[resource]
    at_least_s = max(work.values(), default=0.0)
    alone = [dataclasses.replace(price, uses=()) for price in prices]
    for num_iterations in _NUM_ITERATIONS:
        timeline = run(schedule, alone, capacity, num_iterations)
        if cycle := find_cycle(timeline):
            return max(at_least_s, Simulation(timeline, cycle.first, converged=True, cycle=cycle.length).period_s)
    return at_least_s  # of what was not seen to repeat itself nothing else is known
