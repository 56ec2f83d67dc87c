"""Engines that stream layers: what their kernels save, what the search finds, and how near predictions come."""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from cases import small_units
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import machine
from torch.utils.flop_counter import FlopCounterMode

from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import BF16, Place, Sharding
from planner.graph import Batch, Elementwise, Gemm, build_graph, units
from planner.models import ModelConfigError, resolve_model
from planner.models.formulas.work import newton_schulz
from planner.models.kernels import flop
from planner.schedule.tasks import Op, Tier
from planner.search.scoring import Scorer
from planner.setup import Setup
from ullage.rivals.cases import Metric, load_cases, read_case
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.streaming import best_streaming, streaming
from ullage.rivals.kernels import dataflow
from ullage.rivals.lowering import lower
from ullage.rivals.precision import RivalPrecision

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published" / "streamed_h100.json"
RUNS = {case.id: case for case in load_cases(PUBLISHED)}


def setup(num_rounds: int = 2, **options: Any) -> Setup:
    model_units = small_units("demo-llama", 4)
    largest = max(unit.num_params for unit in model_units)
    precision = RivalPrecision(weights="bf16", state="bf16")
    given = {"num_micro_batches": num_rounds, "precision": precision, "clip": False, "subgroup_params": largest}
    return Setup(model_units, Sharding(**{**given, **options}))


def scorer(some: Setup, gpu_bytes: float = 1e12) -> Scorer:
    cost = CostModel(machine(gpu_bytes=gpu_bytes), some.units, some.given)
    return Scorer(some.units, 64, cost, lower=lower)


def test_a_layer_saves_what_the_engine_documents() -> None:
    """86,152 bytes per token, and the layer's input (docs/models/llama3/llama3_8b_16x4K.md of als244/dataflow)."""
    batch = Batch(4, 4096)
    graph = dataflow.build_graph(resolve_model("llama-3-8b"), batch)
    layer = [unit for unit in units(graph) if unit.segment == "layers.0"]
    assert sum(unit.saved_bytes for unit in layer) == batch.num_tokens * (86_152 + 2 * 4096)
    assert sum(unit.num_params for unit in layer) * 2 == 436_224_000


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-0.5b"])
def test_products_are_those_of_other_kernels_and_less_is_saved_and_moved(name: str) -> None:
    plain, fused = (units(build(resolve_model(name), Batch(2, 512))) for build in (build_graph, dataflow.build_graph))
    for way in ("forward", "backward"):
        for one, other in zip(plain, fused, strict=True):
            kernels = getattr(one, way), getattr(other, way)
            products = [[k.flop for k in each if isinstance(k, Gemm)] for each in kernels]
            assert sum(products[0]) == sum(products[1])
            moved = [sum(k.num_bytes * k.count for k in each if isinstance(k, Elementwise)) for each in kernels]
            assert moved[1] <= moved[0]
    assert sum(unit.saved_bytes for unit in fused) < sum(unit.saved_bytes for unit in plain)


@pytest.mark.parametrize("name", ["gpt2", "qwen3-4b", "mixtral-8x7b"])
def test_layers_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(ModelConfigError, match="are known of models with RMS norms, SwiGLU and no experts, not of"):
        dataflow.build_graph(resolve_model(name), Batch(2, 512))


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (96, 96)])
def test_muon_orthogonalizes_as_torch_does(shape: tuple[int, int]) -> None:
    weight = torch.nn.Parameter(torch.randn(shape))
    optimizer = torch.optim.Muon([weight])
    weight.grad = torch.randn(shape)
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    assert flop(newton_schulz(*shape)) == counted.get_total_flops()


def test_the_device_adds_up_and_the_last_sum_stays() -> None:
    schedule = lower(setup(3).units, streaming(setup(3), 0, 0, 0), asynchronous=True)
    name = "layers.2.mlp"
    moved = [
        (task.op, task.micro_batch) for task in schedule.tasks if task.unit == name and task.lane in {"d2h", "h2d"}
    ]
    sums = [task for task in moved if task[0] in {Op.LOAD, Op.OVERWRITE}]
    assert sorted(sums) == [(Op.LOAD, 1), (Op.LOAD, 2), (Op.OVERWRITE, 0), (Op.OVERWRITE, 1)]


def test_the_last_sum_is_held_until_its_update() -> None:
    given = setup(2)
    schedule = lower(given.units, streaming(given, 0, 0, 0), asynchronous=True)
    tasks = schedule.tasks
    for name in ("layers.1.attn", "layers.2.mlp"):
        held = [b for b in schedule.buffers if b.label == name and b.memory_class == "gradients" and b.tier == "gpu"]
        ends = [(tasks[b.first].op, tasks[b.last].op) for b in sorted(held, key=lambda b: b.first or 0)]
        assert ends == [(Op.BACKWARD, Op.OVERWRITE), (Op.LOAD, Op.UPDATE)]


def test_only_inputs_leave_where_layers_are_recomputed() -> None:
    given = setup()
    schedule = lower(given.units, streaming(given, 1, 1, 0), asynchronous=True)
    moved = {t.unit: t.num_bytes for t in schedule.tasks if t.op is Op.OFFLOAD}
    by_name = {unit.name: unit for unit in given.units}
    assert set(moved) == {f"layers.{i}.{part}" for i in range(3) for part in ("attn", "mlp")}
    ways = {name: decided.activations for name, decided in streaming(given, 1, 1, 0).units.items()}
    assert {ways[name] for name in moved} == {"offload", "recompute"}
    for name, num_bytes in moved.items():
        unit = by_name[name]
        given = unit.activation_output_bytes if unit.is_first else 0
        assert num_bytes == (unit.swap_bytes if ways[name] == "offload" else given)
    assert {t.unit for t in schedule.tasks if t.op is Op.RECOMPUTE} == {n for n in moved if ways[n] == "recompute"}


@settings(max_examples=examples(12, 3), deadline=None)
@given(st.floats(1.0, 3.0), st.integers(1, 3), st.sampled_from(["adamw", "muon"]))
def test_the_search_is_near_the_best_of_all(room: float, num_rounds: int, optimizer: str) -> None:
    given = setup(num_rounds, optimizer=optimizer)
    least = scorer(given).score(streaming(given, 0, 0, 0)).filled[Tier.GPU] * 1e12
    scores = scorer(given, room * least)
    every = [
        scores.score(streaming(given, keep, offload, resident))
        for keep, offload in itertools.product(range(5), repeat=2)
        if keep + offload <= 4
        for resident in range(0, len(given.units) + 1, 2)
    ]
    best = min(every, key=lambda candidate: candidate.order)
    found = best_streaming(given, scores)
    assert not found.missing_bytes
    assert found.iteration_s <= 1.05 * best.iteration_s


@pytest.mark.part(4)
@pytest.mark.parametrize("name", list(RUNS)[::9])
def test_published_runs_are_predicted(name: str) -> None:
    case = RUNS[name]
    outcome = case.predict(load_profile(case.hardware))
    assert outcome.converged
    assert outcome.values[Metric.ITERATION] == pytest.approx(case.measurements()[Metric.ITERATION], rel=0.16)


@pytest.mark.part(0)
def test_all_published_runs_are_predicted() -> None:
    errors = []
    for case in RUNS.values():
        predicted_s = case.predict(load_profile(case.hardware)).values[Metric.ITERATION]
        errors.append(abs(predicted_s / case.measurements()[Metric.ITERATION] - 1))
    assert statistics.mean(errors) < 0.05
    assert max(errors) < 0.16


def test_more_rounds_take_longer_and_more_budget_never_does() -> None:
    data = json.loads(PUBLISHED.read_text(encoding="utf-8"))["cases"][0]
    profile = load_profile(data["hardware"])

    def seconds(**changes: Any) -> float:
        return read_case(data | changes).predict(profile).values[Metric.ITERATION]

    once, twice = (seconds(tokens_per_step=data["tokens_per_round"] * rounds) for rounds in (2, 4))
    assert 1.8 * once < twice <= 2 * once
    budgets = [seconds(device_budget_gib=gib) for gib in (12.0, 48.0)]
    assert budgets == sorted(budgets, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel": 2}, "data_parallel is 2"),
        ({"units": {"a": {"params": "gpu", "activations": "keep", "update": ["cpu"]}}}, "there is one on 'cpu'"),
    ],
)
def test_sums_on_the_device_are_updated_there(changes: dict[str, Any], message: str) -> None:
    plain = {"policy": "test", "gradient_path": "on-device", "units": {}}
    RivalDecisions.model_validate(plain)
    with pytest.raises(ValueError, match=message):
        RivalDecisions.model_validate(plain | changes)


def test_state_in_bf16_is_beside_weights_in_bf16() -> None:
    assert not _BF16.can_be_kept("adamw")
    for other in ({"weights": "fp32"}, {"weights": "bf16", "master": "bf16"}):
        with pytest.raises(ValueError, match="state bf16 needs weights in bf16 and its own master copies"):
            RivalPrecision(**other, state="bf16")


_BF16 = RivalPrecision(weights="bf16", state="bf16")


def test_state_in_bf16_is_half_and_weights_are_their_own_master() -> None:
    assert (BF16.state_bytes_per_param("adamw"), _BF16.state_bytes_per_param("adamw")) == (12, 6)
    assert (BF16.update_bytes_per_param("adamw"), _BF16.update_bytes_per_param("adamw")) == (28, 14)
    held = scorer(setup()).score(streaming(setup(), 0, 0, 0)).filled[Tier.HOST] * 1e13
    num_params = sum(unit.num_params for unit in setup().units)
    assert held >= (6 + 2) * num_params  # state with the weights, and gradients


def test_everything_is_updated_on_the_device() -> None:
    decided = streaming(setup(), 2, 1, 4)
    assert {place for unit in decided.units.values() for place in unit.update} == {Place.STREAM}
