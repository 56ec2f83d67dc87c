"""AdamW in one kernel has the bits of the host's: on a GPU, or without one by Triton's interpreter, if it is installed.

``benchmarks/gpu/run.sh`` runs them on a GPU.
"""

import dataclasses

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from training import OPTIMIZERS

from executor.devices import cuda
from executor.devices.backend import as_array
from executor.memory.pieces import state_buffers
from executor.optimizer.split import BLOCK, SplitMaster
from executor.optimizer.table import Rule, entry_of

HAS_GPU = torch.version.cuda is not None and torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch for CUDA")

from executor.devices import fused  # noqa: E402 - it imports Triton

FORMS = (
    *("adamw", "adam", "adamw-split", "adam-split", "adamw-bf16", "adamw-bf16-rounded", "adamw-bf16-split"),
    *("adamw-8bit", "adamw-8bit-rounded", "adamw-8bit-split"),
)
SPECIAL = torch.tensor([0.0, -0.0, 1e-40, -1e-38, 1e-20, 3e38, float("inf"), -float("inf"), float("nan")])
# A GPU compiles a kernel for each way in which lengths and places are multiples of 16.
LENGTHS = st.sampled_from((300, 2832)) if HAS_GPU else st.integers(1, 3 * BLOCK)
FIRSTS = st.sampled_from((0, 5) if HAS_GPU else (0, 5, 16, BLOCK))


def rule_of(form: str, **changes: object) -> Rule:
    name = form.removesuffix("-split")
    dtype = torch.bfloat16 if form.endswith("rounded") else torch.float32
    optimizer = OPTIMIZERS[name]([torch.nn.Parameter(torch.zeros(1, dtype=dtype))], **{"weight_decay": 0.1} | changes)
    rule = entry_of(optimizer).rule(optimizer.param_groups[0]).of_parameter(7, torch.Size([1]))
    return rule.at(2**32 - 700)  # positions wrap around


class Case:
    """State of one form in host memory, a gradient, and where new weights go.

    A split master copy is the range from ``first`` on among others. A share of the values is ``special``.
    """

    def __init__(self, form, length, seed, *, first=0, dtype=torch.bfloat16, special=0.0):
        generator = torch.Generator().manual_seed(seed)

        def random(size, low, high):
            values = torch.randn(size, generator=generator) * 10 ** (
                low + (high - low) * torch.rand(size, generator=generator)
            )
            chosen = torch.rand(size, generator=generator) < special
            return torch.where(chosen, SPECIAL[torch.randint(len(SPECIAL), (size,), generator=generator)], values)

        self.rule = rule_of(form)
        if "8bit" in form:
            first = first // BLOCK * BLOCK
        self.master = random(length, -3, 1)
        if form.endswith("rounded"):
            self.master = self.master.bfloat16()
        if form.endswith("split"):
            masters = random(first + length + 7, -3, 1)
            masters.view(torch.int32)[::3] &= ~0xFFFF
            masters.view(torch.int32)[::3] |= 0x8000
            whole = SplitMaster.of_zeros(len(masters))
            whole.copy_(masters)
            self.master = whole[first : first + length]
        m, v = random(length, -5, 0), random(length, -9, 0).abs()
        forms = state_buffers(self.rule.entry.planned_as)[1:]
        if forms[0].dtype is torch.uint8:
            codes = (torch.randint(0, 256, (length,), generator=generator).to(torch.uint8) for _ in range(2))
            self.buffers = [*codes, *(random(-(-length // BLOCK), -4, 0).abs() for _ in range(2))]
        else:
            self.buffers = [values.to(form.dtype) for values, form in zip((m, v), forms, strict=True)]
        self.gradient = random(length, -6, 1).to(dtype)
        has_weight = dtype is torch.bfloat16 and not form.endswith(("split", "rounded"))
        self.weights = [torch.zeros(length, dtype=dtype)] if has_weight else []

    def on_host(self, step, scale):
        """Return all that a step on the host leaves."""
        case = self.copied("cpu")
        master = case.master if isinstance(case.master, SplitMaster) else as_array(case.master)
        weight = as_array(case.weights[0]) if case.weights else None
        buffers = [as_array(values) for values in case.buffers]
        case.rule.entry.host([master, *buffers], as_array(case.gradient), weight, case.rule.params, step, scale)
        return case.held()

    def on_device(self, step, scale, lengths=None, way=fused.update):
        """Return all that a step on the device leaves, with the gradient in parts of these lengths."""
        case = self.copied(DEVICE)
        parts = case.gradient.split(lengths or [len(case.gradient)])
        way([case.master, *case.buffers, *case.weights], parts, dataclasses.replace(case.rule, scale=scale), step)
        return case.held()

    def copied(self, device):
        case = object.__new__(Case)
        case.rule, master = self.rule, self.master
        if isinstance(master, SplitMaster):
            parts = (half.to(device, copy=True) for half in (master.weights, master.remainders, master.ties))
            case.master = SplitMaster(*parts, master.start, master.stop)
        else:
            case.master = master.to(device, copy=True)
        case.buffers = [values.to(device, copy=True) for values in self.buffers]
        case.gradient = self.gradient.to(device, copy=True)
        case.weights = [values.to(device, copy=True) for values in self.weights]
        return case

    def held(self):
        master = self.master
        is_split = isinstance(master, SplitMaster)
        masters = [master.weights, master.remainders, master.ties] if is_split else [master]
        return [values.cpu() for values in (*masters, *self.buffers, *self.weights)]


def assert_same(found, expected):
    """Check that bits are the same, but for those of a NaN."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        is_nan = theirs.isnan()
        assert torch.equal(mine.isnan(), is_nan)
        assert torch.equal(*(values.masked_fill(is_nan, 0).view(torch.uint8) for values in (mine, theirs)))


@pytest.mark.parametrize("form", FORMS)
@given(
    length=LENGTHS,
    seed=st.integers(0, 2**32 - 1),
    step=st.sampled_from([1, 2, 1000, 10**6]),
    scale=st.sampled_from([1.0, 0.37, 1e-30, 0.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    special=st.sampled_from([0.0, 0.01, 0.5]),
    first=FIRSTS,
)
@settings(max_examples=examples(60), deadline=None)
def test_a_step_has_the_bits_of_the_host(form, length, seed, step, scale, dtype, special, first):
    case = Case(form, length, seed, dtype=dtype, special=special, first=first)
    with np.errstate(all="ignore"):
        assert_same(case.on_device(step, scale), case.on_host(step, scale))


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 2**32 - 1), first=st.sampled_from([0, 16]), data=st.data())
@settings(max_examples=examples(20), deadline=None)
def test_gradients_end_to_end_are_one(form, seed, first, data):
    """Those of neighbours share a block of a split master copy."""
    grain = BLOCK if "8bit" in form else 16 if HAS_GPU else 1
    lengths = [grain * n for n in data.draw(st.lists(st.integers(0, 5 * BLOCK // grain), min_size=1, max_size=4))]
    case = Case(form, max(sum(lengths), 1), seed, first=first)
    lengths[-1] += max(1 - sum(lengths), 0)
    assert fused.can_update([case.master, *case.buffers, *case.weights], case.gradient.split(lengths), case.rule)
    assert_same(case.on_device(3, 0.5, lengths), case.on_host(3, 0.5))


@pytest.mark.parametrize("form", FORMS)
def test_new_weights_may_overwrite_the_gradient(form):
    case = Case(form, 3000, 0)
    expected, case = case.on_host(2, 0.5), case.copied(DEVICE)
    if case.weights:
        case.weights = [case.gradient]
    fused.update(
        [case.master, *case.buffers, *case.weights], [case.gradient], dataclasses.replace(case.rule, scale=0.5), 2
    )
    assert_same(case.held(), expected)


def test_all_codes_of_a_block_but_the_last_are_in_use():
    """The last master is a tie, for which the search of a free remainder takes all its steps."""
    case = Case("adamw-split", BLOCK, 0)
    case.gradient.zero_()
    case.buffers[0].zero_()
    case.rule = rule_of("adamw-split", weight_decay=0.0)  # masters stay as they are
    bits = torch.arange(BLOCK, dtype=torch.int32) + 0x3F800000
    bits[-1] = 0x3F808000
    case.master.copy_(bits.view(torch.float32))
    found = case.on_device(1, 1.0)
    assert_same(found, case.on_host(1, 1.0))
    assert int(found[1][BLOCK - 1]) == BLOCK - 1
    assert int(found[2][0]) == (BLOCK - 1 ^ 0x8000) - 0x10000


def test_what_no_kernel_does_is_left_to_operators():
    case = Case("adamw", 600, 0)
    state = [case.master, *case.buffers]
    assert fused.can_update([*state, *case.weights], [case.gradient], case.rule)
    assert not fused.can_update(state, [case.gradient.half()], case.rule)
    assert not fused.can_update([*state, case.gradient.float()], [case.gradient], case.rule)
    assert not fused.can_update(state, [case.gradient], rule_of_lion())
    codes = Case("adamw-8bit", 600, 0)
    cut = codes.gradient.split([300, 300])
    assert not fused.can_update([codes.master, *codes.buffers], cut, codes.rule)


def rule_of_lion() -> Rule:
    optimizer = OPTIMIZERS["lion"]([torch.nn.Parameter(torch.zeros(1))])
    return entry_of(optimizer).rule(optimizer.param_groups[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_chain_of_operators_agrees(form, monkeypatch):
    """Bit for bit; but torch's own fused AdamW, which computes in float64, agrees to the last bits alone."""
    kernel, calls = fused.update, []
    assert cuda.fused() or not HAS_GPU  # the first call of it makes an update
    monkeypatch.setattr(fused, "update", lambda *args: calls.append(kernel(*args)))
    case = Case(form, 3_000_016 if HAS_GPU else 3000, 0)
    if form.startswith("adam") and not form.startswith("adamw"):
        case.rule = rule_of(form, weight_decay=0.0)  # a sum in the gradient that is nearly 0 has few common bits
    if HAS_GPU:
        found = case.on_device(5, 0.5, way=cuda.update_on_device)
        assert_same(found, case.on_host(5, 0.5))
        assert len(calls) == 1, "it is what a GPU takes"
        monkeypatch.setattr(cuda, "fused", lambda: None)
    else:
        found = case.on_device(5, 0.5)
    chain = case.on_device(5, 0.5, way=cuda.update_on_device)
    assert len(calls) <= 1
    if "bf16" in form or "8bit" in form:
        assert_same(chain, found)
        return
    if "split" in form:
        chain, found = ([SplitMaster(*x[:3], 0, len(x[0])).joined(), *x[3:]] for x in (chain, found))
    for mine, theirs, atol in zip(found[:3], chain[:3], (1e-4, 2e-6, 0.0), strict=True):  # differences of large values
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=atol)
