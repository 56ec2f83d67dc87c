"""SGD with momentum, and Adagrad, on a CPU in one pass over memory: 20 bytes a parameter, 12 without momentum."""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit

from executor.optimizer.passes import as_float32, check_params, float32s, host_step, store_weight
from executor.optimizer.split import CHUNK, chunks, close_chunk, open_chunk


@dataclass(frozen=True, slots=True)
class SgdParams:
    """Hyper-parameters, as ``torch.optim.SGD`` names and bounds them.

    Raises:
        ValueError: a negative ``lr``, ``momentum`` or ``weight_decay``, Nesterov's momentum without momentum or with
            dampening, or dampening without momentum.
    """

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        check_params(self, not_negative=("lr", "momentum", "weight_decay"))
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov with momentum {self.momentum} and dampening {self.dampening}: it needs momentum and no "
                "dampening"
            )
        if self.dampening and not self.momentum:
            # With torch, the first step after momentum is switched on would have no dampening, whenever it comes.
            raise ValueError(f"dampening is {self.dampening} without momentum, where it does nothing; set it to 0")


def _kernel_args(params: SgdParams, step: int, grad_scale: float) -> tuple[object, ...]:
    factors = float32s(grad_scale, params.weight_decay, params.momentum, 1 - params.dampening, params.lr)
    return params.weight_decay > 0, step == 1, params.nesterov, factors


@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    master: Any,
    momentum_buffer: Any,
    grad: Any,
    weight_out: Any,
    decays: Any,
    first: Any,
    nesterov: Any,
    factors: Any,
) -> None:
    grad_scale, weight_decay, momentum, rest, lr = factors
    values = np.empty(CHUNK, np.float32)
    for chunk in chunks(master):
        ps, (ms,), gs, _ = open_chunk(master, chunk, (momentum_buffer,), grad, values)
        for i in range(ps.size):
            p = ps[i]
            g = as_float32(gs[i]) * grad_scale
            if decays:  # 0 * an infinite weight would be NaN; the compiler makes a loop for each value of the flag
                g = g + weight_decay * p
            if momentum_buffer is not None:  # of the arguments: then numba leaves the branch out
                m = g if first else momentum * ms[i] + rest * g
                ms[i] = m
                g = g + momentum * m if nesterov else m
            p = p - lr * g
            ps[i] = p
            store_weight(weight_out, gs, i, p)
        close_chunk(master, chunk, values)


sgd_step: Final = host_step(_update, _kernel_args, has_buffers=lambda params: params.momentum != 0)
"""As ``torch.optim.SGD`` (Sutskever et al., ICML 2013), with g = ``grad_scale`` * ``grad``::

    g = g + weight_decay * p
    m = g at the first step, then momentum * m + (1 - dampening) * g
    p = p - lr * (g + momentum * m with Nesterov's momentum, else m)

Step 1 has no momentum yet. Without momentum m is not used, and may be ``None``.
"""


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


def _adagrad_args(params: AdagradParams, step: int, grad_scale: float) -> tuple[object, ...]:
    rate = params.lr / (1 + (step - 1) * params.lr_decay)
    return params.weight_decay > 0, float32s(grad_scale, params.weight_decay, rate, params.eps)


@njit(nogil=True, cache=True, error_model="numpy")
def _update_adagrad(master: Any, sum_of_squares: Any, grad: Any, weight_out: Any, decays: Any, factors: Any) -> None:
    grad_scale, weight_decay, rate, eps = factors
    values = np.empty(CHUNK, np.float32)
    for chunk in chunks(master):
        ps, (sums,), gs, _ = open_chunk(master, chunk, (sum_of_squares,), grad, values)
        for i in range(ps.size):
            p = ps[i]
            g = as_float32(gs[i]) * grad_scale
            if decays:
                g = g + weight_decay * p
            s = sums[i] + g * g
            p = p - rate * g / (math.sqrt(s) + eps)
            sums[i] = s
            ps[i] = p
            store_weight(weight_out, gs, i, p)
        close_chunk(master, chunk, values)


adagrad_step: Final = host_step(_update_adagrad, _adagrad_args)
"""As ``torch.optim.Adagrad`` (Duchi et al., JMLR 12, 2011), with g = ``grad_scale`` * ``grad``::

    g = g + weight_decay * p
    s = s + g * g
    p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

The sum s starts from the initial accumulator value.
"""
