"""bfloat16 inside numba kernels.

numpy has no bfloat16, so arrays are ``uint16`` here and hold the bits: the upper half of the equal float32. Without a
copy, a torch tensor gives its bits by ``tensor.view(torch.uint16).numpy()``.

numba recompiles a cached kernel only if the kernel's own file changes. After an edit here, delete the ``__pycache__``
of kernels that call these functions.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

_QUIET_NAN_BITS: Final = np.uint16(0x7FC0)

MASK: Final = 0xFFFFFFFF
SPREAD: Final = 0x9E3779B1  # 2**32 over the golden ratio, odd
MIXERS: Final = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's finalizer
_SPREAD32, _MIXER32_1, _MIXER32_2 = (np.uint32(factor) for factor in (SPREAD, *MIXERS))
_SHIFT13, _SHIFT16 = np.uint32(13), np.uint32(16)


def _bit_cast(source: types.Type, target: types.Type) -> Callable[..., Any]:
    """Return an intrinsic that reads the bits of a ``source`` as a ``target``; an argument of another type fails."""

    @intrinsic
    def cast(_typing_context: Any, value: Any) -> Any:
        if value != source:
            return None

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], context.get_value_type(target))

        return target(source), codegen

    return cast


float32_of_bits: Final = _bit_cast(types.uint32, types.float32)
"""In kernels only: the float32 with the bits of a uint32."""

bits_of_float32: Final = _bit_cast(types.float32, types.uint32)
"""In kernels only: the bits of a float32 as a uint32."""


@njit(nogil=True, cache=True)
def bf16_to_float32(bits: Any) -> Any:
    """Return the float32 equal to the bfloat16 with these bits (uint16). Exact."""
    return float32_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@njit(nogil=True, cache=True)
def float32_to_bf16(value: Any) -> Any:
    """Return the bits (uint16) of the bfloat16 nearest to a float32, ties to even.

    Values beyond the largest bfloat16 by at least half a unit in the last place become infinite. Denormals are kept.
    Every NaN becomes the quiet 0x7FC0, because rounding the bits of a NaN could give an infinity.
    """
    if np.isnan(value):
        return _QUIET_NAN_BITS
    bits = bits_of_float32(value)
    # Half a unit, or one less if the upper half is even: then a tie does not round up.
    bias = np.uint32(0x7FFF) + (np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + bias) >> np.uint32(16))


@njit(nogil=True, cache=True)
def float32_to_bf16_by(value: Any, noise: Any) -> Any:
    """Return the bits (uint16) of a neighbouring bfloat16: the one away from 0 if ``noise`` and the cut-off bits carry.

    With ``noise`` uniform in [0, 2**16) (uint32), the expected value is the float32's own. A value that is a bfloat16
    stays as it is, and every NaN becomes the quiet 0x7FC0.
    """
    if np.isnan(value):
        return _QUIET_NAN_BITS
    return np.uint16(np.uint32(bits_of_float32(value) + noise) >> np.uint32(16))


def _mixed(word: int) -> int:
    """Return murmur3's finalizer of 32 bits."""
    for shift, factor in zip((16, 13), MIXERS, strict=True):
        word = ((word ^ word >> shift) * factor) & MASK
    return word ^ word >> 16


@functools.lru_cache(4096)
def noise_key(*words: int) -> int:
    """Return the 32 bits with which positions are hashed, a hash of these words of 32 bits, of which order counts."""
    return functools.reduce(lambda key, word: _mixed((key * SPREAD + (word & MASK) + 1) & MASK), words, 0)


@njit(nogil=True, cache=True)
def noise_at(position: Any, key: Any) -> Any:
    """Return the 32 random bits of a position (uint32), see [Note: Stochastic rounding]."""
    bits = np.uint32(position ^ key)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> _SHIFT16)) * _MIXER32_1)
    bits = np.uint32(np.uint32(bits ^ np.uint32(bits >> _SHIFT13)) * _MIXER32_2)
    return np.uint32(bits ^ np.uint32(bits >> _SHIFT16))


@njit(nogil=True, cache=True)
def noise_of_weight(noise: Any) -> Any:
    """Return 16 random bits more, of the 32 at a position, see [Note: Stochastic rounding]."""
    return np.uint32(np.uint32(noise * _SPREAD32) >> _SHIFT16)
