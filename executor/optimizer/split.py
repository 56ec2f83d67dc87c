"""Float32 master copies as two halves: the bf16 weight, and the lower 16 bits.

[Note: Split masters] A master copy beside a bf16 weight stores most of the weight twice. Here it is the weight and a
*remainder*: the lower 16 bits of the float32. The upper 16 bits follow from both: they are those of the weight, or one
less if the weight was rounded up (as integers; signs, denormals and the step to infinity need no case of their own). It
was rounded up if the lower half is above 0x8000, and not if it is below. At exactly 0x8000 both neighbours are equally
near, and the even one becomes the weight. Then both the upper half of the weight and the one below are possible: 65,537
masters round to an even weight, and no 16 bits tell them apart. So a remainder of 0x8000 means the master below, and
that above gets another remainder: one that no other master in its block of :data:`BLOCK` has. There always is one. The
block keeps it as its *tie*, xor 0x8000, so that 0 stands for a block without such masters, which is the usual case (one
master in 131,072 is one). Masters are restored to the last bit, whatever they are. NaN becomes 0x7FC00000.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Final, Self, final

import numpy as np
import numpy.typing as npt
import torch
from numba import njit, types
from numba.extending import overload

from executor.optimizer.bf16 import bits_of_float32, float32_of_bits
from planner.decisions.precision import TIE_PARAMS as BLOCK

CHUNK: Final = 8 * BLOCK
"""Masters that are whole at a time in an update: they stay in a core's first cache."""

_AT_ONCE: Final = 1 << 22  # and outside an update
_TIE, _NONE = np.uint16(0x8000), np.uint16(0)
_TIE32, _ODD_AND_LOWER, _HALF = np.uint32(0x8000), np.uint32(0x1FFFF), np.uint32(0x7FFF)
_ZERO, _ONE, _SHIFT = np.uint32(0), np.uint32(1), np.uint32(16)
_MAGNITUDE, _INFINITY, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC0)
_NUM_CODES: Final = BLOCK + 1  # more than a block can use
_LEAST: Final = -0x8000  # as int16, the same bits as a remainder of 0x8000

Halves = npt.NDArray[np.uint16]


@njit(nogil=True, cache=True)
def join(weights: Any, remainders: Any, ties: Any, values: Any) -> None:
    """Write the masters of whole blocks, the last of which may be short, to float32 ``values``. Kernels may call it."""
    for i in range(weights.size):
        lower = np.uint32(np.int32(np.int16(remainders[i])))  # with its sign: at 0x8000 and above, the half below
        values[i] = float32_of_bits(np.uint32(np.uint32(np.uint32(weights[i]) << _SHIFT) + lower))
    for block in range(ties.size):
        if ties[block] != _NONE:
            code = np.uint16(ties[block] ^ _TIE)
            for i in range(block * BLOCK, min(block * BLOCK + BLOCK, weights.size)):
                if remainders[i] == code:
                    values[i] = float32_of_bits(np.uint32(np.uint32(np.uint32(weights[i]) << _SHIFT) | _TIE32))


@njit(nogil=True, cache=True)
def split(values: Any, weights: Any, remainders: Any, ties: Any) -> None:
    """Write weights, remainders and ties of the masters of whole blocks, the reverse of :func:`join`."""
    most = _ZERO
    for i in range(weights.size):  # as :func:`executor.optimizer.bf16.float32_to_bf16`; in integers, it is vectorised
        bits = bits_of_float32(values[i])
        bias = np.uint32(_HALF + np.uint32(np.uint32(bits >> _SHIFT) & _ONE))
        is_nan = np.uint32(bits & _MAGNITUDE) > _INFINITY
        weights[i] = np.uint16(_NAN if is_nan else np.uint32(np.uint32(bits + bias) >> _SHIFT))
        remainders[i] = np.uint16(_ZERO if is_nan else bits)
        most = max(most, _ONE if np.uint32(bits & _ODD_AND_LOWER) == _TIE32 else _ZERO)
    ties[:] = _NONE
    if most:
        for block in range(ties.size):
            _set_tie(values, remainders, ties, block)


@njit(nogil=True, cache=True)
def _set_tie(values: Any, remainders: Any, ties: Any, block: Any) -> None:
    used = np.zeros(_NUM_CODES, np.bool_)
    start, stop, code = block * BLOCK, min(block * BLOCK + BLOCK, remainders.size), np.uint16(0)
    for i in range(start, stop):
        if remainders[i] < _NUM_CODES:
            used[remainders[i]] = True
    while used[code]:
        code = np.uint16(code + 1)
    for i in range(start, stop):
        bits = bits_of_float32(values[i])
        if np.uint32(bits & _ODD_AND_LOWER) == _TIE32 and np.uint32(bits & _MAGNITUDE) <= _INFINITY:
            remainders[i] = code
            ties[block] = np.uint16(code ^ _TIE)


def cut_buffers(buffers: Any, start: Any, stop: Any, num_params: Any) -> Any:
    """Return a range of each buffer, which has a value for each parameter or for each block. Kernels only."""
    raise NotImplementedError


@overload(cut_buffers)
def _cut_buffers(buffers: Any, start: Any, stop: Any, num_params: Any) -> Any:  # noqa: ARG001 - as it is called
    def none(buffers: Any, start: Any, stop: Any, num_params: Any) -> Any:  # noqa: ARG001
        return ()

    def absent(buffers: Any, start: Any, stop: Any, num_params: Any) -> Any:
        return (None, *cut_buffers(buffers[1:], start, stop, num_params))

    def there(buffers: Any, start: Any, stop: Any, num_params: Any) -> Any:
        first = buffers[0]
        if len(first) != num_params:
            start_block, stop_block = start // BLOCK, -(-stop // BLOCK)
            return (first[start_block:stop_block], *cut_buffers(buffers[1:], start, stop, num_params))
        return (first[start:stop], *cut_buffers(buffers[1:], start, stop, num_params))

    if not len(buffers):
        return none
    return there if isinstance(buffers[0], types.Array) else absent


def chunks(master: Any) -> Any:
    """Return where the chunks of a master copy begin, for :func:`open_chunk`. Kernels only.

    A kernel opens one chunk of the master copy after another, updates its masters as float32, and closes
    it. So split masters pass through a core's cache, and are whole only there. A master copy that is not split is one
    chunk, of the very memory. To a kernel, a split one is a tuple: :meth:`SplitMaster.halves` and the range that is
    updated, of which buffers and gradient are.
    """
    raise NotImplementedError


def open_chunk(master: Any, begin: Any, buffers: Any, grad: Any, values: Any) -> Any:
    """Return the masters of the chunk at ``begin``, the same range of buffers and gradient, and its beginning in them.

    If masters are split, they are written to ``values``, float32. Kernels only.
    """
    raise NotImplementedError


def close_chunk(master: Any, begin: Any, values: Any) -> Any:
    """Split the masters in ``values`` again, if they are split. Kernels only."""
    raise NotImplementedError


@overload(chunks)
def _chunks(master: Any) -> Any:
    def whole(master: Any) -> Any:  # noqa: ARG001
        return range(0, 1, 1)

    def parts(master: Any) -> Any:
        return range(master[3] // BLOCK * BLOCK, master[4], CHUNK)

    return whole if isinstance(master, types.Array) else parts


@overload(open_chunk)
def _open_chunk(master: Any, begin: Any, buffers: Any, grad: Any, values: Any) -> Any:  # noqa: ARG001
    def whole(master: Any, begin: Any, buffers: Any, grad: Any, values: Any) -> Any:  # noqa: ARG001
        return master, buffers, grad, 0

    def part(master: Any, begin: Any, buffers: Any, grad: Any, values: Any) -> Any:
        weights, remainders, ties, start, stop = master
        end = min(begin + CHUNK, weights.size)
        join(weights[begin:end], remainders[begin:end], ties[begin // BLOCK : -(-end // BLOCK)], values)
        first, last = max(begin, start), min(end, stop)
        cut = cut_buffers(buffers, first - start, last - start, grad.size)
        return values[first - begin : last - begin], cut, grad[first - start : last - start], first - start

    return whole if isinstance(master, types.Array) else part


@overload(close_chunk)
def _close_chunk(master: Any, begin: Any, values: Any) -> Any:  # noqa: ARG001
    def whole(master: Any, begin: Any, values: Any) -> None:
        pass

    def part(master: Any, begin: Any, values: Any) -> None:
        weights, remainders, ties, _, _ = master
        end = min(begin + CHUNK, weights.size)
        split(values, weights[begin:end], remainders[begin:end], ties[begin // BLOCK : -(-end // BLOCK)])

    return whole if isinstance(master, types.Array) else part


@final
@dataclasses.dataclass(frozen=True, slots=True)
class SplitMaster:
    """A range of split masters, see [Note: Split masters]. It is sliced and written like a flat float32 tensor.

    Attributes:
        weights: bf16, of whole blocks beginning with the first; the last may be short.
        remainders: int16, of the same length.
        ties: int16, one for each block.
        start, stop: the range.
    """

    weights: torch.Tensor
    remainders: torch.Tensor
    ties: torch.Tensor
    start: int
    stop: int

    @classmethod
    def of_zeros(cls, num_params: int) -> Self:
        """Return masters of 0 in new host memory."""
        weights, remainders = (
            torch.zeros(num_params, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.int16)
        )
        return cls(
            weights, remainders, torch.zeros(-(-num_params // BLOCK), dtype=torch.int16, device="cpu"), 0, num_params
        )

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> "SplitMaster":
        start, stop, _ = part.indices(len(self))
        return dataclasses.replace(self, start=self.start + start, stop=self.start + max(start, stop))

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.weights.device

    @property
    def weight(self) -> torch.Tensor:
        """The masters rounded to bf16: the very memory."""
        return self.weights[self.start : self.stop]

    def halves(self) -> tuple[Halves, Halves, Halves]:
        """Return weights, remainders and ties as numpy views of bits. They must be in host memory."""
        return _bits(self.weights), _bits(self.remainders), _bits(self.ties)

    def joined(self) -> torch.Tensor:
        """Return a float32 copy."""
        found = torch.empty(len(self), device=self.device)
        for start in range(0, len(self), _AT_ONCE):
            part = self[start : start + _AT_ONCE]
            blocks = part.blocks()
            found[start : start + len(part)].copy_(_joined(blocks)[part.start - blocks.start :][: len(part)])
        return found

    @contextlib.contextmanager
    def opened(self) -> Iterator[torch.Tensor]:
        """Return a context with the masters as a float32 tensor, to change in place; afterwards they are split again.

        No block may be open twice.
        """
        blocks = self.blocks()
        values = _joined(blocks)
        yield values[self.start - blocks.start :][: len(self)]
        _split(values, blocks)

    def copy_(self, values: torch.Tensor) -> None:
        """Set the masters, from values of any floating-point type on any device."""
        blocks = self.blocks()
        if values.dtype is self.weights.dtype and (blocks.start, blocks.stop) == (self.start, self.stop):
            weights, remainders, ties = self.of_blocks()
            weights.copy_(values)  # which are their own masters
            remainders.zero_()
            ties.zero_()
            return
        for start in range(0, len(self), _AT_ONCE):
            with self[start : start + _AT_ONCE].opened() as masters:
                masters.copy_(values[start : start + _AT_ONCE])

    def zero_(self) -> None:
        """Set the masters to 0."""
        self.copy_(torch.zeros((), device=self.device).expand(len(self)))

    def blocks(self) -> "SplitMaster":
        """Return the whole blocks that the range has a part of."""
        start, stop = self.start // BLOCK * BLOCK, min(-(-self.stop // BLOCK) * BLOCK, len(self.weights))
        return dataclasses.replace(self, start=start, stop=stop)

    def of_blocks(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights, remainders and ties of a range of whole blocks."""
        of_range = slice(self.start, self.stop)
        return (
            self.weights[of_range],
            self.remainders[of_range],
            self.ties[self.start // BLOCK : -(-self.stop // BLOCK)],
        )


def opened(master: torch.Tensor | SplitMaster) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Return a context with a master copy as a tensor, to change in place, whatever its form."""
    return contextlib.nullcontext(master) if isinstance(master, torch.Tensor) else master.opened()


def _joined(blocks: SplitMaster) -> torch.Tensor:
    """Return the masters of whole blocks, float32."""
    parts = blocks.of_blocks()
    values = torch.empty(len(parts[0]), device=blocks.device)
    if values.is_cuda:
        join_with_operators(*parts, values)
    else:
        join(*map(_bits, parts), values.numpy())  # type: ignore[call-arg]
    return values


def _split(values: torch.Tensor, blocks: SplitMaster) -> None:
    """Set the masters of whole blocks, float32."""
    if values.is_cuda:
        split_with_operators(values, *blocks.of_blocks())
    else:
        split(values.numpy(), *map(_bits, blocks.of_blocks()))


def _bits(part: torch.Tensor) -> Halves:
    bits: Halves = part.view(torch.uint16).numpy()
    return bits


def join_with_operators(
    weights: torch.Tensor, remainders: torch.Tensor, ties: torch.Tensor, values: torch.Tensor
) -> None:
    """Do as :func:`join`, on any device. The host waits for the count of ties."""
    bits = values.view(torch.int32)
    bits.copy_(weights.view(torch.int16)).bitwise_left_shift_(16).add_(remainders)
    tied = ties.nonzero().view(-1)
    if len(tied):
        places, there = _places(tied, len(weights))
        places = places[there & (remainders[places] == ties[tied].bitwise_xor(_LEAST).view(-1, 1))]
        bits[places] = weights.view(torch.int16)[places].int().bitwise_left_shift(16).bitwise_or(0x8000)


def split_with_operators(
    values: torch.Tensor, weights: torch.Tensor, remainders: torch.Tensor, ties: torch.Tensor
) -> None:
    """Do as :func:`split`, on any device. The host waits for the count of ties."""
    bits, is_nan = values.view(torch.int32), values.isnan()
    weights.copy_(values).masked_fill_(is_nan, torch.nan)  # a device has another NaN
    remainders.copy_(bits).masked_fill_(is_nan, 0)  # the lower half, as integers wrap
    ties.zero_()
    found = bits.bitwise_and(0x1FFFF).eq(0x8000).logical_and_(is_nan.logical_not_()).nonzero().view(-1)
    if len(found):
        tied, row = torch.unique(found // BLOCK, return_inverse=True)
        places, there = _places(tied, len(weights))
        codes = remainders[places].int().bitwise_and_(0xFFFF).masked_fill_(~there, 0xFFFF).clamp_(max=_NUM_CODES)
        used = torch.zeros(len(tied), _NUM_CODES + 1, dtype=torch.int32, device=values.device)
        free = used.scatter_(1, codes.long(), 1).argmin(1).to(torch.int16)
        remainders[found] = free[row]
        ties[tied] = free.bitwise_xor(_LEAST)


def _places(blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places in some blocks, ``[blocks, BLOCK]``, all below ``length``, and which of them are there."""
    places = blocks.view(-1, 1) * BLOCK + torch.arange(BLOCK, device=blocks.device)
    return places.clamp(max=length - 1), places < length
