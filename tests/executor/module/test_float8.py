"""Training with torchao's products in fp8 under plans, against the same converted model in memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import saved, trained
from rank_references import reference as on_ranks
from ranks import assert_same_bits
from training import Task, assert_same, decide, make_model, planned, prepare, reference, uniform

from executor.distributed.shards import BindingError
from executor.memory import activations
from executor.memory.activations import _assign
from executor.memory.recompute_cache import Product
from planner.decisions import Decisions

pytest.importorskip("torchao.float8")

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@settings(max_examples=examples(20, fewest=4))
@given(st.sampled_from(RECIPES).flatmap(lambda products: plans(families=("llama",), products=products)), st.integers())
def test_any_plan_gives_the_bits_of_training_in_memory(plan: tuple[Task, Decisions], seed: int) -> None:
    task, decisions = plan
    assert_same(planned(task, decisions, abs(seed)), reference(task))


def test_frozen_layers_pass_gradients_on() -> None:
    frozen = frozenset({"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"})
    task = Task("llama", iterations=2, frozen=frozen, products="tensorwise")
    assert_same(planned(task, decide(task, mixed)), reference(task))


@pytest.mark.parametrize(("zero_stage", "choose"), [(3, mixed), (2, uniform("gpu", "cpu", "recompute"))])
def test_ranks_have_scales_of_their_own_activations(processes: Any, zero_stage: int, choose: Any) -> None:
    """As under ``DistributedDataParallel``; their weights are the same, so that these have the same scales."""
    task = Task("llama", num_micro_batches=2, products="tensorwise")
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, trained, task, decisions), on_ranks(task, 2, decisions))


def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(processes: Any, tmp_path: Path) -> None:
    task = Task("llama", iterations=3, products="tensorwise")
    decided, other = (decide(task, choose) for choose in (mixed, uniform("host", "stream", "recompute")))
    (_, seen, end) = processes.call(1, saved, task, decided, tmp_path)[0]
    (_, again, same) = processes.call(1, saved, task, other, tmp_path / "again", 1, tmp_path)[0]
    assert again == seen[2:]  # a loss and a norm of each step
    assert end == same


def test_products_are_offloaded_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of fp32 layers are made in bf16, which is what the plan has room for."""
    found: list[Product] = []

    def assign(segment: Any, unit: str, room_bytes: int) -> None:
        _assign(segment, unit, room_bytes)
        found.extend(segment.products_of[unit])

    monkeypatch.setattr(activations, "_assign", assign)
    task = Task("llama", torch.float32, iterations=1, products="rowwise")
    planned(task, decide(task, uniform("gpu", "gpu", "offload")))
    kinds = Counter(product.function.overloadpacket for product in found)
    assert kinds[torch.ops.aten._scaled_mm] == 7 * 3
    assert all(product.is_offloaded for product in found)


def test_a_model_must_multiply_as_planned() -> None:
    narrow = Task("llama", products="tensorwise")
    plain = Task("llama")
    with pytest.raises(BindingError, match=r"^the plan multiplies model.layers.0.self_attn.\w_proj.weight in fp8, but"):
        prepare(narrow, decide(narrow, mixed), make_model(plain))
    with pytest.raises(
        BindingError, match=r"_proj.weight belongs to a Float8Linear, which multiplies in fp8, but the p"
    ):
        prepare(plain, decide(plain, mixed), make_model(narrow))
