"""Quantized frozen weights: their formats, and how their tensors are packed.

``nf4`` and ``int8`` are formats of ``bitsandbytes``: 4.127 bits a value with all scales (Dettmers et al., QLoRA,
section 3), and one byte a value with a float32 scale a row (Dettmers et al., LLM.int8(), section 2).
"""

from collections.abc import Iterable
from typing import Final, Literal

Quantization = Literal["nf4", "int8"]

GRAIN_BYTES: Final = 16
"""Each tensor of a packed parameter begins at a multiple of this, as vector instructions want it."""


def in_grains(sizes_bytes: Iterable[int]) -> int:
    """Return the bytes of tensors one after another, each from a multiple of :data:`GRAIN_BYTES` on."""
    return sum(-(-num_bytes // GRAIN_BYTES) * GRAIN_BYTES for num_bytes in sizes_bytes)
