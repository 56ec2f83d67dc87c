"""AdamW on a CPU in one pass over memory.

A step that casts the gradient, updates, and casts the weight back walks memory three times, some 54 bytes a parameter.
This one reads gradient (2), master weight, m and v (12) and writes the last three and the bf16 weight (14) once: 28.

[Note: Rounding]
Kernels are compiled without any fast-math flag. Each flag that would change the code lets LLVM round the vectorised
body, its remainder loop, and another machine's vectors differently: ``contract`` fuses a multiply and an add where
that pays, ``reassoc`` regroups, ``arcp`` and ``afn`` may take estimates in vectors but not in scalars. Without them
every operation is the IEEE float32 one, so that a parameter's new bits do not depend on the piece, thread or machine
that updates it (the payload of a NaN aside). Memory bounds the loop, so the flags would gain nothing.
"""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.extending import overload

from executor.optimizer.bf16 import bf16_to_float32, float32_to_bf16
from executor.optimizer.workers import WorkerTeam

Float32Array = npt.NDArray[np.float32]
Bf16Array = npt.NDArray[np.uint16]

BYTES_PER_PARAM: Final = 28
"""Bytes that a step reads and writes per parameter, with bf16 gradients and weights."""


@dataclass(frozen=True, slots=True)
class AdamWParams:
    """Hyper-parameters, as ``torch.optim.AdamW`` names and bounds them.

    Raises:
        ValueError: a negative ``lr``, ``eps`` or ``weight_decay``, or a beta outside [0, 1).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}, but must be finite and at least 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 0 and less than 1")


def adamw_step(
    master: Float32Array,
    exp_avg: Float32Array,
    exp_avg_sq: Float32Array,
    grad: Bf16Array | Float32Array,
    weight_out: Bf16Array | None,
    params: AdamWParams,
    step: int,
    grad_scale: float = 1.0,
    team: WorkerTeam | None = None,
) -> None:
    """Take one AdamW step (decoupled weight decay) on flat arrays of equal length, in place.

    With g = ``grad_scale`` * ``grad``, as ``torch.optim.AdamW`` without amsgrad (Loshchilov and Hutter,
    arXiv:1711.05101)::

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / (sqrt(v) / sqrt(1 - beta2**step) + eps)

    Factors of the whole step are worked out in double precision and rounded to float32 once; the rest is float32. NaN
    and infinite gradients go through. See [Note: Rounding]: the bits do not depend on how ``team`` cuts the range.

    Args:
        master: weights p, float32 ``[num_params]``, updated.
        exp_avg: first moment m, float32 ``[num_params]``, updated.
        exp_avg_sq: second moment v, float32 ``[num_params]``, updated.
        grad: gradient, float32 or bf16 bits (uint16), ``[num_params]``, only read.
        weight_out: where the new weights go as bf16 bits (uint16), ``[num_params]``; ``None`` in float32 training,
            where ``master`` is the weight.
        params: hyper-parameters.
        step: which step this is, from 1.
        grad_scale: multiplies the gradient in float32: the clip factor, one over a loss scale, or their product.
        team: threads to run on; ``None`` means the calling thread.

    None of the arrays may overlap another.

    Raises:
        ValueError: an array of the wrong dtype, length or layout, or ``step`` below 1.
    """
    _check_array("master", master, ("float32",), master.size)
    _check_array("exp_avg", exp_avg, ("float32",), master.size)
    _check_array("exp_avg_sq", exp_avg_sq, ("float32",), master.size)
    _check_array("grad", grad, ("uint16", "float32"), master.size, written=False)
    if weight_out is not None:
        _check_array("weight_out", weight_out, ("uint16",), master.size)
    if step < 1:
        raise ValueError(f"step is {step}, but steps count from 1; count before the update, not after")
    factors = _factors(params, step, grad_scale)

    def update(start: int, stop: int) -> None:
        piece = slice(start, stop)
        weight_piece = None if weight_out is None else weight_out[piece]
        _update(master[piece], exp_avg[piece], exp_avg_sq[piece], grad[piece], weight_piece, factors)

    if team is None:
        update(0, master.size)
    else:
        team.run(update, master.size)


def warm_up(grad_dtype: npt.DTypeLike = np.uint16, *, writes_bf16: bool = True) -> None:
    """Compile the kernel for these types, or load it from numba's cache, so that no timed step has to.

    Args:
        grad_dtype: of the gradients to come: ``uint16`` (bf16 bits) or ``float32``.
        writes_bf16: whether steps will write bf16 weights.
    """
    state = np.zeros((3, 1), np.float32)
    weight_out = np.zeros(1, np.uint16) if writes_bf16 else None
    adamw_step(state[0], state[1], state[2], np.zeros(1, grad_dtype), weight_out, AdamWParams(), step=1)


def _check_array(
    name: str, array: npt.NDArray[Any], dtypes: tuple[str, ...], num_params: int, *, written: bool = True
) -> None:
    if array.dtype.name not in dtypes:
        remedy = "; a bf16 tensor is passed as tensor.view(torch.uint16).numpy()" if "uint16" in dtypes else ""
        raise ValueError(f"{name} has dtype {array.dtype}, but must be {' or '.join(dtypes)}{remedy}")
    if array.shape != (num_params,):
        raise ValueError(f"{name} has shape {array.shape}, but must be flat and as long as master: ({num_params},)")
    if not (array.flags.c_contiguous and array.flags.aligned and (array.flags.writeable or not written)):
        raise ValueError(f"{name} must be contiguous, aligned{' and writeable' if written else ''}; pass a plain slice")


def _factors(params: AdamWParams, step: int, grad_scale: float) -> tuple[np.float32, ...]:
    """Return the float32 factors of a step, in the order in which :func:`_update` unpacks them."""
    bias1 = 1 - params.beta1**step
    bias2 = 1 - params.beta2**step
    factors = (
        grad_scale,
        params.beta1,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        1 - params.lr * params.weight_decay,
        params.lr / bias1,
        1 / math.sqrt(bias2),
        params.eps,
    )
    return tuple(np.float32(factor) for factor in factors)


def _as_float32(bits: Any) -> Any:
    """Return a gradient element, bf16 bits or float32, as float32. Kernels only: numba takes the overload below."""
    raise NotImplementedError


@overload(_as_float32)
def _as_float32_of(bits: Any) -> Any:
    def same(bits: Any) -> Any:
        return bits

    return bf16_to_float32.py_func if bits == types.uint16 else same


# error_model: Python's own raises on a division by zero, and that branch would keep the loop from being vectorised.
@njit(nogil=True, cache=True, error_model="numpy")
def _update(master: Any, exp_avg: Any, exp_avg_sq: Any, grad: Any, weight_out: Any, factors: Any) -> None:
    grad_scale, beta1, rest1, beta2, rest2, decay, step_size, root_bias2_inverse, eps = factors
    for i in range(master.size):
        g = _as_float32(grad[i]) * grad_scale
        m = beta1 * exp_avg[i] + rest1 * g
        v = beta2 * exp_avg_sq[i] + rest2 * g * g
        p = master[i] * decay - step_size * m / (math.sqrt(v) * root_bias2_inverse + eps)
        exp_avg[i] = m
        exp_avg_sq[i] = v
        master[i] = p
        if weight_out is not None:
            weight_out[i] = float32_to_bf16(p)
