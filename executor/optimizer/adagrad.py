"""Adagrad on a CPU in one pass over memory: 20 bytes a parameter."""

import math
from dataclasses import dataclass
from typing import Any

from numba import njit

from executor.optimizer.passes import (
    Bf16Array,
    Float32Array,
    GradientArray,
    as_float32,
    check_params,
    check_step,
    float32s,
    one_pass,
    store_weight,
)
from executor.optimizer.workers import WorkerTeam


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


def adagrad_step(
    master: Float32Array,
    sum_of_squares: Float32Array,
    grad: GradientArray,
    weight_out: Bf16Array | None,
    params: AdagradParams,
    step: int,
    grad_scale: float = 1.0,
    team: WorkerTeam | None = None,
) -> None:
    """Take one step of Adagrad on flat arrays of equal length, in place.

    With g = ``grad_scale`` * ``grad``, as ``torch.optim.Adagrad`` (Duchi et al., JMLR 12, 2011)::

        g = g + weight_decay * p
        s = s + g * g
        p = p - lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

    Args:
        master: weights p, float32 ``[num_params]``, updated.
        sum_of_squares: s, float32 ``[num_params]``, updated; it starts from the initial accumulator value.
        grad: gradient, float32 or bf16 bits (uint16), ``[num_params]``; only read, unless it is
            ``weight_out`` too.
        weight_out: where the new weights go as bf16 bits, ``[num_params]``; ``None`` where ``master`` is the weight.
        params: hyper-parameters.
        step: which step this is, from 1.
        grad_scale: multiplies the gradient in float32.
        team: threads to run on; ``None`` means the calling thread.

    Raises:
        ValueError: an array of the wrong dtype, length or layout, or ``step`` below 1.
    """
    check_step(step)
    rate = params.lr / (1 + (step - 1) * params.lr_decay)
    rest = (params.weight_decay > 0, float32s(grad_scale, params.weight_decay, rate, params.eps))
    one_pass(_update, {"master": master, "sum": sum_of_squares}, grad, weight_out, rest, team)


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
