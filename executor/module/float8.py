"""Products in fp8 for a model that was made for a plan. Importing this module needs torchao.

:class:`Linear` takes the place of each linear layer that the plan multiplies in fp8. Its parameters stay, and its bits
are those of torchao's layer with one scale for each tensor.

[Note: Casts to fp8] ``torch._scaled_mm`` reads both matrices along their inner side. Each of input, weight and gradient
is in two of a layer's three products, along another side in each. So a tensor's scale is found once, and then it is
cast in the layouts that its products take. What reads one input shares its cast
(:func:`planner.models.formulas.float8.input_of`). The scale of a weight is kept for backward. Of an input, backward has
the cast in the layout that it needs, and the input in its own type is dropped. Layers of captured models keep that
instead, and cast it again with the scale, because the capture does not say who else keeps it.

On a GPU with Triton, casts are kernels of :mod:`executor.devices.narrow`. Elsewhere ``torch.compile`` makes two passes
of torchao's operators, which would move 33 bytes a value one by one, and the turned layout is a copy. Compiled modules
call these casts as they are, and take equal ones once.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from executor.callbacks import replace_attribute
from executor.devices.cuda import fused
from executor.distributed.shards import BindingError
from executor.memory.units import UnitState
from planner.graph import Unit, multiplied_in_fp8
from planner.models.formulas.float8 import input_of

_WARM_UP: Final = 64  # rows and columns
_VALUES: Final = torch.float8_e4m3fn
_GRADIENT: Final = torch.float8_e5m2


class _Input(NamedTuple):
    """A layer's input in fp8.

    Attributes:
        rows: ``[tokens, width]``.
        columns: ``[width, tokens]``; without elements if backward does not take it.
        scale, inverse: float32, without dimensions.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor
    inverse: Tensor


class _Shared:
    """The cast of an input that several layers read, each once.

    Attributes:
        held: the input, its version, the cast and the layers that have read it; ``None`` if all of them have.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._num_layers = len(layers)
        self.held: tuple[Tensor, int, _Input, set[nn.Module]] | None = None

    def of(self, layer: nn.Module, values: Tensor, make: Callable[[], _Input]) -> _Input:
        """Return the cast of an input, made anew unless another layer has read the same."""
        held = self.held
        if held is None or held[0] is not values or held[1] != values._version or layer in held[3]:
            held = values, values._version, make(), set()
        held[3].add(layer)
        self.held = held if len(held[3]) < self._num_layers else None
        return held[2]


@final
class Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """torchao's layer with one scale for each tensor; see [Note: Casts to fp8].

    Attributes:
        keeps_columns: whether backward has the input in fp8, rather than in its own type.
        shared: the cast of its input; ``None`` if no other layer reads it.
    """

    keeps_columns: bool = False
    shared: _Shared | None = None

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
            moved = fp8.matrix(i, held.shard.shape), fp8.scales.data[i]
            for layer in owners[id(held.shard.whole)]:
                if getattr(layer, "config", None) != Float8LinearConfig():
                    raise BindingError(
                        f"the plan fetches {held.shard.name} in fp8 with one scale, but a {type(layer).__name__} reads "
                        'it otherwise; convert the model with the recipe "tensorwise" of torchao, or plan with '
                        "--precision fp8-weights=no"
                    )
                yield replace_attribute(layer, "forward", functools.partial(_multiply, layer, moved=moved))


def _multiply(layer: Any, values: Tensor, *, moved: tuple[Tensor | None, Tensor | None] = (None, None)) -> Tensor:
    """Return a layer's output. ``moved`` is its weight in fp8 and its scale, if these are there."""
    given = values
    if torch.is_autocast_enabled():
        values = values.to(torch.get_autocast_gpu_dtype())
    keeps = getattr(layer, "keeps_columns", False)
    make = functools.partial(_cast_input, values, keeps=keeps and layer.weight.requires_grad)
    shared = getattr(layer, "shared", None)
    alone = shared is None or torch.compiler.is_compiling()  # graphs find equal casts themselves
    cast = make() if alone else shared.of(layer, given, make)  # type: ignore[union-attr]
    output: Tensor = _Product.apply(values, layer.weight, *cast, *moved, keeps)  # type: ignore[no-untyped-call]
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


def _cast_input(values: Tensor, *, keeps: bool) -> _Input:
    """Return an input ``[..., width]`` in fp8, turned too if it is kept so."""
    found = _matrix(values)
    scale, inverse = find_scale(found, False)
    rows, columns = cast_to_fp8(found, scale, False, True, keeps and torch.is_grad_enabled())
    return _Input(rows, columns, scale, inverse)


def multiply_in_fp8(model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
    """Convert the linear layers that a plan multiplies in fp8, in place, and compile their casts for a device.

    Raises:
        BindingError: the casts cannot be compiled.
    """
    keeps: dict[str, bool] = {}
    for operator in (operator for unit in units for operator in unit.operators):
        for weight in sorted(multiplied_in_fp8(operator)):
            keeps[weight.rpartition(".")[0]] = not operator.measured
    convert_to_float8_training(model, module_filter_fn=lambda _module, name: name in keeps)
    readers: dict[str, list[nn.Module]] = {}
    for name, layer in model.named_modules():
        if name in keeps:
            layer.__class__ = Linear
            layer.keeps_columns = keeps[name]
            readers.setdefault(input_of(name), []).append(layer)
    for layers in readers.values():
        shared = _Shared(layers) if len(layers) > 1 else None
        for layer in layers:
            object.__setattr__(layer, "shared", shared)
    try:
        for gradient in (False, True):
            values = torch.ones(_WARM_UP, _WARM_UP, dtype=next(model.parameters()).dtype, device=device)
            scale, _ = find_scale(values, gradient)
            for rows, columns in ((True, True), (True, False), (False, True)):
                cast_to_fp8(values, scale, gradient, rows, columns)
    except (TorchDynamoException, RuntimeError) as error:
        what = " ".join(str(error).strip().split("\n\n")[0].split())
        raise BindingError(f"casts to fp8 cannot be compiled: {what}; plan without --precision products=fp8") from error


@torch._dynamo.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's ``matmul_with_hp_or_float8_args``: ``values @ weight.t()`` and its gradients.

    If the weight is there in fp8, ``bits`` with ``scale``, ``weight`` has no values, but takes the gradient.
    """

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        rows: Tensor,
        columns: Tensor,
        scale: Tensor,
        inverse: Tensor,
        bits: Tensor | None,
        bits_scale: Tensor | None,
        keeps: bool,
    ) -> Tensor:
        ctx.shape, ctx.dtype = values.shape, values.dtype
        if bits is None or bits_scale is None:
            of_weight, inverse_of_weight = find_scale(weight.detach(), False)
            narrow, _ = cast_to_fp8(weight.detach(), of_weight, False, True, False)
            kept = weight, of_weight, inverse_of_weight
        else:
            narrow, inverse_of_weight = bits, bits_scale.reciprocal()
            kept = bits, bits_scale, inverse_of_weight
        # Backward reads its input only for the gradient of the weight.
        wants_weight = ctx.needs_input_grad[1]
        inputs = () if not wants_weight else (columns, inverse) if keeps else (values, inverse, scale)
        ctx.save_for_backward(*kept, *inputs)
        output = _scaled(rows, narrow, inverse, inverse_of_weight, ctx.dtype, fast=True)
        return output.reshape(*values.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weight, of_weight, inverse_of_weight, *inputs = ctx.saved_tensors
        wants_values, wants_weight = ctx.needs_input_grad[:2]
        given = _matrix(gradient)
        scale, inverse = find_scale(given, True)
        rows, columns = cast_to_fp8(given, scale, True, wants_values, wants_weight)
        to_values = to_weight = None
        if wants_values:
            if weight.dtype == _VALUES:
                turned = weight.t().contiguous()
            else:
                _, turned = cast_to_fp8(weight.detach(), of_weight, False, False, True)
            to_values = _scaled(rows, turned, inverse, inverse_of_weight, ctx.dtype).reshape(ctx.shape)
            del turned
        del rows
        if wants_weight:
            narrow, inverse_of_input, *own = inputs
            if own:
                _, narrow = cast_to_fp8(_matrix(narrow), own[0], False, False, True)
            to_weight = _scaled(columns, narrow, inverse, inverse_of_input, ctx.dtype)
        return to_values, to_weight, None, None, None, None, None, None, None


def _matrix(values: Tensor) -> Tensor:
    return values.detach().reshape(-1, values.shape[-1]).contiguous()


def _scaled(
    one: Tensor, other: Tensor, inverse: Tensor, other_inverse: Tensor, dtype: Any, *, fast: bool = False
) -> Tensor:
    """Return ``one @ other.t()``, both contiguous; torchao sums forward's products fast."""
    return torch._scaled_mm(
        one, other.t(), scale_a=inverse, scale_b=other_inverse, out_dtype=dtype, use_fast_accum=fast
    )


@torch.library.custom_op("ullage::find_scale", mutates_args=())
def find_scale(values: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the scale with which values are cast to e4m3, or those of a gradient to e5m2, and its inverse."""
    dtype = _GRADIENT if gradient else _VALUES
    if kernels := _kernels(values.device):
        found: tuple[Tensor, Tensor] = kernels.scales(values, torch.finfo(dtype).max)
        return found
    made: tuple[Tensor, Tensor] = _compiled(_row_scale)(values.view(-1), dtype)
    return made


@find_scale.register_fake
def _(values: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return values.new_empty((), dtype=torch.float32), values.new_empty((), dtype=torch.float32)


@torch.library.custom_op("ullage::cast_to_fp8", mutates_args=())
def cast_to_fp8(values: Tensor, scale: Tensor, gradient: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    """Return a matrix in fp8 as it is, and turned; each without elements unless it is wanted."""
    in_rows, turned = _outputs(values, gradient, rows, columns)
    if kernels := _kernels(values.device):
        kernels.cast(values, scale, in_rows if rows else None, turned if columns else None)
        return in_rows, turned
    bits = _compiled(_row_cast)(values.view(-1), scale, in_rows.dtype).view(values.shape)
    return bits if rows else in_rows, bits.t().contiguous() if columns else turned


@cast_to_fp8.register_fake
def _(values: Tensor, scale: Tensor, gradient: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return _outputs(values, gradient, rows, columns)


def _outputs(values: Tensor, gradient: bool, rows: bool, columns: bool) -> tuple[Tensor, Tensor]:
    m, n = values.shape
    dtype = _GRADIENT if gradient else _VALUES
    shapes = (m, n) if rows else (0, n), (n, m) if columns else (0, m)
    return values.new_empty(shapes[0], dtype=dtype), values.new_empty(shapes[1], dtype=dtype)


def _kernels(device: torch.device) -> Any:
    """Return Triton's kernels where they run."""
    if device.type != "cuda" or fused() is None:
        return None
    from executor.devices import narrow  # noqa: PLC0415 - imports Triton

    return narrow


def _row_scale(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scale = tensor_to_scale(values, dtype)
    return scale, scale.reciprocal()


def _row_cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    bits: Tensor = to_fp8_saturated(values.to(torch.float32) * scale, dtype)
    return bits


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a row of values, in the order of memory: it is compiled once for each type."""
    return torch.compile(function, dynamic=True)
