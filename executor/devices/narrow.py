"""Casts to fp8 on a CUDA device, by Triton: one pass finds the scale of a tensor, one writes it in both layouts.

SwiGLU and its backward find the largest values of what they write, so that these need no pass of their own. They round
where PyTorch's operators do; only exponentials may differ from PyTorch's in their last bits.

Products in fp8 take their matrices along the inner side, so a tensor that two products read is written in rows and
turned. A program reads a tile once and writes it both ways. Values are rounded in integers, as
:func:`executor.memory.fp8_weights.cast_to_fp8` does it, so that the bits are torch's on every device, and those of
Triton's interpreter.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from executor.devices.fused import _bits, _from_bf16, _to_bf16

BLOCK: Final = 16384
"""Values whose largest a program finds."""

SWIGLU_BLOCK: Final = 4096
"""Values of which a program computes SwiGLU, or its gradients."""

TILE: Final = (128, 64)
"""Rows and columns that a program casts: a line of the turned tile is a whole sector of memory."""

_EXACT: Final = {"num_warps": 8, "enable_fp_fusion": False, "enable_reflect_ftz": False}

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def _find_largest(values: "Any", largest: "Any", num_values: "Any", BLOCK: tl.constexpr) -> None:  # noqa: N803
    """In the bits of floats without signs, NaN is the largest of all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + at, at < num_values, other=0).to(tl.float32)
    tl.atomic_max(largest, tl.max(found.to(tl.int32, bitcast=True) & _MAGNITUDE, 0))


@triton.jit
def _wide(values: "Any") -> "Any":
    """Return float32 of these or of bf16 bits."""
    if values.dtype == tl.int16:
        values = _from_bf16(values)
    return values


@triton.jit
def _as(values: "Any", pointer: "Any") -> "Any":
    """Round float32 to what a pointer has: these, or bf16 bits."""
    if pointer.dtype.element_ty == tl.int16:
        values = _to_bf16(values)
    return values


@triton.jit
def _note_largest(values: "Any", largest: "Any") -> None:
    tl.atomic_max(largest, tl.max(_wide(values).to(tl.int32, bitcast=True) & _MAGNITUDE, 0))


@triton.jit
def _sigmoid(values: "Any") -> "Any":
    return tl.math.div_rn(tl.full(values.shape, 1.0, tl.float32), 1.0 + tl.exp(-values))


@triton.jit
def _swiglu(gate: "Any", up: "Any", out: "Any", largest: "Any", num_values: "Any", BLOCK: tl.constexpr) -> None:  # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < num_values
    x = _wide(tl.load(gate + at, there, other=0))
    silu = _wide(_as(tl.math.div_rn(x, 1.0 + tl.exp(-x)), out))
    made = _as(silu * _wide(tl.load(up + at, there, other=0)), out)
    tl.store(out + at, made, there)
    _note_largest(made, largest)


@triton.jit
def _swiglu_backward(
    gradient: "Any",
    gate: "Any",
    up: "Any",
    to_gate: "Any",
    to_up: "Any",
    largest_gate: "Any",
    largest_up: "Any",
    num_values: "Any",
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < num_values
    d = _wide(tl.load(gradient + at, there, other=0))
    x = _wide(tl.load(gate + at, there, other=0))
    silu = _wide(_as(tl.math.div_rn(x, 1.0 + tl.exp(-x)), to_up))
    made = _as(d * silu, to_up)
    tl.store(to_up + at, made, there)
    _note_largest(made, largest_up)
    inner = _wide(_as(d * _wide(tl.load(up + at, there, other=0)), to_gate))
    part = _sigmoid(x)
    made = _as(inner * (part * (1.0 + x * (1.0 - part))), to_gate)
    tl.store(to_gate + at, made, there)
    _note_largest(made, largest_gate)


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


def largest_of(values: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of contiguous values, float32 without dimensions."""
    (largest,) = _zeros(values, 1)
    _find_largest[(triton.cdiv(values.numel(), BLOCK),)](values, largest, values.numel(), BLOCK=BLOCK, num_warps=8)
    return largest.view(torch.float32)


def scales(largest: torch.Tensor, limit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale that lets the largest value be ``limit``, and its inverse, both float32 without dimensions."""
    scale, inverse = torch.empty_like(largest), torch.empty_like(largest)
    _make_scale[(1,)](largest.view(torch.int32), scale, inverse, LIMIT=limit, num_warps=1)
    return scale, inverse


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``silu(gate) * up`` of contiguous tensors, and its largest magnitude."""
    out, (largest,) = torch.empty_like(gate), _zeros(gate, 1)
    _swiglu[_swiglu_grid(gate)](*map(_bits, (gate, up, out)), largest, gate.numel(), BLOCK=SWIGLU_BLOCK, **_EXACT)
    return out, largest.view(torch.float32)


def swiglu_backward(gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of ``gate`` and ``up``, and the largest magnitude of each; all tensors are contiguous."""
    to_gate, to_up, largest = torch.empty_like(gate), torch.empty_like(up), _zeros(gate, 2)
    _swiglu_backward[_swiglu_grid(gate)](
        *map(_bits, (gradient, gate, up, to_gate, to_up)), *largest, gate.numel(), BLOCK=SWIGLU_BLOCK, **_EXACT
    )
    return to_gate, to_up, *(each.view(torch.float32) for each in largest)


def _swiglu_grid(values: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(values.numel(), SWIGLU_BLOCK),)


def _zeros(like: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [torch.zeros((), dtype=torch.int32, device=like.device) for _ in range(count)]


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
        **_EXACT,
    )
