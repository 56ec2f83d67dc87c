"""Cycles: systems of which the period is known, that need to warm up, that alternate, that never settle."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.costs.resources import Price, Resource
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation, find_cycle, run, run_until_steady

FREE = dict.fromkeys(Resource, 1.0)
LANES = tuple(Lane)


@dataclasses.dataclass(frozen=True)
class Prices:
    """Stands in for a cost model."""

    durations_s: Sequence[float]

    def prices(self, _: Schedule) -> list[Price]:
        return [Price(0.0, duration_s) for duration_s in self.durations_s]

    def capacities(self) -> dict[Resource, float]:
        return FREE


def settle(tasks: Sequence[Task], durations_s: Sequence[float]) -> Simulation:
    return run_until_steady(Schedule(tuple(tasks)), Prices(durations_s))  # type: ignore[arg-type]


def forward(index: int, lane: Lane, **options) -> Task:
    return Task(index, lane, Op.FORWARD, Phase.FORWARD, **options)


def other(index: int, lane: Lane, **options) -> Task:
    return Task(index, lane, Op.PASS, Phase.UPDATE, **options)


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(0.1, 10.0), st.floats(0.1, 10.0), st.booleans())
def test_two_lanes_in_turn_or_at_once(a_s: float, b_s: float, waits: bool) -> None:
    """Forward, then an update that the next forward waits for, or that only waits for its lane."""
    tasks = [forward(0, Lane.COMPUTE, after_previous=(1,) if waits else ()), other(1, Lane.CPU, after=(0,))]
    simulation = settle(tasks, [a_s, b_s])
    if waits or b_s <= a_s:
        assert simulation.converged
        assert len(simulation.iterations) == 1
        assert simulation.period_s == pytest.approx(a_s + b_s if waits else a_s, rel=1e-6)
    elif b_s > 1.001 * a_s:  # the updates fall further and further behind: no iteration is like the one before
        assert not simulation.converged
        assert simulation.period_s == pytest.approx(a_s)


def relay(num_hops: int) -> list[Task]:
    """Return tasks that hand work on, from one lane to the next, and back to the first after ``num_hops`` iterations.

    The task of each hop waits for what follows the hop before in the iteration before: so there are ``num_hops``
    chains, each of which comes by every lane once in a cycle of as many iterations.
    """
    tasks = []
    for hop in range(num_hops):
        previous = (2 * ((hop - 1) % num_hops) + 1,)
        kind = forward if hop == 0 else other
        tasks.append(kind(2 * hop, LANES[2 * hop], after_previous=previous))
        tasks.append(other(2 * hop + 1, LANES[2 * hop + 1], after=(2 * hop,)))
    return tasks


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(1.0, 1.9), min_size=2 * n, max_size=2 * n)))
def test_work_that_comes_back_after_several_iterations(durations_s: list[float]) -> None:
    """The mean period is the mean time of a hop: no lane is as slow as the way through two of them."""
    num_hops = len(durations_s) // 2
    simulation = settle(relay(num_hops), durations_s)
    assert simulation.converged
    assert num_hops % len(simulation.iterations) == 0
    assert simulation.period_s == pytest.approx(sum(durations_s) / num_hops, rel=1e-6)


def test_iterations_that_alternate() -> None:
    # A cycle of two: forward ends, 1 + 1 s later the other begins; 1 + 2 s later the forward.
    simulation = settle(relay(2), [1.0, 1.0, 1.0, 2.0])
    periods_s = [simulation.timeline.period_s(simulation.steady + i) for i in range(2)]
    assert sorted(periods_s) == [2.0, 3.0]
    assert (simulation.converged, len(simulation.iterations), simulation.period_s) == (True, 2, 2.5)
    assert simulation.iteration_s == 2.5
    assert simulation.phases[Phase.FORWARD] == 1.0


# The second half of a forward waits for the previous iteration's first copy, which waits behind its second one.
BACKLOG = [
    forward(0, Lane.COMPUTE),
    forward(1, Lane.COMPUTE, after_previous=(2,)),
    other(2, Lane.D2H, after=(1,)),
    other(3, Lane.D2H, after=(1,)),
]


@settings(max_examples=examples(50), deadline=None)
@given(st.floats(0.1, 1.9) | st.floats(2.05, 4.0))
def test_a_backlog_that_takes_a_while_to_be_felt(copy_s: float) -> None:
    """For some iterations the period is that of computing, 2 s; but it cannot stay below what the copies take."""
    simulation = settle(BACKLOG, [1.0, 1.0, 0.05, copy_s])
    assert simulation.converged
    assert simulation.period_s == pytest.approx(max(2.0, 0.05 + copy_s), rel=1e-6)


def test_equal_periods_are_not_enough() -> None:
    timeline = run(Schedule(tuple(BACKLOG)), Prices([1.0, 1.0, 0.05, 2.05]).prices(Schedule(())), FREE, 5)
    assert [timeline.period_s(i) for i in range(4)] == [2.0] * 4
    assert find_cycle(timeline) is None


def timeline_of(periods_s: Sequence[float]) -> Timeline:
    """Return iterations of one task each that begin one period apart."""
    begin_s = np.concatenate([[0.0], np.cumsum(periods_s)])[:, np.newaxis]
    return Timeline(Schedule((forward(0, Lane.COMPUTE),)), begin_s, begin_s + 0.5)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 8).flatmap(lambda n: st.lists(st.sampled_from([1.0, 1.5, 2.0]), min_size=n, max_size=n)),
    st.lists(st.sampled_from([0.7, 3.0, 5.0]), unique=True),
)
def test_the_shortest_cycle_is_found_where_it_begins(cycle_s: list[float], warm_up_s: list[float]) -> None:
    """As with a checkpoint every few iterations; against looking for it in the obvious way."""
    periods_s = warm_up_s + 3 * cycle_s
    expected = next(
        range(first, first + length)
        for length in range(1, len(periods_s))
        for first in range(len(periods_s) - 2 * length + 1)
        if periods_s[first : first + length] == periods_s[first + length : first + 2 * length]
    )
    timeline = timeline_of(periods_s)
    assert find_cycle(timeline) == expected
    if len(set(cycle_s)) == len(cycle_s):  # nothing shorter hides in it
        simulation = Simulation(timeline, expected, converged=True)
        assert len(expected) == len(cycle_s)
        assert simulation.period_s == pytest.approx(sum(cycle_s) / len(cycle_s))


def test_a_cycle_must_be_seen_twice() -> None:
    assert find_cycle(timeline_of([1.0, 2.0, 1.0])) is None
    assert find_cycle(timeline_of([1.0, 2.0, 1.0, 2.0])) == range(2)
    assert find_cycle(timeline_of([])) is None


def test_what_runs_beside_later_iterations_is_waited_for() -> None:
    """Each iteration's last task runs three seconds after its forward, beside a later forward that it slows down.

    So the first iterations, before which nothing was running, are alike and too fast; and what a slower one delays
    comes back three iterations later, so that some in between are alike before all are.
    """
    lanes = (Lane.D2H, Lane.STATE_OUT, Lane.CPU)
    tasks = [forward(0, Lane.COMPUTE)] + [other(i, lane, after=(i - 1,)) for i, lane in enumerate(lanes, 1)]
    uses = ((Resource.DRAM, 0.6),)
    prices = [Price(0.0, 1.0, uses), Price(0.0, 1.0), Price(0.0, 1.0), Price(0.0, 0.5, uses)]
    timeline = run(Schedule(tuple(tasks)), prices, FREE, 40)
    offsets_s = timeline.end_s - timeline.start_s[:, :1]
    for alike, period_s in ((0, 1.0), (3, 1.12)):
        np.testing.assert_allclose(offsets_s[alike], offsets_s[alike + 1])
        np.testing.assert_allclose([timeline.period_s(alike), timeline.period_s(alike + 1)], period_s)
    cycle = find_cycle(timeline)
    assert cycle is not None
    assert timeline.period_s(cycle.start) == pytest.approx(1.1, rel=1e-5)
    assert timeline.period_s(37) == pytest.approx(1.1, rel=1e-9)


def test_the_last_iteration_is_not_trusted() -> None:
    """Nothing of a later iteration runs beside it."""
    tasks = [forward(0, Lane.COMPUTE), other(1, Lane.CPU, after=(0,))]
    uses = ((Resource.DRAM, 0.6),)
    timeline = run(Schedule(tuple(tasks)), [Price(0.0, 1.0, uses)] * 2, FREE, 4)
    # Each update shares the DRAM with the next forward: 1.2 s for both. Only the last runs alone.
    np.testing.assert_allclose(timeline.end_s[:, 1] - timeline.start_s[:, 1], [1.2, 1.2, 1.2, 1.0])
    assert find_cycle(timeline) == range(1, 2)
