"""The critical path is a chain of real waits that tiles the iteration; what sharing costs is told from it."""

import itertools

import pytest
from amount import examples
from cases import Case, cases, random_prices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.simulate.critical_path import critical_path, critical_steps, slowed
from planner.simulate.machine import run

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@settings(SLOW, max_examples=examples(100))
@given(cases(), st.integers(0, 2**32 - 1))
def test_steps_tile_the_iteration_and_each_waited_for_the_one_before(case: Case, seed: int) -> None:
    prices, capacities = random_prices(case.schedule, seed)
    simulated = run(case.schedule, prices, capacities, 4)
    period_s = simulated.period_s(2)
    assume(period_s > 0)
    steps = critical_steps(simulated, 2)
    near = 1e-9 * simulated.makespan_s()
    assert steps[0].start_s == pytest.approx(0.0, abs=near)
    assert steps[-1].end_s == pytest.approx(period_s, abs=near)
    assert sum(critical_path(simulated, 2).values()) == pytest.approx(period_s, abs=near)
    tasks = case.schedule.tasks
    order = {lane: [(n, t.index) for n in range(4) for t in tasks if t.lane is lane] for lane in Lane}
    for before, step in itertools.pairwise(steps):
        assert before.end_s == pytest.approx(step.start_s, abs=near)
        task, lane = tasks[step.task], order[tasks[step.task].lane]
        position = lane.index((step.iteration, step.task))
        waited = {*((step.iteration, i) for i in task.after), *lane[max(position - 1, 0) : position]}
        waited |= {(step.iteration - 1, i) for i in task.after_previous if step.iteration}
        ends_s = [float(simulated.end_s[key]) for key in waited]
        assert max(ends_s) == pytest.approx(float(simulated.start_s[step.iteration, step.task]), abs=near)
        if all(simulated.end_s[key] > simulated.start_s[key] for key in waited):  # what takes no time is no step
            assert (before.iteration, before.task) in waited


@settings(SLOW, max_examples=examples(100))
@given(cases(), st.integers(0, 2**32 - 1))
def test_what_sharing_costs_is_the_rest(case: Case, seed: int) -> None:
    prices, capacities = random_prices(case.schedule, seed)
    simulated = run(case.schedule, prices, capacities, 4)
    assume(simulated.period_s(2) > 0)
    steps = critical_steps(simulated, 2)
    found = slowed(simulated, 2, steps, prices, capacities)
    for step in steps:
        price = prices[step.task]
        length_s = float(simulated.end_s[step.iteration, step.task] - simulated.start_s[step.iteration, step.task])
        alone_s = price.latency_s + price.duration_s
        slowed_s, resource = found.get(step, (0.0, None))
        assert slowed_s == pytest.approx((length_s - alone_s) * step.length_s / length_s, abs=1e-6 * length_s)
        assert resource is None or (slowed_s > 0 and resource in dict(price.uses))
    # Alone on the machine nothing is slowed.
    free = [Price(price.latency_s, price.duration_s) for price in prices]
    alone = run(case.schedule, free, capacities, 4)
    assert not slowed(alone, 2, critical_steps(alone, 2), free, capacities)


def test_the_resource_that_is_short_is_named() -> None:
    """Two copies at once: neither direction of the link is full, but both together are."""
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.H2D, Op.UPLOAD, Phase.UPDATE, "a", after=(0,)),
        Task(2, Lane.D2H, Op.FLUSH, Phase.BACKWARD, "a", after=(0,)),
        Task(3, Lane.CPU, Op.UPDATE, Phase.UPDATE, "a", after=(1, 2)),
    )
    first = Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a", after_previous=(3,))
    schedule = Schedule((first, *tasks[1:]))
    prices = [
        Price(0.0, 1.0, ((Resource.DEVICE, 1.0),)),
        Price(0.0, 2.0, ((Resource.DRAM, 8.0), (Resource.LINK_DOWN, 8.0), (Resource.LINK, 8.0))),
        Price(0.0, 1.0, ((Resource.DRAM, 8.0), (Resource.LINK_UP, 8.0), (Resource.LINK, 8.0))),
        Price(0.5, 1.0, ((Resource.CORES, 1.0),)),
    ]
    capacities = dict.fromkeys(Resource, 100.0) | {
        Resource.LINK_DOWN: 10.0, Resource.LINK_UP: 10.0, Resource.LINK: 8.0, Resource.DEVICE: 1.0
    }  # fmt: skip
    simulated = run(schedule, prices, capacities, 3)
    steps = critical_steps(simulated, 1)
    found = slowed(simulated, 1, steps, prices, capacities)
    # Both copies run at half speed for two seconds, then the first one's second half alone.
    assert [(schedule.tasks[s.task].lane, s.length_s, *found.get(s, (0.0, None))) for s in steps] == [
        (Lane.COMPUTE, pytest.approx(1.0), 0.0, None),
        (Lane.H2D, pytest.approx(3.0), pytest.approx(1.0), Resource.LINK),
        (Lane.CPU, pytest.approx(1.5), 0.0, None),
    ]
