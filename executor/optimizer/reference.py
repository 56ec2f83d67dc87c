"""Optimizers that torch does not have, as plain ``torch.optim`` classes: for use without a plan, and as references."""

from collections.abc import Callable
from typing import Any, final

import torch

from executor.optimizer.lion import LionParams


@final
class Lion(torch.optim.Optimizer):
    """Evolved sign momentum (Chen et al., *Symbolic discovery of optimization algorithms*, arXiv:2302.06675).

    Every weight moves by ``lr``, in the direction of the sign of an average of gradients, so ``lr`` is about a tenth of
    AdamW's. If that average is not finite, the weight becomes NaN: a plain sign would hide the error.

    Args:
        params: parameters, or groups of them.
        lr: how far a weight moves.
        betas: weight of the past in the direction, and in the momentum that is kept.
        weight_decay: decoupled, as AdamW's.

    Raises:
        ValueError: a negative ``lr`` or ``weight_decay``, or a beta outside [0, 1).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        LionParams(lr, *betas, weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step; return the result of ``closure``, which computes gradients again."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                lion(parameter, state["exp_avg"], parameter.grad, group["lr"], beta1, beta2, group["weight_decay"])
        return loss


def lion(
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    gradient: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Take one step of Lion in place, with one rounding for every operation."""
    average = exp_avg * beta1
    average += gradient * (1 - beta1)
    direction = average.sign()
    direction += average - average
    weight *= 1 - lr * weight_decay
    weight -= direction.mul_(lr)
    exp_avg *= beta2
    exp_avg += gradient * (1 - beta2)
