"""Captured models whose linear layers a plan converts to products in fp8 (``--precision products=fp8``)."""

import copy
import json
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import nn
from training import ReferenceOptimizer, weights
from transformers import AutoConfig, AutoModelForCausalLM

from executor.module import float8
from executor.options import Options
from executor.prepare import prepare_session
from hwprofiles.registry import load_profile
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, Operator, Unit, build_graph, units
from planner.models import from_hf_config
from planner.models.config import ModelConfigError
from planner.models.formulas.float8 import products as fp8_products
from planner.models.kernels import Elementwise, Gemm
from ullage.capture import capture_module
from ullage.main import main
from ullage.planning import plan as make_plan

torchao = pytest.importorskip("torchao.float8")

INPUTS = ["input_ids=2x32:int64", "labels=2x32:int64"]
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases
    "gemma2": {"head_dim": 16, "sliding_window": 16},
    "phi3": {"pad_token_id": 0},  # fused projections
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}


def config_of(family: str) -> Any:
    return AutoConfig.for_model(**TINY | {"model_type": family, "use_cache": False} | MORE[family])


def made(family: str) -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.bfloat16)
    return model.train()


def operators_of(family: str, **options: Any) -> tuple[Operator, ...]:
    captured = capture_module(made(family), INPUTS, "bf16", as_on_gpu=False)
    return build_graph(captured, Batch(2, 32, fp8_products="device", **options))


def in_fp8(found: tuple[Unit, ...]) -> set[str]:
    return {spec.name for unit in found for spec in unit.fp8_parameters}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_products_and_casts_are_those_of_the_formulas(family: str) -> None:
    """Of forward, backward and what a recomputation runs again, with casts of weights and without."""
    both = (
        operators_of(family),
        build_graph(from_hf_config(config_of(family).to_dict(), family), Batch(2, 32, fp8_products="device")),
    )
    for way in (lambda o: o, lambda o: o.fp8_twin or o):
        for part in ("forward", "backward", "again"):
            captured, formulas = (Counter(kernels_in(operators, part, way)) for operators in both)
            assert formulas[Elementwise(12)] > 0  # kernels that make scales
            assert captured == formulas


def test_a_bias_is_added_behind_the_product() -> None:
    (operator,) = (each for each in operators_of("qwen2") if each.name == "model.layers.0.self_attn.q_proj")
    forward, *_ = fp8_products(64, 64, 64, 2, bias=True, casts_weights=True)
    assert operator.forward == forward
    assert forward != fp8_products(64, 64, 64, 2, bias=False, casts_weights=True)[0]


def kernels_in(operators: tuple[Operator, ...], part: str, way: Any) -> Iterator[Any]:
    """Yield the products of layers, and their kernels on scales."""
    for operator in (way(o) for o in operators if "layers" in o.unit):
        again = operator.forward[: len(operator.forward) - operator.num_skipped]
        for kernel in {"forward": operator.forward, "backward": operator.backward, "again": again}[part]:
            if isinstance(kernel, Gemm):
                yield kernel
            elif isinstance(kernel, Elementwise) and kernel.num_bytes in {4, 8, 12}:
                yield from (Elementwise(kernel.num_bytes),) * kernel.count


def test_which_layers_are_converted() -> None:
    """Not heads, routers and adapters, nor what is no linear layer."""
    fused = {name.partition("layers.0.")[2] for name in in_fp8(units(operators_of("phi3"))) if "layers.0." in name}
    parts = {"mlp.down_proj", "mlp.gate_up_proj", "self_attn.o_proj", "self_attn.qkv_proj"}
    assert fused == {f"{part}.weight" for part in parts}
    experts = in_fp8(units(operators_of("olmoe")))
    assert experts
    assert all("self_attn" in name for name in experts)
    named = {name: nn.Linear(64, 64) for name in ("up", "gate", "router", "gate_proj")}
    of_blocks = nn.Sequential(*(nn.Sequential(OrderedDict(copy.deepcopy(named))) for _ in range(2))).bfloat16()
    captured = capture_module(of_blocks, ["32x64"], "bf16", as_on_gpu=False)
    chosen = in_fp8(units(build_graph(captured, Batch(32, 1, fp8_products="device"))))
    assert chosen == {f"{block}.{name}.weight" for block in "01" for name in ("up", "gate_proj")}
    with pytest.raises(
        ModelConfigError, match=r"has no torch.nn.Linear in a hidden layer .*, or leave out --precision products=fp8$"
    ):
        operators_of("gpt2")
    with pytest.raises(ModelConfigError, match="layer_tile_tokens is 32, but in fp8 each part"):
        operators_of("llama", layer_tile_tokens=32)


def test_rows_that_are_no_multiple_of_16_leave_a_layer_as_it_is() -> None:
    captured = capture_module(made("llama"), ["input_ids=1x24:int64", "labels=1x24:int64"], "bf16", as_on_gpu=False)
    with pytest.raises(
        ModelConfigError, match=r"tokens of a micro-batch, are multiples of 16, .*another --micro-batch"
    ):
        build_graph(captured, Batch(1, 24, fp8_products="device"))


@pytest.fixture
def _eager_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes seconds, and gives the same bits (``test_float8_casts.py``)."""
    monkeypatch.setattr(float8, "_compiled", lambda function: function)


WAYS = {
    "resident": ("gpu", "keep", Place.GPU),
    "fetched": ("host", "recompute", Place.CPU),
    "streamed": ("host", "keep", Place.STREAM),
}


def train(model: nn.Module, optimizer: Any) -> list[float]:
    seen = []
    for step in range(3):
        tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        seen += [loss.item(), float(optimizer.clip_grad_norm_(0.5))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@pytest.mark.part(2)
@pytest.mark.usefixtures("_eager_casts")
@pytest.mark.parametrize("family", ["gemma2", "phi3", "olmoe"])
def test_training_is_that_of_a_model_that_torchao_converted_bit_for_bit(family: str) -> None:
    captured = capture_module(made(family), INPUTS, "bf16", as_on_gpu=False)
    found = units(build_graph(captured, Batch(2, 32, fp8_products="emulated")))
    names = {name.rpartition(".")[0] for name in in_fp8(found)}
    theirs = torchao.convert_to_float8_training(made(family), module_filter_fn=lambda _m, name: name in names)
    expected = train(theirs, ReferenceOptimizer(torch.optim.AdamW(theirs.parameters(), lr=1e-2)))
    for way, (params, activations, place) in WAYS.items():
        model = made(family)
        float8.multiply_in_fp8(model, found, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        decisions = Decisions(
            policy="test",
            precision=Precision(weights="bf16", products="fp8"),
            micro_batch=2,
            fp8_weights=True if params == "host" else None,
            units={
                unit.name: UnitDecision(
                    params=params,  # type: ignore[arg-type]
                    activations=activations if unit.recompute else "keep",  # type: ignore[arg-type]
                    update=(place,) * bool(unit.num_params),
                )
                for unit in found
            },
        )
        model, prepared = prepare_session(model, optimizer, found, decisions, Options(num_threads=1))
        with prepared.session:
            assert train(model, prepared) == expected, way
            final = {name: weight.clone() for name, weight in prepared.session.full_parameters().items()}
        assert all(torch.equal(final[name], weight) for name, weight in weights(theirs).items()), way


def test_frozen_bases_of_adapters_are_converted(tmp_path: Path) -> None:
    """By name, with LoRA: products of the base are in fp8, without gradients of weights; those of adapters are not."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_of("llama").to_dict()), encoding="utf-8")
    hardware = load_profile("h100")
    found = make_plan(
        str(path), hardware=hardware, lora="rank=16", products="fp8", seq_len=32, micro_batch=2, storage="never"
    ).units()
    products = {
        operator.name: [k for k in operator.forward + operator.backward if isinstance(k, Gemm)]
        for unit in found
        for operator in unit.operators
    }
    bases = {name: kernels for name, kernels in products.items() if name.endswith("base_layer") and kernels}
    assert len(bases) == 2 * 7
    assert all(k.fp8 for kernels in bases.values() for k in kernels)
    query = next(o for unit in found for o in unit.operators if o.name.endswith("layers.1.self_attn.q_proj.base_layer"))
    _, to_input, _ = fp8_products(64, 64, 64, 2, bias=False, casts_weights=True, trained=False)
    assert query.backward[-len(to_input) :] == to_input, "the gradient of the input alone"
    assert not any(k.fp8 for name, kernels in products.items() if "lora_" in name for k in kernels)


def test_a_model_that_only_its_code_describes_is_planned_and_executed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, plan = tmp_path / "config.json", tmp_path / "plan.json"
    path.write_text(json.dumps(config_of("gemma2").to_dict()), encoding="utf-8")
    assert not main(["plan", "--model", str(path), "--hardware", "h100", "--precision", "products=fp8",
                     "--seq-len", "32", "--micro-batch", "2", "--output", str(plan)])  # fmt: skip
    assert "products of hidden layers in fp8" in " ".join(capsys.readouterr().out.split())
    assert not main(["verify", str(plan)])
