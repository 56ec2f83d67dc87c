"""Collectives of several groups are launched in one order, and schedules say what that waits for."""

import dataclasses
from functools import cache

import pytest
from amount import examples
from cases import Case, cases, decide, small_units
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from walked import NUM_ITERATIONS, ordered_by_rules

from planner.decisions import Place, Precision
from planner.lowering import exchanges, lower
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import HOST_LANES, Lane, Op

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
CALLER = {Lane.COMPUTE, Lane.LAUNCH}


def sharing(case: Case) -> Case:
    """Return a case whose ranks exchange data inside modules: they share sequences."""
    assume(case.decisions.data_parallel > 1)
    degrees = {"context_parallel": case.decisions.data_parallel}
    return dataclasses.replace(case, decisions=case.decisions.model_copy(update=degrees), asynchronous=True)


def before_launching(schedule: Schedule):
    """Return a function: what the host does before a task's work can be submitted; by the rules, one by one."""
    count, tasks = len(schedule.tasks), schedule.tasks
    lanes: dict[Lane, list[int]] = {}
    for task in tasks:
        lanes.setdefault(task.lane, []).append(task.index)

    @cache
    def of(iteration: int, index: int) -> frozenset[tuple[int, int]]:
        task, lane = tasks[index], lanes[tasks[index].lane]
        position = iteration * len(lane) + lane.index(index) - 1
        direct = [(iteration, each) for each in task.after]
        direct += [(iteration - 1, each) for each in task.after_previous if iteration]
        direct += [(position // len(lane), lane[position % len(lane)])] if position >= 0 else []
        found = frozenset[tuple[int, int]]()
        for node in direct:
            kind = tasks[node[1]].lane
            found |= {node} if kind in HOST_LANES - CALLER else frozenset() if kind in CALLER else of(*node)
        return found

    assert count
    return of


@settings(SLOW, max_examples=examples(60))
@given(st.one_of(cases(ours=True), cases(ours=True, tiled=True)))
def test_a_launch_waits_for_what_the_host_does_before_the_collectives_that_were_issued_before(case: Case) -> None:
    case = sharing(case)
    schedule, ordered = case.schedule, ordered_by_rules(case.schedule)
    needs, pending = before_launching(schedule), set()
    for iteration in range(NUM_ITERATIONS):
        for task in schedule.tasks:
            node = iteration, task.index
            if task.op is Op.ISSUE:
                assert all(ordered(need, node) for need in pending), task.name
                pending.clear()
            elif task.lane is not Lane.COMPUTE and exchanges(task, case.decisions):
                pending |= needs(*node)


@pytest.mark.parametrize("place", [Place.CPU, Place.GPU])
def test_nothing_else_waits(place: Place) -> None:
    """Without updates on the host, or without groups of modules, the order costs nothing."""
    units = small_units("demo-llama", num_layers=4)
    decisions = decide(units, place, params="gpu", zero_stage=2, data_parallel=2, num_micro_batches=2)
    alone = lower(units, decisions, asynchronous=True)
    shared = decisions.model_copy(update={"context_parallel": 2})
    assert lower(units, shared, asynchronous=False).tasks == lower(units, decisions, asynchronous=False).tasks
    waits = [
        (one, other)
        for one, other in zip(alone.tasks, lower(units, shared, asynchronous=True).tasks, strict=True)
        if one != other
    ]
    assert {other.op for _, other in waits} == ({Op.ISSUE} if place is Place.CPU else set())
    # One wait for each unit at most, and only in the first forward: weights change once an iteration.
    assert len(waits) <= len(units)
    assert all(other.micro_batch == 0 for _, other in waits)


def test_updates_that_exchange_matrices_are_launched_in_order_too() -> None:
    units = small_units("demo-llama", tensor_parallel=2)
    decisions = decide(units, Place.GPU, params="gpu", tensor_parallel=2, data_parallel=2, optimizer="muon")
    lanes = {task.lane for task in lower(units, decisions, asynchronous=True).tasks if exchanges(task, decisions)}
    assert lanes == {Lane.COMPUTE, Lane.COLLECTIVE, Lane.GPU_UPDATE}


@pytest.mark.parametrize("fp8_weights", [None, True])
def test_collectives_through_the_host_are_in_no_order_unless_ranks_agree_on_scales(fp8_weights: bool | None) -> None:
    units = small_units("demo-llama", in_fp8=True)
    precision = Precision(weights="bf16", products="fp8")
    options = {"data_parallel": 4, "context_parallel": 2, "zero_stage": 3, "precision": precision}
    decisions = decide(units, Place.GPU, **options, fp8_weights=fp8_weights, collectives="host")
    tasks = lower(units, decisions, asynchronous=True).tasks
    ordered = {task.op for task in tasks if task.lane is Lane.COLLECTIVE and exchanges(task, decisions)}
    assert {task.op for task in tasks if task.lane is Lane.COLLECTIVE} == {Op.GATHER, Op.SCATTER}
    assert ordered == ({Op.GATHER} if fp8_weights else set())
