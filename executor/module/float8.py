"""Products in fp8 for a model that was made for a plan. Importing this module needs torchao.

:class:`Linear` takes the place of each linear layer that the plan multiplies in fp8. Its parameters stay.

[Note: Compiled casts] Run one by one, the operators of a cast move 33 bytes a value, and casts would take longer than
products in fp8 save. So ``torch.compile`` makes two passes of them: one finds the largest value, one scales, clamps and
writes. The code is torchao's own, and so are the bits. It sees each tensor as a row of values in the order of memory.
So it is compiled once for each type, whatever the shapes.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._guards import TracingContext
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from executor.callbacks import replace_attribute
from executor.distributed.shards import BindingError
from executor.memory.units import UnitState
from planner.graph import Unit, multiplied_in_fp8

_WARM_UP = 4096  # values


@final
class Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """torchao's layer with one scale for each tensor, whose casts are compiled; see [Note: Compiled casts]."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the output, as torchao's layer does."""
        return _multiply(self, values)


def bind_fp8_weights(model: nn.Module, units: Iterable[UnitState]) -> Iterator[Callable[[], None]]:
    """Let layers multiply by the weights that are fetched in fp8; yield functions that undo it.

    Raises:
        BindingError: a layer does not cast as planned.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), []).append(module)
    for unit, fp8 in ((unit, unit.fp8) for unit in units if unit.fp8):
        for i, held in enumerate(unit.parameters[-len(fp8.ranges) :]):
            moved = fp8.matrix(i, held.shard.shape).t(), fp8.scales.data[i]
            for layer in owners[id(held.shard.whole)]:
                if getattr(layer, "config", None) != Float8LinearConfig():
                    raise BindingError(
                        f"the plan fetches {held.shard.name} in fp8 with one scale, but a {type(layer).__name__} reads "
                        'it otherwise; convert the model with the recipe "tensorwise" of torchao, or plan with '
                        "--precision fp8-weights=no"
                    )
                yield replace_attribute(layer, "forward", functools.partial(_multiply, layer, moved=moved))


def _multiply(layer: Any, values: Tensor, *, moved: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """Return a layer's output. ``moved`` is its weight in fp8, transposed, and its scale, if these are there."""
    if torch.is_autocast_enabled():
        values = values.to(torch.get_autocast_gpu_dtype())
    output: Tensor = _Product.apply(values, layer.weight.t(), layer.linear_mm_config, *moved)  # type: ignore[no-untyped-call]
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def multiply_in_fp8(model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
    """Convert the linear layers that a plan multiplies in fp8, in place, and compile their casts for a device.

    Raises:
        BindingError: the casts cannot be compiled.
    """
    operators = (operator for unit in units for operator in unit.operators)
    names = {weight.rpartition(".")[0] for operator in operators for weight in multiplied_in_fp8(operator)}
    convert_to_float8_training(model, module_filter_fn=lambda _module, name: name in names)
    for name in names:
        model.get_submodule(name).__class__ = Linear
    try:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            _compiled_cast()(torch.ones(_WARM_UP, dtype=next(model.parameters()).dtype, device=device), dtype)
    except (TorchDynamoException, RuntimeError) as error:
        what = " ".join(str(error).strip().split("\n\n")[0].split())
        raise BindingError(f"casts to fp8 cannot be compiled: {what}; plan without --precision products=fp8") from error


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's ``matmul_with_hp_or_float8_args`` with compiled casts: ``values @ weight`` and its gradients.

    If the weight is there in fp8, with its scale, ``weight`` has no values, but takes the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor, config: Any, bits: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(values, *((weight,) if bits is None else (bits, scale)))
        ctx.config, ctx.dtype = config, weight.dtype
        rows = _cast(values, torch.float8_e4m3fn, GemmInputRole.INPUT, config).reshape(-1, values.shape[-1])
        output = torch.mm(rows, _weight(ctx, *((weight,) if bits is None else (bits, scale))))
        return output.reshape(*values.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        values, *weight = ctx.saved_tensors
        gradient, rows = gradient.reshape(-1, gradient.shape[-1]), values.reshape(-1, values.shape[-1])
        of_values = of_weight = None
        narrow = _cast(gradient, torch.float8_e5m2, GemmInputRole.GRAD_OUTPUT, ctx.config)  # torchao casts it twice
        if ctx.needs_input_grad[0]:
            of_values = torch.mm(narrow, _weight(ctx, *weight).t()).reshape(values.shape)
        if ctx.needs_input_grad[1]:  # not where weights are frozen, which torchao's own layer does not ask
            of_weight = torch.mm(narrow.t(), _cast(rows, torch.float8_e4m3fn, GemmInputRole.INPUT, ctx.config)).t()
        return of_values, of_weight, None, None, None


def _weight(ctx: Any, weight: Tensor, scale: Tensor | None = None) -> Any:
    """Return the weight in fp8: as it is if it has a scale, else cast."""
    if scale is None:
        return _cast(weight, torch.float8_e4m3fn, GemmInputRole.WEIGHT, ctx.config)
    return _narrow(weight, scale, ctx.dtype, GemmInputRole.WEIGHT, ctx.config)


def _cast(tensor: Tensor, dtype: torch.dtype, role: GemmInputRole, config: Any) -> Any:
    """Return a tensor in fp8, for its role in products with torchao's ``LinearMMConfig``."""
    turned = tensor.t() if tensor.dim() == 2 and not tensor.is_contiguous() else tensor
    traced = TracingContext.try_get() is not None  # by a compiled module, which compiles the cast itself
    cast = _row_cast if traced else _compiled_cast()
    bits, scale = cast(turned.detach().contiguous().view(-1), dtype)
    bits = bits.view(turned.shape)
    return _narrow(bits if turned is tensor else bits.t(), scale, tensor.dtype, role, config)


def _narrow(bits: Tensor, scale: Tensor, dtype: torch.dtype, role: GemmInputRole, config: Any) -> Any:
    return Float8TrainingTensor(bits, scale, dtype, linear_mm_config=config, gemm_input_role=role)


def _row_cast(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = tensor_to_scale(values, dtype)
    return to_fp8_saturated(values.to(torch.float32) * scale, dtype), scale


@functools.cache
def _compiled_cast() -> Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]:
    """Return the function that casts a row of values and returns them with their scale; see [Note: Compiled casts]."""
    return torch.compile(_row_cast, dynamic=True)
