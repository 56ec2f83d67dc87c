"""The loss in tiles: the bits of whole logits, but for the weight's gradient; in memory and under any plan."""

import copy
import weakref

import pytest
import torch
import transformers
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_programs import metered, trained
from rounding import assert_same_step, one_step
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from training import (
    MICRO_BATCH,
    SEQ_LEN,
    ReferenceOptimizer,
    Task,
    assert_same,
    decide,
    make_model,
    make_optimizer,
    planned,
    prepare,
    train,
    uniform,
    weights,
)

from executor.audit.audit import AuditError
from executor.distributed.shards import BindingError
from executor.module.tiled_logits import TiledHead, TiledLogits, tile_head
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks

TILE = 5  # of 16 tokens: the last one is smaller
TOKENS = torch.arange(MICRO_BATCH * SEQ_LEN).view(MICRO_BATCH, SEQ_LEN) % 60


def in_memory(task):
    """Return what training in memory gives, with the loss in tiles."""
    model = make_model(task)
    tile_head(model, TILE)
    optimizer = ReferenceOptimizer(make_optimizer(task, model))
    return train(task, model, optimizer), weights(model)


@settings(max_examples=examples(20), deadline=None)
@given(plans(families=["gpt2", "llama"], degrees={"loss_tile_tokens": TILE}), st.integers(0, 99))
def test_any_plan_gives_the_bits_of_tiles_in_memory(plan, seed):
    task, decisions = plan
    assert_same(planned(task, decisions, delays=seed), in_memory(task))


def pair(config, dtype=torch.float32, tile=TILE):
    """Return a model with whole logits, and an equal one with tiles."""
    torch.manual_seed(3)
    whole = transformers.AutoModelForCausalLM.from_config(config).to(dtype).train()
    tiled = copy.deepcopy(whole)
    tile_head(tiled, tile)
    return whole, tiled


_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 61,
}
HEADS = {
    "plain": lambda: transformers.LlamaConfig(**_SIZES),
    "tied": lambda: transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
    "soft caps": lambda: transformers.Gemma2Config(**_SIZES, num_key_value_heads=1, head_dim=8, pad_token_id=0),
    "scaled": lambda: transformers.CohereConfig(**_SIZES, pad_token_id=0, bos_token_id=0, eos_token_id=0),
    "divided": lambda: transformers.GraniteConfig(**_SIZES, logits_scaling=3.0, pad_token_id=0),
    "bias": lambda: transformers.PhiConfig(**_SIZES),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_heads_of_transformers_have_the_gradients_of_whole_logits(head, dtype):
    """All have the same bits but that of the head's own weight: a sum over 4 tiles, rounded at each.

    Its error is at most 4 roundings of the sum of the tiles' sizes, which is at most twice what is seen here.
    """
    whole, tiled = pair(HEADS[head](), dtype)
    labels = TOKENS.clone()
    labels[0, :3] = -100
    num_items = torch.tensor(8)  # a power of two, by which gradients are divided without rounding
    seen = [model(input_ids=TOKENS, labels=labels, num_items_in_batch=num_items).loss for model in (whole, tiled)]
    assert seen[1].item() == pytest.approx(seen[0].item(), rel=1e-6)
    for loss in seen:
        loss.backward()
    summed = {id(p) for p in tiled.get_output_embeddings().parameters()}
    for (name, expected), found in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        if id(found) in summed:
            eps = torch.finfo(dtype).eps
            assert (found.grad - expected.grad).norm() <= 2 * 4 * eps * expected.grad.norm(), name
        else:
            assert torch.equal(found.grad, expected.grad), name


USES = {
    "of the user": lambda logits: functional.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, logits.size(-1)), TOKENS[..., 1:].reshape(-1)
    ),
    "of the user, smoothed": lambda logits: functional.cross_entropy(
        logits.float().flatten(0, 1) / 2, TOKENS.flatten(), label_smoothing=0.1, reduction="sum"
    ),
    "of rows": lambda logits: functional.cross_entropy(logits.reshape(16, 61), TOKENS.view(-1), reduction="none")[3],
    "with class weights": lambda logits: functional.cross_entropy(
        logits.view(-1, 61), TOKENS.view(-1), weight=torch.arange(61.0)
    ),
    "with soft targets": lambda logits: functional.cross_entropy(logits.view(-1, 61), torch.full((16, 61), 1 / 61)),
    "of channels": lambda logits: functional.cross_entropy(logits.transpose(1, 2), TOKENS),
    "the largest": lambda logits: logits.max(),
    "a column": lambda logits: logits[..., 2].sum() + logits[:, 1:3, 5].mean(),
    "a mask": lambda logits: logits[TOKENS % 3 == 1].square().sum(),
    "a change in place": lambda logits: (logits.clone().masked_fill_(TOKENS.unsqueeze(-1) > 5, 0.0) ** 2).sum(),
    "parts": lambda logits: sum(part.tanh().sum() for part in logits.flatten(0, 1).split(7)),
    "a product": lambda logits: (logits * torch.arange(61.0)).sum() + (2 * logits).mean(),
    "two losses": lambda logits: logits.logsumexp(-1).mean() + functional.cross_entropy(logits[0], TOKENS[0]),
}


@pytest.mark.parametrize("use", USES)
def test_logits_in_tiles_are_used_as_whole_ones(use):
    whole, tiled = pair(HEADS["plain"]())
    seen = [USES[use](model(input_ids=TOKENS).logits) for model in (whole, tiled)]
    assert seen[1].item() == pytest.approx(seen[0].item(), rel=1e-6)
    for loss in seen:
        loss.backward()
    for (name, expected), found in zip(whole.named_parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, expected.grad, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_what_is_done_in_place_stays():
    whole, tiled = (model(input_ids=TOKENS).logits for model in pair(HEADS["plain"]()))
    for logits in (whole, tiled):
        with torch.no_grad():
            logits[..., 7] = 5.0
            logits.mul_(2)
    assert isinstance(tiled, TiledLogits)
    assert torch.equal(tiled + 0, whole)
    assert torch.equal(tiled.argmax(-1), whole.argmax(-1))


def test_logits_are_whole_only_if_they_have_to_be(monkeypatch):
    made = []
    monkeypatch.setattr(TiledLogits, "whole", lambda self: made.append(self) or pytest.fail("logits are whole"))
    _, tiled = pair(HEADS["soft caps"]())
    output = tiled(input_ids=TOKENS, labels=TOKENS)
    assert output.logits.shape == (MICRO_BATCH, SEQ_LEN, 61)
    assert output.logits.argmax(-1, keepdim=True).shape == (MICRO_BATCH, SEQ_LEN, 1)
    assert output.logits.detach()[:, -1].argmax(-1).shape == (MICRO_BATCH,)
    output.loss.backward()
    assert not made


def test_a_model_generates_the_same_tokens():
    whole, tiled = (model.eval() for model in pair(HEADS["soft caps"]()))
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(tiled.generate(TOKENS[:, :4], **options), whole.generate(TOKENS[:, :4], **options))


def test_frozen_heads_have_no_gradient():
    whole, tiled = pair(HEADS["plain"]())
    for model in (whole, tiled):
        model.lm_head.requires_grad_(False)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        assert model.lm_head.weight.grad is None
    assert torch.equal(tiled.model.norm.weight.grad, whole.model.norm.weight.grad)


@pytest.mark.parametrize("head", ["plain", "soft caps"])
def test_the_heads_input_is_gone_before_backward_comes_to_layers(head):
    _, tiled = pair(HEADS[head]())
    storages, gone = [], []
    tiled.model.norm.register_forward_hook(lambda _m, _a, out: storages.append(weakref.ref(out.untyped_storage())))
    tiled.model.norm.register_forward_pre_hook(
        lambda _m, args: args[0].register_hook(lambda _g: gone.append(storages[0]() is None)) and None
    )
    tiled(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert gone == [True]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_is_that_of_the_forward(dtype, reduction):
    """Cross-entropy in bf16 is then in float32, and products of float32 are in bf16."""
    whole, tiled = pair(HEADS["plain"](), dtype)
    for model in (whole, tiled):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=TOKENS).logits
            loss = functional.cross_entropy(logits.view(-1, 61), TOKENS.view(-1), reduction=reduction).sum()
        loss.backward()
    assert torch.equal(tiled.model.norm.weight.grad, whole.model.norm.weight.grad)
    torch.testing.assert_close(tiled.lm_head.weight.grad, whole.lm_head.weight.grad, rtol=0.05, atol=0.01)


@pytest.mark.parametrize(("dtype", "certainty", "roundings"), [(torch.float32, 1, 8), (torch.float16, 400, 0.5)])
def test_a_loss_may_have_any_gradient_and_several_backwards(dtype, certainty, roundings):
    """In fp16, gradients of labels that are nearly certain are lost without the loss's scale."""
    whole, tiled = pair(HEADS["plain"](), dtype)
    for model in (whole, tiled):
        with torch.no_grad():
            model.lm_head.weight *= certainty
        logits = model(input_ids=TOKENS).logits.view(-1, 61)
        loss = 1000 / 7 * functional.cross_entropy(logits, logits.argmax(-1))
        loss.backward(retain_graph=True)
        loss.backward()
    for found, expected in zip(tiled.parameters(), whole.parameters(), strict=True):
        assert expected.grad.norm() > 0
        error = (found.grad - expected.grad).norm()
        assert error <= roundings * torch.finfo(dtype).eps * expected.grad.norm()


def test_logits_of_a_loss_are_made_once():
    """Where the loss is one number; the head's three products are all there are."""
    made = {}
    for reduction in ("mean", "none"):
        whole, tiled = pair(HEADS["plain"]())
        for model in (whole, tiled):
            with FlopCounterMode(display=False) as counter:
                logits = model(input_ids=TOKENS).logits
                functional.cross_entropy(logits.view(-1, 61), TOKENS.view(-1), reduction=reduction).sum().backward()
            made[model is tiled, reduction] = counter.get_total_flops()
    assert made[True, "mean"] == made[False, "mean"]
    assert made[True, "none"] == made[False, "none"] + 2 * TOKENS.numel() * 16 * 61


@pytest.mark.parametrize("params", ["gpu", "host"])
def test_logits_can_be_read_before_backward_and_after_an_evaluation(params):
    task = Task("llama", torch.float32, max_norm=None)
    model, optimizer = prepare(task, decide(task, uniform(params, "cpu"), loss_tile_tokens=TILE))
    expected = make_model(task)(input_ids=TOKENS).logits
    with optimizer.session:
        with torch.no_grad():
            seen = model.eval()(input_ids=TOKENS, labels=TOKENS).logits
        torch.testing.assert_close(seen + 0, expected, rtol=0, atol=0)
        again = model(input_ids=TOKENS).logits
        output = model.train()(input_ids=TOKENS, labels=TOKENS)
        assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
        output.loss.backward()
        for late in (output.logits, again):
            with pytest.raises(OutOfOrderError, match="read the logits before, or plan with --tiles loss as large as"):
                late.softmax(-1)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(OutOfOrderError, match="the weights for that are gone once backward or a step has begun"):
            output.logits.softmax(-1)


def test_a_loss_of_the_users_own_is_trained_under_a_plan():
    task = Task("llama", torch.bfloat16)
    found = []
    for tile in (None, 4):
        model, optimizer = prepare(task, decide(task, mixed, loss_tile_tokens=tile))
        with optimizer.session:
            for _ in range(2):
                logits = model(input_ids=TOKENS).logits
                functional.cross_entropy(logits.view(-1, logits.shape[-1]).float(), TOKENS.view(-1)).backward()
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            found.append({name: w.clone() for name, w in optimizer.session.full_parameters().items()})
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=2**-7, atol=2e-3, msg=name)


def test_logits_in_tiles_are_audited():
    task = Task("llama", torch.float32, iterations=1)
    model, optimizer = prepare(task, decide(task, mixed, loss_tile_tokens=TILE), audit="first")
    with optimizer.session:
        train(task, model, optimizer)
        result = optimizer.session.audit.result
        assert "lm_head" in result.kinds
        assert not result.left_out


def test_a_wrong_gradient_of_logits_in_tiles_is_found(monkeypatch):
    wrong = functional.linear
    task = Task("llama", torch.float32, iterations=1)
    model, optimizer = prepare(task, decide(task, mixed, loss_tile_tokens=TILE), audit="first")
    monkeypatch.setattr(TiledHead, "linear", lambda head, hidden: wrong(hidden, head.module.weight * 1.1))
    with pytest.raises(AuditError, match="lm_head differs"), optimizer.session:
        train(task, model, optimizer)


def test_another_kind_of_head_is_refused():
    task = Task("llama")
    model = make_model(task)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(
        BindingError, match=r"no torch\.nn\.Linear as its output embeddings; plan with --tiles loss as large"
    ):
        tile_head(model, TILE)


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama-shared", "gpt2-shared"])
def test_ranks_that_share_the_vocabulary_have_the_gradients_of_the_whole(processes, family, dtype):
    task = one_step(family, dtype)
    decisions = decide(task, mixed, tensor_parallel=2, loss_tile_tokens=TILE)
    assert_same_step(task, decisions, processes.call(2, trained, task, decisions), num_parts=4)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype_bytes", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ledger_has_the_memory_of_tiles(processes, ranks, dtype_bytes):
    """What comes and goes, within three per cent; it is mostly one tile."""
    config = transformers.LlamaConfig(**_SIZES | {"vocab_size": 5000, "num_key_value_heads": 2})
    batch = Batch(2, 16, dtype_bytes, tensor_parallel=ranks, loss_tile_tokens=6)
    found = units(build_graph(from_hf_config(config.to_dict(), "tiled"), batch))
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="bf16" if dtype_bytes == 2 else "fp32"),
        micro_batch=2,
        tensor_parallel=ranks,
        loss_tile_tokens=6,
        units={unit.name: UnitDecision(params="gpu", activations="keep", update=(Place.GPU,)) for unit in found},
    )
    cost = CostModel.of(load_profile("a100x8-nvlink"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    predicted = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    for static_bytes, dynamic_bytes in processes.call(ranks, metered, config, batch, decisions):
        assert predicted - static_bytes == pytest.approx(dynamic_bytes, rel=0.03)
