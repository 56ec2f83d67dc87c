"""AdamW with moments in bf16 or 8 bits, on a device; for the host's see :mod:`executor.optimizer.adamw`.

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

import torch

from executor.optimizer.adamw import AdamWParams, adamw_factors, seeds_of
from executor.optimizer.bf16 import MASK, MIXERS, SPREAD
from executor.optimizer.blocks import SIGNED, UNSIGNED, decoded, encode


def adamw_narrow_(
    master: torch.Tensor,
    buffers: tuple[torch.Tensor, ...],
    gradient: torch.Tensor,
    params: AdamWParams,
    step: int,
) -> None:
    """Take one step with torch's operators.

    The bits are those of :data:`executor.optimizer.adamw.adamw_step`, or where moments are codes with scales of
    :data:`executor.optimizer.adamw_8bit.adamw_8bit_step`. The gradient is overwritten. See [Note: Operators] in
    :mod:`planner.optimizers`.
    """
    exp_avg, exp_avg_sq, *scales = buffers
    beta1, rest1, beta2, rest2, decay, step_size, root_bias2_inverse, eps = map(float, adamw_factors(params, step))
    if scales:
        m, v = decoded(exp_avg, scales[0], SIGNED), decoded(exp_avg_sq, scales[1], UNSIGNED)
    else:
        m, v = exp_avg.float(), exp_avg_sq.float()
    scratch = gradient * rest2
    v.mul_(beta2).add_(scratch.mul_(gradient))
    m.mul_(beta1).add_(gradient.mul_(rest1))
    root = scratch.copy_(v.double().sqrt_())  # rounded once: torch's float32 root on a CPU may be a unit off
    moved = torch.mul(m, step_size, out=gradient).div_(root.mul_(root_bias2_inverse).add_(eps))
    weight = master.float()  # the same tensor, if the master copy is float32
    weight.mul_(decay).sub_(moved)
    noise, half = gradient.view(torch.int32), scratch.view(torch.int32)  # neither value is needed any more
    seeds = tuple(map(int, seeds_of(params, step)))
    if weight is not master:
        _noise_into(noise, half, *seeds)
        _round_into(master, weight, noise.mul_(signed(SPREAD)).bitwise_right_shift_(16).bitwise_and_(0xFFFF))
    if scales:
        encode(m, exp_avg, scales[0], SIGNED)
        encode(v, exp_avg_sq, scales[1], UNSIGNED)
    else:
        _noise_into(noise, half, *seeds)
        _round_into(exp_avg, m, torch.bitwise_and(noise, 0xFFFF, out=half))
        _round_into(exp_avg_sq, v, noise.bitwise_right_shift_(16).bitwise_and_(0xFFFF))


def _noise_into(bits: torch.Tensor, shifted: torch.Tensor, key: int, start: int) -> None:
    """Set ``bits``, int32, to :func:`noise_at` of each position: products wrap, and signs are masked off after shifts.

    ``shifted``, int32, is overwritten.
    """
    torch.arange(len(bits), dtype=torch.int32, out=bits)
    bits.add_(signed(start)).bitwise_xor_(signed(key))

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
