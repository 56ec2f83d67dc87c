"""How the virtual device divides memory, as torch's allocator for CUDA does: by hand where its rules show."""

import contextlib
import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from virtual import NoVirtualGpuError, install, present

MIB = 2**20


@contextlib.contextmanager
def memory(capacity_bytes=2**40, *, expandable=False):
    """Yield what takes memory on a new stream, what frees it, and what is held: active and reserved MiB, retries."""
    try:
        install()
    except NoVirtualGpuError as error:
        pytest.skip(str(error))
    gc.collect()
    with present() as extension, torch.cuda.stream(torch.cuda.Stream()):
        extension.set_memory(2**40, expandable)
        before, held = extension.memory_stats(), {}
        extension.set_memory(before["reserved_bytes.all.current"] + capacity_bytes, expandable)

        def take(key, size):
            held[key] = torch.empty(int(size), dtype=torch.uint8, device="cuda")

        def now():
            stats = extension.memory_stats()
            names = ("active_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries")
            active, reserved, retries = (stats[name] - before[name] for name in names)
            return active / MIB, reserved / MIB, retries

        try:
            yield take, held.pop, now
        finally:
            held.clear()
            extension.set_memory(2**63 - 1, False)


def test_requests_are_rounded_and_small_ones_have_segments_of_their_own():
    with memory() as (take, _, now):
        take("a", 1000)
        assert now() == (1024 / MIB, 2, 0)
        take("b", 5 * MIB)
        assert now()[:2] == (5 + 1024 / MIB, 22)
        take("c", 21 * MIB)
        assert now()[:2] == (27 + 1024 / MIB, 44)  # a rest of 1 MiB is not split off


def test_the_smallest_piece_that_fits_is_taken_and_neighbours_become_one():
    with memory() as (take, free, now):
        for key, size in (("a", 40), ("b", 20), ("c", 30)):
            take(key, size * MIB)
        for key in "abc":
            free(key)
        for key, size in (("d", 25), ("e", 5), ("f", 20), ("g", 40)):
            take(key, size * MIB)
        assert now()[:2] == (90, 90)
        free("d")
        free("e")
        take("h", 30 * MIB)  # only if both have become one again
        assert now()[:2] == (90, 90)


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 56), (True, 60)])
def test_what_lies_between_others_is_not_joined(expandable, reserved):
    with memory(expandable=expandable) as (take, free, now):
        for i in range(4):
            take(i, 8 * MIB)
        free(0)
        free(2)
        take("x", 16 * MIB)
        assert now()[:2] == (32, reserved)


def test_an_expandable_segment_grows_where_its_end_is_free():
    """A larger request after a smaller one, as varying lengths make them: no segment is left behind."""
    for expandable, reserved in ((False, 30 + 50 + 70), (True, 80)):
        with memory(expandable=expandable) as (take, free, now):
            for size in (30, 50, 70):
                take("a", size * MIB)
                free("a")
            assert now()[1] == reserved


def test_a_full_device_gets_idle_segments_back_and_says_so():
    with memory(100 * MIB) as (take, free, now):
        take("a", 60 * MIB)
        free("a")
        take("b", 80 * MIB)
        assert now() == (80, 80, 1)
        with pytest.raises(torch.OutOfMemoryError):
            take("c", 40 * MIB)


def test_a_stream_does_not_take_what_another_has_freed():
    with memory() as (take, free, now):
        take("a", 30 * MIB)
        free("a")
        with torch.cuda.stream(torch.cuda.Stream()):
            take("b", 30 * MIB)
        assert now()[:2] == (30, 60)


def test_what_another_stream_still_uses_is_free_when_the_host_has_waited():
    with memory() as (take, free, now):
        take("a", 30 * MIB)
        other = torch.cuda.Stream()
        tensor = free("a")
        tensor.record_stream(other)
        del tensor
        assert now()[:2] == (30, 30)
        torch.cuda.synchronize()
        assert now()[:2] == (0, 30)


@given(
    st.lists(st.tuples(st.sampled_from([300, 3000, 3 * MIB, 9 * MIB, 25 * MIB]), st.integers(0, 4)), max_size=40),
    st.booleans(),
)
def test_what_is_reserved_holds_what_is_used(history, expandable):
    with memory(400 * MIB, expandable=expandable) as (take, free, now):
        held = {}
        for number, (size, num_freed) in enumerate(history):
            for _ in range(min(num_freed // 2, len(held))):
                key = list(held)[(number * 7919) % len(held)]
                del held[key]
                free(key)
            if sum(held.values()) + size > 300 * MIB:
                break
            with contextlib.suppress(torch.OutOfMemoryError):
                take(number, size)
                held[number] = size
            active, reserved, _ = now()
            assert sum(held.values()) <= active * MIB <= reserved * MIB <= 400 * MIB
        for key in held:
            free(key)
        torch.cuda.empty_cache()
        active, reserved, _ = now()
        assert active == 0
        assert reserved <= (22 if expandable else 0)
