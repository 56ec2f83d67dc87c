"""Quantized frozen weights: how many bytes they take, and the kernels that dequantize them, as ``bitsandbytes`` has it.

- ``nf4`` with double quantization (Dettmers et al., QLoRA, section 3): two values a byte; a scale for each block of 64
  values, in one byte; a float32 scale for each 256 of these scales, and a float32 offset for all. Together 4.127 bits a
  value (``bitsandbytes.functional.quantize_4bit``).
- ``int8`` (Dettmers et al., LLM.int8(), section 2): one byte a value and a float32 scale a row
  (``bitsandbytes.functional.int8_vectorwise_quant``).

The last block of a matrix may be shorter than the others: it has a scale all the same. The tables of the values that a
code stands for are equal for all matrices, 1,088 bytes in all, and are not counted.
"""

import math
from collections.abc import Iterable
from typing import Final, Literal

from planner.models.kernels import Elementwise, Kernels

Quantization = Literal["nf4", "int8"]

GRAIN_BYTES: Final = 16
"""Each tensor of a packed parameter begins at a multiple of this, as vector instructions want it."""

_BLOCK, _OUTER_BLOCK, _TABLE_BYTES = 64, 256, 1024


def in_grains(sizes_bytes: Iterable[int]) -> int:
    """Return the bytes of tensors one after another, each from a multiple of :data:`GRAIN_BYTES` on."""
    return sum(-(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES for num_bytes in sizes_bytes)


def packed_bytes(quantization: Quantization, shape: tuple[int, ...]) -> int:
    """Return the bytes of a quantized matrix and its scales, as they are kept and moved."""
    return in_grains(_tensors(quantization, *shape))


def dequantize(quantization: Quantization, shape: tuple[int, ...], dtype_bytes: int) -> Kernels:
    """Return the kernels that make a matrix of values of ``dtype_bytes`` from its packed form."""
    packed_bytes, *scales = _tensors(quantization, *shape)
    values_bytes = dtype_bytes * math.prod(shape)
    if quantization == "int8":  # the values are converted, the scales divided by 127, and both multiplied in place
        return (*map(Elementwise, (packed_bytes + values_bytes, 2 * scales[0], 2 * values_bytes + scales[0])),)
    blocks, outer_bytes, offset_bytes = scales
    decode, shift = blocks + outer_bytes + _TABLE_BYTES + 4 * blocks, 8 * blocks + offset_bytes
    return (*map(Elementwise, (decode, shift, packed_bytes + 4 * blocks + values_bytes)),)


def dequantized_bytes(quantization: Quantization, shape: tuple[int, ...], dtype_bytes: int) -> int:
    """Return the bytes that a dequantized matrix takes while it is used, with its scales in float32."""
    _, scales, *_ = _tensors(quantization, *shape)
    return dtype_bytes * math.prod(shape) + (4 * scales if quantization == "nf4" else 0)


def _tensors(quantization: Quantization, rows: int, columns: int) -> tuple[int, ...]:
    """Return the bytes of the tensors of a quantized matrix, packed values first."""
    num_params = rows * columns
    if quantization == "int8":
        return num_params, 4 * rows
    blocks = -(-num_params // _BLOCK)
    return -(-num_params // 2), blocks, 4 * -(-blocks // _OUTER_BLOCK), 4
