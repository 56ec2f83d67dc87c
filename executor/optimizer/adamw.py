"""AdamW, and Adam, on a CPU in one pass over memory; moments are float32 or bf16.

A step that casts the gradient, updates, and casts the weight back passes over memory three times: about 54 bytes a
parameter. This step needs 28: it reads the gradient (2), the master weight, m and v (12), and writes the last three and
the bf16 weight (14). With moments in bf16 it needs 20.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numba import njit

from executor.optimizer.bf16 import MASK, noise_at, noise_key, noise_of_weight
from executor.optimizer.passes import (
    as_float32,
    check_params,
    float32s,
    host_step,
    store_rounded,
    store_weight,
)
from executor.optimizer.split import CHUNK, chunks, close_chunk, open_chunk

LIMIT: Final = 1e15
"""Values of a gradient from which on its square, or a sum of squares, may be infinite in float32."""

_SHIFT16, _LOW = np.uint32(16), np.uint32(0xFFFF)


@dataclass(frozen=True, slots=True)
class AdamWParams:
    """Hyper-parameters, as ``torch.optim.AdamW`` names and bounds them.

    Attributes:
        decoupled_weight_decay: weight decay is applied to the weight (AdamW), not added to the gradient (Adam).
        seed: of stochastic rounding; ``None`` without it.
        parameter: the parameter's number in the optimizer, on which random bits depend too.
        start: position in the parameter of the first value, likewise.
        limit: values of the scaled gradient that reach it count as 0, NaN too, so that the step can be taken back, see
            [Note: Speculation] in :mod:`executor.driver.speculation`; ``None``: none do.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled_weight_decay: bool = True
    seed: int | None = None
    parameter: int = 0
    start: int = 0
    limit: float | None = None

    def __post_init__(self) -> None:
        check_params(self, not_negative=("lr", "eps", "weight_decay"), fractions=("beta1", "beta2"))


def adamw_factors(params: AdamWParams, step: int) -> tuple[np.float32, ...]:
    """Return the factors of :func:`advanced`."""
    return float32s(
        params.beta1,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        1 - params.lr * params.weight_decay if params.decoupled_weight_decay else 1.0,
        params.lr / (1 - params.beta1**step),
        1 / math.sqrt(1 - params.beta2**step),
        params.eps,
    )


def _kernel_args(params: AdamWParams, step: int, grad_scale: float) -> tuple[object, ...]:
    # Weight decay in the gradient, and a limit; for ``None`` numba compiles a kernel without it.
    in_gradient = params.weight_decay and not params.decoupled_weight_decay
    l2 = np.float32(params.weight_decay) if in_gradient else None
    limit = None if params.limit is None else np.float32(params.limit)
    return l2, limit, (seeds_of(params, step), np.float32(grad_scale), adamw_factors(params, step))


def seeds_of(params: AdamWParams, step: int) -> tuple[np.uint32, np.uint32]:
    """Return the key of random bits, 0 without a seed, and the position of the first value."""
    seed = params.seed
    key = 0 if seed is None else noise_key(seed, seed >> 32, params.parameter, step)
    return np.uint32(key), np.uint32(params.start & MASK)


@njit(nogil=True, cache=True, error_model="numpy")
def advanced(p: Any, m: Any, v: Any, g: Any, factors: Any) -> Any:
    """Return weight and moments after a step, all float32. Kernels of AdamW call it, whatever type they keep."""
    beta1, rest1, beta2, rest2, decay, step_size, root_bias2_inverse, eps = factors
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    return p * decay - step_size * m / (math.sqrt(v) * root_bias2_inverse + eps), m, v


# error_model: Python's model raises on a division by zero, and that branch would prevent vectorisation.
@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    master: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    grad: Any,
    weight_out: Any,
    l2: Any,
    limit: Any,
    rule: Any,
    begin: Any,
) -> None:
    seeds, grad_scale, factors = rule
    values = np.empty(CHUNK, np.float32)
    for chunk in chunks(master):
        ps, (ms, vs), gs, offset = open_chunk(master, chunk, (exp_avg, exp_avg_sq), grad, values)
        key, first = seeds[0], np.uint32(seeds[1] + np.uint32(begin + offset))
        for i in range(ps.size):
            g = as_float32(gs[i]) * grad_scale
            if limit is not None:
                g = g if abs(g) < limit else np.float32(0)
            if l2 is not None:
                g = g + l2 * as_float32(ps[i])
            p, m, v = advanced(as_float32(ps[i]), as_float32(ms[i]), as_float32(vs[i]), g, factors)
            noise = noise_at(
                np.uint32(first + np.uint32(i)), key
            )  # the compiler leaves it out where nothing is rounded
            store_rounded(ms, i, m, np.uint32(noise & _LOW))
            store_rounded(vs, i, v, np.uint32(noise >> _SHIFT16))
            store_rounded(ps, i, p, noise_of_weight(noise))
            store_weight(weight_out, gs, i, p)
        close_chunk(master, chunk, values)


MOMENTS: Final = ("exp_avg", "exp_avg_sq")
"""Keys of both moments in a parameter's state."""

adamw_step: Final = host_step(_update, _kernel_args, seeded=True)
"""As ``torch.optim.AdamW`` without amsgrad (Loshchilov and Hutter, arXiv:1711.05101); g = ``grad_scale`` * ``grad``::

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

If weight decay is not decoupled, ``g = g + weight_decay * p`` comes first, as in ``torch.optim.Adam``.

Moments may be bf16 bits (uint16), and then the master copy too, see [Note: Stochastic rounding] in
:mod:`executor.optimizer.adamw_narrow`.
"""
