"""Weights that go to the device in fp8, see [Note: Weights in fp8] in :mod:`planner.decisions.fp8`.

Scale and bits are those of torchao's cast of the whole weight. So each rank finds the largest value of its own part of
a weight, and the ranks agree on the maximum.
"""

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from numba import njit

from executor.devices.backend import as_array
from executor.distributed.groups import Group
from executor.memory.pieces import DTYPES
from executor.optimizer.bf16 import bits_of_float32, float32_of_bits
from executor.optimizer.passes import as_float32
from executor.optimizer.workers import WorkerTeam
from planner.decisions.fp8 import CAST_AT_ONCE, Fp8Weights

_LARGEST_E4M3: Final = 448.0
_SMALLEST_DIVISOR: Final = 1e-12  # torchao.float8.float8_utils.EPS

_SIGN, _INFINITE, _NAN = np.uint32(1 << 31), np.uint32(0x7F800000), np.uint32(0x7F)
_LIMIT = np.float32(_LARGEST_E4M3).view(np.uint32)
_NORMAL = np.uint32(121 << 23)  # 2**-6, the smallest normal number of e4m3
_UNIT = np.uint32(141 << 23)  # 2**14, whose last place is the smallest number of e4m3
_REBIAS = np.uint32(((7 - 127) << 23) + 0x7FFFF & 0xFFFFFFFF)  # of the exponent; and half a unit, less one


@dataclasses.dataclass(slots=True)
class Fp8Copy:
    """Memory of a unit whose weights of products in fp8 are fetched or gathered in fp8.

    Attributes:
        sizes: of the memory.
        group: ranks that have shards of the unit, for casts alone.
        ranges: range of each weight in the unit.
        slot: uint8, the memory on the device.
        host: uint8, on the host: the scales, then the copy of the shard; empty if the shard is on the device.
        is_due: whether the host's weights have changed since they were cast, other than by an update of the schedule.
    """

    sizes: Fp8Weights
    group: Group
    ranges: tuple[slice, ...]
    slot: torch.Tensor
    host: torch.Tensor
    is_due: bool = True

    @property
    def must_cast(self) -> bool:
        """Whether the host's weights have to be cast before the next fetch."""
        return self.is_due and len(self.host) > 0

    @property
    def others(self) -> torch.Tensor:
        """Weights on the device that come in their own type, flat. The unit's range begins with them."""
        dtype = DTYPES[self.sizes.weight_bytes]
        start, count = self.sizes.others_start_bytes, self.sizes.num_ranks * self.sizes.own_others
        return self.slot[start : start + dtype.itemsize * count].view(dtype)

    @property
    def scales(self) -> torch.Tensor:
        """The scale of each weight on the device."""
        return self.slot[len(self.slot) - self.sizes.scales_bytes :].view(torch.float32)

    def matrix(self, index: int, shape: torch.Size) -> torch.Tensor:
        """Return a weight on the device.

        Autograd may save it: its version does not change when the slot is filled, see :mod:`executor.memory.state`.
        """
        return self.slot.data[self.ranges[index]].view(torch.float8_e4m3fn).view(shape)

    def fetches(self, weights: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies of a fetch, each as target on the device and source; ``weights`` are those of the host."""
        yield self._own(self._block), self.host[self.sizes.scales_bytes :]
        yield self._own(self.others), weights[: self.sizes.own_others]
        yield self.scales, self._host_scales

    def gathers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the all-gathers, each as target on the device and this rank's part."""
        for whole in (self._block, self.others) if self.sizes.num_ranks > 1 else ():
            yield whole, self._own(whole)

    def cast(self, weights: torch.Tensor, team: WorkerTeam) -> None:
        """Cast the host's weights, ``[shard]``, on a team. All ranks of the group call this together."""
        own = self._own_ranges()
        values = as_array(weights)
        largest = largest_bits(values, own, team)
        self.group.all_reduce(torch.from_numpy(largest), dist.ReduceOp.MAX)
        scales = as_array(self._host_scales)
        scales[:] = scales_of(largest)
        cast_to_fp8(values, scales, own, as_array(self.host[self.sizes.scales_bytes :]), team)
        self.is_due = False

    def cast_on_device(self, weights: torch.Tensor) -> None:
        """Cast a shard on the device, ``[shard]``, into its part of the slot. All ranks of the group call it together.

        The arithmetic is torchao's, a chunk at a time.
        """
        own, others = self._own_ranges(), self._own(self.others)
        largest = torch.zeros(len(own), dtype=torch.float32, device=weights.device)
        for i, values in enumerate(weights[part] for part in own):
            if len(values):
                largest[i] = torch.linalg.vector_norm(values, torch.inf, dtype=torch.float32)
        self.group.all_reduce(largest.view(torch.int32), dist.ReduceOp.MAX)  # NaN is the largest
        self.scales.copy_(_LARGEST_E4M3 / largest.double().clamp_(min=_SMALLEST_DIVISOR))
        out = self._own(self._block)
        for scale, part in zip(torch.split(self.scales, 1), own, strict=True):
            for begin in range(part.start, part.stop, CAST_AT_ONCE):
                chunk = slice(begin, min(begin + CAST_AT_ONCE, part.stop))
                scaled = torch.mul(weights[chunk], scale).clamp_(-_LARGEST_E4M3, _LARGEST_E4M3)
                out[chunk].view(torch.float8_e4m3fn).copy_(scaled)
        others.copy_(weights[: len(others)])

    @property
    def _block(self) -> torch.Tensor:
        return self.slot[: self.sizes.num_ranks * self.sizes.shard_params]

    @property
    def _host_scales(self) -> torch.Tensor:
        return self.host[: self.sizes.scales_bytes].view(torch.float32)

    def _own_ranges(self) -> list[slice]:
        """Return the part of each range that is in the rank's shard, counted from its beginning; it may be empty."""
        count = self.sizes.shard_params
        begin = self.group.rank * count
        ends = ((each.start - begin, each.stop - begin) for each in self.ranges)
        return [slice(first := min(max(start, 0), count), min(max(stop, first), count)) for start, stop in ends]

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.view(self.sizes.num_ranks, -1)[self.group.rank]


def largest_bits(values: npt.NDArray[Any], ranges: Iterable[slice], team: WorkerTeam) -> npt.NDArray[np.int32]:
    """Return the largest magnitude in each range, as the bits of a float32. NaN counts as the largest of all.

    Args:
        values: flat, float32 or bf16 bits (uint16).
        ranges: may be empty, whose largest magnitude is 0.
        team: threads to run on.
    """
    bits = values.view(np.uint32) if values.dtype == np.float32 else values
    magnitude, shift = bits.dtype.type(np.iinfo(bits.dtype).max >> 1), 32 - 8 * bits.itemsize
    result = np.zeros(len(ranges := list(ranges)), np.int32)
    lock = threading.Lock()
    for i, own in enumerate(ranges):

        def find(start: int, stop: int, i: int = i, first: int = own.start) -> None:
            found = int(_largest(bits[first + start : first + stop], magnitude)) << shift
            with lock:
                result[i] = max(result[i], found)

        team.run(find, own.stop - own.start)
    return result


def scales_of(largest: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the scales of weights with these largest magnitudes (``torchao.float8.float8_utils.amax_to_scale``)."""
    divisors = np.maximum(largest.view(np.float32).astype(np.float64), _SMALLEST_DIVISOR)
    return (_LARGEST_E4M3 / divisors).astype(np.float32)


def cast_to_fp8(
    values: npt.NDArray[Any], scales: npt.NDArray[np.float32], ranges: Iterable[slice], out: Any, team: WorkerTeam
) -> None:
    """Multiply values by the scale of their range, and write them as e4m3, saturated.

    Args:
        values: flat, float32 or bf16 bits (uint16).
        scales: one for each range.
        ranges: of values.
        out: the bits of e4m3, uint8, as long as ``values``.
        team: threads to run on.
    """
    for scale, own in zip(scales, ranges, strict=True):

        def cast(start: int, stop: int, scale: np.float32 = scale, first: int = own.start) -> None:
            _cast(values[first + start : first + stop], scale, out[first + start : first + stop])

        team.run(cast, own.stop - own.start)


@njit(nogil=True, cache=True)
def _largest(bits: Any, magnitude: Any) -> Any:
    """Return the largest of floats' bits without their signs; both are integers of one type."""
    largest = magnitude ^ magnitude
    for i in range(len(bits)):
        largest = max(largest, bits[i] & magnitude)
    return largest


@njit(nogil=True, cache=True)
def _cast(values: Any, scale: Any, out: Any) -> None:
    """Write values times ``scale`` as the bits of e4m3 (``c10/util/Float8_e4m3fn.h``), saturated."""
    for i in range(len(values)):
        bits = bits_of_float32(np.float32(as_float32(values[i]) * scale))
        sign = bits & _SIGN
        size = np.uint32(bits ^ sign)
        kept = min(size, _LIMIT)
        normal = np.uint32(kept + _REBIAS + ((kept >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
        small = np.uint32(bits_of_float32(np.float32(float32_of_bits(kept) + np.float32(16384.0))) - _UNIT)
        narrow = small if kept < _NORMAL else normal
        narrow = _NAN if size > _INFINITE else narrow
        out[i] = np.uint8(narrow | (sign >> np.uint32(24)))
