"""What is told of a plan with pipeline stages, and with ranks that share sequences."""

import dataclasses

import pytest
from machines import machine

from planner.choices.request import Request
from planner.decisions import Place
from planner.explain.bench import Bench, changed
from planner.explain.limits import bound_rests_on
from planner.explain.tricks import worths
from planner.models import resolve_model
from planner.plan.planning import make_plan


def test_stages_keep_everything_and_have_no_trick_that_would_not():
    hardware = machine(gpu_bytes=1e9, devices_per_node=2, cpu_params_per_s=5e8)
    model, shape = resolve_model("demo-llama"), {"seq_len": 256, "micro_batch": 1, "num_micro_batches": 2}
    explained = Bench(make_plan(Request(model, hardware, num_devices=2, pipeline_parallel=2, **shape), 20))
    used = {trick.key for trick, trial in worths(explained).items() if trial is not None}
    assert explained.pieces() == explained.pieces(Place.GPU)
    assert "resident-state" not in used


def test_a_bound_of_stages_rests_on_work_and_windows():
    """Which together have all of its weight."""
    hardware = machine(gpu_bytes=4e7, devices_per_node=2, cpu_params_per_s=1e8, issue_s=1e-9)
    model, shape = resolve_model("demo-llama"), {"seq_len": 256, "micro_batch": 1, "num_micro_batches": 2}
    explained = Bench(make_plan(Request(model, hardware, num_devices=2, pipeline_parallel=2, **shape), 20))
    weights = bound_rests_on(explained)
    assert {kind for kind, _ in weights} == {"work", "update"}
    assert sum(weights.values()) == pytest.approx(1.0, abs=1e-3)


def test_what_a_smaller_bubble_gains_is_told():
    hardware = machine(gpu_bytes=1e9, devices_per_node=4, cpu_params_per_s=5e8)
    shape = {"seq_len": 256, "micro_batch": 1, "num_micro_batches": 4, "pipeline_order": "zero-bubble"}
    plan = make_plan(Request(resolve_model("demo-llama"), hardware, num_devices=4, pipeline_parallel=4, **shape), 20)
    explained = Bench(plan)
    (trial,) = (trial for trick, trial in worths(explained).items() if trick.key == "zero-bubble")
    plain = make_plan(dataclasses.replace(plan.request, pipeline_order="1f1b"), 20)
    assert trial.iteration_s == plain.prediction.iteration_s > 1.04 * plan.prediction.iteration_s


def test_what_a_ring_gains_is_told():
    hardware = machine(gpu_bytes=1e9, devices_per_node=2, cpu_params_per_s=5e8)
    model, shape = resolve_model("demo-llama"), {"seq_len": 2048, "micro_batch": 1, "context_parallel": 2}
    plan = make_plan(Request(model, hardware, num_devices=2, context_exchange="ring", **shape), 20)
    (trial,) = (trial for trick, trial in worths(Bench(plan)).items() if trick.key == "ring")
    bench = Bench(plan)
    exchanged = bench.trial(changed(plan.decisions, context_exchange=None))
    assert trial.iteration_s <= exchanged.iteration_s
    assert trial.iteration_s != plan.prediction.iteration_s
    other = plan.model_copy(update={"decisions": exchanged.decisions})
    assert exchanged.iteration_s == Bench(other).own.iteration_s
