"""Kernels of SGD, Adagrad, Lion and Adam: float64 oracles with derived bounds, and torch's own optimizers bit for bit.

[Note: Same bits as torch] torch's CPU operators may fuse a multiply and an add, which our kernels never do, and then a
last bit differs. Where every product that is added to something is exact, fused or not is the same. So with factors
that are powers of two, and gradients of 8 bits (bf16) where they are squared, the bits must be equal; any other order
of operations would show.
"""

import functools
import platform
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from amount import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numba import jit, types
from test_adamw import UNIT, as_float32, assert_python_runs_on, bits_equal, narrow, torch_narrow

from executor.devices.backend import _scale, as_array, sum_of_squares
from executor.memory.pieces import state_buffers
from executor.optimizer import adamw, lion, sgd
from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.lion import LionParams, lion_step
from executor.optimizer.reference import Lion
from executor.optimizer.sgd import AdagradParams, SgdParams, adagrad_step, sgd_step
from executor.optimizer.table import ENTRIES, entry_of
from executor.optimizer.workers import WorkerTeam

KERNELS = {
    "adam": (adamw_step, 2, AdamWParams(weight_decay=0.1, decoupled_weight_decay=False)),
    "sgd": (sgd_step, 1, SgdParams(0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    "nesterov": (sgd_step, 1, SgdParams(0.1, momentum=0.9, weight_decay=0.1, nesterov=True)),
    "sgd-plain": (sgd_step, 1, SgdParams(0.1)),
    "adagrad": (adagrad_step, 1, AdagradParams(0.1, lr_decay=0.1, weight_decay=0.1)),
    "lion": (lion_step, 1, LionParams(0.1, weight_decay=0.1)),
}
seeds, sizes = st.integers(0, 2**32 - 1), st.integers(1, 300)
rates, decays = st.floats(1e-6, 1), st.one_of(st.just(0.0), st.floats(0, 0.5))
scales = st.floats(1e-3, 10)


def random_state(num_params, seed, num_buffers, grad_dtype="uint16"):
    """Return master, buffers (not negative) and gradient; magnitudes span decades, far from denormals."""
    rng = np.random.default_rng(seed)

    def signed(low, high):
        return (10 ** rng.uniform(low, high, num_params) * rng.choice([-1, 1], num_params)).astype(np.float32)

    grad = signed(-6, 2)
    buffers = [np.abs(signed(-5, 2)) for _ in range(num_buffers)]
    return [signed(-3, 1), *buffers, narrow(grad) if grad_dtype == "uint16" else grad]


def stepped(kernel, state, params, step, grad_scale=1.0, team=None, *, bf16=True):
    """Return what a step makes of copies of the state: master, buffers, and the weight if any."""
    *held, grad = (array.copy() for array in state)
    weight = np.zeros(grad.size, np.uint16) if bf16 else None
    kernel(held, grad, weight, params, step, grad_scale, team)
    assert np.array_equal(grad, state[-1], equal_nan=True), "the gradient is only read"
    return [*held, *([weight] if bf16 else [])]


def wide(state, grad_scale):
    """Return master, buffer and scaled gradient in float64."""
    master, buffer, grad = state
    return master.astype(np.float64), buffer.astype(np.float64), as_float32(grad).astype(np.float64) * grad_scale


# --- float64 oracles ------------------------------------------------------------------------------------------------


@settings(max_examples=examples(60), deadline=None)
@given(
    size=sizes,
    seed=seeds,
    scale=scales,
    lr=rates,
    decay=decays,
    momentum=st.floats(0.01, 0.99),
    dampening=st.floats(0, 0.9),
    nesterov=st.booleans(),
    step=st.integers(1, 3),
)
def test_sgd_stays_within_the_derived_bounds(size, seed, scale, lr, decay, momentum, dampening, nesterov, step):
    """Bounds count roundings, u = 2**-24 each, one of them for each float32 factor.

    g: 2 (factor, product); with decay 2 + 1 on g and 2 + 1 on the decay: 3 on their sizes, S. m: 2 + 1 on the old part,
    3 + 2 + 1 on the new: 6. With Nesterov 3 + 1 on g, 6 + 2 + 1 on momentum * m: 9. p: 1 on p, and 9 + 3 on the rest.
    """
    params = SgdParams(lr, momentum, 0.0 if nesterov else dampening, decay, nesterov)
    state = random_state(size, seed, 1)
    ours = stepped(sgd_step, state, params, step, scale)
    p, m, g = wide(state, scale)
    size_g = np.abs(g) + decay * np.abs(p)
    g = g + decay * p
    rest = 1 if step == 1 else 1 - params.dampening
    old = 0 if step == 1 else momentum * m
    m, size_m = old + rest * g, np.abs(old) + rest * size_g
    direction, size_d = (g + momentum * m, size_g + momentum * size_m) if nesterov else (m, size_m)
    assert (np.abs(ours[1] - m) <= 7 * UNIT * size_m).all()
    assert (np.abs(ours[0] - (p - lr * direction)) <= UNIT * (2 * np.abs(p) + 13 * lr * size_d)).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    size=sizes, seed=seeds, scale=scales, lr=rates, decay=decays, lr_decay=st.floats(0, 1), step=st.integers(1, 10_000)
)
def test_adagrad_stays_within_the_derived_bounds(size, seed, scale, lr, decay, lr_decay, step):
    """As above. g: 3 on its size S. s: no cancellation: 2 * 3 S / |g| + 1 on g * g, + 1; as g may cancel, of S * S.

    Root: half of that, + 1; sum: + 1. p: 1 on p; rate * g / root: 3 S and 2 (rate) + 1 (division) + what the root has.
    """
    params = AdagradParams(lr, lr_decay, decay, 1e-10)
    state = random_state(size, seed, 1)
    ours = stepped(adagrad_step, state, params, step, scale)
    p, s, g = wide(state, scale)
    size_g = np.abs(g) + decay * np.abs(p)
    g = g + decay * p
    s_new = s + g * g
    error_s = UNIT * (s_new + 8 * size_g * size_g)
    assert (np.abs(ours[1] - s_new) <= error_s).all()
    root = np.sqrt(s_new) + params.eps
    error_root = error_s / (2 * np.sqrt(s_new)) + 3 * UNIT * root
    rate = lr / (1 + (step - 1) * lr_decay)
    error = UNIT * (2 * np.abs(p) + rate * (4 * size_g + 5 * np.abs(g)) / root)
    error += rate * np.abs(g) / root * (error_root / root) * 1.1
    assert (np.abs(ours[0] - (p - rate * g / root)) <= error).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    size=sizes,
    seed=seeds,
    scale=scales,
    lr=rates,
    decay=decays,
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
)
def test_lion_stays_within_the_derived_bounds(size, seed, scale, lr, decay, betas):
    """c: 2 + 1 on the old part, 2 + 2 + 1 on the new: 5, and its sign is right where it is larger than that; so m."""
    params = LionParams(lr, *betas, decay)
    state = random_state(size, seed, 1)
    ours = stepped(lion_step, state, params, 1, scale)
    p, m, g = wide(state, scale)
    c, size_c = betas[0] * m + (1 - betas[0]) * g, betas[0] * np.abs(m) + (1 - betas[0]) * np.abs(g)
    new, size_m = betas[1] * m + (1 - betas[1]) * g, betas[1] * np.abs(m) + (1 - betas[1]) * np.abs(g)
    assert (np.abs(ours[1] - new) <= 6 * UNIT * size_m).all()
    sure = np.abs(c) > 6 * UNIT * size_c
    assert sure.mean() > 0.9 or size < 30
    error = np.abs(ours[0] - (p * (1 - lr * decay) - lr * np.sign(c)))
    assert (error <= UNIT * (4 * np.abs(p) + 3 * lr))[sure].all()


@settings(max_examples=examples(40), deadline=None)
@given(size=sizes, seed=seeds, scale=scales, lr=rates, decay=st.floats(0.01, 0.5), step=st.integers(1, 1000))
def test_adam_is_adamw_on_a_gradient_that_decays(size, seed, scale, lr, decay, step):
    """Exactly: the sum is made first, in float32."""
    state = random_state(size, seed, 2, "float32")
    ours = stepped(adamw_step, state, AdamWParams(lr, weight_decay=decay, decoupled_weight_decay=False), step, scale)
    grad = state[-1] * np.float32(scale) + np.float32(decay) * state[0]
    theirs = stepped(adamw_step, [*state[:-1], grad], AdamWParams(lr, weight_decay=0.0), step)
    assert bits_equal(ours, theirs)


# --- torch ----------------------------------------------------------------------------------------------------------


def against_torch(make, grads, seed, size):
    """Take steps with torch's optimizer and with the entry's kernel; return both weights and both states."""
    rng = np.random.default_rng(seed)
    start = rng.standard_normal(size).astype(np.float32)
    theirs = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make([theirs])
    entry, (group,) = entry_of(optimizer), optimizer.param_groups
    initial = group[entry.starts_at] if entry.starts_at else 0.0
    state = [start.copy(), *(np.full(size, initial, np.float32) for _ in entry.buffers)]
    for step, grad in enumerate(grads(rng, size), start=1):
        theirs.grad = torch.from_numpy(grad.copy())
        with np.errstate(all="ignore"):
            entry.host(state, grad, None, entry.read(group), step, 1.0, None)
        optimizer.step()
    stocked = [optimizer.state[theirs][key].numpy() for key in entry.buffers if optimizer.state[theirs]]
    return [theirs.detach().numpy(), *stocked], state[: 1 + len(stocked)]


def normal(rng, size):
    return [rng.standard_normal(size).astype(np.float32) for _ in range(20)]


def of_8_bits(rng, size):
    return [torch.from_numpy(grad).bfloat16().float().numpy() for grad in normal(rng, size)]


def awkward(rng, size, largest=3e38):
    """Return zeros, denormals, the largest and smallest numbers, infinities and NaN, of either sign."""
    values = np.array([0.0, 1e-45, 1e-40, 1.2e-38, 1e-20, 1.0, 1e18, largest, np.inf, np.nan], np.float32)
    return [rng.choice(values, size) * rng.choice([-1, 1], size).astype(np.float32) for _ in range(4)]


powers = st.integers(-6, -1).map(lambda n: 2.0**n)
EXACT = {
    "sgd": lambda a, b, c: functools.partial(torch.optim.SGD, lr=a, momentum=b, weight_decay=c),
    "dampened": lambda a, b, c: functools.partial(torch.optim.SGD, lr=a, momentum=b, dampening=0.5, weight_decay=c),
    "nesterov": lambda a, b, c: functools.partial(torch.optim.SGD, lr=a, momentum=b, nesterov=True, weight_decay=c),
    "sgd-plain": lambda a, _, c: functools.partial(torch.optim.SGD, lr=a, weight_decay=c),
    "lion": lambda a, b, c: functools.partial(Lion, lr=a / 3, betas=(0.9 - b / 7, 0.99), weight_decay=c / 3),
}


@settings(max_examples=examples(30), deadline=None)
@given(st.sampled_from(sorted(EXACT)), powers, powers, st.one_of(st.just(0.0), powers), seeds, sizes)
def test_the_bits_are_torchs_where_products_are_exact(name, lr, momentum, decay, seed, size):
    """See [Note: Same bits as torch]; our own Lion rounds each operation, so that any factors do."""
    theirs, ours = against_torch(EXACT[name](lr, momentum, decay), normal, seed, size)
    assert all(np.array_equal(a, b) for a, b in zip(theirs, ours, strict=True))


@settings(max_examples=examples(20), deadline=None)
@given(rates, st.floats(0, 1), st.sampled_from([0.0, 0.3]), seeds, sizes)
def test_adagrads_sums_are_torchs_where_squares_are_exact(lr, lr_decay, initial, seed, size):
    """Weights differ by rounding: torch's root may be that of a vector library, which is off by a unit."""
    make = functools.partial(torch.optim.Adagrad, lr=lr, lr_decay=lr_decay, initial_accumulator_value=initial)
    (weight, total), (our_weight, our_total) = against_torch(make, of_8_bits, seed, size)
    assert np.array_equal(total, our_total)
    # 20 steps, each of at most lr, with 4 roundings of it and 1 of the weight, on either side.
    largest = np.abs(weight).max() + lr
    assert np.abs(weight - our_weight).max() <= 2 * 20 * UNIT * (4 * lr + largest)


AWKWARD = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, weight_decay=0.25),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.5, momentum=0.5, nesterov=True),
    "sgd-plain": functools.partial(torch.optim.SGD, lr=0.5),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.5),
    "adagrad without eps": functools.partial(torch.optim.Adagrad, lr=0.5, eps=0.0),
    "lion": functools.partial(Lion, lr=0.1, weight_decay=0.1),
    "adam": functools.partial(torch.optim.Adam, lr=0.5, weight_decay=0.25),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.5),
}


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(sorted(AWKWARD)), seeds, sizes)
@example("lion", 0, 300)
def test_zeros_denormals_infinities_and_nan_go_through_as_in_torch(name, seed, size):
    # torch's means (lerp) take the difference of old and new: it may overflow, and that of two infinities is NaN.
    of_means = name in {"adam", "adamw"}
    grads = functools.partial(awkward, largest=1e18) if of_means else awkward
    theirs, ours = against_torch(AWKWARD[name], grads, seed, size)
    for number, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert np.array_equal(np.isfinite(a), np.isfinite(b))
        assert np.array_equal(np.isnan(a), np.isnan(b)) or (of_means and number == 1)
        finite = np.isfinite(a)
        np.testing.assert_allclose(a[finite], b[finite], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_lion_does_not_hide_a_gradient_that_is_not_finite(bad):
    state = [np.ones(200, np.float32), np.zeros(200, np.float32), np.ones(200, np.float32)]
    state[-1][[3, 199]] = bad
    master, *_ = stepped(lion_step, state, LionParams(), 1)
    assert np.flatnonzero(np.isnan(master)).tolist() == [3, 199]


# --- all of them ----------------------------------------------------------------------------------------------------


@pytest.mark.part(2)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("grad_dtype", ["uint16", "float32"])
@settings(max_examples=examples(15), deadline=None)
@given(data=st.data())
def test_any_cut_and_team_give_the_same_bits(name, grad_dtype, data):
    kernel, num_buffers, params = KERNELS[name]
    size = data.draw(st.integers(1, 700))
    cuts = data.draw(st.lists(st.integers(0, size), max_size=5))
    state = random_state(size, size, num_buffers, grad_dtype)
    whole = stepped(kernel, state, params, 3, 0.7)
    edges = sorted({0, size, *cuts})
    parts = [stepped(kernel, [a[start:stop] for a in state], params, 3, 0.7) for start, stop in pairwise(edges)]
    assert bits_equal(whole, [np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
    with WorkerTeam(2) as team:
        assert bits_equal(whole, stepped(kernel, state, params, 3, 0.7, team))
    assert np.array_equal(whole[-1], torch_narrow(whole[0]))
    assert bits_equal(whole[:-1], stepped(kernel, state, params, 3, 0.7, bf16=False))


@pytest.mark.parametrize("name", KERNELS)
def test_grad_scale_is_a_scaled_gradient(name):
    kernel, num_buffers, params = KERNELS[name]
    state = random_state(1000, 3, num_buffers, "float32")
    scaled = [*state[:-1], state[-1] * np.float32(0.3)]
    assert bits_equal(stepped(kernel, state, params, 5, 0.3), stepped(kernel, scaled, params, 5))


def test_without_momentum_its_buffer_is_not_touched():
    state = random_state(100, 1, 1)
    master, buffer, _ = stepped(sgd_step, state, SgdParams(0.1), 1)
    assert np.array_equal(buffer, state[1])
    without = [state[0].copy(), None, state[2].copy()]
    sgd_step((without[0], None), without[2], None, SgdParams(0.1), 1)
    assert np.array_equal(master, without[0])


# Muon's is one function on both: see ``test_muon.py``.
@pytest.mark.parametrize(
    "entry", [entry for entry in ENTRIES if entry.others is None], ids=lambda entry: entry.torch_class.__name__
)
@pytest.mark.parametrize("step", [1, 2, 7])
def test_updates_on_a_device_are_those_on_the_host_but_for_rounding(entry, step):
    """torch's kernels may fuse and regroup: some units of 2**-24 of the sizes involved, which are of order 1 here."""
    rng = np.random.default_rng(step)
    state = [rng.standard_normal(1001).astype(np.float32) for _ in range(1 + len(entry.buffers))]
    state[1:] = [np.abs(buffer) for buffer in state[1:]]
    grad = rng.standard_normal(1001).astype(np.float32)
    of_its_own = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.Adagrad: {"lr_decay": 0.2}}
    options = {"weight_decay": 0.1, **of_its_own.get(entry.torch_class, {})}
    (group,) = entry.torch_class([torch.nn.Parameter(torch.zeros(1))], lr=0.1, **options).param_groups
    params = entry.read(group)
    buffers = state_buffers(entry.planned_as)
    held = [
        torch.from_numpy(array[: buffer.length(1001)]).to(buffer.dtype)
        for array, buffer in zip(state, buffers, strict=True)
    ]
    tensors = [tensor.clone() for tensor in held]
    entry.device(tensors[0], tuple(tensors[1:]), torch.from_numpy(grad.copy()), params, step)
    entry.host([as_array(tensor) for tensor in held], grad, None, params, step, 1.0, None)
    for mine, theirs in zip(held, tensors, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in KERNELS if KERNELS[name][0] is not adamw_step])
def test_python_runs_on_while_a_kernel_works(name):
    kernel, num_buffers, params = KERNELS[name]
    state = [np.ones(2**22, np.float32) for _ in range(1 + num_buffers)]
    assert_python_runs_on(lambda: kernel(state, state[0], None, params, 1))


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_python_runs_on_while_gradients_are_measured_or_scaled(dtype):
    values = np.ones(2**22, dtype)  # no tensors: torch would let others run by itself
    assert_python_runs_on(lambda: sum_of_squares(values))
    assert_python_runs_on(lambda: _scale(values, np.float32(1.0)))


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SgdParams(momentum=-1), "momentum is -1, but must be finite and at least 0"),
        (lambda: SgdParams(nesterov=True), "nesterov with momentum 0.0 and dampening 0.0: it needs momentum"),
        (lambda: SgdParams(momentum=0.9, dampening=0.1, nesterov=True), "nesterov with momentum 0.9 and dampening 0.1"),
        (lambda: SgdParams(dampening=0.1), "dampening is 0.1 without momentum"),
        (lambda: AdagradParams(lr_decay=float("inf")), "lr_decay is inf"),
        (lambda: LionParams(beta1=1.0), "beta1 is 1.0, but must be at least 0 and less than 1"),
        (lambda: Lion([torch.zeros(1, requires_grad=True)], lr=-1.0), "lr is -1.0"),
    ],
)
def test_wrong_hyper_parameters_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lion_takes_a_closure_and_leaves_out_what_has_no_gradient():
    one, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Lion([one, other], lr=0.5)

    def closure():
        optimizer.zero_grad()
        loss = (one * 2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 6
    assert one.tolist() == [0.5] * 3
    assert other.tolist() == [1] * 3
    assert other not in optimizer.state


@pytest.mark.parametrize("name", KERNELS)
@given(seed=seeds, num_params=sizes)
def test_weights_over_gradients_have_the_same_bits_as_apart(name, seed, num_params):
    kernel, num_buffers, params = KERNELS[name]
    state = random_state(num_params, seed, num_buffers)
    separate = stepped(kernel, state, params, 1)
    held = [array.copy() for array in state]
    kernel(held[:-1], held[-1], held[-1], params, 1)
    for expected, array in zip(separate, held, strict=True):
        assert bits_equal(expected, array)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads instructions of x86-64")
@pytest.mark.part(2)
@pytest.mark.parametrize(
    ("name", "update"),
    [("adamw", adamw._update), ("adagrad", sgd._update_adagrad), ("lion", lion._update), ("sgd", sgd._update)],
)
def test_weights_over_gradients_are_written_in_vectors(name, update):
    """Where they overlap as two arrays, the kernel's check at run time would choose its loop without vectors."""
    kernel, num_buffers, params = KERNELS.get(name, (adamw_step, 2, AdamWParams()))
    *held, grad = random_state(64, 0, num_buffers)
    kernel(held, grad, grad, params, 1)
    overlapping = [signature for signature in update.signatures if types.Tuple(()) in signature]
    assert overlapping
    compiled = jit(**update.targetoptions)(update.py_func)  # what comes from a cache has no code to read
    for signature in overlapping:
        compiled.compile(signature)
        assert re.search(r"v?mulps\s.*[yzx]mm", compiled.inspect_asm(signature))
