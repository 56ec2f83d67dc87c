"""Products in fp8 for a model that was made for a plan. Importing this module needs torchao.

:class:`Linear` takes the place of each linear layer that the plan multiplies in fp8. Its parameters stay, and its bits
are those of torchao's layer with one scale for each tensor.

[Note: Casts to fp8] ``torch._scaled_mm`` reads both matrices along their inner side. Each of input, weight and gradient
is in two of a layer's three products, along another side in each. So a tensor's scale is found once, and then it is
cast in the layouts that its products take. What reads one input shares its cast
(:func:`planner.models.formulas.float8.input_of`). The scale of a weight is kept for backward. Of an input, backward has
the cast in the layout that it needs, and the input in its own type is dropped. Layers of captured models keep that
instead, and cast it again with the scale, because the capture does not say who else keeps it.

[Note: Scales from SwiGLU] On a GPU, SwiGLU of a model of known sizes is one kernel forward and one backward, and each
finds the largest values of what it writes, which casts read otherwise. Forward hands them on with its output. In
backward they come as the gradient of a second output of the products before, which has no values. So nothing must be
known of the order in which autograd runs, and a product whose second output nobody reads finds them itself.

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
from torch.nn import functional
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

from executor.callbacks import replace_attribute
from executor.devices.cuda import fused
from executor.distributed.shards import BindingError
from executor.memory.units import UnitState
from executor.module.compilation import reason
from executor.module.own_checkpoints import compiled
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


_Shared = Callable[[nn.Module, Tensor, Callable[[], _Input]], _Input]
"""Returns the cast of a layer's input: another layer's of the same, or what the function makes."""


@final
class Linear(Float8Linear):  # type: ignore[misc]  # torchao has no types
    """torchao's layer with one scale for each tensor; see [Note: Casts to fp8].

    Attributes:
        keeps_columns: whether backward has the input in fp8, rather than in its own type.
        shared: the cast of its input; ``None`` if no other layer reads it.
        tags: whether the caller takes the second output of its product; see [Note: Scales from SwiGLU].
        tag: this, until it is taken.
    """

    keeps_columns: bool = False
    shared: _Shared | None = None
    tags: bool = False
    tag: Tensor | None = None

    def forward(self, values: Tensor, largest: Tensor | None = None) -> Tensor:
        """Return the output, as torchao's layer does; ``largest`` is the largest magnitude of the input, if known."""
        return _multiply(self, values, largest=largest)


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


def _multiply(
    layer: Any,
    values: Tensor,
    *,
    moved: tuple[Tensor | None, Tensor | None] = (None, None),
    largest: Tensor | None = None,
) -> Tensor:
    """Return a layer's output.

    Args:
        layer: a layer of torchao's, or ours.
        values: its input.
        moved: its weight in fp8 and the scale, if these are there.
        largest: the largest magnitude of ``values``, if that is known.
    """
    given = values
    if torch.is_autocast_enabled():
        values, largest = values.to(torch.get_autocast_gpu_dtype()), None
    keeps = getattr(layer, "keeps_columns", False)
    make = functools.partial(_cast_input, values, largest, keeps=keeps and layer.weight.requires_grad)
    shared = getattr(layer, "shared", None)
    alone = shared is None or torch.compiler.is_compiling()  # graphs find equal casts themselves
    cast = make() if alone else shared(layer, given, make)  # type: ignore[misc]
    output, tag = _Product.apply(values, layer.weight, *cast, *moved, keeps)  # type: ignore[no-untyped-call]
    if getattr(layer, "tags", False):
        layer.tag = tag
    result: Tensor = output if layer.bias is None else output + layer.bias.to(output.dtype)
    return result


def _cast_input(values: Tensor, largest: Tensor | None, *, keeps: bool) -> _Input:
    """Return an input ``[..., width]`` in fp8, turned too if it is kept so."""
    found = _matrix(values)
    scale, inverse = find_scale(found, False) if largest is None else scale_of(largest, False)
    rows, columns = cast_to_fp8(found, scale, False, True, keeps and torch.is_grad_enabled())
    return _Input(rows, columns, scale, inverse)


def _swiglu_mlp(module: Any, values: Tensor) -> Tensor:
    """Return the output of an MLP ``down(silu(gate(x)) * up(x))``; see [Note: Scales from SwiGLU]."""
    branches = []
    for layer in (module.gate_proj, module.up_proj):
        branches += [layer(values), layer.tag]
        layer.tag = None
    (gate, tag, up, other) = branches
    inner, largest = _SwiGLU.apply(gate, up, tag, other)  # type: ignore[no-untyped-call]
    result: Tensor = module.down_proj(inner, largest=largest)
    return result


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
    readers: dict[str, list[Linear]] = {}
    for name, keeps_columns in keeps.items():
        layer: Any = model.get_submodule(name)
        layer.__class__ = Linear
        layer.keeps_columns = keeps_columns
        readers.setdefault(input_of(name), []).append(layer)
    for layers in readers.values():
        share_casts(layers)
    if device.type == "cuda":
        fuse_swiglu(model)
    try:
        for gradient in (False, True):
            values = torch.ones(_WARM_UP, _WARM_UP, dtype=next(model.parameters()).dtype, device=device)
            scale, _ = find_scale(values, gradient)
            for rows, columns in ((True, True), (True, False), (False, True)):
                cast_to_fp8(values, scale, gradient, rows, columns)
    except (TorchDynamoException, RuntimeError) as error:
        why = reason(error)
        raise BindingError(f"casts to fp8 cannot be compiled: {why}; plan without --precision products=fp8") from error


def share_casts(layers: list[Linear]) -> None:
    """Let layers that read one input share its cast."""
    held: tuple[Tensor, int, _Input, set[nn.Module]] | None = None  # an input, its version, the cast, who has read it

    def shared(layer: nn.Module, values: Tensor, make: Callable[[], _Input]) -> _Input:
        nonlocal held
        if held is None or held[0] is not values or held[1] != values._version or layer in held[3]:
            held = values, values._version, make(), set()
        _, _, cast, readers = held
        readers.add(layer)
        if len(readers) == len(layers):
            held = None
        return cast

    for layer in layers if len(layers) > 1 else ():
        layer.shared = shared


def fuse_swiglu(model: nn.Module) -> None:
    """Let MLPs of known sizes whose layers are in fp8 compute SwiGLU in one kernel; see [Note: Scales from SwiGLU]."""
    for module in model.modules():
        layers = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if all(isinstance(layer, Linear) and layer.keeps_columns for layer in layers):
            for layer in layers[:2]:
                layer.tags = True  # type: ignore[union-attr]
            module.forward = functools.partial(_swiglu_mlp, module)


@torch._dynamo.allow_in_graph
class _SwiGLU(torch.autograd.Function):
    """``silu(gate) * up`` and its largest magnitude; those of its gradients go to ``tag`` and ``other``."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tag: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        ctx.save_for_backward(gate, up)
        inner, largest = swiglu(gate, up)
        ctx.mark_non_differentiable(largest)
        return inner, largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return swiglu_backward(gradient.contiguous(), *ctx.saved_tensors)


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
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
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
        return output.reshape(*values.shape[:-1], output.shape[-1]), inverse.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, largest: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 9
        weight, of_weight, inverse_of_weight, *inputs = ctx.saved_tensors
        wants_values, wants_weight = ctx.needs_input_grad[:2]
        given = _matrix(gradient)
        scale, inverse = find_scale(given, True) if largest is None else scale_of(largest, True)
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
        found: tuple[Tensor, Tensor] = kernels.scales(kernels.largest_of(values), torch.finfo(dtype).max)
        return found
    made: tuple[Tensor, Tensor] = _compiled(_row_scale)(values.view(-1), dtype)
    return made


@find_scale.register_fake
def _(values: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return values.new_empty((), dtype=torch.float32), values.new_empty((), dtype=torch.float32)


@torch.library.custom_op("ullage::scale_of", mutates_args=())
def scale_of(largest: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """Return the scale of values, or of a gradient, with this largest magnitude, and its inverse."""
    dtype = _GRADIENT if gradient else _VALUES
    if kernels := _kernels(largest.device):
        found: tuple[Tensor, Tensor] = kernels.scales(largest, torch.finfo(dtype).max)
        return found
    return _row_scale(largest.view(-1), dtype)


@scale_of.register_fake
def _(largest: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(largest), torch.empty_like(largest)


@torch.library.custom_op("ullage::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``silu(gate) * up``, and its largest magnitude in float32."""
    if kernels := _kernels(gate.device):
        made: tuple[Tensor, Tensor] = kernels.swiglu(gate, up)
        return made
    inner = functional.silu(gate) * up
    return inner, _largest(inner)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(gate), gate.new_empty((), dtype=torch.float32)


@torch.library.custom_op("ullage::swiglu_backward", mutates_args=())
def swiglu_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``gate`` and ``up``, and the largest magnitude of each in float32."""
    if kernels := _kernels(gate.device):
        made: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.swiglu_backward(gradient, gate, up)
        return made
    to_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    to_up = gradient * functional.silu(gate)
    return to_gate, to_up, _largest(to_gate), _largest(to_up)


@swiglu_backward.register_fake
def _(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: ARG001
    largest, other = (gate.new_empty((), dtype=torch.float32) for _ in range(2))
    return torch.empty_like(gate), torch.empty_like(up), largest, other


def _largest(values: Tensor) -> Tensor:
    return values.abs().max().float()


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
    return compiled(torch.compile(function, dynamic=True))
