"""Layers of Megatron-Core: their products are those of ``transformers``, and ranks share them without loss."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from amount import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import machine, quantity
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from planner.costs.model import CostModel
from planner.decisions import BF16, Decisions, Place, Precision, Sharding, UnitDecision
from planner.graph import Attention, Collective, Elementwise, Gemm, Kernel, Unit, units
from planner.models import ModelConfig, parameters
from planner.schedule.tasks import MemoryClass, Op
from planner.setup import Setup
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.kernels import megatron_lm
from ullage.rivals.kernels.megatron_core import MegatronBatch, build_graph, loss, loss_in_place
from ullage.rivals.lowering import lower
from ullage.rivals.passes.stages import merged
from ullage.rivals.precision import RivalPrecision

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
SIZES |= {"ffn_hidden_size": 96, "num_key_value_heads": 4, "word_embed_proj_dim": 64}
SIZES |= {"mlp": "swiglu", "norm": "rmsnorm", "tied_embeddings": False}
LLAMA = ModelConfig.model_validate(
    {**SIZES, "name": "llama", "family": "llama", "head_dim": 16, "max_positions": 2048},
)
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK = ModelConfig.model_validate(
    {**SIZES, "name": "deepseek", "family": "deepseek", "head_dim": 12, "max_positions": 64, "dense_layers": (0,)}
    | {"expert_ffn_hidden_size": 32, "shared_expert_ffn_hidden_size": 32, "num_experts": 16, "experts_per_token": 2}
    | {"latent": {name: size for name, size in LATENT.items() if name != "qk_nope_head_dim"}}
)
HF_SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
HF_SIZES |= {"vocab_size": 256, "intermediate_size": 96, "max_position_embeddings": 64, "attn_implementation": "eager"}
HF = {
    "llama": {"model_type": "llama", **HF_SIZES},
    "deepseek": {"model_type": "deepseek_v3", **HF_SIZES, **LATENT, "first_k_dense_replace": 1, "n_group": 1}
    | {"topk_group": 1, "n_routed_experts": 16, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"moe_intermediate_size": 32},
}
CONFIGS = {"llama": LLAMA, "deepseek": DEEPSEEK}


def graph_units(config: ModelConfig, **options: Any) -> tuple[Unit, ...]:
    return units(build_graph(config, MegatronBatch(1, 64, **options)))


def kernels(found: tuple[Unit, ...], kind: type[Kernel], *, inside: bool = False) -> list[Any]:
    """Return the kernels of a kind in forward and backward, perhaps of layers alone."""
    chosen = [unit for unit in found if unit.recompute or not inside]
    return [k for unit in chosen for way in (unit.forward, unit.backward) for k in way if isinstance(k, kind)]


@pytest.mark.parametrize("name", CONFIGS)
def test_products_and_parameters_are_those_of_transformers(name: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**HF[name]), experts_implementation="eager")
    found = {spec.name: spec.shape for spec in parameters(CONFIGS[name])}
    assert found == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    ids = torch.randint(256, (1, 64))
    with FlopCounterMode(display=False) as counted:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = counted.get_flop_counts()["Global"]
    products = sum(count for op, count in counts.items() if "bmm" not in str(op))  # attention's are batched
    assert sum(kernel.flop for kernel in kernels(graph_units(CONFIGS[name]), Gemm)) == products


@pytest.mark.parametrize("backward", [False, True])
def test_attention_with_narrower_values_has_the_flop_of_its_products(backward: bool) -> None:
    query, key, value = (torch.randn(2, 3, 16, width, requires_grad=True) for width in (12, 12, 8))
    with FlopCounterMode(display=False) as forward:
        out = (query @ key.transpose(-1, -2)).softmax(-1) @ value
    with FlopCounterMode(display=False) as again:
        out.sum().backward()
    core = Attention(2, 3, 16, 12, causal=False, flash=False, value_dim=8, backward=backward)
    assert core.flop == (again if backward else forward).get_total_flops()


@given(st.sampled_from(sorted(CONFIGS)), st.sampled_from([2, 4]), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=examples(12, fewest=12))
def test_ranks_share_the_work_of_layers_equally(name: str, tensor: int, context: int) -> None:
    """Experts too: ranks that share layers route their own tokens to whole experts."""
    config = CONFIGS[name]
    assume(tensor * context <= config.num_attention_heads)  # they exchange tokens for heads
    degrees = {"tensor_parallel": tensor, "context_parallel": context}
    degrees |= {"expert_parallel": tensor * context} if config.is_expert_model else {}
    whole, part = graph_units(config), graph_units(config, **degrees)
    for kind in (Gemm, Attention):
        all_flop, own_flop = (sum(k.flop for k in kernels(found, kind, inside=True)) for found in (whole, part))
        assert own_flop * tensor * context == all_flop
    if context == 1 and name == "llama":  # tokens of norms and residual sums too: nothing is done twice
        all_bytes, own_bytes = (
            sum(k.num_bytes * k.count for k in kernels(found, Elementwise, inside=True)) for found in (whole, part)
        )
        assert own_bytes * tensor == pytest.approx(all_bytes)
    if config.is_expert_model:
        sizes = [sum(u.num_params for u in found if ".experts" in u.name) for found in (whole, part)]
        separate = graph_units(config, expert_parallel=tensor * context)
        assert sizes[1] == sum(u.num_params for u in separate if ".experts" in u.name)


def test_ranks_that_share_sequences_exchange_tokens_for_heads() -> None:
    """Queries, keys and values before attention, outputs after it, and back; the output is saved on both sides."""
    found, alone = graph_units(LLAMA, context_parallel=2), graph_units(LLAMA)
    swaps = [k for k in kernels(found, Collective) if k.kind == "all-to-all"]
    of_layer = 64 // 2 * 64 * 2  # half of the tokens, all heads, in bf16
    assert [k.num_bytes for k in swaps] == [of_layer] * 4 * 2 * LLAMA.num_layers
    (core,), (whole,) = ({k for unit in of for k in unit.forward if isinstance(k, Attention)} for of in (found, alone))
    assert dataclasses.replace(whole, num_heads=whole.num_heads // 2) == core
    saved, all_saved = (
        sum(op.saved_bytes for unit in of for op in unit.operators if op.kind == "attention") for of in (found, alone)
    )
    assert saved == all_saved // 2 + LLAMA.num_layers * of_layer
    with pytest.raises(ValueError, match="context_parallel is 8, but must divide the 4 heads and 4 of keys"):
        graph_units(LLAMA, context_parallel=8)


def test_expert_parallel_ranks_that_share_layers_are_on_one_node() -> None:
    tokens = [Collective(10**6, 4, kind="all-to-all", over_tensor=over_tensor) for over_tensor in (True, False)]
    near_s, far_s = (
        CostModel(machine(devices_per_node=4), (), Sharding(data_parallel=2, tensor_parallel=2)).compute_s([kernel])
        for kernel in tokens
    )
    assert near_s < far_s


def test_shared_tokens_move_the_bytes_of_the_all_reduces_and_one_gather_more() -> None:
    """Two rounds for each of four sums in a layer, and the input of a column's weight gradient once more."""
    layer_bytes = Counter[str]()
    batch = MegatronBatch(1, 64, tensor_parallel=2)
    whole = dataclasses.replace(batch, sequence_parallel=False)
    for kind, made in (
        ("LM", megatron_lm.build_graph(LLAMA, batch)),
        ("Core", build_graph(LLAMA, batch)),
        ("not shared", build_graph(LLAMA, whole)),
    ):
        found = [unit for unit in units(made) if unit.segment == "layers.0"]
        moved = kernels(tuple(found), Collective)
        layer_bytes[kind] = sum(k.num_bytes * k.num_passes * k.count for k in moved)
    assert layer_bytes["Core"] == layer_bytes["LM"] * 10 // 8
    assert layer_bytes["not shared"] == layer_bytes["LM"]


def test_tokens_that_are_not_shared_are_kept_whole_by_every_rank() -> None:
    """Layers' inputs, and what norms and residual sums keep, do not shrink with the ranks; products do."""
    alone = graph_units(LLAMA)
    shared, whole = (graph_units(LLAMA, tensor_parallel=4, sequence_parallel=s) for s in (True, False))
    for one, quarter, full in zip(alone, shared, whole, strict=True):
        if one.recompute:
            outputs = [unit.operators[-1].output_bytes for unit in (one, quarter, full)]
            assert outputs[1] * 4 == outputs[0] == outputs[2]
            assert quarter.saved_bytes < full.saved_bytes < one.saved_bytes
        assert sum(k.flop for k in full.forward if isinstance(k, Gemm)) == sum(
            k.flop for k in quarter.forward if isinstance(k, Gemm)
        )


def cost(found: tuple[Unit, ...], precision: Precision = BF16, **changes: Any) -> CostModel:
    profile = machine(devices_per_node=4)
    device = profile.device.model_copy(update=changes)
    return CostModel(
        profile.model_copy(update={"device": device}), found, Sharding(precision=precision, tensor_parallel=4)
    )


def test_only_what_outlasts_its_product_is_waited_for() -> None:
    costs = cost(graph_units(LLAMA))
    product = Gemm(1024, 1024, 1024)
    alone = [Collective(num_bytes, 4, num_passes=1) for num_bytes in (10**3, 10**9)]
    behind = [dataclasses.replace(kernel, behind=product) for kernel in alone]
    alone_s, behind_s = ([costs.compute_s([kernel]) for kernel in kinds] for kinds in (alone, behind))
    assert behind_s == [max(seconds - costs.compute_s([product]), 0.0) for seconds in alone_s]
    assert 0 == behind_s[0] < behind_s[1]


def test_bytes_of_products_count_where_they_do_not_hide() -> None:
    plain, added = Gemm(100, 200, 300), Gemm(100, 200, 300, accumulates=True)
    hidden, seen = cost(()), cost((), gemm_bytes_per_s=quantity(1e9, "bytes_per_s"))
    assert hidden.compute_s([plain]) == hidden.compute_s([added])
    operands = 2 * (100 * 300 + 300 * 200)
    assert seen.compute_s([plain]) - hidden.compute_s([plain]) == pytest.approx((operands + 2 * 100 * 200) / 1e9)
    assert seen.compute_s([added]) - hidden.compute_s([added]) == pytest.approx((operands + 8 * 100 * 200) / 1e9)


def test_the_steps_of_a_ring_are_kernels_of_their_own() -> None:
    costs = cost(())
    whole = Attention(1, 8, 4096, 128)
    shared = dataclasses.replace(whole, num_steps=4)
    assert shared.flop * 4 == whole.flop
    assert costs.compute_s([shared]) == pytest.approx(costs.compute_s([whole]) / 4)  # at a constant rate


def test_every_rank_of_a_ring_adds_its_step_to_the_latency() -> None:
    profile = machine(devices_per_node=4)
    fabric = profile.intra_node.model_copy(update={"hop_latency_s": quantity(1e-3, "s")})
    slower = profile.model_copy(update={"intra_node": fabric})
    for kind, passes, steps in (("ring", 1, 3), ("ring", 2, 6), ("all-to-all", 2, 3)):
        tokens = Collective(1000, 4, num_passes=passes, kind=kind)
        degrees = Sharding(tensor_parallel=4) if kind == "ring" else Sharding(data_parallel=4)
        took_s = [CostModel(p, (), degrees).compute_s([tokens]) for p in (slower, profile)]
        assert took_s[0] - took_s[1] == pytest.approx(steps * 1e-3)


FP32_GRADIENTS = RivalPrecision(weights="bf16", gradients="fp32")


def lowered(found: tuple[Unit, ...], precision: Precision, pipeline: int = 1, **options: Any) -> tuple[Any, Decisions]:
    setup = Setup(found, Sharding(data_parallel=4, num_micro_batches=2, precision=precision, **options))
    changes = {"reduce_start": "step", "pipeline_parallel": pipeline}
    decisions = next(gpu_only(setup)).model_copy(update=changes)
    return lower(found, decisions, asynchronous=True), decisions


def test_gradients_of_their_own_type_are_held_and_reduced_in_it() -> None:
    found = graph_units(LLAMA)
    moved, held = Counter[Precision](), Counter[Precision]()
    for precision in (BF16, FP32_GRADIENTS):
        schedule, _ = lowered(found, precision)
        moved[precision] = sum(task.num_bytes for task in schedule.tasks if task.op is Op.SCATTER)
        gradients = [b for b in schedule.buffers if b.memory_class is MemoryClass.GRADIENTS]
        held[precision] = sum(b.num_bytes for b in gradients if b.label != "placeholders")
        gathered = sum(task.num_bytes for task in schedule.tasks if task.op is Op.GATHER)
        assert gathered == 2 * sum(unit.num_params for unit in found)
    assert moved[FP32_GRADIENTS] == 2 * moved[BF16] == 4 * sum(unit.num_params for unit in found)
    # In bf16 a rank's shards are held beside whole gradients; sums are whole all the time.
    num_params = sum(unit.num_params for unit in found)
    assert held[BF16] == 2 * (num_params + num_params // 4)
    assert held[FP32_GRADIENTS] == 4 * num_params
    assert FP32_GRADIENTS.update_bytes_per_param("adamw") == BF16.update_bytes_per_param("adamw") + 2 + 5 * 4


@pytest.mark.parametrize("num_layers", [2, 4])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_there_is_one_placeholder_for_each_shape_of_a_weight(num_layers: int, pipeline: int) -> None:
    """``qkv`` and ``gate_up`` of these sizes share one; the head's is on the last stage."""
    found = graph_units(LLAMA.model_copy(update={"num_layers": num_layers}))
    schedule, _ = lowered(found, FP32_GRADIENTS, pipeline)
    held = {b.stage: b for b in schedule.buffers if b.label == "placeholders"}
    of_layers, of_head = 192 * 64 + 64 * 64 + 64 * 96, 256 * 64
    last = pipeline - 1
    assert {stage: b.num_bytes for stage, b in held.items()} == {
        stage: 2 * (of_layers + (of_head if stage == last else 0)) for stage in range(pipeline)
    }
    assert all(b.first is None and b.last is None for b in held.values())


def test_the_gradient_of_an_embedding_comes_when_activations_of_a_stage_are_gone() -> None:
    """So a larger vocabulary, whose gradient is smaller than they are, makes the first stage work in no more memory."""

    def first_stage(vocab_size: int) -> Unit:
        found = graph_units(LLAMA.model_copy(update={"num_layers": 4, "vocab_size": vocab_size}))
        _, decisions = lowered(found, FP32_GRADIENTS, 2)
        return merged(found, decisions)[0]

    small, large = first_stage(256), first_stage(512)
    assert large.num_params > small.num_params
    assert large.workspace_bytes == small.workspace_bytes
    assert large.forward == small.forward
    assert first_stage(2**16).workspace_bytes > small.workspace_bytes  # until it is larger


def test_a_loss_in_place_has_logits_once() -> None:
    rows, vocab = 128, 1000
    in_place, plain = loss_in_place(rows, vocab, 2, 4), loss(rows, vocab, 2, 4)
    assert in_place.saved_bytes + in_place.workspace_bytes == 2 * rows * vocab
    assert plain.saved_bytes + plain.workspace_bytes == (4 + 6) * rows * vocab + 8 * rows
    moved = [
        sum(k.num_bytes * k.count for k in (*w.forward, *w.backward) if isinstance(k, Elementwise))
        for w in (in_place, plain)
    ]
    assert moved == [10 * rows * vocab, 40 * rows * vocab]
    (gathered,) = (k for k in in_place.forward if isinstance(k, Collective))
    assert gathered.num_bytes == 3 * 4 * rows * 4
    assert not any(isinstance(k, Collective) for k in loss_in_place(rows, vocab, 2, 1).forward)


def test_gradients_of_their_own_type_stay_on_the_device() -> None:
    unit = {"unit": UnitDecision(params="gpu", activations="keep", update=(Place.CPU,))}
    with pytest.raises(ValidationError, match="gradients in fp32 stay on the device, but an update is on 'cpu'"):
        RivalDecisions(policy="test", precision=FP32_GRADIENTS, units=unit)
    assert not FP32_GRADIENTS.can_be_split
    assert not FP32_GRADIENTS.can_be_kept("adamw")


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("expert", [2, 4])
def test_experts_are_sharded_over_the_ranks_that_have_the_same(expert: int, pipeline: int) -> None:
    config = DEEPSEEK.model_copy(update={"num_layers": 4})
    found = graph_units(config, expert_parallel=expert)
    schedule, decisions = lowered(found, FP32_GRADIENTS, pipeline, expert_parallel=expert)
    own = {
        name: sum(u.num_params for u in found if (".experts" in u.name) == (name == "experts"))
        for name in ("experts", "others")
    }
    state = sum(b.num_bytes for b in schedule.buffers if b.memory_class is MemoryClass.OPTIMIZER)
    shards = own["experts"] / (4 // expert) + own["others"] / 4
    assert state == pytest.approx(12 * shards, rel=1e-2)  # shards are padded
    updated = sum(task.num_params for task in schedule.tasks if task.op is Op.UPDATE)
    assert updated == pytest.approx(shards, rel=1e-2)
    reduced = sum(task.num_bytes for task in schedule.tasks if task.op is Op.SCATTER)
    assert reduced == 4 * (own["others"] + (own["experts"] if expert < 4 else 0))
    for buffer in schedule.buffers:
        if buffer.memory_class is MemoryClass.GRADIENTS and buffer.first is not None and pipeline > 1:
            made = schedule.tasks[buffer.first]
            assert buffer.label.startswith(f"stage{made.stage}")
            assert buffer.stage == made.stage
    held = sum(b.num_bytes for b in schedule.buffers if b.memory_class is MemoryClass.PARAMETERS)
    assert held == 2 * sum(own.values())
    assert decisions.pipeline_parallel == pipeline
