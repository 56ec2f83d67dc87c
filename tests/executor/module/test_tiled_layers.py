"""Norms and MLPs in tiles: the values of all tokens at once, in memory and under any plan."""

import copy

import pytest
import torch
import transformers
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plans
from rank_programs import metered
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from training import (
    ReferenceOptimizer,
    assert_same,
    make_model,
    make_optimizer,
    planned,
    train,
    weights,
)

from executor.module.tiled_layers import tile_modules
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.schedule.tasks import Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks

TILE = 5  # of 16 tokens: the last one is smaller
TOKENS = torch.arange(32).view(2, 16) % 60
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "use_cache": False,
}


def tiled_parts(model):
    """Return the norms and MLPs of its layers."""
    return [
        module for name, module in model.named_modules() if name.endswith(("norm", ".mlp")) and "self_attn" not in name
    ]


def pair(dtype=torch.float32, tile=TILE, **changes):
    """Return a model, and an equal one with tiles."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**SIZES | changes)
    whole = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    tiled = copy.deepcopy(whole)
    tile_modules(tiled_parts(tiled), tile)
    return whole, tiled


def in_memory(task):
    """Return what training in memory gives, with layers in tiles."""
    model = make_model(task)
    tile_modules(tiled_parts(model), TILE)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return train(task, model, optimizer), weights(model)


@settings(max_examples=examples(20), deadline=None)
@given(plans(families=["llama", "qwen3"], degrees={"layer_tile_tokens": TILE}), st.integers(0, 99))
def test_any_plan_gives_the_bits_of_tiles_in_memory(plan, seed):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), in_memory(task))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_all_tokens_at_once(dtype, bias):
    """A product of fewer rows may add in another order; a weight's gradient is a sum over 7 tiles, rounded at each."""
    whole, tiled = pair(dtype, mlp_bias=bias)
    for model in (whole, tiled):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for (name, expected), found in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        error = (found.grad.double() - expected.grad.double()).norm()
        assert error <= 2 * 7 * torch.finfo(dtype).eps * expected.grad.double().norm(), name


@pytest.mark.parametrize("is_trained", [True, False])
def test_what_is_frozen_gets_no_gradient(is_trained):
    """Also where the input, or all of the module, needs none."""
    whole, tiled = pair()
    for model in (whole, tiled):
        model.requires_grad_(False)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(is_trained)
        model.model.layers[1].self_attn.q_proj.weight.requires_grad_()
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for (name, expected), found in zip(whole.named_parameters(), tiled.named_parameters(), strict=True):
        assert (found[1].grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            torch.testing.assert_close(found[1].grad, expected.grad, msg=name)


def test_hooks_on_parameters_see_one_gradient():
    _, model = pair()
    weight, seen = model.model.layers[0].mlp.gate_proj.weight, []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()) or 2 * gradient)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert len(seen) == 1
    assert torch.equal(weight.grad, 2 * seen[0])


def test_an_evaluation_computes_in_tiles_too():
    whole, tiled = pair()
    sizes = []
    down = tiled.model.layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _module, args: sizes.append(len(args[0])))
    with torch.no_grad():
        seen = [model.eval()(input_ids=TOKENS).logits for model in (whole, tiled)]
    torch.testing.assert_close(seen[1], seen[0])
    assert sizes == [TILE] * 6 + [2]
    sizes.clear()
    tiled(input_ids=TOKENS[:1, :TILE])
    assert sizes == [1]  # a batch that is no larger than a tile is one call, of its own shape


def test_a_recomputed_layer_computes_no_product_more_often():
    """Its recomputation ends before the MLP, which backward runs again without its last product."""
    flop = []
    for model in pair():
        model.activation_checkpointing_enable({"use_reentrant": False})
        with FlopCounterMode(display=False) as counter:
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        flop.append(counter.get_total_flops())
    assert flop[0] == flop[1]


def test_autocast_is_that_of_the_forward():
    whole, tiled = pair()
    for model in (whole, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=TOKENS).logits
        functional.cross_entropy(logits.float().view(-1, 61), TOKENS.view(-1)).backward()
    for (name, expected), found in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=2**-5, atol=1e-3, msg=name)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype_bytes", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_the_ledger_has_the_memory_of_tiles(processes, activations, dtype_bytes):
    """What comes and goes, within three per cent."""
    config = transformers.LlamaConfig(**SIZES | {"hidden_size": 64, "intermediate_size": 512})
    batch = Batch(2, 128, dtype_bytes, layer_tile_tokens=48)
    found = units(build_graph(from_hf_config(config.to_dict(), "tiled"), batch))
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="bf16" if dtype_bytes == 2 else "fp32"),
        micro_batch=2,
        layer_tile_tokens=48,
        units={
            unit.name: UnitDecision(
                params="gpu", activations=activations if unit.in_layer else "keep", update=(Place.GPU,)
            )
            for unit in found
        },
    )
    cost = CostModel.of(load_profile("a100x8-nvlink"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    predicted = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    for static_bytes, dynamic_bytes in processes.call(1, metered, config, batch, decisions):
        assert predicted - static_bytes == pytest.approx(dynamic_bytes, rel=0.03)
