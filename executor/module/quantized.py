"""What modules of ``bitsandbytes`` do differently under a plan."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.callbacks import replace_attribute


class _Frozen8bit(torch.autograd.Function):
    """A frozen int8 projection, which keeps nothing for backward.

    ``bitsandbytes`` keeps the input, although only the gradient of a weight that is trained needs it; and past what
    autograd saves, so that recomputation would not free it. The arithmetic is that of ``bitsandbytes``.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, module: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        ctx.module, ctx.dtype, ctx.shape = module, values.dtype, values.shape
        return forward(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        state = ctx.module.state
        weight = state.CB.to(ctx.dtype, copy=True).mul_(state.SCB.unsqueeze(1).mul(1.0 / 127.0))
        gradient = gradient.reshape(-1, gradient.shape[-1])
        return torch.matmul(gradient.to(ctx.dtype), weight).view(ctx.shape), None, None


def bind_quantized(model: nn.Module) -> list[Callable[[], None]]:
    """Let quantized modules keep no more, and change nothing of their own; return what undoes it."""
    undo: list[Callable[[], None]] = []
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # evaluating would pack the weights anew, elsewhere
            undo.append(replace_attribute(module, "support_avx512bf16_for_cpu", False))
        if _is_frozen_8bit(module):
            undo.append(replace_attribute(module, "forward", _without_saving(module, module.forward)))
    return undo


def _is_frozen_8bit(module: Any) -> bool:
    if not hasattr(module, "init_8bit_state") or module.weight.dtype is not torch.int8:
        return False
    return module.bias is None or not module.bias.requires_grad


def _without_saving(
    module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(values: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and values.requires_grad:
            result: torch.Tensor = _Frozen8bit.apply(values, module, forward)  # type: ignore[no-untyped-call]
            return result
        return forward(values)

    return run
