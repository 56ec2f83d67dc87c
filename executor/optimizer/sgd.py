"""SGD with momentum on a CPU in one pass over memory: 20 bytes a parameter, 12 without momentum."""

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
            # torch forgets it: the first step with momentum would have none, however late it comes.
            raise ValueError(f"dampening is {self.dampening} without momentum, where it does nothing; set it to 0")


def sgd_step(
    master: Float32Array,
    momentum_buffer: Float32Array | None,
    grad: GradientArray,
    weight_out: Bf16Array | None,
    params: SgdParams,
    step: int,
    grad_scale: float = 1.0,
    team: WorkerTeam | None = None,
) -> None:
    """Take one step of SGD on flat arrays of equal length, in place.

    With g = ``grad_scale`` * ``grad``, as ``torch.optim.SGD`` (Sutskever et al., ICML 2013)::

        g = g + weight_decay * p
        m = g at the first step, then momentum * m + (1 - dampening) * g
        p = p - lr * (g + momentum * m with Nesterov's momentum, else m)

    Args:
        master: weights p, float32 ``[num_params]``, updated.
        momentum_buffer: m, float32 ``[num_params]``, updated, but not touched without momentum.
        grad: gradient, float32 or bf16 bits (uint16), ``[num_params]``; only read, unless it is
            ``weight_out`` too.
        weight_out: where the new weights go as bf16 bits, ``[num_params]``; ``None`` where ``master`` is the weight.
        params: hyper-parameters.
        step: 1 where there is no momentum yet.
        grad_scale: multiplies the gradient in float32.
        team: threads to run on; ``None`` means the calling thread.

    Raises:
        ValueError: an array of the wrong dtype, length or layout, ``step`` below 1, or momentum without a buffer.
    """
    check_step(step)
    if params.momentum and momentum_buffer is None:
        raise ValueError(f"momentum is {params.momentum}, but there is no momentum_buffer; pass one")
    state = {"master": master, "momentum_buffer": momentum_buffer if params.momentum else None}
    factors = float32s(grad_scale, params.weight_decay, params.momentum, 1 - params.dampening, params.lr)
    flags = (params.weight_decay > 0, step == 1, params.nesterov)
    one_pass(_update, state, grad, weight_out, (*flags, factors), team)


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
    for i in range(master.size):
        p = master[i]
        g = as_float32(grad[i]) * grad_scale
        if decays:  # by 0 it would make a NaN of an infinite weight's gradient; loops are split by these flags
            g = g + weight_decay * p
        if momentum_buffer is not None:
            m = g if first else momentum * momentum_buffer[i] + rest * g
            momentum_buffer[i] = m
            g = g + momentum * m if nesterov else m
        p = p - lr * g
        master[i] = p
        store_weight(weight_out, grad, i, p)
