"""What is wrong in a run is named, with its size: exactly one thing is, in each of these."""

import dataclasses
import itertools

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, random_prices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.costs.resources import Price, Resource
from planner.fitting.attribution import Attribution, attribute, lane_and_op, middle, shapley
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation, find_cycle, run

SLOW = settings(
    deadline=None, max_examples=examples(30), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
FREE = dict.fromkeys(Resource, 1.0)
NUM, READ = 10, (6, 7, 8)


def predicted(case: Case, seed: int) -> Simulation:
    """Return a simulation in which tasks share resources and every iteration is like the one before."""
    prices, capacities = random_prices(case.schedule, seed)
    timeline = run(case.schedule, prices, capacities, NUM)
    cycle = find_cycle(timeline)
    assume(cycle is not None and len(cycle) == 1 and cycle.start <= READ[0])
    assume(timeline.period_s(READ[0]) > 0)
    return Simulation(timeline, range(READ[0], READ[0] + 1), converged=True)


def durations_of(simulation: Simulation) -> np.ndarray:
    timeline = simulation.timeline
    return timeline.end_s[simulation.steady] - timeline.start_s[simulation.steady]


def executed(schedule: Schedule, durations_s: np.ndarray, stalls_s: np.ndarray | None = None) -> Timeline:
    """Return a run in which tasks take so long, and begin so much later than they could."""
    late_s = np.zeros(len(durations_s)) if stalls_s is None else stalls_s
    prices = [Price(float(late), float(seconds)) for late, seconds in zip(late_s, durations_s, strict=True)]
    timeline = run(schedule, prices, FREE, NUM)
    return Timeline(schedule, timeline.start_s + late_s, timeline.end_s)


def seconds_of(found: Attribution, kind: str) -> float:
    return sum(cause.seconds for cause in found.causes if cause.kind == kind)


def check_sum(found: Attribution) -> float:
    error_s = found.measured_s - found.predicted_s
    assert sum(cause.seconds for cause in found.causes) == pytest.approx(error_s, abs=1e-6 * found.measured_s)
    return error_s


@SLOW
@given(cases(), st.integers(0, 2**32 - 1), st.floats(0.2, 5.0), st.data())
def test_a_wrong_rate_is_named_with_its_size(case: Case, seed: int, factor: float, data: st.DataObject) -> None:
    simulation = predicted(case, seed)
    kinds = sorted({lane_and_op(task) for task in case.schedule.tasks})
    kind = data.draw(st.sampled_from(kinds))
    durations_s = durations_of(simulation)
    durations_s[[task.index for task in case.schedule.tasks if lane_and_op(task) == kind]] *= factor
    found = attribute(simulation, executed(case.schedule, durations_s), READ)
    error_s = check_sum(found)
    near = 1e-6 * found.measured_s
    by_kind = {cause.of: cause.seconds for cause in found.causes if cause.kind == "rate"}
    # What lanes began with may take more iterations to wear off than are simulated: then it is the same everywhere.
    assert by_kind.get(kind, 0.0) == pytest.approx(error_s, abs=near + abs(seconds_of(found, "stall")))
    assert all(abs(seconds) <= near for other, seconds in by_kind.items() if other != kind)
    assert seconds_of(found, "count") == seconds_of(found, "order") == 0.0
    assert not found.swapped
    (tasks,) = (tasks for tasks in found.tasks if (tasks.lane, tasks.op) == kind)
    assert tasks.measured_s == pytest.approx(factor * tasks.predicted_s)


@SLOW
@given(cases(), st.integers(0, 2**32 - 1), st.data())
def test_a_stall_is_named_with_its_size_and_place(case: Case, seed: int, data: st.DataObject) -> None:
    simulation = predicted(case, seed)
    lasting = np.flatnonzero(durations_of(simulation) > 0).tolist()  # what takes no time is no step of a path
    index = data.draw(st.sampled_from(lasting))
    stalls_s = np.zeros(len(case.schedule.tasks))
    stalls_s[index] = simulation.period_s
    found = attribute(simulation, executed(case.schedule, durations_of(simulation), stalls_s), READ)
    error_s = check_sum(found)
    assert seconds_of(found, "stall") == pytest.approx(error_s, abs=1e-6 * found.measured_s)
    assert {cause.kind for cause in found.causes if abs(cause.seconds) > 1e-6 * found.measured_s} <= {"stall"}
    task = case.schedule.tasks[index]
    located = {kind for kind, seconds in found.stalls_s.items() if seconds > 1e-6 * found.measured_s}
    assert located <= {lane_and_op(task)}
    if error_s > 0.01 * found.measured_s:
        assert located
        assert sum(found.stalls_s.values()) >= error_s - 1e-6 * found.measured_s


@SLOW
@given(cases(), st.integers(0, 2**32 - 1), st.data())
def test_a_task_that_did_not_run_is_counted(case: Case, seed: int, data: st.DataObject) -> None:
    simulation = predicted(case, seed)
    others = [task.index for task in case.schedule.tasks if task.index != case.schedule.first_forward]
    index = data.draw(st.sampled_from(others))
    durations_s = durations_of(simulation)
    durations_s[index] = 0.0
    timeline = executed(case.schedule, durations_s)
    timeline.start_s[:, index] = timeline.end_s[:, index] = np.nan
    found = attribute(simulation, timeline, READ)
    error_s = check_sum(found)
    rest_s = abs(seconds_of(found, "stall"))
    assert seconds_of(found, "count") == pytest.approx(error_s, abs=1e-6 * found.measured_s + rest_s)
    assert seconds_of(found, "rate") == pytest.approx(0.0, abs=1e-6 * found.measured_s)
    task = case.schedule.tasks[index]
    (tasks,) = (tasks for tasks in found.tasks if (tasks.lane, tasks.op) == lane_and_op(task))
    assert tasks.num_ran == tasks.num_planned - 1


def chain(first: str, second: str) -> Schedule:
    """Two copies in one lane; what computes next needs the copy of ``b`` alone."""
    copies = {"a": 1.0, "b": 1.0}
    tasks = [Task(i, Lane.H2D, Op.FETCH, Phase.FORWARD, unit) for i, unit in enumerate((first, second))]
    needed = next(task.index for task in tasks if task.unit == "b")
    assert len(copies) == len(tasks)
    compute = Task(2, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "b", after=(needed,))
    after = Task(3, Lane.COMPUTE, Op.BACKWARD, Phase.BACKWARD, "b", after=(2,))
    return Schedule((*(dataclasses.replace(t, after_previous=(3,)) for t in tasks), compute, after))


def test_another_order_is_named_with_its_size() -> None:
    """Planned: the needed copy is the second one. As it ran: the first, so that computing began a second earlier."""
    planned, ran = chain("a", "b"), chain("b", "a")
    prices = [Price(0.0, 1.0), Price(0.0, 1.0), Price(0.0, 3.0), Price(0.0, 2.0)]
    simulation = Simulation(run(planned, prices, FREE, NUM), range(6, 7), converged=True)
    swapped = run(ran, prices, FREE, NUM)
    where = [1, 0, 2, 3]
    found = attribute(simulation, Timeline(planned, swapped.start_s[:, where], swapped.end_s[:, where]), READ)
    assert check_sum(found) == pytest.approx(-1.0)
    assert [(cause.kind, cause.seconds) for cause in found.causes] == [("order", pytest.approx(-1.0))]
    assert found.swapped == {Lane.H2D: 1}


def test_a_dependency_that_was_not_kept_is_counted_as_order() -> None:
    planned = chain("a", "b")
    prices = [Price(0.0, 1.0), Price(0.0, 1.0), Price(0.0, 3.0), Price(0.0, 2.0)]
    simulation = Simulation(run(planned, prices, FREE, NUM), range(6, 7), converged=True)
    tasks = planned.tasks
    hasty = Schedule((*tasks[:2], dataclasses.replace(tasks[2], after=()), tasks[3]))
    ran = run(hasty, prices, FREE, NUM)
    found = attribute(simulation, Timeline(planned, ran.start_s, ran.end_s), READ)
    error_s = check_sum(found)
    assert error_s < -1
    assert [cause.kind for cause in found.causes] == ["order"]
    assert found.num_broken > 0


def test_tasks_that_were_not_planned_are_counted() -> None:
    planned = chain("a", "b")
    prices = [Price(0.0, 1.0), Price(0.0, 1.0), Price(0.0, 3.0), Price(0.0, 2.0)]
    simulation = Simulation(run(planned, prices, FREE, NUM), range(6, 7), converged=True)
    tasks = planned.tasks
    more = Task(3, Lane.COMPUTE, Op.RECOMPUTE, Phase.BACKWARD, "b", after=(2,))
    ran = Schedule(
        (
            *(dataclasses.replace(task, after_previous=(4,)) for task in tasks[:2]),
            tasks[2],
            more,
            dataclasses.replace(tasks[3], index=4, after=(3,)),
        )
    )
    found = attribute(simulation, run(ran, [*prices[:3], Price(0.0, 0.5), prices[3]], FREE, NUM), READ)
    assert check_sum(found) == pytest.approx(0.5)
    assert [(cause.kind, cause.seconds) for cause in found.causes] == [("count", pytest.approx(0.5))]
    (added,) = (tasks for tasks in found.tasks if tasks.op is Op.RECOMPUTE)
    assert (added.num_planned, added.num_ran, added.predicted_s, added.measured_s) == (0, 1, 0.0, pytest.approx(0.5))


@given(st.integers(0, 5).flatmap(lambda n: st.lists(st.floats(-1e3, 1e3), min_size=2**n, max_size=2**n)))
def test_shapley_is_the_mean_over_all_orders(worth: list[float]) -> None:
    num_players = len(worth).bit_length() - 1
    orders = list(itertools.permutations(range(num_players)))
    wanted = [0.0] * num_players
    for order in orders:
        coalition = 0
        for player in order:
            wanted[player] += (worth[coalition | 1 << player] - worth[coalition]) / len(orders)
            coalition |= 1 << player
    assert shapley(worth) == pytest.approx(wanted, abs=1e-6)
    assert sum(shapley(worth)) == pytest.approx(worth[-1] - worth[0], abs=1e-6)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20), st.floats(10, 1e3))
def test_the_middle_third_is_robust(lengths_s: list[float], disturbance: float) -> None:
    schedule = Schedule((Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),))
    disturbed = [*lengths_s] + [disturbance] * ((len(lengths_s) - 1) // 3)
    ends_s = np.cumsum(disturbed)[:, None]
    timeline = Timeline(schedule, ends_s - np.array(disturbed)[:, None], ends_s)
    chosen = middle(timeline, range(len(disturbed)))
    assert len(chosen) >= len(disturbed) / 3
    assert all(timeline.period_s(i) <= 2.0 + 1e-9 for i in chosen)
