"""AdamW with bf16 moments: a float64 oracle, unbiased rounding, the same bits everywhere; and with 8-bit ones too."""

import dataclasses

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed
from rank_programs import trained
from rank_references import reference, trained_in_memory
from ranks import assert_same_bits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import Task, decide, uniform

from executor.devices.backend import as_array
from executor.devices.cuda import update_on_device
from executor.devices.meter import MemoryMeter
from executor.memory.pieces import state_buffers
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.adamw_narrow import adamw_narrow_
from executor.optimizer.table import entry_of
from executor.optimizer.workers import WorkerTeam
from planner.optimizers import OPTIMIZERS
from ullage import AdamW8bit, AdamWBf16

UNIT = 2.0**-24


def random_state(num_params, seed):
    """Return master, moments and gradient; magnitudes span decades, and all but the master are bf16."""
    generator = torch.Generator().manual_seed(seed)

    def signed(low, high):
        size = 10 ** (low + (high - low) * torch.rand(num_params, generator=generator))
        return size * (torch.randint(0, 2, (num_params,), generator=generator) * 2 - 1)

    return [signed(-3, 1), signed(-5, 2).bfloat16(), signed(-5, 2).abs().bfloat16(), signed(-6, 2).bfloat16()]


def stepped(state, params, step, scale=1.0, team=None):
    """Return master and moments after a step on the host."""
    master, *moments, gradient = (values.clone() for values in state)
    bits = [moment.view(torch.uint16).numpy() for moment in moments]
    weight = np.zeros(len(master), np.uint16)
    adamw_step([master.numpy(), *bits], gradient.view(torch.uint16).numpy(), weight, params, step, scale, team)
    written = torch.from_numpy(weight).view(torch.bfloat16)
    torch.testing.assert_close(written, master.bfloat16(), rtol=0, atol=0, equal_nan=True)
    return [master, *moments]


def neighbours(values):
    """Return the bf16 values around float64 ones: towards and away from 0."""
    bits = values.float().view(torch.int32)
    lower = (bits & ~0xFFFF).view(torch.float32).double()
    return lower, ((bits & ~0xFFFF) + 0x10000).view(torch.float32).double()


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.floats(1e-3, 10))
def test_a_step_is_float64_arithmetic_within_rounding(num_params, seed, step, scale):
    """Each value has at most 5 roundings to float32; moments then go to one of the two bf16 values around them.

    The sum of the first moment may cancel: its bound is that of its two products. The quotient has 5 roundings more.
    """
    state = random_state(num_params, seed)
    params = AdamWParams(0.1, 0.9, 0.95, weight_decay=0.1, seed=seed)
    master, exp_avg, exp_avg_sq = stepped(state, params, step, scale)
    w, m, v, g = (values.double() for values in state)
    g = g * float(np.float32(scale))
    products = (0.9 * m).abs() + (0.1 * g).abs()
    m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
    for seen, exact, error in ((exp_avg, m, 5 * UNIT * products), (exp_avg_sq, v, 5 * UNIT * v)):
        low, high = (torch.minimum, torch.maximum)
        ends = [end for near in (exact - error, exact + error) for end in neighbours(near)]
        least, most = ends[0], ends[0]
        for end in ends[1:]:
            least, most = low(least, end), high(most, end)
        assert bool(((seen.double() >= least) & (seen.double() <= most)).all())
    divisor = v.sqrt() / (1 - 0.95**step) ** 0.5 + 1e-8
    moved = 0.1 / (1 - 0.9**step) / divisor
    bound = 4 * UNIT * (w.abs() + moved * m.abs()) + moved * (12 * UNIT * m.abs() + 5 * UNIT * products)
    assert bool(((master.double() - (w * 0.99 - moved * m)).abs() <= bound).all())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(1, 10**6), st.integers(0, 2**33), st.data())
def test_device_threads_and_cuts_give_the_same_bits(num_params, seed, step, start, data):
    state = random_state(num_params, seed)
    params = AdamWParams(0.1, seed=seed, parameter=7, start=start)
    expected = stepped(state, params, step)
    with WorkerTeam(3) as team:
        in_threads = stepped(state, params, step, team=team)
    on_device = [values.clone() for values in state]
    adamw_narrow_(on_device[0], tuple(on_device[1:3]), on_device[3].float(), params, step)
    cut = data.draw(st.integers(0, num_params))
    rest = dataclasses.replace(params, start=start + cut)
    halves = [stepped([values[:cut] for values in state], params, step)] if cut else []
    halves += [stepped([values[cut:] for values in state], rest, step)] if cut < num_params else []
    joined = [torch.cat(parts) for parts in zip(*halves, strict=True)]
    for whole, *others in zip(expected, in_threads, on_device[:3], joined, strict=True):
        assert all(torch.equal(whole, other) for other in others)


def test_rounding_is_unbiased_and_its_bits_depend_on_seed_step_parameter_and_position():
    """The mean of n errors deviates by at most half a unit over n ** 0.5; five times that is allowed."""
    num_params = 1 << 16
    first = 1 + torch.full((num_params,), 0.3 * 2**-7)  # three tenths of the way between two bf16 values
    gradient = (first * 10).clone()
    seen = {}
    for name, change in {"": {}, "seed": {"seed": 1}, "parameter": {"parameter": 1}, "start": {"start": 1}}.items():
        for step in (1, 2):
            state = [torch.zeros(num_params), *(torch.zeros(num_params, dtype=torch.bfloat16) for _ in range(2))]
            adamw_narrow_(state[0], tuple(state[1:]), gradient.clone(), AdamWParams(**{"seed": 0} | change), step)
            seen[name, step] = state[1:]
    for moments in seen.values():
        exacts = (gradient * np.float32(0.1), gradient * np.float32(0.001) * gradient)
        for moment, exact in zip(moments, exacts, strict=True):
            unit = float(moment.max() - moment.min())
            assert unit > 0
            assert abs(float((moment.double() - exact.double()).mean())) < 5 * 0.5 * unit / num_params**0.5
        correlation = np.corrcoef(*(moment.double().numpy() for moment in moments))[0, 1]
        assert abs(correlation) < 5 / num_params**0.5, "both moments of a value are rounded independently"
    ups = [moments[0].double().numpy() for moments in seen.values()]
    for i, one in enumerate(ups):
        for other in ups[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / num_params**0.5


def test_the_second_moment_follows_where_rounding_to_the_nearest_stands_still():
    state = [torch.zeros(4096), torch.zeros(4096).bfloat16(), torch.ones(4096).bfloat16()]
    gradient = torch.full((4096,), 0.5)
    nearest = state[2].clone()
    for step in range(1, 301):
        adamw_narrow_(state[0], tuple(state[1:]), gradient.clone(), AdamWParams(seed=0), step)
        nearest = (nearest.float() * 0.999 + gradient * gradient * 0.001).bfloat16()
    exact = 0.25 + 0.75 * 0.999**300
    assert float(state[2].float().mean()) == pytest.approx(exact, rel=2e-3)
    assert bool((nearest == 1).all())


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            read = args[1:] if func is torch.ops.aten.copy_.default else args
            operands = {x.data_ptr(): x for x in tree_leaves(read) if isinstance(x, torch.Tensor)}
            self.num_bytes += sum(x.nbytes for x in (*operands.values(), *tree_leaves(result)))
        return result


@pytest.mark.parametrize("make", [AdamWBf16, AdamW8bit])
def test_the_planner_knows_what_operators_move_and_hold_and_chunks_have_the_bits_of_the_whole(make, monkeypatch):
    for module in ("planner.optimizers", "executor.optimizer.table"):
        monkeypatch.setattr(f"{module}.UPDATED_AT_ONCE", 512)
    num_params = 1280
    optimizer = make([torch.nn.Parameter(torch.zeros(1))])
    rule = entry_of(optimizer).rule(optimizer.param_groups[0])
    row = OPTIMIZERS[rule.entry.planned_as]
    generator = torch.Generator().manual_seed(0)
    buffers = [torch.zeros(b.length(num_params), dtype=b.dtype) for b in state_buffers(rule.entry.planned_as)[1:]]
    state = [torch.randn(num_params, generator=generator), *buffers]
    expected = [values.clone() for values in state]
    gradients = [torch.randn(num_params, generator=generator).bfloat16() for _ in range(2)]
    for step, gradient in enumerate(gradients, 1):
        bits = gradient.view(torch.uint16).numpy()
        rule.entry.host([as_array(values) for values in expected], bits, None, rule.params, step, 0.5)
        with MemoryMeter() as meter:
            update_on_device(state, [gradient], dataclasses.replace(rule, scale=0.5), step)
        assert meter.peak_bytes == row.scratch_bytes(num_params) + 4  # the factor
        assert all(torch.equal(mine, whole) for mine, whole in zip(state, expected, strict=True))
    many = [values.repeat(100) for values in (*state, gradients[0].float())]  # beside them, tables of codes are nothing
    with Traffic() as traffic:
        rule.entry.device(many[0], tuple(many[1:-1]), many[-1], rule.params, 3)
    assert traffic.num_bytes == pytest.approx(row.gpu_update_bytes * 100 * num_params, rel=2e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_stay_so(bad):
    state = random_state(64, 0)
    state[3][::2] = bad
    params = AdamWParams(seed=0)
    on_device = [values.clone() for values in state]
    adamw_narrow_(on_device[0], tuple(on_device[1:3]), on_device[3].float(), params, 1)
    for host, device in zip(stepped(state, params, 1), on_device[:3], strict=True):
        assert torch.equal(host.isnan(), device.isnan())
        assert bool((~host.isfinite())[::2].all())
        assert bool(host.isfinite()[1::2].all())


def test_weights_of_the_first_step_are_those_of_adamw():
    """Moments are rounded after the weight has moved."""
    master, exp_avg, exp_avg_sq, gradient = random_state(300, 1)
    seen = stepped([master, exp_avg, exp_avg_sq, gradient], AdamWParams(0.1, seed=0), 5)[0]
    held = [master.clone().numpy(), exp_avg.float().numpy(), exp_avg_sq.float().numpy()]
    adamw_step(held, gradient.view(torch.uint16).numpy(), None, AdamWParams(0.1), 5)
    assert np.array_equal(held[0], seen.numpy())


def test_bad_hyper_parameters_are_refused():
    for bad in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1.0}):
        with pytest.raises(ValueError, match="must be"):
            AdamWBf16([torch.nn.Parameter(torch.zeros(3))], **bad)
    assert entry_of(AdamWBf16([torch.nn.Parameter(torch.zeros(3))])).planned_as == "adamw-bf16"


@pytest.mark.parametrize(
    ("optimizer", "num_ranks", "zero_stage"),
    [
        ("adamw-bf16", 2, 1),
        ("adamw-8bit", 2, 3),
        *(
            pytest.param(optimizer, *ranks, marks=pytest.mark.torture)
            for optimizer, *ranks in (
                ("adamw-bf16", 2, 3),
                ("adamw-8bit", 2, 1),
                ("adamw-bf16", 4, 3),
                ("adamw-8bit", 4, 3),
            )
        ),
    ],
)
def test_ranks_share_the_state_without_a_trace(processes, optimizer, num_ranks, zero_stage):
    """Cut at other places on other ranks: one reference in memory has the same random bits, and the same blocks."""
    task = Task("gpt2", iterations=3, num_micro_batches=2, optimizer=optimizer)
    choose = uniform("gpu", "cpu") if zero_stage == 1 else mixed
    degrees = {"data_parallel": num_ranks, "zero_stage": zero_stage}
    decisions = decide(task, choose, subgroup_params=1000, **degrees)
    results = processes.call(num_ranks, trained, task, decisions)
    if num_ranks == 2:
        assert_same_bits(results, reference(task, 2, decisions))
        return
    expected = processes.call(num_ranks, trained_in_memory, task, decisions)  # sums in the order of the collective
    for (seen, final, *_), (losses, theirs) in zip(results, expected, strict=True):
        assert seen == losses
        assert all(final[name].tobytes() == weight.tobytes() for name, weight in theirs.items())
