"""The model of PyTorch's caching allocator: by hand where its rules show, and properties of every history."""

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, random_prices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.costs.allocator import AllocatorUse, CachingAllocator, replay, rounded_bytes, segment_bytes
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Buffer, Lane, MemoryClass, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline, memory_use
from planner.simulate.machine import run

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MIB = 2**20
PLENTY = 2**50


def test_sizes_are_rounded_as_in_the_source() -> None:
    assert [rounded_bytes(n) for n in (0, 1, 512, 513, MIB)] == [0, 512, 512, 1024, MIB]
    assert [segment_bytes(n) for n in (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 21 * MIB, 22 * MIB)] == [
        2 * MIB, 2 * MIB, 20 * MIB, 20 * MIB, 10 * MIB, 22 * MIB, 22 * MIB
    ]  # fmt: skip


def test_small_and_large_requests_do_not_share_segments() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.allocate("a", 1000)
    allocator.allocate("b", 5 * MIB)
    assert (allocator.requested_bytes, allocator.allocated_bytes, allocator.reserved_bytes) == (
        1000 + 5 * MIB, 1024 + 5 * MIB, 22 * MIB
    )  # fmt: skip


def test_a_large_rest_is_not_split_off_unless_it_is_worth_it() -> None:
    allocator = CachingAllocator(PLENTY)
    allocator.allocate("a", 11 * MIB)  # of a segment of 12 MiB: 1 MiB is left, which large requests cannot use
    assert allocator.allocated_bytes == allocator.reserved_bytes == 12 * MIB
    allocator.allocate("b", 9 * MIB)  # of a segment of 20 MiB
    allocator.allocate("c", 9 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (30 * MIB, 32 * MIB)


def test_the_smallest_block_that_fits_is_taken_and_neighbours_merge() -> None:
    allocator = CachingAllocator(PLENTY)
    for key, size in (("a", 40), ("b", 20), ("c", 30)):
        allocator.allocate(key, size * MIB)
    for key in "abc":
        allocator.free(key)
    allocator.allocate("d", 25 * MIB)  # best fit: the segment of 30, of which 5 are split off
    allocator.allocate("e", 5 * MIB)
    allocator.allocate("f", 20 * MIB)
    allocator.allocate("g", 40 * MIB)
    assert allocator.allocated_bytes == allocator.reserved_bytes == 90 * MIB
    allocator.free("d")
    allocator.free("e")
    allocator.allocate("h", 30 * MIB)  # only if both halves have become one again
    assert allocator.reserved_bytes == 90 * MIB


def test_fragmentation_needs_a_new_segment_though_enough_is_free() -> None:
    allocator = CachingAllocator(PLENTY)
    for i in range(4):
        allocator.allocate(i, 8 * MIB)  # two to a segment of 20 MiB
    allocator.free(0)
    allocator.free(2)
    allocator.allocate("x", 16 * MIB)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (32 * MIB, 56 * MIB)
    assert allocator.peak.fragmentation == 1 - 32 / 56


def test_a_full_device_gets_its_idle_segments_back() -> None:
    allocator = CachingAllocator(100 * MIB)
    allocator.allocate("a", 60 * MIB)
    allocator.free("a")
    allocator.allocate("b", 80 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate("c", 40 * MIB)  # does not fit, and is visible
    assert allocator.peak == AllocatorUse(120 * MIB, 120 * MIB, 120 * MIB)


SIZES = st.one_of(st.integers(0, 3000), st.integers(0, 3 * MIB), st.integers(9 * MIB, 90 * MIB))


@settings(SLOW, max_examples=examples(200))
@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=60), st.sampled_from([PLENTY, 64 * MIB]))
def test_what_is_reserved_holds_what_is_allocated_holds_what_is_requested(
    history: list[tuple[int, int]], capacity_bytes: int
) -> None:
    allocator, again = CachingAllocator(capacity_bytes), CachingAllocator(capacity_bytes)
    held: list[tuple[int, int]] = []
    for number, (size, num_frees) in enumerate(history):
        for _ in range(min(num_frees // 2, len(held))):
            key, _ = held.pop((number * 7919) % len(held))
            allocator.free(key)
            again.free(key)
        allocator.allocate(number, size)
        again.allocate(number, size)
        held.append((number, size))
        assert allocator.requested_bytes == sum(n for _, n in held)
        assert allocator.requested_bytes <= sum(rounded_bytes(n) for _, n in held) <= allocator.allocated_bytes
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak.reserved_bytes
    assert allocator.peak == again.peak
    for key, _ in held:
        allocator.free(key)
    assert (allocator.requested_bytes, allocator.allocated_bytes) == (0, 0)
    allocator.empty_cache()  # every segment is one free block again
    assert allocator.reserved_bytes == 0


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1))
def test_a_replay_asks_for_what_the_schedule_holds(case: Case, seed: int) -> None:
    simulated = run(case.schedule, *random_prices(case.schedule, seed), 3)
    assume(simulated.period_s(1) > 0)
    use = replay(simulated, 1, PLENTY)
    assert use.requested_bytes == pytest.approx(memory_use(simulated, 1)[Tier.GPU].peak_bytes, rel=1e-12)
    assert use.requested_bytes <= use.allocated_bytes <= use.reserved_bytes
    assert use == replay(simulated, 1, PLENTY)


@pytest.mark.parametrize(("size", "reserved"), [(8 * MIB, 20 * MIB), (100, 2 * MIB)])
def test_a_buffer_that_is_handed_over_is_reserved_once(size: int, reserved: int) -> None:
    """Also where one repetition of the iteration follows the other."""
    tasks = tuple(Task(i, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, f"u{i}") for i in range(3))
    buffers = tuple(Buffer(Tier.GPU, MemoryClass.ACTIVATIONS, size, str(i), i, i) for i in range(3))
    starts_s = np.array([[0.1, 0.3, 0.7], [1.1, 1.3, 1.7]])
    timeline = Timeline(Schedule(tasks, buffers), starts_s, np.array([[0.3, 0.7, 1.1], [1.3, 1.7, 2.1]]))
    use = replay(timeline, 0, PLENTY)
    assert (use.requested_bytes, use.reserved_bytes) == (size, reserved)


def test_what_is_carried_over_meets_the_next_iteration() -> None:
    tasks = tuple(Task(i, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, f"u{i}") for i in range(2))
    carried = Buffer(Tier.GPU, MemoryClass.GRADIENTS, 30 * MIB, "carried", first=1, last=0)
    own = Buffer(Tier.GPU, MemoryClass.ACTIVATIONS, 12 * MIB, "own", first=0, last=0)
    starts_s, ends_s = np.array([[0.0, 1.0], [2.0, 3.0]]), np.array([[1.0, 2.0], [3.0, 4.0]])
    use = replay(Timeline(Schedule(tasks, (carried, own)), starts_s, ends_s), 0, PLENTY)
    assert use == AllocatorUse(42 * MIB, 42 * MIB, 42 * MIB)
