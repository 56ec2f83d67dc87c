"""Training under a plan against the same training in memory: the same bits, whatever the plan."""

import gc
import weakref

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import ACTIVATIONS, mixed, plans
from training import (
    Task,
    assert_same,
    batches,
    decide,
    groups,
    make_model,
    model_units,
    planned,
    prepare,
    reference,
    stock,
    train,
    uniform,
)

from executor.prepare import prepare_session

PLACEMENTS = [("gpu", "gpu"), ("gpu", "stream"), ("gpu", "cpu"), ("host", "stream"), ("host", "cpu")]
PLACEMENTS += [("gpu", "nvme"), ("host", "nvme"), ("nvme", "nvme")]


@pytest.mark.part(6)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("params", "place"), PLACEMENTS)
def test_every_placement_gives_the_same_bits(params, place, dtype, num_micro_batches):
    # Family and activations alternate, so that every pair of choices is met.
    turn = PLACEMENTS.index((params, place)) + num_micro_batches
    task = Task(["gpt2", "llama"][turn % 2], dtype, num_micro_batches)
    activations = ACTIVATIONS[(turn // 2 + (dtype is torch.float32)) % 4]
    assert_same(planned(task, decide(task, uniform(params, place, activations))), reference(task))


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(plans(), st.integers(0, 99), st.sampled_from(["off", 2]))
def test_any_plan_gives_the_same_bits_on_lanes_of_any_speed_audited_or_not(plan, seed, audit):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed, audit=audit), reference(task))


def test_stock_clipping_and_adamw_agree_within_rounding():
    # Our kernel and torch's round differently, by about an ulp (1.2e-7) of m and v; a step moves a weight by the rate
    # (5e-3) times their quotient, and errors add up over 20 steps and pass through the gradients of the later ones.
    task = Task("gpt2", torch.float32, iterations=20)
    decisions = decide(task, mixed)
    model, optimizer = prepare(task, decisions)
    with optimizer.session:
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        clip = lambda max_norm: torch.nn.utils.clip_grad_norm_(everything, max_norm)  # noqa: E731
        seen = train(task, model, optimizer, clip=clip)
        final = optimizer.session.full_parameters()
        losses, weights = stock(task)
        assert seen == pytest.approx(losses, rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(final[name], weight, rtol=0, atol=2e-5)


def test_stock_clipping_is_the_optimizers_own():
    task = Task(iterations=3)
    model, optimizer = prepare(task, decide(task, mixed))
    with optimizer.session:
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        seen = train(task, model, optimizer, clip=lambda n: torch.nn.utils.clip_grad_norm_(everything, n))
        assert_same((seen, optimizer.session.full_parameters()), reference(task))


@pytest.mark.parametrize("family", ["gpt2-untied", "llama-tied", "qwen3", "mixtral", "opt"])
def test_every_family_gives_the_same_bits(family):
    task = Task(family, torch.bfloat16, iterations=3)
    assert_same(planned(task, decide(task, mixed, num_param_slots=1)), reference(task))


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_slot_that_is_refilled_between_forward_and_backward_gives_the_right_gradient(num_slots):
    task = Task("llama", torch.float32, iterations=1)
    decisions = decide(task, uniform("host", "cpu"), num_param_slots=num_slots)
    model, optimizer = prepare(task, decisions)
    plain = make_model(task)
    with optimizer.session as session:
        attention = [
            session.runtime.parameter_states()[f"model.layers.{i}.self_attn.q_proj.weight"][0] for i in range(3)
        ]
        addresses = {unit.device_weights.data_ptr() for unit in attention}
        assert len(addresses) == num_slots, "layers share slots"
        seen = {}
        for name, (_, entry) in session.runtime.parameter_states().items():
            entry.shard.leaf.register_hook(lambda gradient, name=name: seen.update({name: gradient.clone()}))
        tokens = batches(task)[0, 0]
        for m in (model, plain):
            m(input_ids=tokens, labels=tokens).loss.backward()
        for name, parameter in plain.named_parameters():
            assert torch.equal(seen[name], parameter.grad), name
        optimizer.step()


@pytest.mark.parametrize("params", ["gpu", "host"])
def test_the_models_own_memory_is_given_back(params):
    task = Task()
    model = make_model(task)
    gone = []
    for parameter in model.parameters():
        weakref.finalize(parameter.untyped_storage(), gone.append, parameter.shape)
    count = len(list(model.parameters()))

    optimizer = torch.optim.AdamW(groups(model))
    _, optimizer = prepare_session(model, optimizer, model_units("gpt2"), decide(task, uniform(params, "cpu")))
    with optimizer.session:
        gc.collect()
        assert len(gone) == count
