"""Formulas of fp8 products against torchao's layer, traced."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from planner.models.formulas.float8 import cast, float8_linear
from planner.models.formulas.work import linear
from planner.models.kernels import Elementwise, Gemm, Kernel, flop, num_kernels

ROWS, INPUTS, OUTPUTS = 32, 48, 80


class Kernels(TorchDispatchMode):
    """Lists the kernels that run, products by their sizes and the rest by the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Kernel] = []

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
    """Return kernels without repetitions; what is read beside a large tensor does not count."""
    parts = [(k, k.count) if isinstance(k, Elementwise) else (k, 1) for k in kernels]
    return [Elementwise(k.num_bytes) if isinstance(k, Elementwise) else k for k, count in parts for _ in range(count)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_list_is_what_torchao_runs(dtype: torch.dtype, *, bias: bool) -> None:
    layer = Float8Linear.from_float(torch.nn.Linear(INPUTS, OUTPUTS, bias=bias, dtype=dtype))
    x = torch.randn(ROWS, INPUTS, dtype=dtype, requires_grad=True)
    with Kernels() as forward:
        y = layer(x)
    gradient = torch.randn_like(y)
    with Kernels() as backward:
        torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    work = float8_linear(ROWS, INPUTS, OUTPUTS, dtype.itemsize, bias=bias)
    for found, stated in ((forward.found, work.forward), (backward.found, work.backward)):
        expected = one_by_one(stated)
        assert len(found) == len(expected) == num_kernels(stated)
        for one, other in zip(found, expected, strict=True):
            if isinstance(one, Gemm):
                assert one == other
            else:
                slack = OUTPUTS * dtype.itemsize  # a scale, an amax and its index, a bias or its gradient
                assert isinstance(other, Elementwise)
                assert 0 <= one.num_bytes - other.num_bytes <= slack


def test_only_the_casts_differ_from_products_in_the_type_of_weights() -> None:
    plain, narrow = (make(ROWS, INPUTS, OUTPUTS, 2, bias=True) for make in (linear, float8_linear))
    assert flop(plain.forward) == flop(narrow.forward)
    assert flop(plain.backward) == flop(narrow.backward)
    assert plain.saved_bytes == narrow.saved_bytes == 0
    assert [k.fp8 for k in narrow.forward + narrow.backward if isinstance(k, Gemm)] == [True] * 3


def test_bytes_of_a_cast_by_hand() -> None:
    """In bf16: abs 4, max 2, to fp32 6, scale 8, clamp 8, to fp8 5; fp32 needs no cast, but abs and max move twice."""
    for e, scalars in ((2, 10 + 3 * 16 + 12), (4, 12 + 3 * 16 + 12)):
        assert sum(k.num_bytes * k.count for k in cast(1000, e) if isinstance(k, Elementwise)) == 33 * 1000 + scalars
        assert num_kernels(cast(1000, e)) == (11 if e == 2 else 10)
