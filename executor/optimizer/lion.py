"""Lion on a CPU in one pass over memory: 20 bytes a parameter."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numba import njit

from executor.optimizer.passes import as_float32, check_params, float32s, host_step, store_weight
from executor.optimizer.split import CHUNK, chunks, close_chunk, open_chunk

_ZERO: Final = np.float32(0)
_ONE: Final = np.float32(1)


@dataclass(frozen=True, slots=True)
class LionParams:
    """Hyper-parameters, as :class:`executor.optimizer.reference.Lion` names and bounds them.

    Raises:
        ValueError: a negative ``lr`` or ``weight_decay``, or a beta outside [0, 1).
    """

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_params(self, not_negative=("lr", "weight_decay"), fractions=("beta1", "beta2"))


def _kernel_args(params: LionParams, _step: int, grad_scale: float) -> tuple[object, ...]:
    rests = (1 - params.beta1, 1 - params.beta2)
    decay = 1 - params.lr * params.weight_decay
    return (float32s(grad_scale, params.beta1, rests[0], params.beta2, rests[1], decay, params.lr),)


@njit(nogil=True, cache=True, error_model="numpy")
def _update(master: Any, exp_avg: Any, grad: Any, weight_out: Any, factors: Any) -> None:
    grad_scale, beta1, rest1, beta2, rest2, decay, lr = factors
    values = np.empty(CHUNK, np.float32)
    for chunk in chunks(master):
        ps, (ms,), gs, _ = open_chunk(master, chunk, (exp_avg,), grad, values)
        for i in range(ps.size):
            g = as_float32(gs[i]) * grad_scale
            m = ms[i]
            c = beta1 * m + rest1 * g
            # Selecting between constants is vectorised; converting the comparison to a number is not.
            sign = (_ONE if c > _ZERO else _ZERO) - (_ONE if c < _ZERO else _ZERO) + (c - c)
            p = ps[i] * decay - lr * sign
            ms[i] = beta2 * m + rest2 * g
            ps[i] = p
            store_weight(weight_out, gs, i, p)
        close_chunk(master, chunk, values)


lion_step: Final = host_step(_update, _kernel_args)
"""As algorithm 2 of Chen et al., arXiv:2302.06675, with g = ``grad_scale`` * ``grad``; the same at each step::

    c = beta1 * m + (1 - beta1) * g
    p = p * (1 - lr * weight_decay) - lr * sign(c)
    m = beta2 * m + (1 - beta2) * g

If c is not finite, p becomes NaN. A plain sign would hide that: sign(NaN) is 0, sign(infinity) is 1.
"""


def lion_(
    master: torch.Tensor,
    buffers: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    params: LionParams,
    step: int,  # noqa: ARG001 - all have it
) -> None:
    """Take one step with torch's operators, each of which rounds once. See :data:`lion_step`."""
    (exp_avg,) = buffers
    average = exp_avg * params.beta1
    average += gradient * (1 - params.beta1)
    direction = average.sign()
    direction += average - average
    master *= 1 - params.lr * params.weight_decay
    master -= direction.mul_(params.lr)
    exp_avg *= params.beta2
    exp_avg += gradient * (1 - params.beta2)
