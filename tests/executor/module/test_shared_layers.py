"""Layers that tensor-parallel ranks share, against the whole model in the memory of one process."""

import functools
import math
import re

import numpy as np
import pytest
import torch
import transformers
from amount import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from plans import mixed, plans
from rank_failures import failed, with_a_loss_of, with_a_loss_of_its_own, with_something_of_its_own
from rank_programs import around_training, dropped, left, metered, seen_from_outside, trained
from rank_references import reference
from rounding import assert_same_step, one_step, tensors
from training import CONFIGS, Task, decide, make_model, uniform, weights

from executor.distributed.mesh import Mesh
from executor.distributed.shards import BindingError, assemble, shards_of
from executor.distributed.watchdog import RankError
from executor.gradients import GradientError
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Choice, Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.models.config import ModelConfigError
from planner.schedule.tasks import Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks

SHARED = {
    "gpt2-shared": (2, 1),
    "opt-shared": (2, 2),
    "llama-shared": (2, 2),
    "llama-tied-shared": (4, 1),
    "qwen2-shared": (2, 1),
    "qwen3-shared": (4, 1),
    "mixtral-shared": (2, 2),
    "qwen3-moe-shared": (4, 1),
}
"""Every family, with ranks that share layers and ranks that share the data."""


@pytest.mark.part(7)
@pytest.mark.parametrize(("family", "ranks"), SHARED.items(), ids=SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_step_has_the_gradients_of_the_whole_model(processes, family, ranks, dtype):
    tensor_parallel, data_parallel = ranks
    task = one_step(family, dtype)
    zero_stage = 3 if data_parallel > 1 else 0
    decisions = decide(task, mixed, tensor_parallel=tensor_parallel, data_parallel=data_parallel, zero_stage=zero_stage)
    results = processes.call(tensor_parallel * data_parallel, trained, task, decisions)
    assert_same_step(task, decisions, results, num_parts=4)


@functools.cache
def in_the_simplest_way(processes, task, tensor_parallel):
    decisions = decide(task, uniform("gpu", "gpu"), tensor_parallel=tensor_parallel)
    return processes.call(tensor_parallel, trained, task, decisions)


@settings(max_examples=examples(6), deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    plans(families=["gpt2-shared", "llama-shared"], degrees={"tensor_parallel": 2}, optimizers=["adamw", "muon"]),
    st.integers(0, 99),
)
def test_any_plan_of_one_degree_gives_the_same_bits(processes, plan, seed):
    """Clipping, groups, schedules, accumulation, recomputation; and as without shares, but for rounding."""
    task, decisions = plan
    expected = in_the_simplest_way(processes, task, 2)
    for ours, theirs in zip(processes.call(2, trained, task, decisions, seed), expected, strict=True):
        assert ours[0] == theirs[0]
        different = [name for name in theirs[1] if ours[1][name].tobytes() != theirs[1][name].tobytes()]
        assert not different, different
    losses, _ = reference(task, 1, decisions)
    bound = 1e-5 if task.optimizer == "adamw" else 2**-10  # Muon orthogonalizes in bf16
    assert expected[0][0] == pytest.approx(losses[0], rel=2e-2 if task.dtype is torch.bfloat16 else bound)


WIDE = {"vocab_size": 2000, "use_cache": False, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NARROW = WIDE | {"vocab_size": 32}  # one of two ranks has nothing but pads
METERED = {
    "many words": lambda: (4, transformers.OPTConfig(**WIDE, ffn_dim=256, word_embed_proj_dim=64, dropout=0.0)),
    "tied": lambda: (4, transformers.LlamaConfig(**WIDE, intermediate_size=256, tie_word_embeddings=True)),
    "tied, gradients are the most": lambda: (
        1,
        transformers.LlamaConfig(**WIDE | {"vocab_size": 6000}, intermediate_size=256, tie_word_embeddings=True),
    ),
    "narrow": lambda: (4, transformers.LlamaConfig(**NARROW, intermediate_size=64)),
}


@pytest.mark.part(3)
@pytest.mark.parametrize("dtype_bytes", [2, 4], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", METERED)
def test_each_rank_holds_what_the_plan_says(processes, name, dtype_bytes):
    """What comes and goes, within three per cent: also on the last rank, whose share of the words has pads."""
    micro_batch, config = METERED[name]()
    batch = Batch(micro_batch, 16 * micro_batch, dtype_bytes, tensor_parallel=2)
    found = units(build_graph(from_hf_config(config.to_dict(), name), batch))
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="bf16" if dtype_bytes == 2 else "fp32"),
        micro_batch=micro_batch,
        tensor_parallel=2,
        units={unit.name: UnitDecision(params="gpu", activations="keep", update=(Place.GPU,)) for unit in found},
    )
    cost = CostModel.of(load_profile("a100x8-nvlink"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    predicted = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    for static_bytes, dynamic_bytes in processes.call(2, metered, config, batch, decisions):
        assert predicted - static_bytes == pytest.approx(dynamic_bytes, rel=0.03)


def test_norms_and_updates_where_data_is_shared_too(processes):
    """Norms count what is divided over all ranks, and what is not once; bits do not depend on who holds what."""
    task = Task("gpt2-shared", torch.float32, iterations=3)
    found = [
        processes.call(4, trained, task, decide(task, choose, tensor_parallel=2, data_parallel=2, zero_stage=stage))
        for stage, choose in ((0, uniform("gpu", "gpu")), (2, uniform("gpu", "cpu", "recompute")), (3, mixed))
    ]
    losses, _ = reference(task, 2, decide(task, mixed, data_parallel=2, zero_stage=3))
    for rank, (seen, final) in enumerate(found[0]):
        assert seen == pytest.approx(losses[rank // 2], rel=1e-5)
        for other in found[1:]:
            assert other[rank][0] == seen
            assert all(other[rank][1][name].tobytes() == final[name].tobytes() for name in final)


@pytest.mark.part(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory_and_times_are_those_of_the_schedule(processes, dtype):
    task = Task("llama-tied-shared", dtype, iterations=2)
    for ranks, zero_stage, choose in ((2, 0, mixed), (4, 3, mixed), (4, 2, uniform("gpu", "cpu"))):
        decisions = decide(task, choose, tensor_parallel=2, data_parallel=ranks // 2, zero_stage=zero_stage)
        assert processes.call(ranks, seen_from_outside, task, decisions) == [[]] * ranks


@pytest.mark.part(2)
@pytest.mark.parametrize("family", ["gpt2-shared", "llama-shared", "qwen3-shared"])
def test_what_leaves_is_what_the_plan_counts_and_no_sum_is_made_again(processes, family):
    """Also where a bias comes behind the sum."""
    task = Task(family, iterations=1)
    decisions = decide(task, uniform("host", "cpu", "offload"), tensor_parallel=2)
    for moved, stated, again, sums in processes.call(2, left, task, decisions):
        assert moved == stated
        assert again == ["ullage.summed_product.default"] * (len(stated) // 2), "the last of each layer"
        assert sums == 0


def test_evaluation_states_and_a_closed_model_are_whole(processes):
    task = Task("gpt2-shared", torch.float32, iterations=1, schedule=False)
    decisions, more = (
        decide(task, choose, tensor_parallel=2, data_parallel=2, zero_stage=stage)
        for choose, stage in ((uniform("host", "cpu"), 3), (mixed, 0))
    )
    assert processes.call(4, around_training, task, decisions, more) == [[]] * 4


def test_frozen_parameters_stay_as_they_are(processes):
    task = Task("gpt2-shared", torch.float32, iterations=3, optimizer="sgd")
    frozen = ("transformer.wte", "transformer.wpe", "transformer.h.0.", "transformer.h.1.mlp.c_proj")
    decisions = decide(task, mixed, tensor_parallel=2)
    losses, expected = reference(task, 1, decisions, frozen)
    first = weights(make_model(task))
    for seen, final in processes.call(2, trained, task, decisions, None, frozen):
        assert seen == pytest.approx(losses[0], rel=1e-5)
        for name, weight in tensors(final, expected).items():
            assert torch.equal(weight, first[name]) == name.startswith(frozen), name


def test_a_loss_of_the_users_own_gets_whole_logits(processes):
    task = Task("llama-shared", torch.float32, iterations=1)
    alone, shared = (decide(task, uniform("gpu", "gpu"), tensor_parallel=ranks) for ranks in (1, 2))
    (expected,) = processes.call(1, with_a_loss_of_its_own, task, alone)
    assert processes.call(2, with_a_loss_of_its_own, task, shared) == pytest.approx([expected] * 2, rel=1e-5)


@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("batches", ValueError, "rank 1 has another batch than rank 0; give the same to ranks 0, 1"),
        ("random", GradientError, r"different gradients of .* the same random numbers \(torch.manual_seed\)"),
    ],
)
def test_ranks_that_share_layers_notice_what_they_must_not_have_of_their_own(processes, what, kind, message):
    task = Task("gpt2-shared", torch.float32, iterations=1)
    decisions = decide(task, uniform("gpu", "gpu"), tensor_parallel=2)
    processes.begin(2, with_something_of_its_own, task, decisions, what)
    errors = processes.results(2)
    assert kind in {type(error) for error in errors}
    assert all(re.search(message, str(error)) for error in errors), errors


def test_a_loss_that_is_not_finite_is_no_difference_of_ranks(processes):
    """Their norm is NaN, as in memory, for whoever wants to stop at that."""
    task = Task("llama-shared", torch.float32, iterations=1)
    decisions = decide(task, uniform("gpu", "gpu"), tensor_parallel=2)
    assert np.isnan(processes.call(2, with_a_loss_of, task, decisions, math.nan)).all()
    assert not np.isfinite(processes.call(2, with_a_loss_of, task, decisions, math.inf)).any()


def test_ranks_that_share_layers_begin_with_the_same_random_numbers(processes):
    task = Task("gpt2-shared", torch.float32, iterations=1)
    decisions = decide(task, uniform("gpu", "gpu"), tensor_parallel=2)
    assert len(set(processes.call(2, with_something_of_its_own, task, decisions, "nothing"))) == 1


def test_ranks_drop_the_same_of_what_they_share_and_not_the_same_of_what_they_divide(processes):
    """Also in a second pass, whose dropout is that of the first: a plan that keeps all gives the same bits."""
    task = Task("gpt2-dropping-shared", torch.float32, iterations=2)
    kept, again = (
        processes.call(2, dropped, task, decide(task, uniform("gpu", "gpu", how), tensor_parallel=2))
        for how in ("keep", "recompute")
    )
    (first, losses), (second, other_losses) = kept
    assert losses == other_losses
    assert first["whole"] == second["whole"]
    heads = first["heads"] + second["heads"]
    assert len(heads) == len(set(heads)) > 0, "no rank, layer or iteration drops what another does"
    for (masks, seen), (expected, expected_losses) in zip(again, kept, strict=True):
        assert seen == expected_losses
        assert all(set(masks[kind]) == set(expected[kind]) for kind in masks)
        assert len(masks["heads"]) > len(expected["heads"]), "there was a second pass"


def test_what_cannot_be_divided_is_named():
    config = from_hf_config(transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=1).to_dict(), "llama")
    with pytest.raises(ModelConfigError, match=r"num_key_value_heads of llama is 1.*choose a tensor_parallel"):
        build_graph(config, Batch(1, 8, tensor_parallel=2))


def test_shares_are_of_the_planned_model():
    task = Task("llama-shared")
    other = from_hf_config(make_model(task).config.to_dict() | {"intermediate_size": 96}, "llama")
    planned = units(build_graph(other, Batch(2, 8, tensor_parallel=2)))
    with pytest.raises(BindingError, match=r"gate_proj.weight has shape \(64, 32\), but \(48, 32\) .* one of 2 ranks"):
        shards_of(make_model(task), planned, Mesh(Choice(tensor_parallel=2), 0))


@given(
    st.sampled_from(["gpt2-shared", "llama-shared", "mixtral-shared"]),
    st.sampled_from([2, 4]),
    st.sampled_from([64, 128, 200, 256, 300]),
)
def test_shards_join_to_the_whole(family, ranks, vocab_size):
    if family == "llama-shared":
        ranks = 2  # its keys and values have two heads
    config = CONFIGS[family]()
    config.vocab_size = vocab_size
    model = transformers.AutoModelForCausalLM.from_config(config)
    config = from_hf_config(config.to_dict(), family)
    planned = units(build_graph(config, Batch(2, 8, tensor_parallel=ranks)))
    of_ranks = [shards_of(model, planned, Mesh(Choice(tensor_parallel=ranks), rank)) for rank in range(ranks)]
    for name, shard in of_ranks[0].items():
        whole = shard.whole.detach()
        parts = [of_rank[name].part(whole) for of_rank in of_ranks]
        assert {part.shape for part in parts} == {shard.shape}
        joined = torch.empty_like(whole)
        shard.join(parts, joined)
        assert torch.equal(joined, whole), name
        own = {of_rank[name].shard_name: part for of_rank, part in zip(of_ranks, parts, strict=True)}
        assert len(own) == (1 if shard.dim is None else ranks)
        joined.fill_(torch.nan)
        assemble(shard.name, own, joined)
        assert torch.equal(joined, whole), name
        assert (
            shard.dim is not None
            or "norm" in name
            or "ln_" in name
            or "wpe" in name
            or "bias" in name
            or "gate" in name
        )


@pytest.mark.parametrize(
    ("moment", "kind", "message"),
    [
        ("forward", ZeroDivisionError, "rank 1 failed: ZeroDivisionError: in the loop"),
        ("kill in the loop", EOFError, r"rank 1 \(process \d+\) has ended without reporting why"),
    ],
)
def test_a_rank_that_fails_ends_those_that_share_layers_with_it(processes, moment, kind, message):
    task = Task("gpt2-shared", iterations=50)
    processes.begin(2, failed, task, decide(task, mixed, tensor_parallel=2), moment)
    first, second = processes.results(2)
    assert isinstance(second, kind)
    assert isinstance(first, RankError)
    assert re.search(message, str(first)), first
