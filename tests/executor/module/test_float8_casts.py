"""Products in fp8 of models that are made for a plan, against torchao's eager layer."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import LlamaConfig, LlamaForCausalLM

from executor.distributed.shards import BindingError
from executor.module import float8
from executor.module.float8 import Linear, multiply_in_fp8
from planner.graph import Batch, Unit, build_graph, units
from planner.models import from_hf_config
from planner.models.formulas.float8 import float8_linear as work_in_fp8

SIZES = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24}
FITTING = ("q_proj", "o_proj")
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64)


def planned() -> tuple[Unit, ...]:
    sizes = from_hf_config(CONFIG.to_dict(), "tiny")
    return units(build_graph(sizes, Batch(2, 32, fp8_products="device")))


def made() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).bfloat16()


def trained(model: nn.Module) -> list[torch.Tensor]:
    """Return loss and gradients."""
    ids = torch.arange(64).view(2, 32)
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that are cast; the cast is not compiled, which takes seconds."""
    sizes: list[int] = []

    def listed(function: Any, **_options: Any) -> Any:
        return lambda values, dtype: sizes.append(values.numel()) or function(values, dtype)

    monkeypatch.setattr(torch, "compile", listed)
    float8._compiled_cast.cache_clear()
    yield sizes
    float8._compiled_cast.cache_clear()


def test_losses_and_gradients_are_those_of_torchao_to_the_bit(casts: list[int]) -> None:
    """Layers whose sides are no multiples of 16 (keys, values and MLP here) and the head stay as they are."""
    expected = convert_to_float8_training(made(), module_filter_fn=lambda _m, name: name.endswith(FITTING))
    eager = trained(expected)
    assert not casts
    model = made()
    multiply_in_fp8(model, planned(), torch.device("cpu"))
    del casts[:]
    own = trained(model)
    assert len(casts) == 2 * 2 * 5  # layers, their projections, casts of each
    assert all(torch.equal(one, other) for one, other in zip(own, eager, strict=True))
    del casts[:]
    assert all(torch.equal(one, other) for one, other in zip(trained(expected), eager, strict=True))
    assert not casts, "torchao's own layers keep their casts"
    converted = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert converted == {f"model.layers.{i}.self_attn.{side}_proj" for i in range(2) for side in "qo"}
    assert [*model.state_dict()] == [*made().state_dict()]


@pytest.mark.part(0)  # compiling takes a minute
def test_a_compiled_cast_has_the_bits_of_torchao_and_takes_the_planned_memory() -> None:
    eager, compiled = made(), made()
    convert_to_float8_training(eager, module_filter_fn=lambda _m, name: name.endswith(FITTING))
    expected = trained(eager)
    multiply_in_fp8(compiled, planned(), torch.device("cpu"))
    assert all(torch.equal(one, other) for one, other in zip(trained(compiled), expected, strict=True))
    for rows, inputs, outputs in ((128, 1024, 1024), (256, 1408, 512)):
        for casts in (True, False):
            work = work_in_fp8(rows, inputs, outputs, 2, bias=False, emulated=True, casts_weights=casts)
            measured_bytes = backward_peak_bytes(rows, inputs, outputs, casts_weights=casts)
            # At the last product there is the gradient of the weight too, which is counted elsewhere.
            assert work.workspace_bytes <= measured_bytes <= work.workspace_bytes + 2 * inputs * outputs


def test_a_layer_in_a_compiled_module_has_the_same_bits() -> None:
    layer = Linear.from_float(nn.Linear(64, 32, dtype=torch.bfloat16))
    expected = Float8Linear.from_float(layer)
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for forward in (torch.compile(layer.forward, backend="aot_eager"), expected):
        y = forward(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, layer.weight, layer.bias])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def backward_peak_bytes(rows: int, inputs: int, outputs: int, *, casts_weights: bool) -> int:
    layer = Linear.from_float(nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, requires_grad=True)
    moved = None, None
    if not casts_weights:
        moved = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn).t(), torch.ones(())
    y = float8._multiply(layer, x, moved=moved)
    gradient = torch.randn_like(y)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        torch.autograd.grad(y, [x, layer.weight], gradient)
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.usefixtures("casts")
def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("no compiler was found\n\nadvice")

    monkeypatch.setattr(torch, "compile", lambda _function, **_options: fails)
    with pytest.raises(BindingError, match="casts to fp8 cannot be compiled: no compiler was found; plan without"):
        multiply_in_fp8(made(), planned(), torch.device("cpu"))
