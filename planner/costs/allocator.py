"""A model of PyTorch's caching allocator: bytes requested, allocated and reserved for a schedule's buffers.

[Note: Allocator] The allocator rounds a request up to 512 B and cuts it from a *segment* that it got from the driver. A
segment has 2 MiB for requests up to 1 MiB, 20 MiB for requests below 10 MiB, and the request rounded up to 2 MiB for
larger ones. Freed blocks merge with free neighbours in their segment and wait for later requests; the smallest block
that fits is used first, and a large enough rest is split off. So three numbers differ: the bytes *requested*; the
blocks in use (*allocated*, ``torch.cuda.max_memory_allocated``, the number that is usually published); and the segments
(*reserved*, ``torch.cuda.max_memory_reserved``, the number that must fit on the device). Source: PyTorch 2,
``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``, ``should_split``, ``try_merge_blocks``)
with its default settings.

A buffer of a schedule may stand for several tensors of a unit, and is one block here. All streams share one pool here.
A real allocator has a pool per stream, so it may reserve more.
"""

import bisect
import dataclasses
import functools
from collections.abc import Hashable, Sequence

from planner.schedule.tasks import Tier
from planner.schedule.timeline import Timeline, buffer_spans

_MIN_BLOCK_BYTES = 512
_SMALL_BYTES = 2**20  # the largest request that is "small", and the least rest that a large block is split for
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_MIN_OWN_SEGMENT_BYTES = 10 * 2**20
_SEGMENT_GRAIN_BYTES = 2 * 2**20
_NUM_REPEATED = 3  # iterations: segments of one remain for the next


@dataclasses.dataclass(frozen=True, slots=True)
class AllocatorUse:
    """Peaks of an iteration; see [Note: Allocator].

    Attributes:
        requested_bytes: the bytes of the buffers.
        allocated_bytes: blocks in use.
        reserved_bytes: segments.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    def highest(self, other: "AllocatorUse") -> "AllocatorUse":
        """Return the maximum of each number."""
        return AllocatorUse(
            max(self.requested_bytes, other.requested_bytes),
            max(self.allocated_bytes, other.allocated_bytes),
            max(self.reserved_bytes, other.reserved_bytes),
        )

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that is free at the peak."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


def rounded_bytes(num_bytes: int) -> int:
    """Return the size of the block that a request gets: a multiple of 512 B, and at least that; 0 for nothing."""
    return -(-num_bytes // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES


def segment_bytes(block_bytes: int) -> int:
    """Return the size of the segment to get from the driver for a block that fits into no free one."""
    if block_bytes <= _SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if block_bytes < _MIN_OWN_SEGMENT_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-block_bytes // _SEGMENT_GRAIN_BYTES) * _SEGMENT_GRAIN_BYTES


@dataclasses.dataclass(slots=True, eq=False)
class _Block:
    """Contiguous bytes of a segment; ``before`` and ``behind`` are its neighbours."""

    address: int
    num_bytes: int
    small: bool
    before: "_Block | None" = None
    behind: "_Block | None" = None
    free: bool = True

    @property
    def order(self) -> tuple[int, int]:
        """Sort key: by size, then by address. The best fit is the first block that is large enough."""
        return (self.num_bytes, self.address)


class CachingAllocator:
    """A model of the allocator; see [Note: Allocator].

    Args:
        capacity_bytes: of the device. If a segment does not fit, empty segments go back to the driver first. If it
            still does not fit, it is taken anyway, so that the missing amount is visible.

    Attributes:
        requested_bytes, allocated_bytes, reserved_bytes: the current numbers.
        peak: the maximum of each so far.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.requested_bytes = self.allocated_bytes = self.reserved_bytes = 0
        self.peak = AllocatorUse(0, 0, 0)
        self._capacity_bytes = capacity_bytes
        self._free: dict[bool, list[_Block]] = {
            True: [],
            False: [],
        }  # the pool for small requests, and the other; sorted
        self._used: dict[Hashable, tuple[_Block, int]] = {}
        self._end = 0  # segments get ascending addresses, each used once

    def allocate(self, key: Hashable, num_bytes: int) -> None:
        """Hold bytes under the caller's key until :meth:`free`; a request for 0 bytes holds nothing."""
        assert key not in self._used, f"{key} is held already"
        size = rounded_bytes(num_bytes)
        if not size:
            return
        small = size <= _SMALL_BYTES
        pool = self._free[small]
        position = bisect.bisect_left(pool, (size, -1), key=lambda block: block.order)
        block = pool.pop(position) if position < len(pool) else self._segment(size, small=small)
        block.free = False
        rest = block.num_bytes - size
        if rest >= _MIN_BLOCK_BYTES if small else rest > _SMALL_BYTES:
            self._split(block, size)
        self._used[key] = (block, num_bytes)
        self.requested_bytes += num_bytes
        self.allocated_bytes += block.num_bytes
        now = AllocatorUse(self.requested_bytes, self.allocated_bytes, self.reserved_bytes)
        self.peak = self.peak.highest(now)

    def free(self, key: Hashable) -> None:
        """Release the bytes that :meth:`allocate` holds under a key, if any."""
        if key not in self._used:
            return
        block, num_bytes = self._used.pop(key)
        self.requested_bytes -= num_bytes
        self.allocated_bytes -= block.num_bytes
        block.free = True
        for neighbour in (block.before, block.behind):
            if neighbour is not None and neighbour.free:
                self._take(neighbour)
                block = self._merged(*sorted((block, neighbour), key=lambda b: b.address))
        self._put(block)

    def empty_cache(self) -> None:
        """Return all empty segments to the driver."""
        for pool in self._free.values():
            in_use = [block for block in pool if block.before is not None or block.behind is not None]
            self.reserved_bytes -= sum(block.num_bytes for block in pool) - sum(block.num_bytes for block in in_use)
            pool[:] = in_use

    def _segment(self, size: int, *, small: bool) -> _Block:
        num_bytes = segment_bytes(size)
        if self.reserved_bytes + num_bytes > self._capacity_bytes:
            self.empty_cache()
        block = _Block(self._end, num_bytes, small)
        self._end += num_bytes
        self.reserved_bytes += num_bytes
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.num_bytes - size, block.small, block, block.behind)
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.num_bytes = rest, size
        self._put(rest)

    def _merged(self, left: _Block, right: _Block) -> _Block:
        left.num_bytes += right.num_bytes
        left.behind = right.behind
        if right.behind is not None:
            right.behind.before = left
        return left

    def _put(self, block: _Block) -> None:
        bisect.insort(self._free[block.small], block, key=lambda b: b.order)

    def _take(self, block: _Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, block.order, key=lambda b: b.order)]


def replay(timeline: Timeline, iteration: int, capacity_bytes: int) -> AllocatorUse:
    """Return the allocator's peaks for the buffers of a steady iteration; in a pipeline, of the largest stage.

    Args:
        timeline: the timeline of a schedule with buffers.
        iteration: the steady iteration.
        capacity_bytes: of the device.
    """
    spans = [(buffer, held) for buffer, held in buffer_spans(timeline, iteration) if buffer.tier is Tier.GPU]
    period_s = timeline.period_s(iteration)
    peaks = []
    for stage in range(timeline.schedule.num_stages):
        own = [(buffer.num_bytes, held) for buffer, held in spans if buffer.stage == stage]
        peaks.append(_replay(own, period_s, capacity_bytes))
    return functools.reduce(AllocatorUse.highest, peaks)


def _replay(
    spans: Sequence[tuple[int, tuple[float, float] | None]], period_s: float, capacity_bytes: int
) -> AllocatorUse:
    """Return the peaks of one device for buffers, each with its bytes and its life (``None``: always held)."""
    allocator = CachingAllocator(capacity_bytes)
    # Period, time within it, allocated?, repetition, buffer, size.
    events: list[tuple[float, float, bool, int, int, int]] = []
    for number, (num_bytes, held) in enumerate(spans):
        if held is None:
            allocator.allocate((0, number), num_bytes)
        elif held[1] > held[0] and period_s > 0:
            for taken, moment_s in ((True, held[0]), (False, held[1])):
                later, within_s = divmod(moment_s, period_s)  # equal times must stay equal in every repetition
                events += [(i + later, within_s, taken, i, number, num_bytes) for i in range(_NUM_REPEATED)]
    # At one instant, buffers are freed before others are allocated (False sorts first).
    for _, _, taken, i, number, size in sorted(events):
        if taken:
            allocator.allocate((i, number), size)
        else:
            allocator.free((i, number))
    return allocator.peak
