"""Values in 8 bits, with one scale for each block of them, as ``bitsandbytes`` keeps optimizer state.

The format is that of ``bitsandbytes.functional.create_dynamic_map`` (Dettmers, *8-Bit Approximations for Parallelism in
Deep Learning*, arXiv:1511.04561): a code stands for one of 256 values between -1 and 1, which lie closer together near
0. The scale of a block is its largest magnitude, and what is kept is ``values[code] * scale``. A value that is not
finite makes its whole block NaN. Where blocks begin, [Note: Blocks] in :mod:`planner.optimizers` says.

Processors look up one value at a time, and two moments that are decoded and encoded by tables have four
look-ups. So kernels have none.

They encode by arithmetic. The values of a decade are means of ``n`` equal intervals, and the next decade has twice as
many. Let the *position* of a magnitude in a decade that ends at ``end`` be ``n * (8/9 + magnitude / (0.9 * end))``. It
goes from ``n`` to ``2 * n``, and halfway between neighbours it is a whole number. Its slope is smaller in each decade
than in the one before, so the position in the right decade is the least of all seven. The first interval of a decade is
five times as long as the last one before it. So halfway between their means the position is not ``2 * n``, but 0.2
more. From positions between both, 0.2 is subtracted. Then the whole part says the code. Numbers are such that it and
the fraction are bits of the float32.

That is exact, except where rounding matters: close to borders between codes. If a block has a value there (one block in
twenty), all its codes are compared with the borders beside them. So multiplies and adds may be fused: no code changes.

They decode by a table that lies in vector registers, if the processor can look up there (AVX-512 VBMI).

No second moment becomes 0. Small second moments get the least value above 0. If one became 0 and the first moment did
not, and the next gradient were 0, the step would divide by ``eps`` alone. That happens in the row of an embedding whose
token is not in the next batch: its weights would move by hundreds of times the learning rate.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import llvmlite.binding
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from executor.optimizer.adamw import MOMENTS
from executor.optimizer.bf16 import bits_of_float32
from executor.optimizer.passes import BLOCK

Table = npt.NDArray[np.float32]

LEAST_SCALE: Final = np.float32(1e-38)
"""Smaller scales are kept, but not divided by: one over them could be infinite."""


def _dynamic(*, signed: bool) -> Table:
    """Return the 256 values in order: means of intervals that divide seven decades, 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        num_ends = 2 ** (decade if signed else decade + 1) + 1
        ends = torch.linspace(0.1, 1, num_ends, dtype=torch.float32, device="cpu")  # a GPU's may differ in a last bit
        means = 10 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += means.tolist() + ((-means).tolist() if signed else [])
    return np.sort(np.array(found, np.float32))


SIGNED: Final = _dynamic(signed=True)
"""The values of codes of first moments, ascending, float32 ``[256]``."""

UNSIGNED: Final = _dynamic(signed=False)
"""The values of codes of second moments, likewise."""

VALUES: Final[Mapping[str, Table]] = dict(zip(MOMENTS, (SIGNED, UNSIGNED), strict=True))
"""By the key of codes in a parameter's state."""

SCALES: Final[Mapping[str, str]] = {key: f"{key}_scale" for key in MOMENTS}
"""The key of scales, by that of their codes."""


def borders(values: Table) -> Table:
    """Return what lies between the values of neighbouring codes; a border itself has the lower code.

    Nothing is below the first border of second moments: none becomes 0.
    """
    found = (values[:-1] + values[1:]) / np.float32(2)
    if not values[0]:
        found[0] = -np.inf
    return found


def decoded(codes: torch.Tensor, scales: torch.Tensor, values: Table) -> torch.Tensor:
    """Return float32 values, ``[num_values]``, of codes of any type and scales ``[blocks]``."""
    found = torch.from_numpy(values).to(codes.device)[codes.int()]
    for rows, of_rows in _rows(found, scales):
        rows.mul_(of_rows)
    return found


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: Table) -> None:
    """Quantize values to the nearest; no second moment becomes 0, see the module.

    Args:
        values: float32, ``[num_values]``, from the beginning of a block on; overwritten.
        codes: where codes go, ``[num_values]``, of any type.
        scales: where scales go, float32 ``[blocks]``.
        table: the values of codes.
    """
    for rows, of_rows in _rows(values, scales):
        torch.amax(rows.abs(), 1, keepdim=True, out=of_rows)
        rows.mul_(of_rows.clamp_min(float(LEAST_SCALE)).reciprocal_())
    codes.copy_(torch.bucketize(values, torch.from_numpy(borders(table)).to(values.device), out_int32=True))


def spread(scales: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return scales ``[blocks]`` as those of each value, ``[num_values]``."""
    return scales.repeat_interleave(BLOCK)[:num_values]


def _rows(values: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield whole blocks, ``[blocks, BLOCK]`` with scales ``[blocks, 1]``, and then a shorter one."""
    count = len(values) // BLOCK
    if count:
        yield values[: count * BLOCK].view(count, BLOCK), scales[:count].view(count, 1)
    if len(values) > count * BLOCK:
        yield values[count * BLOCK :].view(1, -1), scales[count:].view(1, 1)


_compiler: Any = config  # names of settings are made at run time
HAS_VBMI: Final = bool(
    llvmlite.binding.get_host_cpu_features().get("avx512vbmi") and not (_compiler.CPU_NAME or _compiler.CPU_FEATURES)
)
"""Whether numba compiles for a processor that looks up in registers: this one, if its settings name no other."""

_ALL_BITS, _HIGHEST = np.uint32(0xFFFFFFFF), np.uint32(255)
NEAR: Final = 3
"""How far the position at a border may be from a whole number, in units of its last bit; tests find 1."""


def _lines(table: Table, first: int, added: float) -> tuple[tuple[np.float32, ...], tuple[np.float32, ...]]:
    """Return slopes and offsets of positions by decade; the first has ``2**first`` intervals."""
    lines = [(2.0 ** (d + first) / 0.9 / 10.0 ** (d - 6), 2.0 ** (d + first) * 8 / 9) for d in range(7)]
    # The border above 0 is at 0.2 above a power of two as well, if the first line goes through there.
    num_intervals, border = 2.0**first, float(table[table > 0][0]) / 2
    slope = 0.8 / ((num_intervals + 1 - lines[0][1]) / lines[0][0] - border)
    lines[0] = slope, num_intervals + 0.2 - slope * border
    return tuple(np.float32(slope) for slope, _ in lines), tuple(np.float32(offset + added) for _, offset in lines)


def position_function(table: Table, *, signed: bool) -> tuple[Callable[[Any], Any], int]:
    """Return the kernel function of codes, from a float32 up to 1 to a uint32, and the bits of its fraction."""
    first = 0 if signed else 1
    bits = 16 - first
    added = np.float32(2 ** (23 - bits))  # so that bits of a float32 are units
    slopes, offsets = _lines(table, first, float(added))
    none, fifth, fifth_and_near = added.view(np.uint32), np.uint32(2**bits / 5), np.uint32(2**bits / 5 + 2 * NEAR)

    @njit(fastmath={"contract"}, error_model="numpy")
    def position(size: Any) -> Any:
        a, b = slopes, offsets
        low = min(size * a[0] + b[0], size * a[1] + b[1], size * a[2] + b[2])
        high = min(size * a[3] + b[3], size * a[4] + b[4], size * a[5] + b[5], size * a[6] + b[6])
        found = np.uint32(bits_of_float32(min(low, high)) - none)
        below = np.uint32(found - fifth_and_near)
        if np.uint32(found ^ below) > below:  # it has lost its highest bit: a power of two is in between
            found = np.uint32(found - fifth)
        return found

    return position, bits


def _encoder(table: Table, *, signed: bool) -> Callable[..., None]:
    """Return a kernel function that makes codes of values ``[count]`` times a factor, as :func:`encode` does."""
    position, bits = position_function(table, signed=signed)
    fraction, shift, near = np.uint32(2**bits - 1), np.uint32(bits), np.uint32(NEAR)
    zero = np.uint32(127) if signed else _ALL_BITS  # the code at position 0; unsigned values are 0 at position 1
    smallest = np.float32(0) if signed else table[1]  # no second moment becomes 0
    last = borders(table)[-1]
    ends = np.concatenate([[-np.inf], borders(table), [np.inf]]).astype(np.float32)

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def encode_block(values: Any, factor: Any, codes: Any) -> None:
        least = _ALL_BITS
        for i in range(codes.size):
            value = values[i] * factor
            found = position(min(max(abs(value), smallest), last))
            least = min(least, np.uint32(np.uint32(found + near) & fraction))
            steps = np.uint32(found >> shift)
            code = np.uint32(zero - steps) if signed and value < 0 else np.uint32(zero + steps)
            codes[i] = np.uint8(code if value <= last else _HIGHEST)  # of NaN too
        if least > np.uint32(2 * near):
            return
        for i in range(codes.size):
            value, made = values[i] * factor, np.int32(codes[i])
            codes[i] = np.uint8(made + (value > ends[made + 1]) - (value <= ends[made]))

    return encode_block


encode_signed, encode_unsigned = _encoder(SIGNED, signed=True), _encoder(UNSIGNED, signed=False)
"""Kernel functions, called with values, a factor, and where the codes go."""


def _in_registers(table: Table) -> Callable[..., None]:
    """Return a kernel function that looks up 64 codes, from an index on, with AVX-512 VBMI.

    An instruction looks up a byte of 64 codes in 128 entries: each byte of a float32 takes two, and a choice.
    """
    lanes, byte = 64, ir.IntType(8)

    def constants(values: Iterable[int], kind: ir.Type) -> ir.Constant:
        found = [int(value) for value in values]
        return ir.Constant(ir.VectorType(kind, len(found)), found)

    @intrinsic
    def look_up(_typing_context: Any, codes: Any, values: Any, _start: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            def at_start(number: int, kind: ir.Type) -> Any:
                array = context.make_array(signature.args[number])(context, builder, arguments[number])
                vector = ir.VectorType(kind, lanes).as_pointer()
                return builder.bitcast(builder.gep(array.data, [arguments[2]]), vector)

            def joined(lower: Any, upper: Any, *, kind: ir.Type) -> Any:
                in_turn = constants((lane + side for lane in range(lanes) for side in (0, lanes)), ir.IntType(32))
                return builder.bitcast(builder.shuffle_vector(lower, upper, in_turn), ir.VectorType(kind, lanes))

            vector = ir.VectorType(byte, lanes)
            name, function = "llvm.x86.avx512.vpermi2var.qi.512", ir.FunctionType(vector, [vector] * 3)
            permute = cgutils.get_or_insert_function(builder.module, function, name)  # type: ignore[no-untyped-call]
            wanted = builder.load(at_start(0, byte), align=1)
            is_upper = builder.icmp_signed("<", wanted, constants([0] * lanes, byte))
            found = []
            for of_byte in table.view(np.uint8).reshape(256, 4).T:
                a, b, c, d = (constants(entries, byte) for entries in np.split(of_byte, 4))
                lower, upper = builder.call(permute, [a, wanted, b]), builder.call(permute, [c, wanted, d])
                found.append(builder.select(is_upper, upper, lower))
            low, high = (joined(*pair, kind=ir.IntType(16)) for pair in (found[:2], found[2:]))
            builder.store(joined(low, high, kind=ir.FloatType()), at_start(1, ir.FloatType()), align=4)
            return context.get_dummy_value()

        return types.void(codes, values, types.intp), codegen

    return look_up


def decoder(table: Table, *, in_registers: bool = HAS_VBMI) -> Callable[..., None]:
    """Return a kernel function that writes the values of a block's codes, as :func:`decoded` does."""
    look_up, at_once = _in_registers(table), 64

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def decode_block(codes: Any, scale: Any, values: Any) -> None:
        start = 0
        if in_registers:
            for _ in range(codes.size // at_once):
                look_up(codes, values, start)
                start += at_once
        for i in range(start, codes.size):
            values[i] = table[codes[i]]
        for i in range(codes.size):
            values[i] *= scale

    return decode_block


decode_signed, decode_unsigned = decoder(SIGNED), decoder(UNSIGNED)
"""Kernel functions, called with the codes of a block, its scale, and where values go."""
