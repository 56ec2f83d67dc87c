"""Frozen projections that torchao has quantized: their bytes, and training under plans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny import TINY
from torch import nn
from training import ReferenceOptimizer, session_options
from transformers import AutoConfig, AutoModelForCausalLM

from executor.module.quantized import bind_quantized
from executor.packed import StoredParameter
from executor.prepare import prepare_session
from planner.decisions import Decisions, Place, UnitDecision
from planner.graph import Batch, build_graph, units
from ullage.capture import capture_module

quantization = pytest.importorskip("torchao.quantization")

VOCABULARY, SHAPE = TINY["vocab_size"], (2, 16)
CONFIG = AutoConfig.for_model(**TINY, use_cache=False)


def to_nf4(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(quantization.to_nf4(module.weight.detach(), 64, 8), requires_grad=False)


def by_config(config: Any) -> Callable[[nn.Module], None]:
    return lambda model: quantization.quantize_(model, config)


FORMATS = {
    "int8": by_config(quantization.Int8WeightOnlyConfig()),
    "int8 in groups": by_config(quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(32))),
    "nf4": to_nf4,
}


def projection(rows: int, columns: int, kind: str, *, bias: bool = False) -> nn.Module:
    """Return a quantized projection with random values."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, rows, bias=bias).bfloat16()).requires_grad_(requires_grad=False)
    FORMATS[kind](model)
    return model[0]


@settings(max_examples=10)
@given(st.integers(1, 6).map(lambda n: 8 * n), st.integers(1, 4).map(lambda n: 64 * n), st.sampled_from([*FORMATS]))
def test_a_parameter_lives_where_its_bytes_are(rows: int, columns: int, kind: str) -> None:
    module, values = projection(rows, columns, kind), torch.randn(5, columns).bfloat16()
    expected = module(values)
    stored = StoredParameter(module.weight, module)
    assert stored.is_quantized
    assert stored.shape == (rows, columns)
    assert stored.num_bytes < rows * columns * {"int8": 1.3, "int8 in groups": 1.4, "nf4": 0.9}[kind] + 100
    stored_bytes, slot = torch.empty(2, stored.num_bytes, dtype=torch.uint8).unbind()
    stored.read(stored_bytes)
    stored.live_in(slot.fill_(1))
    assert not torch.equal(module(values), expected)
    slot.copy_(stored_bytes)
    assert torch.equal(module(values), expected)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("shape", [(6, 128), (2, 3, 128)])
def test_a_frozen_projection_computes_like_torchao_and_keeps_nothing(kind: str, shape: tuple[int, ...]) -> None:
    module, values = projection(48, 128, kind, bias=True), torch.randn(shape).bfloat16()

    def run() -> tuple[torch.Tensor, torch.Tensor, int]:
        given_values, saved = values.clone().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda t: t):
            result = module(given_values)
        result.float().square().sum().backward()
        return result.detach(), given_values.grad, sum(tensor.numel() >= 48 * 128 for tensor in saved)

    (theirs, their_gradient, they_keep), undo = run(), bind_quantized(module)
    mine, my_gradient, i_keep = run()
    assert torch.equal(mine, theirs)
    assert torch.equal(my_gradient, their_gradient)
    assert (i_keep, they_keep) == (0, 1)
    for call in undo:
        call()
    assert "forward" not in vars(module)


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)
    FORMATS[kind](base.model.layers)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(base, config, autocast_adapter_dtype=False).train()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)


def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    generator, seen = torch.Generator().manual_seed(1), []
    for _ in range(4):
        tokens = torch.randint(VOCABULARY, SHAPE, generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.part(3)
@pytest.mark.parametrize(
    ("kind", "params", "activations"),
    [
        ("int8", "host", "offload"),
        ("int8", "gpu", "keep"),
        ("int8 in groups", "host", "recompute"),
        ("nf4", "nvme", "recompute"),
        ("nf4", "host", "keep"),
    ],
)
def test_adapters_train_as_in_memory(kind: str, params: str, activations: str, tmp_path: Path) -> None:
    expected_model = adapted(kind)
    expected = losses(expected_model, ReferenceOptimizer(optimizer_of(expected_model)))
    inputs = [f"{key}={SHAPE[0]}x{SHAPE[1]}:int64" for key in ("input_ids", "labels")]
    model = adapted(kind)
    found = units(build_graph(capture_module(model, inputs, "bf16"), Batch(*SHAPE, 2)))
    place = {"gpu": Place.GPU, "host": Place.CPU, "nvme": Place.NVME}[params]
    chosen = {
        unit.name: UnitDecision(
            params=params,
            activations=activations if unit.recompute else "keep",
            update=(place,) * bool(unit.num_params),
        )
        for unit in found
    }
    decisions = Decisions(policy="test", micro_batch=SHAPE[0], clip=False, units=chosen)
    model, optimizer = prepare_session(model, optimizer_of(model), found, decisions, session_options())
    with optimizer.session:
        assert losses(model, optimizer) == expected
        during = model.state_dict()
        assert all(_equal(during[name], value) for name, value in expected_model.state_dict().items())
    after = model.state_dict()
    assert all(_equal(after[name], value) for name, value in expected_model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()


def _equal(one: Any, other: Any) -> bool:
    if type(other) is torch.Tensor:
        return torch.equal(one, other)
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in other.__tensor_flatten__()[0])


def test_other_classes_of_parameters_are_refused_in_one_line() -> None:
    def refused(change: Callable[[nn.Sequential], None]) -> str:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16()
        change(model)
        with pytest.raises(ValueError, match=r".") as error:
            capture_module(model, ["2x64"])
        assert "\n" not in str(error.value)
        return str(error.value)

    dynamic = quantization.Int8DynamicActivationInt8WeightConfig()
    text = refused(lambda model: quantization.quantize_(model[1:], dynamic))
    assert "parameter 1.weight, quantized to Int8Tensor, quantizes activations too, which have no gradient" in text
    assert "use torchao's Int8WeightOnlyConfig" in text
    text = refused(lambda model: quantization.quantize_(model[1:], quantization.Float8WeightOnlyConfig()))
    assert "is of class torchao.quantization.Float8Tensor, which plans do not know; quantize frozen proj" in text
    text = refused(lambda model: FORMATS["int8"](model[1:]) or model[1].weight.requires_grad_())
    assert "1.weight, quantized to Int8Tensor, is trained, but what is quantized is frozen" in text
