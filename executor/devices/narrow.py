"""Casts to fp8 on a CUDA device, by Triton: one pass finds the scale of a tensor, one writes it in both layouts.

Products in fp8 take their matrices along the inner side, so a tensor that two products read is written in rows and
turned. A program reads a tile once and writes it both ways. Values are rounded in integers, as
:func:`executor.memory.fp8_weights.cast_to_fp8` does it, so that the bits are torch's on every device, and those of
Triton's interpreter.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

BLOCK: Final = 16384
"""Values whose largest a program finds."""

TILE: Final = (128, 64)
"""Rows and columns that a program casts: a line of the turned tile is a whole sector of memory."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _find_largest(values: "Any", largest: "Any", num_values: "Any", BLOCK: tl.constexpr) -> None:  # noqa: N803
    """In the bits of floats without signs, NaN is the largest of all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + at, at < num_values, other=0).to(tl.float32)
    tl.atomic_max(largest, tl.max(found.to(tl.int32, bitcast=True) & _MAGNITUDE, 0))


@triton.jit
def _make_scale(largest: "Any", scale: "Any", inverse: "Any", LIMIT: tl.constexpr) -> None:  # noqa: N803
    """As ``torchao.float8.float8_utils.amax_to_scale``, in float64."""
    most = tl.load(largest).to(tl.float32, bitcast=True).to(tl.float64)
    least = tl.full((), 1e-12, tl.float64)
    found = (tl.full((), LIMIT, tl.float64) / tl.where(most < least, least, most)).to(tl.float32)
    tl.store(scale, found)
    tl.store(inverse, tl.math.div_rn(tl.full((), 1.0, tl.float32), found))


@triton.jit
def _cast(
    values: "Any",
    scale: "Any",
    in_rows: "Any",  # bits, or None
    turned: "Any",
    num_rows: "Any",
    num_columns: "Any",
    GRADIENT: tl.constexpr,  # noqa: N803 - e5m2, else e4m3
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < num_rows) & (column < num_columns)
    given = tl.load(values + row * num_columns + column, there, other=0)
    # Of bf16, the sign is read from the bits. If there was one conversion alone, Triton would compute all behind it
    # twice, once for each layout.
    if values.dtype.element_ty == tl.bfloat16:
        sign = (given.to(tl.int16, bitcast=True).to(tl.int32) >> 8) & 0x80
    else:
        sign = (given.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = (given.to(tl.float32) * tl.load(scale)).to(tl.int32, bitcast=True) & _MAGNITUDE
    # The largest number; the smallest normal one; a number whose last place is the smallest of all; the change of the
    # exponent's bias, with half a place less one; bits that go.
    if GRADIENT:
        kept = tl.minimum(size, 0x47600000)  # 57344
        normal = (kept + ((15 - 127) * 8388608 + 0xFFFFF) + ((kept >> 21) & 1)) >> 21
        small = (kept.to(tl.float32, bitcast=True) + 128.0).to(tl.int32, bitcast=True) - 0x43000000
        is_small = kept < 0x38800000  # 2**-14
    else:
        kept = tl.minimum(size, 0x43E00000)  # 448
        normal = (kept + ((7 - 127) * 8388608 + 0x7FFFF) + ((kept >> 20) & 1)) >> 20
        small = (kept.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        is_small = kept < 0x3C800000  # 2**-6
    narrow = tl.where(size > _INFINITE, 0x7F, tl.where(is_small, small, normal))
    narrow = (narrow | sign).to(tl.uint8)
    if in_rows is not None:
        tl.store(in_rows + row * num_columns + column, narrow, there)
    if turned is not None:
        tl.store(turned + column * num_rows + row, narrow, there)


def scales(values: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale that lets the largest value be ``limit``, and its inverse, both float32 without dimensions."""
    largest = torch.zeros((), dtype=torch.int32, device=values.device)
    scale, inverse = (torch.empty((), dtype=torch.float32, device=values.device) for _ in range(2))
    _find_largest[(triton.cdiv(values.numel(), BLOCK),)](values, largest, values.numel(), BLOCK=BLOCK, num_warps=8)
    _make_scale[(1,)](largest, scale, inverse, LIMIT=limit, num_warps=1)
    return scale, inverse


def cast(values: torch.Tensor, scale: torch.Tensor, in_rows: torch.Tensor | None, turned: torch.Tensor | None) -> None:
    """Write ``values``, ``[m, n]`` and contiguous, times their scale in fp8: as they are, and turned, ``[n, m]``."""
    m, n = values.shape
    dtype = next(out.dtype for out in (in_rows, turned) if out is not None)
    _cast[(triton.cdiv(m, TILE[0]), triton.cdiv(n, TILE[1]))](
        values,
        scale,
        None if in_rows is None else in_rows.view(torch.uint8),
        None if turned is None else turned.view(torch.uint8),
        m,
        n,
        GRADIENT=dtype is torch.float8_e5m2,
        ROWS=TILE[0],
        COLUMNS=TILE[1],
        num_warps=8,
        enable_fp_fusion=False,
        enable_reflect_ftz=False,
    )
