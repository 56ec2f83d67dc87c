"""The simulated machine: walks a schedule in virtual time."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.costs import CostModel, Price, Resource
from planner.loop import Loop
from planner.schedule import Lane, Schedule, Task
from planner.simulate.kernel import simulate
from planner.simulate.system import FluidSystem
from planner.timeline import Span, Timeline

_LANES = {lane: number for number, lane in enumerate(Lane)}
# Periods of two consecutive iterations that differ by less than this are the same.
_STEADY = 1e-6


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulated timeline, and the iteration of it that repeats from then on.

    Attributes:
        timeline: several iterations.
        steady: index of the first iteration whose period equals the next one's (or the last complete one).
        converged: whether two equal periods were found.
    """

    timeline: Timeline
    steady: int
    converged: bool


class SimulatedMachine:
    """Collects issued tasks and prices them; :meth:`run` then lets virtual time pass.

    Args:
        schedule: what is walked.
        prices: the price of each task (see :meth:`planner.costs.CostModel.prices`), or its measured duration.
        capacities: what there is of each resource.
    """

    def __init__(self, schedule: Schedule, prices: Sequence[Price], capacities: dict[Resource, float]) -> None:
        self._schedule = schedule
        self._prices = prices
        self._capacities = capacities
        self._issued: list[tuple[int, int]] = []

    def issue(self, task: Task, iteration: int) -> None:
        """Append a task to its lane."""
        self._issued.append((iteration, task.index))

    def run(self) -> Timeline:
        """Simulate everything issued so far."""
        system = self._system()
        result = simulate(system)
        starts, ends = result.start_s.tolist(), result.end_s.tolist()
        return Timeline(
            self._schedule,
            tuple(
                Span(iteration, task, start_s, end_s)
                for (iteration, task), start_s, end_s in zip(self._issued, starts, ends, strict=True)
            ),
        )

    def _system(self) -> FluidSystem:
        """Tile the arrays of one iteration over all issued iterations."""
        tasks = self._schedule.tasks
        count = len(tasks)
        position = {key: i for i, key in enumerate(self._issued)}
        in_order = len(position) % count == 0 and list(position) == [
            (it, i) for it in range(len(position) // count) for i in range(count)
        ]
        assert in_order, "the loop issues whole iterations in order"
        iterations = len(self._issued) // count
        pred_counts, pred = [0], list[int]()
        for iteration in range(iterations):
            base = iteration * count
            for task in tasks:
                pred += [base + i for i in task.after]
                if iteration:
                    pred += [base - count + i for i in task.after_previous]
                pred_counts.append(len(pred))
        uses = [use for price in self._prices for use in price.uses]
        use_counts = np.tile([len(price.uses) for price in self._prices], iterations)
        return FluidSystem(
            lane=np.tile(np.array([_LANES[task.lane] for task in tasks], np.int32), iterations),
            latency_s=np.tile(np.array([price.latency_s for price in self._prices]), iterations),
            duration_s=np.tile(np.array([price.duration_s for price in self._prices]), iterations),
            pred_ptr=np.array(pred_counts, np.int64),
            pred=np.array(pred, np.int32),
            use_ptr=np.concatenate([[0], np.cumsum(use_counts)]).astype(np.int64),
            use_resource=np.tile(np.array([int(r) for r, _ in uses], np.int32), iterations),
            use_rate=np.tile(np.array([rate for _, rate in uses], np.float64), iterations),
            capacity=np.array([[self._capacities[resource]] for resource in Resource]),
            lane_names=tuple(_LANES),
            task_name=lambda i: tasks[i % count].name,
        )


def run(
    schedule: Schedule, prices: Sequence[Price], capacities: dict[Resource, float], num_iterations: int
) -> Timeline:
    """Walk a schedule for some iterations in virtual time."""
    machine = SimulatedMachine(schedule, prices, capacities)
    loop = Loop(schedule, machine)
    for _ in range(num_iterations):
        loop.finish()
    return machine.run()


def run_until_steady(schedule: Schedule, cost: CostModel, *, quick: bool = False) -> Simulation:
    """Walk a schedule until its iteration repeats itself.

    Args:
        schedule: what is walked.
        cost: prices of its tasks.
        quick: take the second iteration as steady without looking further (what a search needs).
    """
    prices, capacities = cost.prices(schedule), cost.capacities()
    num_iterations = 3
    while True:
        timeline = run(schedule, prices, capacities, num_iterations)
        periods = [timeline.period_s(i) for i in range(num_iterations - 1)]
        if quick:
            return Simulation(timeline, 1, converged=False)
        for i in range(len(periods) - 1):
            if abs(periods[i + 1] - periods[i]) <= _STEADY * periods[i]:
                return Simulation(timeline, i, converged=True)
        if num_iterations >= 12:
            return Simulation(timeline, len(periods) - 1, converged=False)
        num_iterations *= 2
