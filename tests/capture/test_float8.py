"""Captures of linear layers whose products torchao computes in fp8."""

import dataclasses
from typing import Any

import pytest
import torch
from tiny import TINY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models.captured import CapturedModel, CapturedOperator
from planner.models.kernels import Elementwise, Gemm
from planner.models.operators import Batch
from planner.plan.planning import make_plan
from ullage.capture import capture_module
from ullage.capture.records import CaptureError

float8 = pytest.importorskip("torchao.float8")

ROWS, INPUTS, OUTPUTS = 32, 48, 80
SHAPES = {(ROWS, OUTPUTS, INPUTS), (ROWS, INPUTS, OUTPUTS), (OUTPUTS, INPUTS, ROWS)}  # output, and both gradients


def between(inputs: int = INPUTS, outputs: int = OUTPUTS, dtype: str = "bf16", **settings: Any) -> nn.Sequential:
    """Return a converted layer between two others."""
    recipe, bias = settings.pop("recipe", None), settings.pop("bias", False)
    config = float8.Float8LinearConfig.from_recipe_name(recipe) if recipe else float8.Float8LinearConfig(**settings)
    sizes = ((inputs, inputs, True), (inputs, outputs, bias), (outputs, 8, True))
    model = nn.Sequential(*(nn.Linear(one, other, bias=has_bias) for one, other, has_bias in sizes))
    float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name == "1")
    return model.to({"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])


def captured(model: nn.Module, dtype: Any = "bf16", *, rows: int = ROWS, as_on_gpu: bool = True) -> CapturedModel:
    return capture_module(model, [f"{rows}x{model[0].in_features}"], dtype, as_on_gpu=as_on_gpu)  # type: ignore[index]


def converted_of(model: CapturedModel) -> CapturedOperator:
    return next(o for block in model.blocks for o in block.operators if o.kind == "Float8Linear")


def products(kernels: Any) -> list[Gemm]:
    return [kernel for kernel in kernels if isinstance(kernel, Gemm)]


def moved(kernels: Any) -> list[int]:
    """Return the bytes that each kernel reads and writes, without those of products."""
    return [k.num_bytes for k in kernels if isinstance(k, Elementwise) for _ in range(k.count)]


class Moved(TorchDispatchMode):
    """Lists the bytes that each real kernel reads and writes, without those of products."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "Float8TrainingTensor" for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(given) if isinstance(t, torch.Tensor)] for given in (args, output))
        made = {t.untyped_storage().data_ptr() for t in written} - {t.untyped_storage().data_ptr() for t in read}
        if func.overloadpacket.__name__ != "_scaled_mm" and (made or func._schema.is_mutable):
            self.found.append(sum(tensor.nbytes for tensor in (*read, *written)))
        return output


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_capture_has_the_kernels_that_run(dtype: str, recipe: str, *, bias: bool) -> None:
    model = between(dtype=dtype, recipe=recipe, bias=bias)
    values = torch.randn(ROWS, INPUTS, dtype=model[1].weight.dtype, requires_grad=True)
    with Moved() as forward:
        output = model[1](values)
    gradient = torch.randn_like(output)
    with Moved() as backward:
        torch.autograd.grad(output, [values, *model[1].parameters()], gradient)
    found = converted_of(captured(model, dtype))
    assert moved(found.forward) == forward.found
    assert moved(found.backward) == backward.found
    every = products(found.forward + found.backward)
    assert {(product.m, product.n, product.k) for product in every} == SHAPES
    assert len(every) == 3
    assert all(product.fp8 for product in every)


def test_what_is_kept_is_what_any_linear_layer_keeps() -> None:
    narrow, plain = (
        between(),
        nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS), nn.Linear(OUTPUTS, 8)),
    )
    found = converted_of(captured(narrow))
    expected = captured(plain).operators()[1]
    assert found.saved_bytes == expected.saved_bytes
    assert found.product_bytes == expected.product_bytes
    assert [spec.name for spec in found.parameters] == ["1.weight"]
    assert found.workspace_bytes > expected.workspace_bytes  # casts have copies in fp32


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({"recipe": "rowwise_with_gw_hp"}, [True, True, False]), ({"emulate": True}, [False, False, False])],
    ids=str,
)
def test_products_that_stay_in_the_type_of_weights(settings: Any, expected: list[bool]) -> None:
    found = converted_of(captured(between(**settings)))
    assert [product.fp8 for product in products(found.forward + found.backward)] == expected


def test_sizes_that_a_gpu_refuses_are_refused() -> None:
    def refusal(model: nn.Module, rows: int) -> str:
        with pytest.raises(CaptureError) as error:
            captured(model, rows=rows)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "module 1: a product in fp8 of [32, 40] and [40, 80] does not run on a GPU" in refusal(between(40), ROWS)
    assert "[80, 24] and [24, 48] does not run on a GPU, which needs multiples of 16; leave" in refusal(between(), 24)
    assert captured(between(40), rows=24, as_on_gpu=False)  # a CPU takes them
    assert captured(between(pad_inner_dim=True), rows=24)


def test_weights_that_are_gathered_in_fp8_are_refused() -> None:
    with pytest.raises(
        CaptureError, match=r"^.*1.weight is of class .*WeightWithDynamicFloat8CastTensor.* without en.*$"
    ):
        captured(between(enable_fsdp_float8_all_gather=True))


def test_a_profile_needs_products_in_fp8() -> None:
    model = captured(between()).of_one_size()
    profile = load_profile("a100-80")
    request = Request(model, profile, num_devices=1, seq_len=1, micro_batch=ROWS, precision="bf16")
    with pytest.raises(ValueError, match=r"^profile a100-80 says nothing about products in fp8: .*choose hardware.*$"):
        make_plan(request)
    gemm = profile.device.gemm | {"fp8": profile.device.gemm["bf16"]}
    able = profile.model_copy(update={"device": profile.device.model_copy(update={"gemm": gemm})})
    plan = make_plan(dataclasses.replace(request, hardware=able))
    assert plan.prediction.fits
    assert any(product.fp8 for unit in plan.units() for product in products(unit.forward))


def test_layers_in_fp8_are_not_computed_in_tiles() -> None:
    """Each tile would have scales of its own, so that losses would differ by more than the order of sums."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY, use_cache=False), dtype=torch.bfloat16)
    emulated = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(model, config=dataclasses.replace(emulated, emulate=True))
    found = capture_module(model, ["input_ids=2x32:int64", "labels=2x32:int64"])
    assert found.num_logits is None
    tiled = found.at(Batch(2, 32, layer_tile_tokens=32))
    assert {o.kind for o in tiled.operators() if o.in_tiles} == {"LlamaRMSNorm"}
