"""Formulas of fp8 products against the layers that run, traced."""

import inspect
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.module import float8
from planner.models.config import ModelConfigError
from planner.models.formulas.float8 import cast, float8_linear, input_of, products, swiglu
from planner.models.formulas.layers import linear
from planner.models.kernels import Elementwise, Gemm, Kernel, Kernels, flop, num_kernels
from planner.models.operators import Batch

ROWS, INPUTS, OUTPUTS = 32, 48, 80


class Traced(TorchDispatchMode):
    """Lists the kernels that run: products by their sizes, the rest by the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_scaled_mm":
            self.found.append(Gemm(args[0].shape[0], args[1].shape[1], args[0].shape[1], fp8=True))
        elif name == "find_scale":  # three kernels; the cast reads the scale that the last one has made
            self.found += [Elementwise(4), Elementwise(args[0].nbytes), Elementwise(12)]
        elif name == "scale_of":
            self.found.append(Elementwise(12))
        elif name == "cast_to_fp8":
            self.found.append(Elementwise(args[0].nbytes + sum(each.nbytes for each in result)))
        elif not (func.is_view or name in {"detach", "_unsafe_view", "new_empty"}):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            self.found.append(Elementwise(sum(leaf.nbytes for leaf in tensors)))
        return result


def one_by_one(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    """Return kernels without repetitions."""
    parts = [(k, k.count) if isinstance(k, Elementwise) else (k, 1) for k in kernels]
    return [Elementwise(k.num_bytes) if isinstance(k, Elementwise) else k for k, count in parts for _ in range(count)]


@pytest.fixture(autouse=True)
def _eager_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "_compiled", lambda function: function)


def layer_of(dtype: torch.dtype, *, bias: bool = False) -> float8.Linear:
    layer: float8.Linear = float8.Linear.from_float(torch.nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype))
    return layer


def ran(layers: list[float8.Linear], **given: Any) -> tuple[list[Kernel], list[Kernel]]:
    """Return the kernels of forward and of backward, of layers that read one input."""
    x = torch.randn(ROWS, INPUTS, dtype=layers[0].weight.dtype, requires_grad=True)
    with (forward := Traced()):
        outputs = [float8._multiply(layer, x, **given) for layer in layers]
    gradients = [torch.randn_like(y) for y in outputs]
    trained = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
    with (backward := Traced()):
        torch.autograd.grad(outputs[::-1], [x, *trained], gradients[::-1])
    return forward.found, backward.found


def assert_lists(found: tuple[list[Kernel], list[Kernel]], stated: tuple[Kernels, Kernels]) -> None:
    for one_way, listed in zip(found, stated, strict=True):
        expected = one_by_one(listed)
        assert len(one_way) == len(expected) == num_kernels(listed)
        for one, other in zip(one_way, expected, strict=True):
            if isinstance(one, Gemm):
                assert one == other
            else:
                assert isinstance(other, Elementwise)
                assert 0 <= one.num_bytes - other.num_bytes <= OUTPUTS * 4  # a bias, or its gradient


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_list_is_what_a_layer_runs(dtype: torch.dtype, *, bias: bool) -> None:
    layer = layer_of(dtype, bias=bias)
    layer.keeps_columns = True
    work = float8_linear(ROWS, INPUTS, OUTPUTS, dtype.itemsize, bias=bias)
    assert_lists(ran([layer]), (work.forward, work.backward))


@pytest.mark.parametrize("trained", [False, True])
def test_the_list_of_a_layer_that_keeps_its_input_as_it_is(*, trained: bool) -> None:
    layer = layer_of(torch.bfloat16)
    layer.weight.requires_grad_(trained)
    output, to_input, to_weight = products(ROWS, INPUTS, OUTPUTS, 2, bias=False, casts_weights=True, trained=trained)
    assert_lists(ran([layer]), (output, to_input + (to_weight if trained else ())))


def test_the_list_of_a_layer_whose_weight_comes_in_fp8() -> None:
    layer = layer_of(torch.bfloat16)
    layer.keeps_columns = True
    moved = torch.zeros(OUTPUTS, INPUTS, dtype=torch.float8_e4m3fn), torch.ones(())
    work = float8_linear(ROWS, INPUTS, OUTPUTS, 2, bias=False, casts_weights=False)
    assert_lists(ran([layer], moved=moved), (work.forward, work.backward))


def test_layers_that_read_one_input_cast_it_once() -> None:
    layers = [layer_of(torch.bfloat16) for _ in range(3)]
    float8.share_casts(layers)
    for layer in layers:
        layer.keeps_columns = True
    forward, _ = ran(layers)
    stated = [float8_linear(ROWS, INPUTS, OUTPUTS, 2, bias=False, shares=i > 0) for i in range(3)]
    assert forward == [kernel for work in stated for kernel in one_by_one(work.forward)]
    assert layers[0].shared is not None
    assert inspect.getclosurevars(layers[0].shared).nonlocals["held"] is None, "nothing outlives the last of them"


def test_which_modules_read_one_input() -> None:
    for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        assert len({input_of(f"layers.0.{name}") for name in names}) == 1
    alone = "layers.1.mlp.up_proj", "layers.0.mlp.down_proj", "encoder_attn.q_proj", "encoder_attn.k_proj", "q_proj"
    assert len({input_of(f"layers.{i}.{name}") for i in range(2) for name in alone}) == 2 * len(alone)


def test_only_the_casts_differ_from_products_in_the_type_of_weights() -> None:
    batches = [Batch(1, ROWS, fp8_products=products) for products in (None, "device")]
    plain, narrow = (linear(batch, INPUTS, OUTPUTS, bias=True) for batch in batches)
    assert flop(plain.forward) == flop(narrow.forward)
    assert flop(plain.backward) == flop(narrow.backward)
    assert plain.saved_bytes == narrow.saved_bytes == 0
    assert [k.fp8 for k in narrow.forward + narrow.backward if isinstance(k, Gemm)] == [True] * 3
    uneven = [linear(batch, INPUTS, OUTPUTS + 8, bias=True) for batch in batches]
    assert uneven[0] == uneven[1]  # torchao leaves such layers as they are


@pytest.mark.parametrize("found", ["input", "gradient"])
def test_the_list_where_a_largest_value_is_known(found: Any) -> None:
    layer = layer_of(torch.bfloat16)
    layer.keeps_columns = layer.tags = True
    x = torch.randn(ROWS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    largest = x.detach().abs().max().float() if found == "input" else None
    with (forward := Traced()):
        y = layer(x, largest=largest)
    outputs, gradients = [y], [torch.randn_like(y)]
    if found == "gradient":
        outputs, gradients = [y, layer.tag], [gradients[0], gradients[0].abs().max().float()]
    with (backward := Traced()):
        torch.autograd.grad(outputs, [x, layer.weight], gradients)
    work = float8_linear(ROWS, INPUTS, OUTPUTS, 2, bias=False, found=found)
    assert_lists((forward.found, backward.found), (work.forward, work.backward))


def test_swiglu_by_hand() -> None:
    """Two inputs and one output, and in backward three and two; each way a number for each largest value."""
    work = swiglu(1000, 2)
    assert one_by_one(work.forward) == [Elementwise(4), Elementwise(6000)]
    assert one_by_one(work.backward) == [Elementwise(4), Elementwise(4), Elementwise(10000)]


def test_bytes_of_a_cast_by_hand() -> None:
    """In bf16: 2 to find the largest value, 2 + 1 to cast, and 1 for another layout; and kernels on one value."""
    assert sum(k.num_bytes * k.count for k in cast(1000, 2) if isinstance(k, Elementwise)) == 5 * 1000 + 16
    assert sum(k.num_bytes * k.count for k in cast(1000, 4, 2) if isinstance(k, Elementwise)) == 10 * 1000 + 16
    assert num_kernels(cast(1000, 2)) == 4


def test_bytes_of_casts_of_a_layer_by_hand() -> None:
    """Each value of input and gradient is read twice and written twice, in fp8; a weight is read three times."""
    work = float8_linear(ROWS, INPUTS, OUTPUTS, 2, bias=False)
    casts = [k for k in one_by_one(work.forward + work.backward) if isinstance(k, Elementwise) and k.num_bytes > 12]
    x, w, y = ROWS * INPUTS, INPUTS * OUTPUTS, ROWS * OUTPUTS
    assert sum(k.num_bytes for k in casts) == 6 * x + 6 * y + (2 + 3 + 3) * w


def test_rows_that_products_in_fp8_cannot_have() -> None:
    with pytest.raises(ModelConfigError, match="a product has 40 tokens, but products in fp8 need a multiple of 16"):
        float8_linear(40, INPUTS, OUTPUTS, 2, bias=False)
