"""AdamW with moments in bf16 and stochastic rounding: on a CPU 20 bytes a parameter in one pass, and on a device.

[Note: Stochastic rounding] Rounded to the nearest bf16, the second moment would stand still: a step changes it by
1 - beta2 of the difference, often less than half a unit in its last place. So would weights in bf16. Therefore a value
is rounded up with a probability of its distance from the lower neighbour, and its expected value is exact. The random
bits are a hash of the seed, the step, the parameter's number in the optimizer and the value's position in the
parameter. So neither the placement, nor subgroups, nor how many ranks share the state change any bit. Each moment takes
16 of the hash's 32 bits. A weight takes the upper 16 bits of their product with an odd number: a function of both
halves, which is uniform beside either of them alone, and costs less than a second hash. Host and device hash alike, and
do the same operations in the same order, each rounded once. The step of the weights uses moments before they are
rounded.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import njit

from executor.optimizer.adamw import MOMENTS, AdamWParams, adamw_factors, advanced
from executor.optimizer.bf16 import MASK, MIXERS, SPREAD, bf16_to_float32, float32_to_bf16_by, noise_at, noise_key
from executor.optimizer.passes import HostStep, as_float32, store_master, store_weight
from executor.optimizer.split import CHUNK, chunks, close_chunk, open_chunk

_SHIFT16, _LOW = np.uint32(16), np.uint32(0xFFFF)


def _key(params: AdamWParams, step: int) -> int:
    assert params.seed is not None
    return noise_key(params.seed, params.seed >> 32, params.parameter, step)


def seeds_of(params: AdamWParams, step: int) -> tuple[np.uint32, np.uint32]:
    """Return the key of random bits, and the position of the first value."""
    return np.uint32(_key(params, step)), np.uint32(params.start & MASK)


def _kernel_args(params: AdamWParams, step: int, grad_scale: float) -> tuple[object, ...]:
    return seeds_of(params, step), np.float32(grad_scale), adamw_factors(params, step)


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
    values = np.empty(CHUNK, np.float32)
    for chunk in chunks(master):
        ps, (ms, vs), gs, offset = open_chunk(master, chunk, (exp_avg, exp_avg_sq), grad, values)
        key, first = seeds[0], np.uint32(seeds[1] + np.uint32(begin + offset))
        for i in range(ps.size):
            g = as_float32(gs[i]) * grad_scale
            p, m, v = advanced(as_float32(ps[i]), bf16_to_float32(ms[i]), bf16_to_float32(vs[i]), g, factors)
            noise = noise_at(np.uint32(first + np.uint32(i)), key)
            ms[i] = float32_to_bf16_by(m, np.uint32(noise & _LOW))
            vs[i] = float32_to_bf16_by(v, np.uint32(noise >> _SHIFT16))
            store_master(ps, i, p, noise)
            store_weight(weight_out, gs, i, p)
        close_chunk(master, chunk, values)


adamw_bf16_step: Final = HostStep(_update, MOMENTS, _kernel_args, buffer_dtype="uint16", seeded=True)
"""As :data:`executor.optimizer.adamw.adamw_step` with decoupled weight decay; moments are bf16 bits (uint16), and the
master copy may be, see [Note: Stochastic rounding]."""


def adamw_bf16_(
    master: torch.Tensor,
    buffers: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    params: AdamWParams,
    step: int,
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
    _noise_into(noise, half, params.start, _key(params, step))
    _round_into(exp_avg, m, torch.bitwise_and(noise, 0xFFFF, out=half))
    _round_into(exp_avg_sq, v, noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF))
    root = scratch.copy_(v.double().sqrt_())  # rounded once: torch's float32 root on a CPU may be a unit off
    weight = master.float()  # the same tensor, if the master copy is float32
    weight.mul_(decay).sub_(m.mul_(step_size).div_(root.mul_(root_bias2_inverse).add_(eps)))
    round_weights_into(master, weight, (gradient, scratch), params, step)


def round_weights_into(
    master: torch.Tensor, weight: torch.Tensor, scratch: tuple[torch.Tensor, torch.Tensor], params: Any, step: int
) -> None:
    """Round new weights to the master copy, unless they are the same tensor. ``scratch``, float32, is overwritten."""
    if weight is master:
        return
    noise, shifted = (values.view(torch.int32) for values in scratch)
    _noise_into(noise, shifted, params.start, _key(params, step))
    _round_into(master, weight, noise.mul_(signed(SPREAD)).bitwise_right_shift_(16).bitwise_and_(0xFFFF))


def _noise_into(bits: torch.Tensor, shifted: torch.Tensor, start: int, key: int) -> None:
    """Set ``bits``, int32, to :func:`noise_at` of each position: products wrap, and signs are masked off after shifts.

    ``shifted``, int32, is overwritten.
    """
    torch.arange(len(bits), dtype=torch.int32, out=bits)
    bits.add_(signed(start & MASK)).bitwise_xor_(signed(key))

    def mix(shift: int) -> None:
        bits.bitwise_xor_(torch.bitwise_right_shift(bits, shift, out=shifted).bitwise_and_(MASK >> shift))

    for shift, factor in zip((16, 13), MIXERS, strict=True):
        mix(shift)
        bits.mul_(signed(factor))
    mix(16)


def _round_into(target: torch.Tensor, values: torch.Tensor, noise: torch.Tensor) -> None:
    """Round float32 values by 16 random bits each (int32, overwritten); NaN as :func:`float32_to_bf16_by` does."""
    upper_halves = noise.add_(values.view(torch.int32)).view(torch.int16)[1::2]  # in little-endian order
    target.view(torch.int16).copy_(upper_halves)
    target.masked_fill_(values.isnan(), torch.nan)


def signed(bits: int) -> int:
    """Return the int32 with the bits of a uint32."""
    return bits - (1 << 32) if bits >> 31 else bits
