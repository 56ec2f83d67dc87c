"""What a schedule takes at least, against what it is simulated to take, and against hand calculation."""

from collections import Counter

from cases import cases, decide, small_units
from hypothesis import given
from machines import machine

from planner.bounds.certificate import order_bound_s
from planner.costs.model import CostModel
from planner.decisions import Place
from planner.lowering import lower
from planner.simulate.machine import run_until_steady


@given(cases(ours=True))
def test_no_simulation_is_faster(case) -> None:
    profile = machine(kind="gpu" if case.asynchronous else "host", devices_per_node=2)
    cost = CostModel.of(profile, case.units, case.decisions)
    simulation = run_until_steady(case.schedule, cost)
    if simulation.converged:
        assert order_bound_s(case.schedule, cost) <= simulation.period_s * (1 + 1e-6)


@given(cases(ours=True))
def test_no_resource_does_more_than_it_can(case) -> None:
    profile = machine(kind="gpu" if case.asynchronous else "host", devices_per_node=2)
    cost = CostModel.of(profile, case.units, case.decisions)
    work, capacity = Counter(), cost.capacities()
    for task in case.schedule.tasks:
        price = cost.price(task)
        work.update({resource: rate * price.duration_s for resource, rate in price.uses})
    busiest_s = max(amount / capacity[resource] for resource, amount in work.items())
    assert order_bound_s(case.schedule, cost) >= busiest_s * (1 - 1e-9)


def test_without_sharing_it_is_what_the_schedule_takes() -> None:
    """Computing alone is a chain, so the bound is met; a link that is shared both ways leaves a part to sharing."""
    units = small_units()
    cost = CostModel.of(machine(), units, decide(units, Place.GPU))
    schedule = lower(units, decide(units, Place.GPU), asynchronous=True)
    assert abs(order_bound_s(schedule, cost) / run_until_steady(schedule, cost).period_s - 1) < 1e-9
    shared = lower(units, decide(units, Place.STREAM), asynchronous=True)
    slow = CostModel.of(machine(gpu_params_per_s=1e12, flop_per_s=1e16), units, decide(units, Place.STREAM))
    assert 0.5 < order_bound_s(shared, slow) / run_until_steady(shared, slow).period_s < 1 - 1e-3
