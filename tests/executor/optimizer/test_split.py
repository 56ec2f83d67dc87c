"""Master copies as weights and remainders: exact for every float32, and updated to the same bits as whole ones."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_kernels import KERNELS
from test_narrow_adamw import Traffic

from executor.devices.meter import MemoryMeter
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.adamw_8bit import adamw_8bit_step
from executor.optimizer.split import BLOCK, SplitMaster, join, join_with_operators, split, split_with_operators
from executor.optimizer.workers import WorkerTeam
from planner.decisions.precision import SPLIT_OPERATOR_BYTES, SPLIT_SCRATCH_BYTES

NAN_BITS = 0x7FC00000
BITS = st.one_of(
    st.integers(0, 2**32 - 1),
    st.builds(lambda upper, lower: upper << 16 | lower, st.integers(0, 2**16 - 1), st.sampled_from([0x8000, 0x7FFF])),
    st.builds(lambda code: 0x3F800000 | code, st.integers(0, BLOCK + 2)),  # codes that a tie would get
    st.sampled_from([0, 1 << 31, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 1, 0x8000]),
)


def split_by_operators(values, weights, remainders, ties):
    split_with_operators(torch.from_numpy(values), *tensors(weights, remainders, ties))


def join_by_operators(weights, remainders, ties, values):
    join_with_operators(*tensors(weights, remainders, ties), torch.from_numpy(values))


def tensors(weights, *others):
    in_bits = [torch.from_numpy(array.view(np.int16)) for array in (weights, *others)]
    return in_bits[0].view(torch.bfloat16), *in_bits[1:]


WAYS = {"kernel": (split, join), "operators": (split_by_operators, join_by_operators)}


def as_split(bits):
    weights, remainders = (np.empty(len(bits), np.uint16) for _ in range(2))
    return weights, remainders, np.empty(-(-len(bits) // BLOCK), np.uint16)


def assert_exact(bits, way):
    """Check that weights are masters rounded as torch does, and that masters are restored."""
    into, back = WAYS[way]
    values, halves = bits.view(np.float32), as_split(bits)
    into(values.copy(), *halves)
    is_nan = np.isnan(values)
    rounded = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(halves[0], np.where(is_nan, NAN_BITS >> 16, rounded))
    restored = np.empty_like(values)
    back(*halves, restored)
    assert np.array_equal(restored.view(np.uint32), np.where(is_nan, NAN_BITS, bits))
    return halves


@pytest.mark.parametrize("way", WAYS)
@given(bits=st.lists(BITS, min_size=1, max_size=2 * BLOCK + 3))
@example(bits=[*range(0x3F80_0000, 0x3F80_0000 + BLOCK - 1), 0x3F80_8000])  # all codes but the last are in use
@settings(max_examples=examples(60), deadline=None)
def test_masters_are_restored_to_the_last_bit(way, bits):
    assert_exact(np.array(bits, np.uint32), way)


@pytest.mark.parametrize("way", WAYS)
def test_all_upper_halves_with_the_lower_halves_around_a_tie(way):
    uppers = np.arange(2**16, dtype=np.uint32) << 16
    found = [assert_exact(uppers | lower, way) for lower in (0x8000, 0x7FFF, 0x8001, 0)]
    assert (found[0][2] != 0).all(), "every block has a tie"
    assert not (found[1][2] | found[2][2] | found[3][2]).any()
    several = np.repeat(uppers, 3) | np.tile(np.array([0x8000, 0, 1], np.uint32), 2**16)
    kernel, operators = (assert_exact(several, way) for way in WAYS)
    for mine, theirs in zip(kernel, operators, strict=True):
        assert np.array_equal(mine, theirs), "both ways choose the same codes"


@given(
    bits=st.lists(BITS, min_size=1, max_size=2 * BLOCK + 3), cuts=st.tuples(st.integers(0, 600), st.integers(0, 600))
)
@settings(max_examples=examples(60), deadline=None)
def test_a_range_is_read_and_written_alone(bits, cuts):
    bits = np.array(bits, np.uint32)
    start, stop = sorted(min(cut, len(bits)) for cut in cuts)
    halves = assert_exact(bits, "kernel")
    whole = SplitMaster(*tensors(*halves), 0, len(bits))
    before = whole.joined()
    mine = whole[start:stop]
    assert len(mine) == stop - start
    assert np.array_equal(bits_of(mine.joined()), bits_of(before[start:stop]))
    new = torch.arange(stop - start) * (1 + 2.0**-8)  # among them ties
    mine.copy_(new)
    before[start:stop] = new
    assert np.array_equal(bits_of(whole.joined()), bits_of(before))
    assert torch.equal(mine.weight.float(), new.bfloat16().float())
    mine.zero_()
    assert not mine.joined().any()


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=3 * BLOCK), st.integers(0, 2), st.integers(0, BLOCK))
@settings(max_examples=examples(60), deadline=None)
def test_weights_are_their_own_masters(weights, first_block, num_more):
    """Written as they are, without a pass over float32, they leave what their float32 values leave."""
    values = torch.tensor(weights).to(torch.uint16).view(torch.bfloat16)
    start = min(first_block * BLOCK, len(values))
    stop = min(start + BLOCK + num_more, len(values))
    before = torch.full((len(values),), 1 + 2.0**-8)  # ties
    found = []
    for written in (values, values.float()):
        whole = SplitMaster.of_zeros(len(values))
        whole.copy_(before)
        whole[start:stop].copy_(written[start:stop])
        found.append(whole.joined())
    assert torch.equal(*(masters.nan_to_num(7.0) for masters in found))


def bits_of(values):
    return values.numpy().view(np.uint32)


def test_memory_of_zeros_is_zero():
    halves = as_split(np.zeros(BLOCK + 1))
    for half in halves:
        half[:] = 0
    values = np.ones(BLOCK + 1, np.float32)
    join(*halves, values)
    assert not values.any()


@pytest.mark.parametrize("kernel", [*KERNELS, "adamw", "adamw-bf16", "adamw-8bit"])
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 3 * BLOCK),
    start=st.integers(0, BLOCK + 3),
    team=st.booleans(),
)
@settings(max_examples=examples(15), deadline=None)
def test_updates_have_the_bits_of_whole_masters(kernel, seed, length, start, team):
    """Of a range anywhere among others, which stay as they are; half of the masters are ties."""
    step, buffers, params, start = state_of(kernel, seed, length, start)
    rng = np.random.default_rng(seed)
    masters = (10 ** rng.uniform(-3, 1, start + length + 7) * rng.choice([-1, 1], start + length + 7)).astype(
        np.float32
    )
    bits = masters.view(np.uint32)
    bits[::2] = bits[::2] & np.uint32(0xFFFF0000) | np.uint32(0x8000)
    halves = as_split(bits)
    split(masters, *halves)
    mine = SplitMaster(*tensors(*halves), start, start + length)
    gradient = torch.from_numpy(rng.standard_normal(length).astype(np.float32)).bfloat16().view(torch.uint16).numpy()
    weights, expected = np.empty(length, np.uint16), masters[start : start + length].copy()
    theirs = [array if array is None else array.copy() for array in buffers]
    step([expected, *theirs], gradient, weights, params, 2, 0.5)
    with WorkerTeam(3) if team else nullcontext() as threads:
        step([mine, *buffers], gradient, None, params, 2, 0.5, threads)
    masters[start : start + length] = expected
    restored = np.empty_like(masters)
    join(*halves, restored)
    assert np.array_equal(restored.view(np.uint32), masters.view(np.uint32))
    assert np.array_equal(mine.weight.view(torch.uint16).numpy(), weights)
    for one, other in zip(buffers, theirs, strict=True):
        assert one is other is None or np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def state_of(kernel, seed, length, start):
    """Return a step, buffers after one step, hyper-parameters, and where the range may begin."""
    rng = np.random.default_rng(seed)
    if kernel in KERNELS:
        step, count, params = KERNELS[kernel]
        if kernel == "sgd-plain":
            return step, [None], params, start
        return step, [rng.random(length, np.float32) for _ in range(count)], params, start
    if kernel == "adamw":
        return adamw_step, [rng.random(length, np.float32) for _ in range(2)], AdamWParams(), start
    seeded = AdamWParams(seed=seed % 1000, parameter=3, start=5 * BLOCK)
    if kernel == "adamw-bf16":
        return adamw_step, [rng.integers(0, 1 << 14, length, np.uint16) for _ in range(2)], seeded, start
    codes = [rng.integers(0, 256, length, np.uint8) for _ in range(2)]
    scales = [rng.random(-(-length // BLOCK), np.float32) + np.float32(0.1) for _ in range(2)]
    return adamw_8bit_step, [*codes, *scales], seeded, start // BLOCK * BLOCK


def test_the_planner_knows_what_operators_move_and_hold():
    """Beside what is done for each tie: such are few among random masters."""
    num_params = 1 << 20
    parts = SplitMaster.of_zeros(num_params)
    parts.copy_(torch.randn(num_params, generator=torch.Generator().manual_seed(0)))
    with Traffic() as traffic, MemoryMeter() as meter:
        values, scaled = torch.empty(num_params), torch.empty(num_params)
        join_with_operators(*parts.of_blocks(), values)
        split_with_operators(values, *parts.of_blocks())
        del scaled
    assert traffic.num_bytes / num_params == pytest.approx(SPLIT_OPERATOR_BYTES, rel=0.02)
    assert meter.peak_bytes / num_params == pytest.approx(SPLIT_SCRATCH_BYTES, rel=0.02)
