"""Formulas of fp8 products against torchao's layer, traced."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torchao.float8 import float8_linear as torchao_linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from planner.models.config import ModelConfigError
from planner.models.formulas.float8 import cast, float8_linear
from planner.models.formulas.work import linear
from planner.models.kernels import Elementwise, Gemm, Kernel, flop, num_kernels

ROWS, INPUTS, OUTPUTS = 32, 48, 80


class Kernels(TorchDispatchMode):
    """Lists the kernels that run: products by their sizes, the rest by the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []
        self.cast: set[int] = set()  # addresses of tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Float8TrainingTensor) for each in types):
            return NotImplemented  # the class calls other operators, which come here
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "_scaled_mm":
            self.found.append(Gemm(args[0].shape[0], args[1].shape[1], args[0].shape[1], fp8=True))
        elif name == "contiguous" or not (func.is_view or name in {"detach", "_unsafe_view"}):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
            self.found.append(Elementwise(sum(leaf.nbytes for leaf in tensors)))
        return result


def one_by_one(kernels: tuple[Kernel, ...]) -> list[Kernel]:
    """Return kernels without repetitions."""
    parts = [(k, k.count) if isinstance(k, Elementwise) else (k, 1) for k in kernels]
    return [Elementwise(k.num_bytes) if isinstance(k, Elementwise) else k for k, count in parts for _ in range(count)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_list_is_what_torchao_runs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, *, bias: bool) -> None:
    """Casts are listed as compiled ones. torchao casts the output's gradient again for the second product."""
    layer = torchao_linear.Float8Linear.from_float(torch.nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype))
    x = torch.randn(ROWS, INPUTS, dtype=dtype, requires_grad=True)
    found: list[Kernel] = []
    eager = torchao_linear.hp_tensor_to_float8_dynamic

    def listed(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        if tensor.data_ptr() not in modes.cast:
            modes.found += one_by_one(cast(tensor.numel(), tensor.itemsize))
        modes.cast.add(tensor.data_ptr())
        with _disable_current_modes():
            return eager(tensor, *args, **options)

    monkeypatch.setattr(torchao_linear, "hp_tensor_to_float8_dynamic", listed)
    with (modes := Kernels()):
        y = layer(x)
    forward, gradient = modes.found, torch.randn_like(y)
    with (modes := Kernels()):
        torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    work = float8_linear(ROWS, INPUTS, OUTPUTS, dtype.itemsize, bias=bias)
    for found, stated in ((forward, work.forward), (modes.found, work.backward)):
        expected = one_by_one(stated)
        assert len(found) == len(expected) == num_kernels(stated)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Gemm):
                assert one == other
            else:
                assert isinstance(other, Elementwise)
                assert 0 <= one.num_bytes - other.num_bytes <= OUTPUTS * dtype.itemsize  # a bias, or its gradient


def test_only_the_casts_differ_from_products_in_the_type_of_weights() -> None:
    plain, narrow = (linear(ROWS, INPUTS, OUTPUTS, 2, bias=True, fp8=fp8) for fp8 in (None, "device"))
    assert flop(plain.forward) == flop(narrow.forward)
    assert flop(plain.backward) == flop(narrow.backward)
    assert plain.saved_bytes == narrow.saved_bytes == 0
    assert [k.fp8 for k in narrow.forward + narrow.backward if isinstance(k, Gemm)] == [True] * 3
    uneven = [linear(ROWS, INPUTS, OUTPUTS + 8, 2, bias=True, fp8=fp8) for fp8 in (None, "device")]
    assert uneven[0] == uneven[1]  # torchao leaves such layers as they are


def test_bytes_of_a_cast_by_hand() -> None:
    """In bf16: 2 to find the largest value, 2 + 1 to cast; and two kernels on one value."""
    assert sum(k.num_bytes * k.count for k in cast(1000, 2) if isinstance(k, Elementwise)) == 5 * 1000 + 12
    assert sum(k.num_bytes * k.count for k in cast(1000, 4) if isinstance(k, Elementwise)) == 9 * 1000 + 16
    assert num_kernels(cast(1000, 2)) == 4


def test_rows_that_products_in_fp8_cannot_have() -> None:
    with pytest.raises(ModelConfigError, match="a product has 40 tokens, but products in fp8 need a multiple of 16"):
        float8_linear(40, INPUTS, OUTPUTS, 2, bias=False)
