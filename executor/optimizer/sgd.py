"""SGD with momentum on a CPU in one pass over memory: 20 bytes a parameter, 12 without momentum."""

from dataclasses import dataclass
from typing import Any, Final

from numba import njit

from executor.optimizer.passes import HostStep, as_float32, check_params, float32s, store_weight


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
    for i in range(master.size):
        p = master[i]
        g = as_float32(grad[i]) * grad_scale
        if decays:  # 0 * an infinite weight would be NaN; the compiler makes a loop for each value of the flag
            g = g + weight_decay * p
        if momentum_buffer is not None:
            m = g if first else momentum * momentum_buffer[i] + rest * g
            momentum_buffer[i] = m
            g = g + momentum * m if nesterov else m
        p = p - lr * g
        master[i] = p
        store_weight(weight_out, grad, i, p)


sgd_step: Final = HostStep(_update, ("momentum_buffer",), _kernel_args, has_buffers=lambda params: params.momentum != 0)
"""As ``torch.optim.SGD`` (Sutskever et al., ICML 2013), with g = ``grad_scale`` * ``grad``::

    g = g + weight_decay * p
    m = g at the first step, then momentum * m + (1 - dampening) * g
    p = p - lr * (g + momentum * m with Nesterov's momentum, else m)

Step 1 has no momentum yet. Without momentum m is not used, and may be ``None``.
"""
