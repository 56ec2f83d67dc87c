"""What modules of ``bitsandbytes`` and ``torchao`` do differently under a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from executor.callbacks import replace_attribute, with_gradient
from executor.distributed.shards import BindingError
from planner.graph import Unit, multiplied_in_fp8


def is_float8(module: nn.Module) -> bool:
    """Return whether a module is a linear layer of ``torchao`` whose products are in fp8.

    Its weight is a parameter like any other. Each product casts it, with a scale from the largest value of the whole.
    """
    kinds = type(module).__mro__
    return any(kind.__name__ == "Float8Linear" and kind.__module__.startswith("torchao.") for kind in kinds)


def check_products(model: nn.Module, units: tuple[Unit, ...]) -> None:
    """Check that linear layers multiply in fp8 exactly where the plan says so.

    Raises:
        BindingError: one does not; says which, and what to do.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    # Elsewhere a weight is a buffer, or is made of parameters (weight norm, spectral norm, pruning): it has no name.
    layers: dict[str, Any] = {
        names[id(weight)]: module
        for module in model.modules()
        if isinstance(module, nn.Linear) and (weight := module._parameters.get("weight")) is not None
    }
    operators = (operator for unit in units for operator in unit.operators)
    planned = {weight for operator in operators for weight in multiplied_in_fp8(operator)}
    for name, layer in layers.items():
        given = is_float8(layer) and not layer.config.emulate
        if given is not (name in planned):
            raise BindingError(
                f"{name} belongs to a {type(layer).__name__}, which multiplies in fp8, but the plan does not; plan "
                "with --precision products=fp8, or give ullage.prepare a batch instead of a plan"
                if given
                else f"the plan multiplies {name} in fp8, but it belongs to a {type(layer).__name__}; convert the "
                "model with torchao.float8.convert_to_float8_training, or plan without --precision products=fp8"
            )


def bind_quantized(model: nn.Module) -> list[Callable[[], None]]:
    """Let quantized modules keep nothing for backward; return a function that undoes it."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # evaluating would pack the weights anew, elsewhere
            undo.append(replace_attribute(module, "support_avx512bf16_for_cpu", False))
        if _keeps_for_backward(module):
            undo.append(replace_attribute(module, "forward", _without_saving(module, module.forward)))
    return undo


def _keeps_for_backward(module: Any) -> bool:
    """Return whether a module is a frozen projection that keeps more than its backward needs."""
    # Not the attributes: those of a parametrization (spectral norm) would compute, and advance buffers.
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    if weight is None or (bias is not None and bias.requires_grad):
        return False
    if hasattr(module, "init_8bit_state"):  # of bitsandbytes
        return bool(weight.dtype is torch.int8)
    return isinstance(module, nn.Linear) and is_traceable_wrapper_subclass(weight)


def _backward(module: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a frozen projection's input from that of its output, as its library computes it."""
    weight = module.weight
    if hasattr(module, "init_8bit_state"):
        state = module.state
        weight = state.CB.to(gradient.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        return torch.matmul(gradient, weight)
    if not hasattr(weight, "qdata"):  # NF4
        return torch.matmul(gradient, weight.to(gradient.dtype))
    if weight.block_size[-1] < weight.qdata.shape[-1]:  # scales of groups within a row
        return torch.mm(gradient, weight.dequantize().to(gradient.dtype))
    return torch.mm(gradient * weight.scale.to(gradient.dtype).flatten(), weight.qdata.to(gradient.dtype))


def _without_saving(
    module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a frozen quantized projection, which keeps nothing for backward.

    If the weight is int8, ``bitsandbytes`` keeps the input, which only the gradient of a trained weight needs. Autograd
    does not know of it, so recomputation would not free it. ``torchao`` lets autograd keep the dequantized weight. This
    has their arithmetic, and keeps neither.
    """

    def run(values: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and values.requires_grad):
            return forward(values)
        shape, dtype = values.shape, values.dtype

        def back(gradient: torch.Tensor) -> torch.Tensor:
            return _backward(module, gradient.reshape(-1, gradient.shape[-1]).to(dtype)).view(shape)

        return with_gradient(values, forward, back)

    return run
