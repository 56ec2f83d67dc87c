"""AdamW with moments in bf16 and stochastic rounding: on a CPU 20 bytes a parameter in one pass, and on a device.

[Note: Stochastic rounding] Rounded to the nearest bf16, the second moment would stand still: a step changes it by
1 - beta2 of the difference, often less than half a unit in its last place. So a moment is rounded up with a probability
of its distance from the lower neighbour, and its expected value is exact. The random bits are a hash of the seed, the
step, the parameter's number in the optimizer and the value's position in the parameter. So neither the placement, nor
subgroups, nor how many ranks share the state change any bit. Host and device hash alike, and do the same operations in
the same order, each rounded once. The step of the weights uses moments before they are rounded.
"""

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numba import njit

from executor.optimizer.adamw import MOMENTS, AdamWParams, adamw_factors, advanced
from executor.optimizer.bf16 import bf16_to_float32, float32_to_bf16_by
from executor.optimizer.passes import HostStep, as_float32, store_weight

BYTES_PER_PARAM: Final = 20
"""Bytes that an update moves with a bf16 gradient and weight."""

_MASK: Final = 0xFFFFFFFF
_SPREAD: Final = 0x9E3779B1  # 2**32 over the golden ratio, odd
_FACTORS: Final = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's finalizer
_SPREAD32, _FACTOR32_1, _FACTOR32_2 = (np.uint32(factor) for factor in (_SPREAD, *_FACTORS))
_SHIFT13, _SHIFT16, _LOW = np.uint32(13), np.uint32(16), np.uint32(0xFFFF)


@dataclass(frozen=True, slots=True)
class AdamWBf16Params(AdamWParams):
    """Hyper-parameters of AdamW, and what random bits depend on.

    Attributes:
        seed: of the rounding.
        parameter: the parameter's number in the optimizer.
        start: position in the parameter of the first value.

    Raises:
        ValueError: as those of AdamW.
    """

    seed: int = 0
    parameter: int = 0
    start: int = 0


def _mixed(word: int) -> int:
    """Return murmur3's finalizer of 32 bits."""
    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        word = ((word ^ word >> shift) * factor) & _MASK
    return word ^ word >> 16


@functools.lru_cache(4096)
def _key(seed: int, parameter: int, step: int) -> int:
    """Return the 32 bits that a parameter's positions are hashed with at a step."""
    words = (seed & _MASK, seed >> 32 & _MASK, parameter & _MASK, step & _MASK)
    return functools.reduce(lambda key, word: _mixed((key * _SPREAD + word + 1) & _MASK), words, 0)


def _kernel_args(params: AdamWBf16Params, step: int, grad_scale: float) -> tuple[object, ...]:
    key = np.uint32(_key(params.seed, params.parameter, step))
    return (key, np.uint32(params.start & _MASK)), np.float32(grad_scale), adamw_factors(params, step)


@njit(nogil=True, cache=True)
def noise_at(position: Any, key: Any) -> Any:
    """Return the 32 random bits of a position (uint32)."""
    bits = np.uint32(np.uint32(position * _SPREAD32) ^ key)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> _SHIFT16)) * _FACTOR32_1)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> _SHIFT13)) * _FACTOR32_2)
    return np.uint32(bits ^ np.uint32(bits >> _SHIFT16))


@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    master: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    grad: Any,
    weight_out: Any,
    seeds: Any,
    grad_scale: Any,
    factors: Any,
    begin: Any,
) -> None:
    key, start = seeds
    first = np.uint32(start + np.uint32(begin))
    for i in range(master.size):
        g = as_float32(grad[i]) * grad_scale
        m, v = bf16_to_float32(exp_avg[i]), bf16_to_float32(exp_avg_sq[i])
        p, m, v = advanced(master[i], m, v, g, factors)
        noise = noise_at(np.uint32(first + np.uint32(i)), key)
        exp_avg[i] = float32_to_bf16_by(m, np.uint32(noise & _LOW))
        exp_avg_sq[i] = float32_to_bf16_by(v, np.uint32(noise >> _SHIFT16))
        master[i] = p
        store_weight(weight_out, grad, i, p)


adamw_bf16_step: Final = HostStep(_update, MOMENTS, _kernel_args, buffer_dtype="uint16", by_position=True)
"""As :data:`executor.optimizer.adamw.adamw_step` with decoupled weight decay; moments are bf16 bits (uint16), see
[Note: Stochastic rounding]."""


def adamw_bf16_(
    master: torch.Tensor, buffers: tuple[torch.Tensor, ...], gradient: torch.Tensor, params: AdamWBf16Params, step: int
) -> None:
    """Take one step with torch's operators; the bits are those of :data:`adamw_bf16_step`.

    The gradient is overwritten. See [Note: Operators] in :mod:`planner.optimizers`.
    """
    exp_avg, exp_avg_sq = buffers
    beta1, rest1, beta2, rest2, decay, step_size, root_bias2_inverse, eps = map(float, adamw_factors(params, step))
    scratch = gradient * rest2
    v = exp_avg_sq.float().mul_(beta2).add_(scratch.mul_(gradient))
    m = exp_avg.float().mul_(beta1).add_(gradient.mul_(rest1))
    noise, half = gradient.view(torch.int32), scratch.view(torch.int32)  # neither value is needed any more
    _noise_into(noise, half, params, step)
    _round_into(exp_avg, m, torch.bitwise_and(noise, 0xFFFF, out=half))
    _round_into(exp_avg_sq, v, noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF))
    root = scratch.copy_(v.double().sqrt_())  # rounded once: torch's float32 root on a CPU may be a unit off
    master.mul_(decay).sub_(m.mul_(step_size).div_(root.mul_(root_bias2_inverse).add_(eps)))


def _noise_into(bits: torch.Tensor, shifted: torch.Tensor, params: AdamWBf16Params, step: int) -> None:
    """Set ``bits``, int32, to :func:`noise_at` of each position: products wrap, and signs are masked off after shifts.

    ``shifted``, int32, is overwritten.
    """
    torch.arange(len(bits), dtype=torch.int32, out=bits)
    bits.add_(_signed(params.start & _MASK)).mul_(_signed(_SPREAD))
    bits.bitwise_xor_(_signed(_key(params.seed, params.parameter, step)))

    def mix(shift: int) -> None:
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, shift, out=shifted).bitwise_and_(_MASK >> shift))

    for shift, factor in zip((16, 13), _FACTORS, strict=True):
        mix(shift)
        bits.mul_(_signed(factor))
    mix(16)


def _round_into(target: torch.Tensor, values: torch.Tensor, noise: torch.Tensor) -> None:
    """Round float32 values by 16 random bits each (int32, overwritten); NaN as :func:`float32_to_bf16_by` does."""
    upper_halves = noise.add_(values.view(torch.int32)).view(torch.int16)[1::2]  # in little-endian order
    target.view(torch.int16).copy_(upper_halves)
    target.masked_fill_(values.isnan(), torch.nan)


def _signed(bits: int) -> int:
    return bits - (1 << 32) if bits >> 31 else bits
