"""The simulator of schedules: runs them in virtual time.

[Note: Steady state] Iterations settle into a *cycle*, of one iteration or of several different ones; two may alternate,
for example, if work that passes from lane to lane returns only every second time. Equal periods do not prove a cycle:
while one lane falls behind, lanes that do not wait for it yet keep a period that will not last. Two iterations are
equal if each task starts and ends at the same times after the iteration's beginning.

Let *reach* be the number of iterations by which tasks of one iteration may still overlap with later ones. From the
first start of iteration i on, everything depends on earlier iterations only through the start and end times of
iterations from i - reach on: these determine which tasks overlap, and so every speed. So if that many iterations in a
row equal those ``length`` later, all following iterations do too. We also require that each iteration of the cycle was
seen twice. The last iteration does not count: nothing later overlaps with it, and it has no period.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import LANES, Phase
from planner.schedule.timeline import Timeline
from planner.simulate.kernel import simulate
from planner.simulate.system import Capacity, Floats, FluidSystem, Ints, capacity_rows, pointers

# Times that differ by less than this fraction of the period are equal.
_SAME = 1e-6


def find_cycle(timeline: Timeline) -> range | None:
    """Return the iterations of the first occurrence of the shortest cycle in a timeline; ``None`` if there is none."""
    num_iterations = timeline.num_iterations
    begin_s = np.array([timeline.begin_s(i) for i in range(num_iterations)])
    period_s = np.diff(begin_s)
    moments_s = np.concatenate([timeline.start_s, timeline.end_s], axis=1) - begin_s[:, np.newaxis]
    slack_s = _SAME * period_s.max(initial=0.0)
    reach = _reach(timeline)
    num_whole = num_iterations - 1
    for length in range(1, num_whole // 2 + 1):
        earlier, later = slice(num_whole - length), slice(length, num_whole)
        same = abs(period_s[later] - period_s[earlier]) <= slack_s
        same[same] = (abs(moments_s[later][same] - moments_s[earlier][same]) <= slack_s).all(axis=1)
        in_a_row = max(length, reach)
        for first in range(len(same) - in_a_row + 1):
            if same[first : first + in_a_row].all():
                return range(first, first + length)
    return None


def _reach(timeline: Timeline) -> int:
    """Return the number of later iterations with which an iteration may overlap."""
    first_s, last_s = timeline.start_s.min(axis=1), timeline.end_s.max(axis=1)
    slack_s = _SAME * (last_s - first_s)
    begun = np.searchsorted(np.maximum.accumulate(first_s), last_s - slack_s)  # iterations begun before each one's end
    return int((begun - 1 - np.arange(timeline.num_iterations)).max(initial=0))


Capacities = Mapping[Resource, Capacity]

# Iterations to simulate in search of a cycle: at first, and at most.
_FIRST_ITERATIONS, _MAX_ITERATIONS = 4, 64


@dataclasses.dataclass(frozen=True)
class Simulation:
    """A simulated timeline, and the cycle of iterations that repeats; see [Note: Steady state].

    Attributes:
        timeline: several iterations.
        iterations: those of the cycle (or the last complete one, if no cycle was found).
        converged: whether a cycle was found.
    """

    timeline: Timeline
    iterations: range
    converged: bool

    @property
    def steady(self) -> int:
        """The first iteration of the cycle."""
        return self.iterations.start

    @property
    def period_s(self) -> float:
        """Seconds per iteration, the mean over the cycle."""
        return sum(self.timeline.period_s(i) for i in self.iterations) / len(self.iterations)

    @property
    def phases(self) -> dict[Phase, float]:
        """Seconds of an iteration in each phase, the mean over the cycle; see :meth:`Timeline.phases`."""
        phases = [self.timeline.phases(i) for i in self.iterations]
        return {phase: sum(seconds[phase] for seconds in phases) / len(phases) for phase in Phase}

    @property
    def iteration_s(self) -> float:
        """Seconds of all phases: :attr:`period_s`, added up in another order."""
        return sum(self.phases.values())


def run(schedule: Schedule, prices: Sequence[Price], capacities: Capacities, num_iterations: int) -> Timeline:
    """Run iterations of a schedule in virtual time. To issue tasks takes none: what it costs the host is a task too.

    Args:
        schedule: the schedule.
        prices: the price of each task (see :meth:`planner.costs.model.CostModel.prices`), or its measured duration.
        capacities: the capacity of each resource.
        num_iterations: how many.
    """
    start_s, end_s = simulate(system_of(schedule, prices, capacities, num_iterations))
    shape = (num_iterations, schedule.num_tasks)
    return Timeline(schedule, start_s.reshape(shape), end_s.reshape(shape))


def system_of(schedule: Schedule, prices: Sequence[Price], capacities: Capacities, num_iterations: int) -> FluidSystem:
    """Return the arrays of one iteration, repeated; every pipeline stage has its own lanes and resources.

    Raises:
        ValueError: a task would take for ever.
    """
    arrays, count, stages = schedule.arrays, schedule.num_tasks, range(schedule.num_stages)
    # Tasks of one kind have one price, and there are few kinds.
    identities = np.fromiter(map(id, prices), np.int64, count)
    _, firsts, price = np.unique(identities, return_index=True, return_inverse=True)
    kinds = [prices[first] for first in firsts.tolist()]
    amounts = np.array([(p.latency_s, p.duration_s, p.weight) for p in kinds]).reshape(-1, 3)[price]
    if not np.isfinite(amounts).all():
        task = schedule.tasks[int(np.argmin(np.isfinite(amounts).all(axis=1)))]
        raise ValueError(f"{task.name} on lane {task.lane} would take for ever; correct the profile of the machine")
    num_uses, uses = _uses(kinds, price)
    stage_of_use = np.repeat(arrays.lane // len(LANES), num_uses)
    pred_ptr, pred = _predecessors(schedule, num_iterations)
    return FluidSystem(
        lane=np.tile(arrays.lane.astype(np.int32), num_iterations),
        latency_s=np.tile(amounts[:, 0], num_iterations),
        duration_s=np.tile(amounts[:, 1], num_iterations),
        weight=np.tile(amounts[:, 2], num_iterations),
        pred_ptr=pred_ptr,
        pred=pred.astype(np.int32),
        use_ptr=pointers(np.tile(num_uses, num_iterations)),
        use_resource=np.tile((stage_of_use * len(Resource) + uses[:, 0]).astype(np.int32), num_iterations),
        use_rate=np.tile(uses[:, 1], num_iterations),
        capacity=capacity_rows([capacities[resource] for _ in stages for resource in Resource]),
    )


def _predecessors(schedule: Schedule, num_iterations: int) -> tuple[Ints, Ints]:
    """Return CSR pointers and indices; the first iteration does not wait for a previous one."""
    arrays, count = schedule.arrays, schedule.num_tasks
    first, first_counts = arrays.after, arrays.num_after
    previous, previous_counts = arrays.after_previous, arrays.num_after_previous
    owner = np.concatenate([np.repeat(np.arange(count), n) for n in (first_counts, previous_counts)])
    later = np.concatenate([first, previous - count])[np.argsort(owner, kind="stable")]
    again = range(1, num_iterations)
    return (
        pointers(np.concatenate([first_counts, np.tile(first_counts + previous_counts, len(again))])),
        np.concatenate([first, *(later + count * iteration for iteration in again)]),
    )


def _uses(prices: Sequence[Price], price: Ints) -> tuple[Ints, Floats]:
    """Return how many resources each task uses, and (resource, rate) of each use, one task after another.

    Args:
        prices: the different prices.
        price: int64[n], the price of each task.
    """
    sizes = np.fromiter((len(each.uses) for each in prices), np.int64, len(prices))
    uses = np.array([use for each in prices for use in each.uses], np.float64).reshape(-1, 2)
    num_uses = sizes[price]
    begins, ends = pointers(sizes)[price], np.cumsum(num_uses)
    return num_uses, uses[np.arange(num_uses.sum()) + np.repeat(begins - ends + num_uses, num_uses)]


def run_until_steady(schedule: Schedule, cost: CostModel, *, quick: bool = False) -> Simulation:
    """Run a schedule until its iterations repeat; see [Note: Steady state].

    Args:
        schedule: the schedule.
        cost: prices of its tasks.
        quick: take the second iteration as steady without further search, as the planner's search does.
    """
    prices, capacities = cost.prices(schedule), cost.capacities()
    if quick:
        return Simulation(run(schedule, prices, capacities, 3), range(1, 2), converged=False)
    num_iterations = _FIRST_ITERATIONS
    while True:
        timeline = run(schedule, prices, capacities, num_iterations)
        if cycle := find_cycle(timeline):
            return Simulation(timeline, cycle, converged=True)
        if num_iterations >= _MAX_ITERATIONS:
            return Simulation(timeline, range(num_iterations - 2, num_iterations - 1), converged=False)
        num_iterations *= 2
