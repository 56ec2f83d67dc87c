"""Weights that go to the device in fp8: their cast on the host, against torchao's."""

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.devices.backend import as_array
from executor.distributed.ranks import ALONE
from executor.memory.fp8_weights import Fp8Copy, cast_to_fp8, largest_bits, scales_of
from executor.optimizer.workers import WorkerTeam
from planner.decisions import Fp8Weights

float8_utils = pytest.importorskip("torchao.float8.float8_utils")

NARROW = torch.float8_e4m3fn
EVERY_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
SPECIAL = (0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), -float("inf"), float("nan"))


def casts(values: torch.Tensor, ranges: list[slice], num_threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales, and the bits, of which those outside of all ranges are 77."""
    array, out = as_array(values), np.full(len(values), 77, np.uint8)
    with WorkerTeam(num_threads) as team:
        scales = scales_of(largest_bits(array, ranges, team))
        cast_to_fp8(array, scales, ranges, out, team)
    return scales, out


def assert_as_torchao(values: torch.Tensor, ranges: list[slice], num_threads: int = 1) -> None:
    """On the host, and on a device. The sign of a NaN is left alone: torch's own depends on its place in a row."""
    scales, out = casts(values, ranges, num_threads)
    scales_there, out_there = casts_on_device(values, ranges)
    expected = np.full(len(values), 77, np.uint8)
    for i, (scale, own) in enumerate(zip(scales, ranges, strict=True)):
        part = values[own]
        its_scale = float8_utils.tensor_to_scale(part, NARROW)
        np.testing.assert_array_equal(scale, its_scale.numpy())
        np.testing.assert_array_equal(scales_there[i], its_scale.numpy())
        narrow = float8_utils.to_fp8_saturated(part.float() * its_scale, NARROW)
        expected[own] = narrow.view(torch.uint8).numpy()
    for found in (out, out_there):
        np.testing.assert_array_equal(*(np.where(bits == 0xFF, 0x7F, bits) for bits in (found, expected)))


def casts_on_device(values: torch.Tensor, ranges: list[slice]) -> tuple[np.ndarray, np.ndarray]:
    """Return the same from a slot, which the values before the first range reach in their own type."""
    sizes = Fp8Weights(len(values), ranges[0].start, len(ranges), 1, values.itemsize)
    slot = torch.full((sizes.slot_bytes,), 77, dtype=torch.uint8)
    copy = Fp8Copy(sizes, ALONE, tuple(ranges), slot, torch.empty(0, dtype=torch.uint8))
    copy.cast_on_device(values)
    assert torch.equal(copy.others.view(torch.uint8), values[: sizes.num_others].view(torch.uint8))
    return copy.scales.numpy(), slot[: len(values)].numpy()


@settings(max_examples=examples(100, fewest=20))
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 300)), min_size=1, max_size=4),
    st.integers(-40, 38),
    st.lists(st.tuples(st.integers(0, 1000), st.sampled_from(SPECIAL)), max_size=3),
    st.integers(1, 3),
    st.integers(0, 1 << 30),
)
def test_casts_have_the_bits_of_torchao(dtype, sizes, exponent, special, num_threads, seed) -> None:
    """Any values in any ranges, on any number of threads; values between the ranges are left alone."""
    ends = np.cumsum([0, *(gap + size for gap, size in sizes)])
    ranges = [slice(int(start) + gap, int(stop)) for start, stop, (gap, _) in zip(ends, ends[1:], sizes, strict=False)]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(int(ends[-1]), generator=generator, dtype=torch.float64) * 10.0**exponent
    values = wide.to(dtype)
    for place, value in special:
        values[place % len(values)] = value
    assert_as_torchao(values, ranges, num_threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("limit", [448.0, 1.0, 3e38])
def test_every_value_is_rounded_as_by_torchao(dtype: torch.dtype, limit: float) -> None:
    """At a scale of 1 these are all ties, and all numbers below the smallest normal one."""
    values = EVERY_BF16[EVERY_BF16.abs() <= limit].to(dtype)
    steps = torch.linspace(-limit / 4, limit / 4, 10_001).to(dtype)
    assert_as_torchao(torch.cat((values, steps)), [slice(0, len(values) + len(steps))])


def test_ranks_agree_on_the_maximum_of_their_parts() -> None:
    """NaN is the largest, and an empty part has nothing larger than 0."""
    values = torch.tensor([1.0, -3.0, 2.0, float("nan"), -float("inf")])
    with WorkerTeam(1) as team:
        parts = largest_bits(values.numpy(), [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5), slice(5, 5)], team)
    assert parts.view(np.float32)[:2].tolist() == [3.0, 2.0]
    assert parts[2] > parts[3] > parts[0] > parts[1] > parts[4] == 0
