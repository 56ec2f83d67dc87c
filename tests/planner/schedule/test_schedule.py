"""The schedule as data: its rules, its text and its JSON."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from amount import examples
from cases import Case, cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Buffer, Lane, MemoryClass, Op, Phase, Task, Tier


def task(index: int, **fields: object) -> Task:
    return Task(**{"index": index, "lane": Lane.CPU, "op": Op.PASS, "phase": Phase.UPDATE, **fields})  # type: ignore[arg-type]


def buffer(**fields: object) -> Buffer:
    kind = {"tier": Tier.GPU, "memory_class": MemoryClass.WORKSPACE, "num_bytes": 1, "label": "mine"}
    return Buffer(**{**kind, **fields})  # type: ignore[arg-type]


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_json_and_text(case: Case) -> None:
    schedule = case.schedule
    data = json.loads(schedule.to_json())
    for key, items in (("tasks", schedule.tasks), ("buffers", schedule.buffers)):
        for written, item in zip(data[key], items, strict=True):
            values = {field.name: getattr(item, field.name) for field in dataclasses.fields(item)}
            defaults = {field.name: field.default for field in dataclasses.fields(item)}
            assert json.loads(json.dumps(values)) == json.loads(json.dumps(defaults, default=str)) | written
    lines = schedule.to_text().split("\n")
    assert len(lines) == len(schedule.tasks)
    for line, each in zip(lines, schedule.tasks, strict=True):
        assert line.split()[:2] == [str(each.index), each.lane]
        assert each.name in line


def test_text_says_all_that_matters() -> None:
    fetch = task(
        2, lane=Lane.H2D, op=Op.FETCH, unit="layers.3.mlp", num_bytes=33_550_000, slot=2, after=(0, 1), pinned=False
    )
    update = task(3, op=Op.UPDATE, unit="head", piece=1, num_params=2_000_000, after_previous=(3,))
    lines = Schedule((task(0), task(1), fetch, update)).to_text().splitlines()
    squeezed = [" ".join(line.split()) for line in lines]
    assert squeezed[2] == "2 h2d fetch layers.3.mlp 33.55 MB pageable after 0,1 -> slot 2"
    assert squeezed[3] == "3 cpu update head#1 2.00 Mparam after previous 3"
    assert squeezed[0] == "0 cpu pass model"
    assert task(0, micro_batch=2).name == "pass model mb2"


def test_lowering_does_not_depend_on_hash_seeds() -> None:
    program = (
        "from cases import *\n"
        "for model in MODELS:\n"
        "    units = small_units(model)\n"
        "    for options in ({'params': 'host'}, {'data_parallel': 2, 'zero_stage': 3, 'num_micro_batches': 2}):\n"
        "        print(lower(units, decide(units, Place.STREAM, **options), asynchronous=True).to_json())\n"
    )
    root, here = Path(__file__).parents[3], Path(__file__).parents[1]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(root), str(here)])},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(next(iter(outputs)).splitlines()) == 6


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((task(1),), "has index 1 at position 0; number tasks in order"),
        ((task(0, after=(0,)),), r"task 0 pass model comes after \[0\], not issued before it"),
        ((task(0), task(1, after=(-1, 0))), r"task 1 pass model comes after \[-1\]"),
        ((task(0, after_previous=(1,)),), r"comes after \[1\] of the previous iteration: no such task"),
        ((task(0, after_previous=(-1,)),), r"comes after \[-1\] of the previous iteration"),
        ((task(0, num_bytes=-1),), "negative amount"),
        ((task(0, num_params=-1),), "negative amount"),
    ],
)
def test_broken_tasks_are_named(tasks: tuple[Task, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(tasks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first": 0}, "buffer mine is held from 0 to None"),
        ({"last": 0}, "held from None to 0"),
        ({"first": 0, "last": 1}, "held from 0 to 1: no such tasks"),
        ({"first": -1, "last": 0}, "held from -1 to 0"),
        ({"num_bytes": -1}, "has -1 bytes"),
    ],
)
def test_broken_buffers_are_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule((task(0),), (buffer(**fields),))


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(cases(), cases(in_fp8=True)))
def test_arrays_that_are_lowered_say_the_same_as_tasks(case: Case) -> None:
    """A search simulates the arrays, an executor runs the tasks."""
    lowered = case.schedule.arrays
    from_tasks = Schedule(case.schedule.tasks, case.schedule.buffers).arrays
    for field in dataclasses.fields(lowered):
        one, other = getattr(lowered, field.name), getattr(from_tasks, field.name)
        if field.name == "works":
            names = [f.name for f in dataclasses.fields(Task) if f.name not in {"index", "after", "after_previous"}]
            assert [[getattr(each, n) for n in names] for each in one] == [
                [getattr(t, n) for n in names] for t in other
            ]
        elif field.name in {"kinds", "first_forward"}:
            assert one == other
        else:
            assert one.tolist() == other.tolist(), field.name


@settings(deadline=None, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_work_that_is_listed_once_has_one_price(case: Case) -> None:
    profile = load_profile("h100x4-56core-nvme")
    cost, other = (CostModel.of(profile, case.units, case.decisions) for _ in range(2))
    assert other.prices(case.schedule) == [cost.price(task) for task in case.schedule.tasks]


def test_tasks_that_are_made_later_are_validated_then() -> None:
    arrays = Schedule((task(0),)).arrays
    schedule = Schedule.deferred(arrays, lambda: ((task(0, after=(0,)),), ()), "wrong")
    assert schedule.num_tasks == 1
    with pytest.raises(ValueError, match="not issued before it"):
        _ = schedule.tasks
    with pytest.raises(AttributeError, match="no attribute 'task'"):
        _ = schedule.task  # type: ignore[attr-defined]


def test_later_tasks_of_the_previous_iteration_can_be_waited_for() -> None:
    schedule = Schedule((task(0, after_previous=(1, 0)), task(1, after=(0,))), (buffer(first=1, last=0),))
    assert schedule.first_forward is None


@settings(deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_the_graph_has_every_dependency_and_no_cycle(case: Case) -> None:
    schedule = case.schedule
    graph = schedule.graph()
    assert list(graph) == list(range(schedule.num_tasks))
    assert {(before, task.index) for task in schedule.tasks for before in task.after} == set(graph.edges)
    assert nx.is_directed_acyclic_graph(graph)


def test_schedules_are_frozen() -> None:
    schedule = Schedule((task(0),))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.tasks[0].num_bytes = 1  # type: ignore[misc]
