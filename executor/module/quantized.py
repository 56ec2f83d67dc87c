"""What modules of ``bitsandbytes`` and ``torchao`` do differently under a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.callbacks import replace_attribute, with_gradient
from executor.distributed.shards import BindingError
from executor.packed import StoredParameter
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
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    layers: dict[str, Any] = {
        names[id(module._parameters["weight"])]: module
        for module in linear
        if module._parameters.get("weight") is not None
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
        if (backward := _backward_of(module)) is not None:
            undo.append(replace_attribute(module, "forward", _without_saving(module, module.forward, backward)))
    return undo


def _backward_of(module: Any) -> Callable[[Any, torch.Tensor], torch.Tensor] | None:
    """Return a function from the gradient of a frozen projection's output to its input's; ``None`` for others."""
    bias = getattr(module, "bias", None)  # recurrent modules have a flag of that name
    if isinstance(bias, torch.Tensor) and bias.requires_grad:
        return None
    if hasattr(module, "init_8bit_state"):
        return _backward_int8_of_bitsandbytes if module.weight.dtype is torch.int8 else None
    if not isinstance(module, nn.Linear):
        return None
    weight: Any = module.weight
    if not StoredParameter(weight, module).is_wrapper:
        return None
    return _backward_int8_of_torchao if hasattr(weight, "qdata") else _backward_nf4_of_torchao


def _backward_int8_of_bitsandbytes(module: Any, gradient: torch.Tensor) -> torch.Tensor:
    state = module.state
    weight = state.CB.to(gradient.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
    return torch.matmul(gradient, weight)


def _backward_int8_of_torchao(module: Any, gradient: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if weight.block_size[-1] < weight.qdata.shape[-1]:  # scales of groups within a row
        return torch.mm(gradient, weight.dequantize().to(gradient.dtype))
    return torch.mm(gradient * weight.scale.to(gradient.dtype).flatten(), weight.qdata.to(gradient.dtype))


def _backward_nf4_of_torchao(module: Any, gradient: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = module.weight.to(gradient.dtype)
    return gradient @ weight


def _without_saving(
    module: nn.Module,
    forward: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[Any, torch.Tensor], torch.Tensor],
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
            return backward(module, gradient.reshape(-1, gradient.shape[-1]).to(dtype)).view(shape)

        return with_gradient(values, forward, back)

    return run
