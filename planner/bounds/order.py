"""A lower bound on one schedule that ignores how its tasks share resources: between the proofs and the simulation.

Two things hold however tasks overlap. A resource has a capacity, so an iteration lasts at least as
long as the resource needs for its work. And no task is faster than alone. If nothing were shared, no task would start
later than it does now, because a start is a maximum of ends. The iteration would take the longest chain of waits along
dependencies and lanes, divided by the number of iterations that the chain spans. A simulation without resources finds
it.
"""

import dataclasses
from collections import defaultdict

import numpy as np

from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.schedule.schedule import Schedule
from planner.simulate.machine import Simulation, run
from planner.simulate.steady import find_cycle

# Iterations to simulate in search of a cycle. Without sharing, a cycle shows up soon or is not needed.
_NUM_ITERATIONS = (4, 16)


def order_bound_s(schedule: Schedule, cost: CostModel) -> float:
    """Return a lower bound on the iteration time of a schedule, in seconds; see the module."""
    arrays, capacity = schedule.arrays, cost.capacities()
    prices = [cost.price(each) for each in arrays.works]
    counts = np.bincount(arrays.work, minlength=len(prices)).tolist()
    work: dict[tuple[Resource, int], float] = defaultdict(float)
    for each, price, count in zip(arrays.works, prices, counts, strict=True):
        for resource, rate in price.uses:
            work[resource, each.stage] += count * rate * price.duration_s / capacity[resource]
    at_least_s = max(work.values(), default=0.0)
    without = [dataclasses.replace(price, uses=()) for price in prices]
    alone = [without[number] for number in arrays.work.tolist()]
    for num_iterations in _NUM_ITERATIONS:
        timeline = run(schedule, alone, capacity, num_iterations)
        if cycle := find_cycle(timeline):
            return max(at_least_s, Simulation(timeline, cycle, converged=True).period_s)
    return at_least_s  # no cycle was found, so nothing more is known
