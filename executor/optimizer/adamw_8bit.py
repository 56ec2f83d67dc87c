"""AdamW with moments in 8 bits, in the format of ``bitsandbytes``, on a CPU in one pass.

The format is in :mod:`executor.optimizer.blocks`. The step of the weights uses moments before they are quantized. Codes
are the nearest ones, as those of ``bitsandbytes`` on a GPU, but second moments do not become 0, for a reason that
stands there too. Its CPU build finds codes in a table of 65,536 equal steps, which merges all second moments below
1/65,536 of the largest.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from executor.optimizer.adamw import MOMENTS, AdamWParams, adamw_factors, advanced, seeds_of
from executor.optimizer.bf16 import bits_of_float32, float32_of_bits, noise_at, noise_of_weight
from executor.optimizer.blocks import (
    LEAST_SCALE,
    SCALES,
    decode_signed,
    decode_unsigned,
    encode_signed,
    encode_unsigned,
)
from executor.optimizer.passes import BLOCK, as_float32, host_step, store_rounded, store_weight
from executor.optimizer.split import CHUNK, chunks, close_chunk, open_chunk

KEYS: Final = (*MOMENTS, *(SCALES[key] for key in MOMENTS))
"""Keys of codes, then of scales, in a parameter's state."""

_MAGNITUDE, _ZERO, _ONE = np.uint32(0x7FFFFFFF), np.uint32(0), np.float32(1)
_LEAST_BITS = LEAST_SCALE.view(np.uint32)


@njit(nogil=True, cache=True, error_model="numpy")
def _update(
    master: Any,
    exp_avg: Any,
    exp_avg_sq: Any,
    exp_avg_scale: Any,
    exp_avg_sq_scale: Any,
    grad: Any,
    weight_out: Any,
    rule: Any,
    start: Any,
) -> None:
    (key, first), grad_scale, factors = rule
    ms, vs, values = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(CHUNK, np.float32)
    buffers = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale)
    for chunk in chunks(master):
        ps, (all_m, all_v, m_scales, v_scales), gs, offset = open_chunk(master, chunk, buffers, grad, values)
        for block in range(m_scales.size):
            begin = block * BLOCK
            count = min(BLOCK, ps.size - begin)
            position = np.uint32(first + np.uint32(start + offset + begin))
            m_codes, v_codes = all_m[begin : begin + count], all_v[begin : begin + count]
            decode_signed(m_codes, m_scales[block], ms)
            decode_unsigned(v_codes, v_scales[block], vs)
            # The largest magnitudes as bits: in integers, NaN is larger than all numbers, and no flag is needed.
            m_most, v_most = _ZERO, _ZERO
            for i in range(count):
                g = as_float32(gs[begin + i]) * grad_scale
                p, m, v = advanced(as_float32(ps[begin + i]), ms[i], vs[i], g, factors)
                m_most = max(m_most, np.uint32(bits_of_float32(m) & _MAGNITUDE))
                v_most = max(v_most, np.uint32(bits_of_float32(v) & _MAGNITUDE))
                ms[i], vs[i] = m, v
                noise = noise_of_weight(noise_at(np.uint32(position + np.uint32(i)), key))
                store_rounded(ps, begin + i, p, noise)
                store_weight(weight_out, gs, begin + i, p)
            m_scales[block], v_scales[block] = float32_of_bits(m_most), float32_of_bits(v_most)
            encode_signed(ms, _ONE / float32_of_bits(max(m_most, _LEAST_BITS)), m_codes)
            encode_unsigned(vs, _ONE / float32_of_bits(max(v_most, _LEAST_BITS)), v_codes)
        close_chunk(master, chunk, values)


def _kernel_args(params: AdamWParams, step: int, grad_scale: float) -> tuple[object, ...]:
    return ((seeds_of(params, step), np.float32(grad_scale), adamw_factors(params, step)),)


adamw_8bit_step: Final = host_step(_update, _kernel_args, in_blocks=True, seeded=True)
"""As :data:`executor.optimizer.adamw.adamw_step` with decoupled weight decay; moments are codes (uint8), and their
scales (float32) one for each block. The first value is the first of a block. With seeds, the master copy may be bf16
bits (uint16), see [Note: Stochastic rounding] in :mod:`executor.optimizer.adamw_narrow`."""
