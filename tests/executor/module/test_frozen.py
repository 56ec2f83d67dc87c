"""Weights that are planned as frozen: any of them, under any plan, as in memory."""

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import saved, trained
from rank_references import reference as of_ranks
from ranks import assert_same_bits
from training import Task, assert_memory_is_stated, assert_same, decide, delay, prepare, reference, train, uniform

FAMILIES = ("gpt2", "llama", "llama-tied")


@settings(max_examples=examples(40), deadline=None)
@given(plans(families=FAMILIES, optimizers=("adamw", "sgd", "lion"), freezes=True), st.integers(0, 99))
def test_any_frozen_weights_under_any_plan_give_the_same_bits(plan, seed):
    task, decisions = plan
    model, optimizer = prepare(task, decisions)
    with optimizer.session as session:
        delay(session, seed)
        seen = train(task, model, optimizer)
        assert_memory_is_stated(session)
        assert_same((seen, session.full_parameters()), reference(task))


ATTENTION = frozenset(
    f"transformer.h.{layer}.attn.{name}.{kind}"
    for layer in range(3)
    for name in ("c_attn", "c_proj")
    for kind in ("weight", "bias")
)
FIRST = frozenset({"transformer.wte.weight", "transformer.wpe.weight"})  # the head uses one of them


@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("zero_stage", "choose"),
    [
        (1, uniform("gpu", "stream")),
        (2, uniform("gpu", "cpu", "recompute")),
        (3, uniform("gpu", "gpu")),
        (3, mixed),
    ],
    ids=["1", "2", "3, resident", "3, everything"],
)
def test_two_ranks_with_frozen_weights_give_the_bits_of_one_process(processes, zero_stage, choose):
    """Each rank has other weights before it begins: those of the first are everyone's, frozen or not."""
    task = Task("gpt2", [torch.bfloat16, torch.float32][zero_stage % 2], 2, iterations=3, frozen=ATTENTION | FIRST)
    decisions = decide(task, choose, data_parallel=2, zero_stage=zero_stage)
    assert_same_bits(processes.call(2, trained, task, decisions), of_ranks(task, 2, decisions))


@pytest.mark.part(0)
@settings(max_examples=40, deadline=None)
@given(plans(sizes=[2], families=FAMILIES, freezes=True), st.integers(0, 99))
def test_any_frozen_weights_on_two_ranks_give_the_same_bits(processes, plan, seed):
    task, decisions = plan
    assert_same_bits(processes.call(2, trained, task, decisions, seed), of_ranks(task, 2, decisions))


def test_a_checkpoint_goes_on_to_the_same_bits_under_another_plan(tmp_path):
    """Frozen weights are in it too, wherever either plan has them."""
    task = Task("llama", schedule=False, frozen=frozenset(f"model.layers.{i}.mlp.down_proj.weight" for i in range(3)))
    _, expected, end = saved(0, 1, task, decide(task, mixed, clip=True), tmp_path / "first")
    for folder, choose in ((tmp_path / "a", mixed), (tmp_path / "b", uniform("host", "stream", "recompute"))):
        _, seen, last = saved(0, 1, task, decide(task, choose, clip=True), folder, 2, tmp_path / "first")
        assert seen == expected[4:]
        assert last == end
