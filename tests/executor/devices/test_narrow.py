"""Casts to fp8 by Triton have torch's bits: on a GPU, or without one by Triton's interpreter, if it is installed."""

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch for CUDA")
utils = pytest.importorskip("torchao.float8.float8_utils")

from executor.devices import narrow  # noqa: E402 - it imports Triton

HAS_GPU = torch.version.cuda is not None and torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])
SIDES = st.sampled_from([16, 48, 128, 144, 272])


def assert_cast(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, rows: bool, columns: bool) -> None:
    """Compare both layouts with torch's own, but for the bits of a NaN."""
    expected = utils.to_fp8_saturated(values.float() * scale, dtype)
    in_rows, turned = (torch.empty(shape, dtype=dtype, device=DEVICE) for shape in (values.shape, values.shape[::-1]))
    narrow.cast(values.to(DEVICE), scale.to(DEVICE), in_rows if rows else None, turned if columns else None)
    is_nan = expected.float().isnan()
    for found in ([in_rows.cpu()] if rows else []) + ([turned.cpu().t()] if columns else []):
        assert torch.equal(found.float().isnan(), is_nan)
        mine, theirs = (each.contiguous().view(torch.uint8).masked_fill(is_nan, 0) for each in (found, expected))
        assert torch.equal(mine, theirs)


@given(
    shape=st.tuples(SIDES, SIDES),
    wide=st.sampled_from([torch.bfloat16, torch.float32]),
    dtype=DTYPES,
    power=st.integers(-30, 30),
    special=st.sampled_from([[], [0.0, -0.0], [float("inf")], [-float("nan")]]),
    layouts=st.sampled_from([(True, True), (True, False), (False, True)]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(40), deadline=None)
def test_scales_and_casts_are_those_of_torchao(shape, wide, dtype, power, special, layouts, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    values.view(-1)[: len(special)] = torch.tensor(special)
    values = values.to(wide)
    scale = utils.tensor_to_scale(values, dtype)
    found, inverse = narrow.scales(narrow.largest_of(values.to(DEVICE)), torch.finfo(dtype).max)
    for one, other in ((found, scale), (inverse, scale.reciprocal())):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
    assert_cast(values, scale, dtype, rows=layouts[0], columns=layouts[1])


@given(dtype=DTYPES, scale=st.sampled_from([1.0, 1.2345, 3e-5, 1e30]))
@settings(max_examples=examples(8), deadline=None)
def test_every_bf16_value_is_rounded_as_by_torch(dtype, scale):
    values = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32).bfloat16().view(256, 256)
    assert_cast(values, torch.tensor(scale), dtype, rows=True, columns=True)


@given(
    length=st.sampled_from([16, 4096, 9000]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    power=st.integers(-6, 3),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=examples(30), deadline=None)
def test_swiglu_rounds_as_torch_and_finds_largest_values(length, dtype, power, seed):
    """Exponentials may differ in their last bits, which shows in a few values that are nearly half-way between two."""
    generator = torch.Generator().manual_seed(seed)
    gradient, gate, up = (torch.randn(length, generator=generator, dtype=torch.float32) for _ in range(3))
    gradient, gate, up = ((each * 10.0**power).to(dtype) for each in (gradient, gate, up))
    out, largest = narrow.swiglu(gate.to(DEVICE), up.to(DEVICE))
    to_gate, to_up, *largests = narrow.swiglu_backward(*(each.to(DEVICE) for each in (gradient, gate, up)))
    silu = torch.nn.functional.silu(gate)
    expected = silu * up, torch.ops.aten.silu_backward(gradient * up, gate), gradient * silu
    places = 2**-7 if dtype is torch.bfloat16 else 1e-5
    for made, other, found in zip((out, to_gate, to_up), expected, (largest, *largests), strict=True):
        assert found.dtype == torch.float32
        assert found == made.abs().max().float()
        torch.testing.assert_close(made.cpu(), other, rtol=places, atol=1e-6 * float(found))
        if dtype is torch.bfloat16:
            assert (made.cpu() != other).float().mean() < 0.01
