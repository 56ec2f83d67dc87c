"""The critical path: the chain of tasks that determines the length of an iteration, and what slows it.

A task starts when the last of its predecessors has ended, or the task before it in its lane. So a
walk back from the beginning of the next iteration, always to the task that ended last, covers the iteration without
gaps. Under fluid sharing, a task of the chain may take longer than alone; the difference is due to sharing. It is
attributed to the task's resource with the highest demand while the task ran, summed over all running tasks at their
mean rates.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.series import Flow, series
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Span, Timeline

_Key = tuple[int, int]  # iteration, task
_Share = Callable[[Resource, int, float, float], float]
"""Returns the used share of a resource's capacity in a stage over an interval, from and to seconds."""
# The relative error of times, which are differences of timestamps.
_ROUNDING = 1e-12


Slowed = dict[Span, tuple[float, Resource]]
"""Of steps that sharing slows: the part of their time that is due to it, and the resource that slows them."""


def critical_steps(timeline: Timeline, iteration: int) -> tuple[Span, ...]:
    """Return the critical path of one iteration in order of time; see the module.

    Of each task, this is only the part within the iteration, in seconds since that began.

    In a simulated timeline, the steps cover the period. In a measured one, gaps are times in which no task of the
    schedule ran.
    """
    begin_s, end_s = timeline.begin_s(iteration), timeline.begin_s(iteration) + timeline.period_s(iteration)
    # The last iteration ends with its last task, others with the beginning of the next one.
    is_last = iteration + 1 >= timeline.num_iterations
    end = _last_of(timeline) if is_last else (iteration + 1, timeline.schedule.first_forward or 0)
    steps = []
    for key in critical_walk(timeline, end):
        if (step := _step(timeline, key, begin_s, end_s)).length_s > 0:
            steps.append(step)
        if timeline.start_s[key] <= begin_s:
            break
    return tuple(reversed(steps))


def critical_walk(timeline: Timeline, end: tuple[int, int] | None = None) -> Iterator[tuple[int, int]]:
    """Walk back through executions, each time to the one that was waited for last; see the module.

    Args:
        timeline: the timeline.
        end: iteration and task to begin with; by default the execution that ended last.

    Yields:
        Iteration and task of each execution of the chain, the latest first.
    """
    before, tasks = _before_in_lane(timeline.schedule), timeline.schedule.tasks
    current = _last_of(timeline) if end is None else end
    while True:
        yield current
        number, index = current
        lane_task, back = before[index]
        waited = [(number - back, lane_task), *((number, i) for i in tasks[index].after)]
        waited += [(number - 1, i) for i in tasks[index].after_previous]
        known = [key for key in waited if key[0] >= 0 and not np.isnan(timeline.start_s[key])]
        if not known:
            return
        # Of several tasks that ended at once, take the one that started last: it is the shortest explanation.
        current = max(known, key=lambda key: (timeline.end_s[key], timeline.start_s[key], key))


def _last_of(timeline: Timeline) -> _Key:
    return timeline.num_iterations - 1, int(np.nanargmax(timeline.end_s[-1]))


def critical_path(timeline: Timeline, iteration: int) -> dict[str, float]:
    """Return each lane's share of one period, in seconds, largest first."""
    shares: dict[str, float] = defaultdict(float)
    for step in reversed(critical_steps(timeline, iteration)):
        shares[timeline.schedule.tasks[step.task].lane.value] += step.length_s
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def slowed(
    timeline: Timeline,
    iteration: int,
    steps: Sequence[Span],
    prices: Sequence[Price],
    capacities: Mapping[Resource, float],
) -> Slowed:
    """Return which steps sharing slows, by how much, and the resource that causes it.

    Args:
        timeline: a simulated timeline.
        iteration: the iteration of the steps.
        steps: from :func:`critical_steps`.
        prices: the price of each task of the schedule, as in the simulation.
        capacities: the capacities of the simulation.
    """
    begin_s, tasks = timeline.begin_s(iteration), timeline.schedule.tasks
    share, found = _demand(timeline, prices, capacities), Slowed()
    for step in steps:
        price, key = prices[step.task], (step.iteration, step.task)
        start_s, end_s = float(timeline.start_s[key]), float(timeline.end_s[key])
        extra_s = (end_s - start_s) - (price.latency_s + price.duration_s)
        if extra_s > _ROUNDING * end_s and price.uses:
            stage, from_s, to_s = tasks[step.task].stage, begin_s + step.start_s, begin_s + step.end_s
            shares = {resource: share(resource, stage, from_s, to_s) for resource, _ in price.uses}
            found[step] = extra_s * step.length_s / (end_s - start_s), max(shares, key=shares.__getitem__)
    return found


def used_meanwhile(
    timeline: Timeline,
    iteration: int,
    lane: Lane,
    resource: Resource,
    prices: Sequence[Price],
    capacities: Mapping[Resource, float],
) -> float:
    """Return the share of a resource that all tasks together use while a lane is critical; 0 if it never is.

    Arguments are those of :func:`slowed`.
    """
    begin_s, tasks = timeline.begin_s(iteration), timeline.schedule.tasks
    steps = [step for step in critical_steps(timeline, iteration) if tasks[step.task].lane is lane]
    share = _demand(timeline, prices, capacities)
    used_s = sum(
        step.length_s * share(resource, tasks[step.task].stage, begin_s + step.start_s, begin_s + step.end_s)
        for step in steps
    )
    return used_s / sum(step.length_s for step in steps) if steps else 0.0


def _step(timeline: Timeline, key: _Key, begin_s: float, end_s: float) -> Span:
    start_s, stop_s = float(timeline.start_s[key]), float(timeline.end_s[key])
    return Span(*key, start_s=max(start_s, begin_s) - begin_s, end_s=min(stop_s, end_s) - begin_s)


def _before_in_lane(schedule: Schedule) -> list[tuple[int, int]]:
    """Return for every task the previous task in its lane, and how many iterations back that is (0 or 1)."""
    latest = {(task.lane, task.stage): (task.index, 1) for task in schedule.tasks}  # the last of the previous iteration
    result = []
    for task in schedule.tasks:
        result.append(latest[task.lane, task.stage])
        latest[task.lane, task.stage] = (task.index, 0)
    return result


def _demand(timeline: Timeline, prices: Sequence[Price], capacities: Mapping[Resource, float]) -> _Share:
    """Return the mean use of every resource over any interval; each pipeline stage has its own resources."""
    flows: dict[tuple[Resource, int], list[Flow]] = defaultdict(list)
    for task, price in zip(timeline.schedule.tasks, prices, strict=True):
        spans = zip(timeline.start_s[:, task.index].tolist(), timeline.end_s[:, task.index].tolist(), strict=True)
        ran = [(start_s, end_s) for start_s, end_s in spans if end_s > start_s]
        for resource, rate in price.uses:
            amount = rate * price.duration_s
            flows[resource, task.stage] += [(start_s, end_s, amount / (end_s - start_s)) for start_s, end_s in ran]
    used = {key: series(of_key, float(timeline.end_s.max())) for key, of_key in flows.items()}

    def share(resource: Resource, stage: int, start_s: float, end_s: float) -> float:
        return used[resource, stage].mean_within(start_s, end_s) / capacities[resource]

    return share
