"""AdamW on a CUDA device in one kernel, by Triton: state, gradient and weight pass through memory once.

[Note: Fused updates] The kernel does the operations of :func:`executor.optimizer.adamw.advanced` in their order, and
each is rounded once: multiplies and adds are not fused, roots and quotients are exact, denormals stay. So the bits are
those of the kernels on the host, for every type of state (the payload of a NaN aside). bf16 values are read and written
as integers, for the same reason. Other optimizers, and devices without Triton, have chains of torch's operators
([Note: Operators] in :mod:`planner.optimizers`).

Triton compiles a kernel for each combination of types when it is first launched, in about a second, and keeps it on
disk. A session launches those that it needs when it begins, so that no update waits for it.
"""

import functools
from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
import triton.language as tl

from executor.optimizer.adamw import AdamWParams, adamw_factors, seeds_of
from executor.optimizer.adamw_narrow import signed
from executor.optimizer.bf16 import MIXERS, SPREAD
from executor.optimizer.blocks import LEAST_SCALE, SIGNED, UNSIGNED, borders
from executor.optimizer.passes import BLOCK, cut
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import Rule
from planner.decisions.precision import TIE_PARAMS
from planner.optimizers import OPTIMIZERS

assert BLOCK == TIE_PARAMS  # a row has one scale for each moment, and one tie

ROWS: Final = 4
"""Blocks that a program updates."""

OPTIONS: Final = {"num_warps": 4, "enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Of the compiler, see [Note: Fused updates]."""

_BLOCK = tl.constexpr(BLOCK)
_SPREAD, _MIXER_1, _MIXER_2 = (tl.constexpr(factor) for factor in (SPREAD, *MIXERS))
_LEAST_BITS = tl.constexpr(int(LEAST_SCALE.view("int32")))
_QUIET_NAN = tl.constexpr(0x7FC0)


@triton.jit
def _from_bf16(bits: "Any") -> "Any":
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _to_bf16_by(values: "Any", added: "Any") -> "Any":
    """Return the upper halves after an addition to the bits (uint32)."""
    rounded = (values.to(tl.uint32, bitcast=True) + added) >> 16
    return tl.where(values != values, _QUIET_NAN, rounded).to(tl.int16)  # noqa: PLR0124 - NaN


@triton.jit
def _to_bf16(values: "Any") -> "Any":
    """Return the nearest, ties to even."""
    return _to_bf16_by(values, ((values.to(tl.uint32, bitcast=True) >> 16) & 1) + 0x7FFF)


@triton.jit
def _noise(positions: "Any", key: "Any") -> "Any":
    """As :func:`executor.optimizer.bf16.noise_at`; positions are uint32."""
    bits = positions ^ key.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * _MIXER_1
    bits = (bits ^ (bits >> 13)) * _MIXER_2
    return bits ^ (bits >> 16)


@triton.jit
def _encode(values: "Any", there: "Any", ends: "Any") -> "Any":
    """Return codes and scales, as :func:`executor.optimizer.blocks.encode`: in integers, NaN is the largest."""
    most = tl.max(tl.where(there, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0), 1)
    least = tl.maximum(most, _LEAST_BITS).to(tl.float32, bitcast=True)
    values = values * tl.math.div_rn(tl.full(least.shape, 1.0, tl.float32), least)[:, None]
    codes = tl.zeros(values.shape, tl.int32)
    for i in tl.static_range(8):  # how many ends are below
        codes += tl.where(tl.load(ends + codes + ((128 >> i) - 1)) >= values, 0, 128 >> i)
    return codes.to(tl.uint8), most.to(tl.float32, bitcast=True)


@triton.jit
def _read(pointer: "Any", at: "Any", there: "Any") -> "Any":
    """Return values, or codes."""
    values = tl.load(pointer + at, there, other=0)
    if pointer.dtype.element_ty == tl.int16:
        values = _from_bf16(values)
    return values


@triton.jit
def _read_moment(
    pointer: "Any", at: "Any", there: "Any", scales: "Any", table: "Any", rows: "Any", num_params: "Any"
) -> "Any":
    values = _read(pointer, at, there)
    if scales is not None:
        of_rows = tl.load(scales + rows, rows * _BLOCK < num_params, other=0)
        values = tl.load(table + values.to(tl.int32)) * of_rows[:, None]
    return values


@triton.jit
def _write_moment(
    pointer: "Any",
    values: "Any",
    noise: "Any",
    at: "Any",
    there: "Any",
    scales: "Any",
    ends: "Any",
    rows: "Any",
    num_params: "Any",
) -> None:
    if scales is not None:
        codes, of_rows = _encode(values, there, ends)
        tl.store(pointer + at, codes, there)
        tl.store(scales + rows, of_rows, rows * _BLOCK < num_params)
    elif pointer.dtype.element_ty == tl.int16:
        tl.store(pointer + at, _to_bf16_by(values, noise), there)
    else:
        tl.store(pointer + at, values, there)


@triton.jit
def _join(
    weights: "Any", remainders: "Any", ties: "Any", rows: "Any", places: "Any", held: "Any", num_masters: "Any"
) -> "Any":
    """As :func:`executor.optimizer.split.join`."""
    upper = tl.load(weights + places, held, other=0).to(tl.int32) << 16
    lower = tl.load(remainders + places, held, other=0).to(tl.int32)
    tie = tl.load(ties + rows, rows * _BLOCK < num_masters, other=0).to(tl.int32)[:, None]
    is_above = (tie != 0) & (((lower ^ tie) & 0xFFFF) == 0x8000)
    return tl.where(is_above, upper | 0x8000, upper + lower).to(tl.float32, bitcast=True)


@triton.jit
def _split(
    values: "Any",
    weights: "Any",
    remainders: "Any",
    ties: "Any",
    rows: "Any",
    places: "Any",
    held: "Any",
    num_masters: "Any",
) -> None:
    """As :func:`executor.optimizer.split.split`."""
    bits = values.to(tl.int32, bitcast=True)
    is_nan = values != values  # noqa: PLR0124
    is_tie = held & ((bits & 0x1FFFF) == 0x8000) & (is_nan == 0)
    remainder = tl.where(is_nan, 0, bits & 0xFFFF)
    in_use = tl.where(held, remainder, -1)
    has_tie = tl.max(is_tie.to(tl.int32), 1)
    code = has_tie * 0
    taken = has_tie * tl.max((in_use == code[:, None]).to(tl.int32), 1)
    while tl.max(taken, 0) > 0:
        code += taken
        taken = has_tie * tl.max((in_use == code[:, None]).to(tl.int32), 1)
    tl.store(weights + places, _to_bf16(values), held)
    tl.store(remainders + places, tl.where(is_tie, code[:, None], remainder).to(tl.int16), held)
    tl.store(ties + rows, tl.where(has_tie != 0, code ^ 0x8000, 0).to(tl.int16), rows * _BLOCK < num_masters)


# What depends on the step or on the place has one kernel for all its values.
@triton.jit(do_not_specialize=["key", "position"])
def _update(  # noqa: PLR0913, PLR0917
    master: "Any",  # float32, or bf16 bits
    remainders: "Any",  # of a split master, with its ties; else None
    ties: "Any",
    exp_avg: "Any",  # float32, bf16 bits or codes
    exp_avg_sq: "Any",
    exp_avg_scale: "Any",  # of codes, with tables of values and of what lies between them; else None
    exp_avg_sq_scale: "Any",
    signed: "Any",
    unsigned: "Any",
    signed_ends: "Any",
    unsigned_ends: "Any",
    gradient: "Any",  # float32, or bf16 bits
    weight: "Any",  # bf16 bits, may be the gradient's memory; or None
    num_params: "Any",
    first: "Any",  # of the parameters, among the masters of whole blocks
    num_masters: "Any",
    key: "Any",
    position: "Any",
    scale: "Any",
    l2: "Any",  # weight decay in the gradient; or None
    limit: "Any",  # values of the gradient that reach it count as 0; or None
    beta1: "Any",
    rest1: "Any",
    beta2: "Any",
    rest2: "Any",
    decay: "Any",
    step_size: "Any",
    root_bias2_inverse: "Any",
    eps: "Any",
    ROWS: tl.constexpr,  # noqa: N803
) -> None:
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    held = places < num_masters
    if remainders is None:
        at, there = places, held
        old = _read(master, places, held)
    else:
        at = places - first
        there = (at >= 0) & (at < num_params)
        old = _join(master, remainders, ties, rows, places, held, num_masters)
    g = _read(gradient, at, there) * scale
    if limit is not None:
        g = tl.where(tl.abs(g) < limit, g, 0.0)
    if l2 is not None:
        g = g + l2 * old
    m = _read_moment(exp_avg, at, there, exp_avg_scale, signed, rows, num_params)
    v = _read_moment(exp_avg_sq, at, there, exp_avg_sq_scale, unsigned, rows, num_params)
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    p = old * decay - tl.math.div_rn(step_size * m, tl.math.sqrt_rn(v) * root_bias2_inverse + eps)
    noise = _noise((at + position).to(tl.uint32), key)
    _write_moment(exp_avg, m, noise & 0xFFFF, at, there, exp_avg_scale, signed_ends, rows, num_params)
    _write_moment(exp_avg_sq, v, noise >> 16, at, there, exp_avg_sq_scale, unsigned_ends, rows, num_params)
    if weight is not None:
        tl.store(weight + at, _to_bf16(p), there)
    if remainders is not None:
        p = tl.where(there, p, old)  # others in these blocks keep their values, but may get another remainder
        _split(p, master, remainders, ties, rows, places, held, num_masters)
    elif master.dtype.element_ty == tl.int16:
        tl.store(master + places, _to_bf16_by(p, (noise * _SPREAD) >> 16), there)
    else:
        tl.store(master + places, p, there)


def can_update(state: Sequence[torch.Tensor | SplitMaster], gradients: Sequence[torch.Tensor], rule: Rule) -> bool:
    """Return whether :func:`update` can take a step."""
    row = OPTIMIZERS[rule.entry.planned_as]
    weights = state[1 + len(rule.entry.buffers) :]
    starts = [state[0].start] if isinstance(state[0], SplitMaster) else []
    return (
        row.fuses
        and rule.entry.device is not rule.entry.back
        and all(tensor.dtype in _DTYPES for tensor in gradients)
        and all(isinstance(tensor, torch.Tensor) and tensor.dtype is torch.bfloat16 for tensor in weights)
        and len(weights) <= 1
        # Blocks of codes begin with a gradient, as those of a plan do, and are blocks of the master copy.
        and (not row.block_params or not any(x % BLOCK for x in (*starts, *map(len, gradients[:-1]))))
    )


_DTYPES: Final = (torch.float32, torch.bfloat16)


def update(
    state: Sequence[torch.Tensor | SplitMaster],
    gradients: Sequence[torch.Tensor],
    rule: Rule,
    step: int,
) -> None:
    """Take one step on the current stream, with a kernel for each gradient; see :func:`can_update`.

    The arguments are those of :func:`executor.devices.cuda.update_on_device`.
    """
    assert isinstance(rule.params, AdamWParams)
    in_gradient = rule.params.weight_decay and not rule.params.decoupled_weight_decay
    l2 = rule.params.weight_decay if in_gradient else None
    factors = float(rule.scale), l2, rule.params.limit, *map(float, adamw_factors(rule.params, step))
    begin, num_buffers = 0, len(rule.entry.buffers)
    for gradient in gradients:
        end = begin + len(gradient)
        if end > begin:
            params = rule.at(begin).params
            assert isinstance(params, AdamWParams)
            seeds = tuple(map(signed, map(int, seeds_of(params, step))))
            _launch(cut(state, begin, end), num_buffers, gradient, seeds, factors)
        begin = end


def _launch(
    state: Sequence[Any],
    num_buffers: int,
    gradient: torch.Tensor,
    seeds: tuple[int, ...],
    factors: tuple[float | None, ...],
) -> None:
    master, buffers, weights = state[0], state[1 : 1 + num_buffers], state[1 + num_buffers :]
    whole: tuple[Any, ...] = master, None, None
    first, num_masters = 0, len(gradient)
    if isinstance(master, SplitMaster):
        blocks = master.blocks()
        first, num_masters, whole = master.start - blocks.start, len(blocks), blocks.of_blocks()
    of_codes = (*buffers[2:], *_tables(gradient.device)) if buffers[2:] else (None,) * 6
    _update[(triton.cdiv(num_masters, ROWS * BLOCK),)](
        *(_bits(whole[0]), *whole[1:], *map(_bits, buffers[:2]), *of_codes),
        *(_bits(gradient), _bits(weights[0]) if weights else None),
        *(len(gradient), first, num_masters, *seeds, *factors),
        ROWS=ROWS,
        **OPTIONS,
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor


@functools.cache
def _tables(device: torch.device) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(table).to(device) for table in (SIGNED, UNSIGNED, borders(SIGNED), borders(UNSIGNED)))
