"""The simulated machine: it adds nothing to the schedule, and agrees with a run that is fed back to it."""

import dataclasses

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, decide, random_prices, small_units
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machines import machine

from hwprofiles.profile import HardwareProfile
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.decisions import Place, Sharding
from planner.lowering import lower
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.simulate.machine import run, run_until_steady

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
FREE = dict.fromkeys(Resource, 1.0)


def measured(schedule: Schedule, start_s: np.ndarray, end_s: np.ndarray) -> list[Price]:
    """Return what tasks took as their prices: no latency, no sharing."""
    return [Price(0.0, float(end_s[t.index] - start_s[t.index])) for t in schedule.tasks]


def _alone(prices: list[Price]) -> list[Price]:
    return [dataclasses.replace(price, uses=()) for price in prices]


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_agreement_without_sharing(case: Case, seed: int, num_iterations: int) -> None:
    """Durations read off a timeline and fed back give the same timeline."""
    prices, _ = random_prices(case.schedule, seed)
    first = run(case.schedule, _alone(prices), FREE, num_iterations)
    again = run(case.schedule, measured(case.schedule, first.start_s[0], first.end_s[0]), FREE, num_iterations)
    np.testing.assert_allclose(again.start_s, first.start_s, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(again.end_s, first.end_s, rtol=1e-9, atol=1e-9)
    assert again.makespan_s() == pytest.approx(first.makespan_s())


@settings(SLOW, max_examples=examples(25))
@given(cases(), st.integers(0, 2**32 - 1))
def test_agreement_with_sharing_for_one_iteration(case: Case, seed: int) -> None:
    """In one iteration a task has one duration, shared or not, so the durations say all."""
    first = run(case.schedule, *random_prices(case.schedule, seed), 1)
    again = run(case.schedule, measured(case.schedule, first.start_s[0], first.end_s[0]), FREE, 1)
    assert again.makespan_s() == pytest.approx(first.makespan_s(), rel=1e-6)


def test_agreement_fails_when_a_rule_is_forgotten() -> None:
    """Without dependencies, or with every task on a lane of its own kind, the makespan is another."""
    units = small_units()
    schedule = lower(units, decide(units, Place.CPU, params="host"), asynchronous=False)
    prices, _ = random_prices(schedule, 1)
    prices = _alone(prices)
    makespan_s = run(schedule, prices, FREE, 2).makespan_s()
    free = Schedule(tuple(dataclasses.replace(t, after=(), after_previous=()) for t in schedule.tasks))
    assert run(free, prices, FREE, 2).makespan_s() < 0.95 * makespan_s
    separate = Schedule(
        tuple(dataclasses.replace(t, lane=tuple(Lane)[t.index % len(Lane)], after=t.after) for t in schedule.tasks)
    )
    assert abs(run(separate, prices, FREE, 2).makespan_s() / makespan_s - 1) > 0.05


def test_sharing_and_latency_by_hand() -> None:
    """Two copies that together want 1.5 of a link: one of them is alone for its latency and again at the end."""
    tasks = (Task(0, Lane.H2D, Op.FETCH, Phase.FORWARD), Task(1, Lane.D2H, Op.FLUSH, Phase.BACKWARD))
    prices = [Price(0.0, 3.0, ((Resource.LINK, 1.0),)), Price(1.0, 1.0, ((Resource.LINK, 1.0),))]
    timeline = run(Schedule(tasks), prices, FREE, 1)
    assert timeline.start_s.tolist() == [[0.0, 0.0]]
    np.testing.assert_allclose(timeline.end_s, [[4.0, 3.0]])


def test_an_iteration_waits_for_the_previous_one_only_where_it_says_so() -> None:
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, after_previous=(1,)),
        Task(1, Lane.CPU, Op.UPDATE, Phase.UPDATE, after=(0,)),
        Task(2, Lane.H2D, Op.PASS, Phase.UPDATE),
    )
    timeline = run(Schedule(tasks), [Price(0.0, 1.0), Price(0.0, 2.0), Price(0.0, 0.5)], FREE, 3)
    np.testing.assert_allclose(timeline.start_s, [[0, 1, 0], [3, 4, 0.5], [6, 7, 1.0]])
    assert timeline.period_s(0) == 3.0


@pytest.mark.parametrize("place", list(Place))
@pytest.mark.parametrize("overlap", [True, False])
def test_steady_iterations_repeat(profile: HardwareProfile, place: Place, overlap: bool) -> None:
    if place is Place.NVME and profile.nvme is None:
        pytest.skip("this machine has no drives")
    units = small_units()
    schedule = lower(units, decide(units, place, overlap_next_forward=overlap), asynchronous=True)
    cost = CostModel(profile, units, Sharding())
    steady = run_until_steady(schedule, cost)
    assert steady.converged
    periods_s = [steady.timeline.period_s(i) for i in (steady.steady, steady.steady + 1)]
    assert periods_s[0] == pytest.approx(periods_s[1], rel=1e-6)
    # What a search takes for the period is close to it.
    quick = run_until_steady(schedule, cost, quick=True)
    assert quick.timeline.period_s(quick.steady) == pytest.approx(periods_s[0], rel=0.02)


def test_a_cpu_update_is_hidden_behind_the_next_forward() -> None:
    """By hand: without overlap the update is waited for; with it only what compute does not cover."""
    units = small_units(micro_batch=8)
    cost = CostModel(machine(), units, Sharding())
    periods_s = {}
    for overlap in (True, False):
        decisions = decide(units, Place.CPU, overlap_next_forward=overlap, clip=True)
        simulation = run_until_steady(lower(units, decisions, asynchronous=False), cost)
        periods_s[overlap] = simulation.timeline.period_s(simulation.steady)
    assert periods_s[True] < periods_s[False]
    assert periods_s[True] >= sum(unit.num_params for unit in units) / 1e9  # the CPU is the bottleneck
