"""Adagrad on a CPU in one pass over memory: 20 bytes a parameter."""

import math
from dataclasses import dataclass
from typing import Any, Final

from numba import njit

from executor.optimizer.passes import HostStep, as_float32, check_params, float32s, store_weight


@dataclass(frozen=True, slots=True)
class AdagradParams:
    """Hyper-parameters, as ``torch.optim.Adagrad`` names and bounds them.

    Raises:
        ValueError: one is negative or not finite.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        check_params(self, not_negative=("lr", "lr_decay", "weight_decay", "eps"))


def _kernel_args(params: AdagradParams, step: int, grad_scale: float) -> tuple[object, ...]:
    rate = params.lr / (1 + (step - 1) * params.lr_decay)
    return params.weight_decay > 0, float32s(grad_scale, params.weight_decay, rate, params.eps)


@njit(nogil=True, cache=True, error_model="numpy")
def _update(master: Any, sum_of_squares: Any, grad: Any, weight_out: Any, decays: Any, factors: Any) -> None:
    grad_scale, weight_decay, rate, eps = factors
    for i in range(master.size):
        p = master[i]
        g = as_float32(grad[i]) * grad_scale
        if decays:
            g = g + weight_decay * p
        s = sum_of_squares[i] + g * g
        p = p - rate * g / (math.sqrt(s) + eps)
        sum_of_squares[i] = s
        master[i] = p
        store_weight(weight_out, grad, i, p)


adagrad_step: Final = HostStep(_update, ("sum",), _kernel_args)
"""As ``torch.optim.Adagrad`` (Duchi et al., JMLR 12, 2011), with g = ``grad_scale`` * ``grad``::

    g = g + weight_decay * p
    s = s + g * g
    p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

The sum s starts from the initial accumulator value.
"""
