"""Products in fp8 for a model that was made for a plan. Importing this module needs torchao.

:class:`Linear` takes the place of each linear layer that the plan multiplies in fp8. Its parameters stay.

[Note: Compiled casts] Run one by one, the operators of a cast move 33 bytes a value, and casts would take longer than
products in fp8 save. So ``torch.compile`` makes two passes of them: one finds the largest value, one scales, clamps and
writes. The code is torchao's own, and so are the bits. It sees each tensor as a row of values in the order of memory.
So it is compiled once for each type, whatever the shapes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from executor.distributed.shards import BindingError
from planner.graph import Gemm, Unit
from planner.models.formulas.float8 import fits

_WARM_UP = 4096  # values


@final
class Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """torchao's layer with one scale for each tensor, whose casts are compiled; see [Note: Compiled casts]."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the output, as torchao's layer does."""
        if torch.is_autocast_enabled():
            values = values.to(torch.get_autocast_gpu_dtype())
        output: Tensor = _Product.apply(values, self.weight.t(), self.linear_mm_config)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(output.dtype)


def multiply_in_fp8(model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
    """Convert the linear layers that a plan multiplies in fp8, in place, and compile their casts for a device.

    Raises:
        BindingError: the casts cannot be compiled.
    """
    names = _layers_in_fp8(units)
    convert_to_float8_training(model, module_filter_fn=lambda _module, name: name in names)
    for name in names:
        model.get_submodule(name).__class__ = Linear
    try:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            _compiled_cast()(torch.ones(_WARM_UP, dtype=next(model.parameters()).dtype, device=device), dtype)
    except (TorchDynamoException, RuntimeError) as error:
        what = " ".join(str(error).strip().split("\n\n")[0].split())
        raise BindingError(f"casts to fp8 cannot be compiled: {what}; plan without --products fp8") from error


def _layers_in_fp8(units: Iterable[Unit]) -> set[str]:
    """Return the names of the linear layers that a plan multiplies in fp8."""
    operators = (operator for unit in units for operator in unit.operators)
    chosen = (o for o in operators if any(isinstance(kernel, Gemm) and kernel.fp8 for kernel in o.forward))
    specs = (spec for operator in chosen for spec in operator.parameters)
    return {spec.name.rpartition(".")[0] for spec in specs if len(spec.shape) == 2 and fits(*spec.shape)}


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's ``matmul_with_hp_or_float8_args`` with compiled casts: ``values @ weight`` and its gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, config: Any) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.config = config
        rows = _cast(values, torch.float8_e4m3fn, GemmInputRole.INPUT, config).reshape(-1, values.shape[-1])
        output = torch.mm(rows, _cast(weight, torch.float8_e4m3fn, GemmInputRole.WEIGHT, config))
        return output.reshape(*values.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, weight = ctx.saved_tensors
        gradient, rows = gradient.reshape(-1, gradient.shape[-1]), values.reshape(-1, values.shape[-1])
        first = _cast(gradient, torch.float8_e5m2, GemmInputRole.GRAD_OUTPUT, ctx.config)
        narrow_weight = _cast(weight, torch.float8_e4m3fn, GemmInputRole.WEIGHT, ctx.config)
        of_values = torch.mm(first, narrow_weight.t()).reshape(values.shape)
        again = _cast(gradient, torch.float8_e5m2, GemmInputRole.GRAD_OUTPUT, ctx.config)
        of_weight = torch.mm(again.t(), _cast(rows, torch.float8_e4m3fn, GemmInputRole.INPUT, ctx.config))
        return of_values, of_weight.t(), None


def _cast(tensor: Tensor, dtype: torch.dtype, role: GemmInputRole, config: Any) -> Any:
    """Return a tensor in fp8, for its role in products with torchao's ``LinearMMConfig``."""
    turned = tensor.t() if tensor.dim() == 2 and not tensor.is_contiguous() else tensor
    cast = _row_cast if torch.compiler.is_compiling() else _compiled_cast()  # a compiled module compiles it itself
    bits, scale = cast(turned.detach().contiguous().view(-1), dtype)
    bits = bits.view(turned.shape)
    return Float8TrainingTensor(
        bits if turned is tensor else bits.t(), scale, tensor.dtype, linear_mm_config=config, gemm_input_role=role
    )


def _row_cast(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = tensor_to_scale(values, dtype)
    return to_fp8_saturated(values.to(torch.float32) * scale, dtype), scale


@functools.cache
def _compiled_cast() -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """Return the function that casts a row of values and returns them with their scale; see [Note: Compiled casts]."""
    return torch.compile(_row_cast, dynamic=True)
