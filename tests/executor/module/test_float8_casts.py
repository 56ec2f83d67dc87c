"""Products in fp8 of models that are made for a plan, against torchao's eager layer."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

from executor.distributed.shards import BindingError
from executor.module import float8
from executor.module.float8 import Linear, fuse_swiglu, multiply_in_fp8
from planner.graph import Batch, Unit, build_graph, units
from planner.models import from_hf_config
from planner.models.formulas.float8 import float8_linear as work_in_fp8

SIZES = {"hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 24}
FITTING = ("q_proj", "o_proj")
CONFIG = LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=64, max_position_embeddings=64)
WHOLE = LlamaConfig(**SIZES | {"intermediate_size": 96, "head_dim": 32}, vocab_size=64, max_position_embeddings=64)
OPT = OPTConfig(vocab_size=64, hidden_size=64, word_embed_proj_dim=64, ffn_dim=96, num_hidden_layers=2,
                num_attention_heads=2, max_position_embeddings=64, dropout=0.0)  # fmt: skip


def planned(config: Any = CONFIG, fp8: Any = "emulated") -> tuple[Unit, ...]:
    sizes = from_hf_config(config.to_dict(), "tiny")
    return units(build_graph(sizes, Batch(2, 32, fp8_products=fp8)))


def made(config: Any = CONFIG) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def trained(model: nn.Module, device: str = "cpu") -> list[torch.Tensor]:
    """Return loss and gradients."""
    ids = torch.arange(64, device=device).view(2, 32)
    loss = model(input_ids=ids, labels=ids).loss
    return [loss, *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the passes over tensors; they are not compiled, which takes seconds."""
    found: list[str] = []
    monkeypatch.setattr(
        float8, "_compiled", lambda function: lambda *args: found.append(function.__name__) or function(*args)
    )
    return found


@pytest.mark.parametrize("captured", [False, True])
def test_losses_and_gradients_are_those_of_torchao_to_the_bit(passes: list[str], *, captured: bool) -> None:
    """Layers whose sides are no multiples of 16 (keys, values and MLP here) and the head stay as they are."""
    expected = convert_to_float8_training(made(), module_filter_fn=lambda _m, name: name.endswith(FITTING))
    eager = trained(expected)
    model = made()
    multiply_in_fp8(model, planned(), torch.device("cpu"))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    for layer in layers.values() if captured else ():
        layer.keeps_columns = False
    del passes[:]
    own = trained(model)
    # In each of two projections of two layers: input, weight, gradient; the weight again, and the input if it is kept.
    assert Counter(passes) == {"_row_scale": 4 * 3, "_row_cast": 4 * (5 if captured else 4)}
    assert all(torch.equal(one, other) for one, other in zip(own, eager, strict=True))
    del passes[:]
    assert all(torch.equal(one, other) for one, other in zip(trained(expected), eager, strict=True))
    assert not passes, "torchao's own layers keep their casts"
    assert layers.keys() == {f"model.layers.{i}.self_attn.{side}_proj" for i in range(2) for side in "qo"}
    assert [*model.state_dict()] == [*made().state_dict()]


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_siblings_share_the_cast_of_their_input_to_the_same_bits(passes: list[str], name: str) -> None:
    """In the order in which a model calls them, which is not that of its modules in OPT."""
    config = WHOLE if name == "llama" else OPT
    expected = convert_to_float8_training(made(config), module_filter_fn=lambda _m, name: ".layers." in f".{name}")
    model = made(config)
    multiply_in_fp8(model, planned(config), torch.device("cpu"))
    del passes[:]
    assert all(torch.equal(one, other) for one, other in zip(trained(model), trained(expected), strict=True))
    per_layer = 4 + 7 + 7 if name == "llama" else 4 + 6 + 6  # distinct inputs, weights and gradients
    assert passes.count("_row_scale") == 2 * per_layer
    with torch.no_grad():
        del passes[:]
        model(input_ids=torch.arange(64).view(2, 32))
    assert passes.count("_row_cast") == 2 * (4 + (7 if name == "llama" else 6))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_swiglu_hands_scales_to_casts_to_the_same_bits(passes: list[str], backend: str | None) -> None:
    """Those of its output and of both gradients, so that the casts of these find none, also in a compiled MLP."""
    expected, model = made(WHOLE), made(WHOLE)
    for each in (expected, model):
        multiply_in_fp8(each, planned(WHOLE), torch.device("cpu"))
    fuse_swiglu(model)
    mlps = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    for mlp in mlps if backend else ():
        mlp.forward = torch.compile(mlp.forward, backend=backend, fullgraph=True)
    plain, own = trained(expected), trained(model)
    assert all(torch.equal(one, other) for one, other in zip(own, plain, strict=True))
    assert all(mlp.gate_proj.tag is mlp.up_proj.tag is None for mlp in mlps)
    counts = []
    for each in (expected, model):
        del passes[:]
        trained(each)
        counts.append(Counter(passes))
    assert counts[0] - counts[1] == {"_row_scale": 2 * 3}
    assert not counts[1] - counts[0]


def test_an_input_that_changes_in_place_is_cast_again(passes: list[str]) -> None:
    model = made(WHOLE)
    multiply_in_fp8(model, planned(WHOLE), torch.device("cpu"))
    attention = model.get_submodule("model.layers.0.self_attn")
    x = torch.randn(1, 16, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        attention.q_proj(x)
        x.mul_(2)
        changed = attention.k_proj(x)
        assert torch.equal(changed, attention.k_proj(x.clone()))
        assert not torch.equal(changed, attention.k_proj(x / 2))
    assert passes


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("sizes", ["llama", "uneven", "opt"])
@pytest.mark.parametrize("fp8", ["device", "emulated", None])
def test_layers_save_what_the_formulas_count(sizes: str, fp8: Any) -> None:
    """Activations alone, each storage once: norms, casts, attention and MLP."""
    config = {"llama": WHOLE, "uneven": CONFIG, "opt": OPT}[sizes]
    model, found = made(config), planned(config, fp8=fp8)
    if fp8:
        multiply_in_fp8(model, found, torch.device("cpu"))
    if fp8 == "device":
        fuse_swiglu(model)
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    inside: list[bool] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if inside and storage.data_ptr() not in weights and tensor.numel() > 1:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = next(each for name, each in model.named_modules() if name.endswith("layers.1"))
    layer.register_forward_pre_hook(lambda *_: inside.append(True))
    layer.register_forward_hook(lambda *_: inside.clear())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(input_ids=torch.arange(64).view(2, 32))
    stated = sum(o.saved_bytes for unit in found if unit.segment == "layers.1" for o in unit.operators)
    rotary_bytes = 0 if sizes == "opt" else 2 * 32 * (config.head_dim or 16) * 2  # cosines and sines, of all layers
    shared_bytes = sum(saved.values()) - stated
    assert 0 <= shared_bytes <= rotary_bytes + 4 * 64
    del output


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
            measured_bytes = peak_bytes(rows, inputs, outputs, casts_weights=casts)
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


@pytest.mark.usefixtures("gpu", "passes")
def test_on_a_gpu() -> None:
    """A layer has torchao's bits; with SwiGLU in one kernel, exponentials may differ in their last."""
    layer = Linear.from_float(nn.Linear(64, 32, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(2, 16, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    found = []
    for forward in (layer, Float8Linear.from_float(layer)):
        y = forward(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, layer.weight, layer.bias])])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    expected, model = made(WHOLE).to("cuda"), made(WHOLE).to("cuda")
    convert_to_float8_training(expected, module_filter_fn=lambda _m, name: ".layers." in f".{name}")
    multiply_in_fp8(model, planned(WHOLE, "device"), torch.device("cuda"))
    for one, other in zip(trained(model, "cuda"), trained(expected, "cuda"), strict=True):
        assert (one - other).float().norm() <= 0.05 * other.float().norm()


def peak_bytes(rows: int, inputs: int, outputs: int, *, casts_weights: bool) -> int:
    """Return what a layer takes at most, in forward without what it keeps, or in backward."""
    layer = Linear.from_float(nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16))
    layer.keeps_columns = True
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, requires_grad=True)
    moved = None, None
    if not casts_weights:
        moved = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn), torch.ones(())
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        y = float8._multiply(layer, x, moved=moved)
    gradient = torch.randn_like(y)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        torch.autograd.grad(y, [x, layer.weight], gradient)
    return max(most_bytes(forward) - rows * inputs, most_bytes(backward))


def most_bytes(profiler: Any) -> int:
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("no compiler was found\n\nadvice")

    monkeypatch.setattr(float8, "_compiled", lambda _function: fails)
    with pytest.raises(BindingError, match="casts to fp8 cannot be compiled: no compiler was found; plan without"):
        multiply_in_fp8(made(), planned(), torch.device("cpu"))
