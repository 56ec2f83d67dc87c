"""Kernel sets against each other, against what torch's compiler saves, and against layers measured on a GPU."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from executor.module.compilation import compile_function
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Precision, Sharding
from planner.graph import Batch, Elementwise, Gemm, Kernels, Unit, build_graph, units
from planner.models import ModelConfig, resolve_model, to_hf_config_dict
from planner.models.formulas.ends import with_gradients
from planner.models.formulas.kernel_sets import KERNEL_SETS
from planner.models.kernels import flop, num_kernels
from planner.plan.planning import make_plan
from planner.verification import verify

LLAMA = resolve_model("llama-3.1-8b")
SMALL = ModelConfig.model_validate(
    {"name": "small", "family": "llama", "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 384, "head_dim": 32}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "mlp": "swiglu", "norm": "rmsnorm"}
    | {"tied_embeddings": False, "max_positions": 2048, "word_embed_proj_dim": 128}
)
SETS: tuple[Any, ...] = ("transformers", "liger")
NAMES = ("llama-3.1-8b", "qwen2.5-0.5b", "qwen3-4b")
PROBE = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu_probe.json"


def layer(model: ModelConfig, batch: Batch) -> list[Unit]:
    """Return the units of the second layer."""
    return [unit for unit in units(build_graph(model, batch)) if unit.segment == "layers.1"]


def small_layer(dtype: torch.dtype, kernels: str) -> tuple[Any, torch.Tensor, Any]:
    """Return a layer of the small model, an input and its rotary factors.

    The backend cuts graphs as Inductor does, and needs no compiler of kernels.
    """
    torch._dynamo.reset()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**to_hf_config_dict(SMALL))).to(dtype).model
    block, x = model.layers[1], torch.randn(2, 64, 128, dtype=dtype, requires_grad=True)
    modules = (block.self_attn, block.mlp, block.input_layernorm, block.post_attention_layernorm)
    for part in modules if kernels == "compiled" else (block,):
        part.forward = compile_function(part.forward, "", "aot_eager_decomp_partition")
    return block, x, model.rotary_emb(x, torch.arange(64)[None])


def elementwise_bytes(kernels: Kernels) -> int:
    return sum(kernel.num_bytes * kernel.count for kernel in kernels if isinstance(kernel, Elementwise))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ["compiled", "compiled-layers", "liger"])
@given(micro_batch=st.integers(1, 8), seq_len=st.integers(1, 64), dtype_bytes=st.sampled_from([2, 4]))
def test_fused_kernels_never_take_more(
    name: str, kernels: Any, micro_batch: int, seq_len: int, dtype_bytes: Any
) -> None:
    batch = Batch(micro_batch, 64 * seq_len, dtype_bytes)
    plain, fused = (
        layer(resolve_model(name), dataclasses.replace(batch, kernels=each)) for each in ("transformers", kernels)
    )
    profile = load_profile("h200x1-16c")
    cost = CostModel(profile, tuple(plain), Sharding(micro_batch=micro_batch))
    for way in ("forward", "backward", "recompute"):
        before, after = ([kernel for unit in found for kernel in getattr(unit, way)] for found in (plain, fused))
        if way == "recompute" and kernels != "liger":  # which runs the last product again
            assert flop(after) > flop(before)
        else:
            assert flop(after) == flop(before)
            assert cost.compute_s(after) <= cost.compute_s(before)
        assert elementwise_bytes(tuple(after)) <= elementwise_bytes(tuple(before))
        assert num_kernels(tuple(after)) <= num_kernels(tuple(before))
    saved, less = (sum(unit.saved_bytes for unit in found) for found in (plain, fused))
    assert less < saved


@pytest.mark.part(2)
@pytest.mark.parametrize("kernels", ["compiled", "compiled-layers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_blocks_save_what_torch_decides(dtype: torch.dtype, kernels: Any) -> None:
    block, x, place = small_layer(dtype, kernels)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *place)}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)  # so that no other takes its place
        return tensor

    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, position_embeddings=place, attention_mask=None)
    found = layer(SMALL, Batch(2, 64, dtype.itemsize, kernels=kernels))
    assert sum(saved.values()) == sum(unit.saved_bytes for unit in found)


def test_layers_on_a_gpu_take_the_predicted_time() -> None:
    """With recomputation, eager and compiled, within 3 %; the gain of compiling within 2 % of the time."""
    profile, ratios = load_profile("h200x1-16c"), dict[tuple[int, bool], float]()
    for row in json.loads(PROBE.read_text())["lines"]:
        if row["step"] != "layer":
            continue
        count = row["tokens"] // row["seq_len"]
        batch = Batch(count, row["seq_len"], kernels="compiled" if row["compiled"] else "transformers")
        found = layer(LLAMA, dataclasses.replace(batch, attention_scratch=True))
        cost = CostModel(profile, tuple(found), Sharding(micro_batch=count))
        ways = ("forward", "recompute", "backward")
        time_s = sum(cost.compute_s(getattr(unit, way)) for unit in found for way in ways)
        if row["seq_len"] == 2048:
            ratios[row["tokens"], row["compiled"]] = time_s / (1e-3 * row["late_ms"])
        assert time_s == pytest.approx(1e-3 * row["late_ms"], rel=0.03)
        # The probe keeps the layer's input, which its first norm saves.
        most_bytes = sum(unit.saved_bytes for unit in found) + max(unit.workspace_bytes for unit in found)
        assert most_bytes == pytest.approx(row["peak_bytes"], rel=0.1)
        launched = sum(num_kernels(getattr(unit, way)) for unit in found for way in ways)
        assert launched * 54e-6 == pytest.approx(1e-3 * row["host_issue_ms"], rel=0.15)
    assert len(ratios) == 4
    for tokens in (8192, 16384):
        assert ratios[tokens, True] == pytest.approx(ratios[tokens, False], abs=0.02)


@pytest.mark.parametrize("kernels", ["compiled", "compiled-layers"])
def test_recomputation_of_compiled_blocks_runs_the_products_that_torch_runs(kernels: Any) -> None:
    """A compiled graph saves its tensors when it ends, so checkpointing cannot stop before its last product."""
    block, x, place = small_layer(torch.bfloat16, kernels)
    block(x, position_embeddings=place, attention_mask=None).sum().backward()  # compiles
    with torch.profiler.profile(with_flops=True) as counted:  # a dispatch mode would keep graphs from running
        checkpoint(block, x, position_embeddings=place, attention_mask=None, use_reentrant=False).sum().backward()
    products = sum(event.flops for event in counted.events() if event.name == "aten::mm")
    found = layer(SMALL, Batch(2, 64, kernels=kernels))
    lists = [getattr(unit, way) for unit in found for way in ("forward", "recompute", "backward")]
    assert products == sum(kernel.flop for kernels in lists for kernel in kernels if isinstance(kernel, Gemm))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama-3.1-8b", {"kernels": "fused"}, "must be one of transformers, compiled, compiled-layers, liger"),
        (
            "llama-3.1-8b",
            {"kernels": "compiled", "storage": "activations"},
            "leave out --storage or --kernels compiled",
        ),
        ("llama-3.1-8b", {"kernels": "liger", "hardware": "epyc-turin-2c"}, "Liger's kernels are for GPUs"),
        ("opt-13b", {"kernels": "compiled-layers"}, "RMS norms, SwiGLU and no experts, not of opt-13b"),
        ("opt-13b", {"kernels": "liger"}, "RMS norms, SwiGLU and no experts, not of opt-13b"),
        ("mixtral-8x7b", {"kernels": "liger"}, "RMS norms, SwiGLU and no experts, not of mixtral-8x7b"),
        (
            "llama-3.1-8b",
            {"kernels": "liger", "loss_tile_tokens": 512},
            "loss_tile_tokens is 512, which is not known of",
        ),
        (
            "llama-3.1-8b",
            {"kernels": "compiled", "layer_tile_tokens": 64},
            "layer_tile_tokens is 64, which is not known",
        ),
        (
            "llama-3.1-8b",
            {"kernels": "liger", "num_devices": 2, "tensor_parallel": 2},
            "tensor_parallel is 2, which is not known of liger kernels",
        ),
    ],
)
def test_what_a_set_cannot_run_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    hardware = load_profile(options.pop("hardware", "a100-80"))
    with pytest.raises(ValueError, match=message):
        variants(Request(resolve_model(model), hardware, **options))


@pytest.mark.parametrize("kernels", ["compiled-layers", "liger"])
def test_degrees_that_a_set_cannot_have_are_not_tried(kernels: Any) -> None:
    request = Request(
        resolve_model("llama-3.1-8b"), load_profile("h100"), num_devices=2, global_batch=2, kernels=kernels
    )
    assert {each.choice.tensor_parallel for each in variants(request)} == {1}


def test_auto_is_the_faster_kind_and_leaves_out_what_cannot_be_executed() -> None:
    def chosen(**options: Any) -> dict[str | None, float]:
        """Return the time of computing a micro-batch, by the kernels of each variant."""
        given = {"seq_len": 1024, "micro_batch": 8, "kernels": "auto", **options}
        model = resolve_model(given.pop("model", "qwen2.5-0.5b"))
        found = variants(Request(model, load_profile("h100"), **given))
        return {
            each.choice.kernels: sum(each.cost.compute_s((*u.forward, *u.backward)) for u in each.setup.units)
            for each in found
            if each.choice.loss_tile_tokens is None and each.choice.layer_tile_tokens is None
        }

    times_s = chosen()
    assert set(times_s) == {None, "compiled", "compiled-layers"}
    assert times_s["compiled-layers"] < times_s["compiled"], "sums of the residual are made inside other kernels"
    assert times_s["compiled"] < 0.75 * times_s[None], "its loss has a vocabulary of 170 times its width"
    assert set(chosen(storage="activations")) == {None}
    assert set(chosen(precision=Precision(weights="bf16", products="fp8"))) == set(times_s)
    assert set(chosen(model="mixtral-8x7b", storage="activations")) == {None}
    request = Request(resolve_model("qwen2.5-0.5b"), load_profile("h100"), seq_len=1024, micro_batch=8, kernels="auto")
    plan = make_plan(request)
    assert plan.decisions.kernels == "compiled-layers"
    assert verify(plan).iteration_s == plan.prediction.iteration_s


def test_a_compiled_loss_moves_less_and_saves_the_logits_alone() -> None:
    losses = {name: KERNEL_SETS[name].loss(64, 1000, 2, 1) for name in ("transformers", "compiled")}
    moved = {
        n: sum(k.num_bytes for k in (*work.forward, *work.backward) if k.num_bytes > 64 * 12)
        for n, work in losses.items()
    }
    assert moved["compiled"] == 64 * 1000 * 6
    assert moved["transformers"] > 5 * moved["compiled"]
    assert losses["compiled"].saved_bytes == 64 * (1000 * 2 + 8)
    shared = [KERNEL_SETS[name].loss(64, 1000, 2, 2) for name in losses]
    assert shared[0] == shared[1], "ranks that share a vocabulary exchange sums outside of any graph"


def test_the_loss_of_liger_never_has_all_logits_and_runs_every_product_once() -> None:
    batch = Batch(4, 2048)
    (plain, fused) = (units(build_graph(LLAMA, dataclasses.replace(batch, kernels=k)))[-1] for k in SETS)
    assert flop((*fused.forward, *fused.backward)) == flop((*plain.forward, *plain.backward))
    weight = LLAMA.vocab_size * LLAMA.hidden_size
    assert fused.saved_bytes + fused.workspace_bytes - 6 * weight < plain.saved_bytes / 10


def test_the_loss_of_liger_casts_and_adds_a_gradient_as_large_as_the_weight_for_every_tile() -> None:
    """2 B read and 4 written; then 2 + 4 read and 2 written: as often as there are tiles, however many tokens."""
    weight, passes = 64_000 * 128, []
    for rows in (8192, 16_384):
        head, _ = with_gradients(rows, 128, 64_000, 2)
        frozen, _ = with_gradients(rows, 128, 64_000, 2, frozen=True)
        assert head.workspace_bytes - frozen.workspace_bytes == (2 + 4) * weight
        passes.append(sum(k.num_bytes * k.count for k in head.backward if isinstance(k, Elementwise)) / weight)
        assert not any(isinstance(kernel, Elementwise) for kernel in frozen.backward)
    assert passes == [(6 + 8) * 256] * 2
