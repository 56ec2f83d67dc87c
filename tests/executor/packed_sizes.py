"""Bytes of quantized matrices, as ``bitsandbytes`` keeps them.

- ``nf4`` with double quantization (Dettmers et al., QLoRA, section 3): two values a byte; a scale for each block of 64
  values, in one byte; a float32 scale for each 256 of these scales, and a float32 offset for all. Together 4.127 bits a
  value (``bitsandbytes.functional.quantize_4bit``).
- ``int8`` (Dettmers et al., LLM.int8(), section 2): one byte a value and a float32 scale a row
  (``bitsandbytes.functional.int8_vectorwise_quant``).

The last block of a matrix may be shorter than the others: it has a scale all the same. The tables of the values that a
code stands for are equal for all matrices, 1,088 bytes in all, and are not counted.
"""

from planner.models.quantization import Quantization, in_grains

_BLOCK, _OUTER_BLOCK = 64, 256


def packed_bytes(quantization: Quantization, shape: tuple[int, ...]) -> int:
    """Return the bytes of a quantized matrix and its scales, as they are kept and moved."""
    return in_grains(_tensors(quantization, *shape))


def _tensors(quantization: Quantization, rows: int, columns: int) -> tuple[int, ...]:
    """Return the bytes of the tensors of a quantized matrix, packed values first."""
    num_params = rows * columns
    if quantization == "int8":
        return num_params, 4 * rows
    blocks = -(-num_params // _BLOCK)
    return -(-num_params // 2), blocks, 4 * -(-blocks // _OUTER_BLOCK), 4
