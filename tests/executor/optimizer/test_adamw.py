"""The one-pass AdamW against numpy operation by operation, a float64 oracle with derived bounds, and torch."""

import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from amount import examples
from forked import completed, script
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from executor.optimizer.adamw import AdamWParams, adamw_step
from executor.optimizer.bf16 import bf16_to_float32, float32_to_bf16
from executor.optimizer.workers import WorkerTeam

PARAMS = AdamWParams(lr=2e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
UNIT = 2.0**-24  # largest relative error of one float32 rounding


@njit
def widen(bits):
    out = np.empty(bits.size, np.float32)
    for i in range(bits.size):
        out[i] = bf16_to_float32(bits[i])
    return out


@njit
def narrow(values):
    out = np.empty(values.size, np.uint16)
    for i in range(values.size):
        out[i] = float32_to_bf16(values[i])
    return out


def torch_narrow(values):
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def random_state(num_params, seed, grad_dtype="uint16"):
    """Return master, exp_avg, exp_avg_sq, grad; magnitudes span decades, far from denormals."""
    rng = np.random.default_rng(seed)

    def signed(low, high):
        return (10 ** rng.uniform(low, high, num_params) * rng.choice([-1, 1], num_params)).astype(np.float32)

    grad = signed(-6, 2)
    return [signed(-3, 1), signed(-5, 1), np.abs(signed(-8, 2)), narrow(grad) if grad_dtype == "uint16" else grad]


def as_float32(grad):
    return widen(grad) if grad.dtype == np.uint16 else grad


def stepped(state, params, step, grad_scale=1.0, team=None, *, bf16=True):
    """Return what a step makes of copies of the state: master, exp_avg, exp_avg_sq, and the weight if any."""
    master, exp_avg, exp_avg_sq, grad = (array.copy() for array in state)
    weight = np.zeros(master.size, np.uint16) if bf16 else None
    adamw_step((master, exp_avg, exp_avg_sq), grad, weight, params, step, grad_scale, team)
    assert np.array_equal(grad, state[3], equal_nan=True), "the gradient is only read"
    return [master, exp_avg, exp_avg_sq] + ([weight] if bf16 else [])


def bits_equal(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


def numpy_step(state, params, step, grad_scale):
    """Apply the documented formula with numpy: a float32 rounding per operation, nothing fused or regrouped."""
    f = np.float32
    master, m, v = state[:3]
    with np.errstate(all="ignore"):
        g = as_float32(state[3]) * f(grad_scale)
        m = f(params.beta1) * m + f(1 - params.beta1) * g
        v = f(params.beta2) * v + f(1 - params.beta2) * g * g
        denominator = np.sqrt(v) * f(1 / np.sqrt(1 - params.beta2**step)) + f(params.eps)
        decayed = master * f(1 - params.lr * params.weight_decay)
        return [decayed - f(params.lr / (1 - params.beta1**step)) * m / denominator, m, v]


# --- bfloat16 -------------------------------------------------------------------------------------------------------


def test_every_bf16_widens_exactly_and_comes_back():
    bits = np.arange(2**16, dtype=np.uint16)
    values = widen(bits)
    assert values.tobytes() == torch.from_numpy(bits).view(torch.bfloat16).float().numpy().tobytes()
    nan = np.isnan(values)
    back = narrow(values)
    assert np.array_equal(back[~nan], bits[~nan])
    assert np.isnan(widen(back[nan])).all()


def check_narrow(bits):
    values = bits.view(np.float32)
    ours = narrow(values)
    nan = np.isnan(values)
    assert np.array_equal(ours[~nan], torch_narrow(values)[~nan])
    assert (ours[nan] == 0x7FC0).all()


def test_narrowing_rounds_as_torch_around_every_tie():
    upper = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    check_narrow((upper | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).ravel())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_narrowing_rounds_as_torch_on_any_bits(bits):
    check_narrow(np.array(bits, np.uint32))


# --- the step -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_dtype", ["uint16", "float32"])
@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize(("step", "grad_scale"), [(1, 1.0), (2, 0.37), (1000, 1e-3)])
def test_every_operation_is_the_plain_float32_one(grad_dtype, bf16, step, grad_scale):
    state = random_state(10_007, step, grad_dtype)
    ours = stepped(state, PARAMS, step, grad_scale, bf16=bf16)
    assert bits_equal(ours[:3], numpy_step(state, PARAMS, step, grad_scale))
    if bf16:
        assert np.array_equal(ours[3], torch_narrow(ours[0]))


@settings(max_examples=examples(50), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    step=st.integers(1, 10_000),
    grad_scale=st.floats(1e-3, 10),
    lr=st.floats(1e-6, 1),
    weight_decay=st.floats(0, 0.5),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.9999)),
)
def test_step_stays_within_the_derived_bounds_of_a_float64_oracle(seed, step, grad_scale, lr, weight_decay, betas):
    """Bounds count roundings, u = 2**-24 each, one of them for each float32 factor, one to spare for products of u.

    g: 2 (factor, product). m: 2 + 1 on the old part, 2 + 2 + 1 on the new: 5 (|old| + |new|). v: no cancellation, so
    relative: 1 + 2 * 2 + 2 + 1 = 8. Denominator: 8 / 2 + 1 (root) + 2 (bias) + 1 (sum) = 8. Update: m's 5 on
    |old| + |new|, and 2 (step size) + 8 + 1 (division). Master: 3 on the decayed part, update + 1 on the rest.
    """
    state = random_state(257, seed)
    params = AdamWParams(lr, *betas, 1e-8, weight_decay)
    ours = stepped(state, params, step, grad_scale)

    master, m_old, v_old = (array.astype(np.float64) for array in state[:3])
    beta1, beta2 = betas
    g = as_float32(state[3]).astype(np.float64) * grad_scale
    m_old, m_new = beta1 * m_old, (1 - beta1) * g
    v = beta2 * v_old + (1 - beta2) * g * g
    rate = lr / (1 - beta1**step) / (np.sqrt(v) / np.sqrt(1 - beta2**step) + params.eps)
    decayed = master * (1 - lr * weight_decay)

    size_m = np.abs(m_old) + np.abs(m_new)
    assert (np.abs(ours[1] - (m_old + m_new)) <= 6 * UNIT * size_m).all()
    assert (np.abs(ours[2] - v) <= 9 * UNIT * v).all()
    error = np.abs(ours[0] - (decayed - rate * (m_old + m_new)))
    assert (error <= UNIT * (4 * np.abs(decayed) + 18 * rate * size_m)).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_follows_torch_adamw_over_many_steps(weight_decay, clip):
    """Over N steps each side errs by at most 4 u |p| and 18 u |update| a step; here |update| is below |p| / 100."""
    num_steps, num_params, rng = 150, 1003, np.random.default_rng(7)
    params = replace(PARAMS, weight_decay=weight_decay)
    state = [rng.standard_normal(num_params).astype(np.float32), *np.zeros((2, num_params), np.float32)]
    theirs = torch.nn.Parameter(torch.from_numpy(state[0].copy()))
    options = {"betas": (params.beta1, params.beta2), "eps": params.eps, "weight_decay": weight_decay}
    optimizer = torch.optim.AdamW([theirs], lr=params.lr, **options)
    for step in range(1, num_steps + 1):
        params = replace(params, lr=PARAMS.lr * (1 - step / 200))  # a schedule
        optimizer.param_groups[0]["lr"] = params.lr
        grad = rng.standard_normal(num_params).astype(np.float32)
        theirs.grad = torch.from_numpy(grad.copy())
        grad_scale = 1.0
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_([theirs], clip)
            grad_scale = min(1.0, clip / (float(norm) + 1e-6))
        adamw_step(state, grad, None, params, step, grad_scale)
        optimizer.step()
    reached = theirs.detach().numpy()
    assert np.abs(reached).max() > 1
    assert np.abs(state[0] - reached).max() <= 2 * num_steps * 5 * UNIT * np.abs(reached).max()
    torch_state = optimizer.state[theirs]
    np.testing.assert_allclose(state[1], torch_state["exp_avg"].numpy(), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(state[2], torch_state["exp_avg_sq"].numpy(), rtol=1e-5)


def test_weight_decay_alone_shrinks_the_weight():
    state = [np.ones(5, np.float32), *np.zeros((3, 5), np.float32)]
    assert (stepped(state, replace(PARAMS, lr=0.5, weight_decay=0.25), 1)[0] == 0.875).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    num_params=st.integers(1, 700),
    cuts=st.lists(st.integers(0, 700), max_size=6),
    seed=st.integers(0, 99),
    grad_dtype=st.sampled_from(["uint16", "float32"]),
)
def test_any_cut_gives_the_same_bits(num_params, cuts, seed, grad_dtype):
    state = random_state(num_params, seed, grad_dtype)
    edges = sorted({0, num_params, *(min(cut, num_params) for cut in cuts)})
    parts = [stepped([array[start:stop] for array in state], PARAMS, 3, 0.7) for start, stop in pairwise(edges)]
    assert bits_equal(stepped(state, PARAMS, 3, 0.7), [np.concatenate(arrays) for arrays in zip(*parts, strict=True)])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_any_team_gives_the_same_bits(num_threads):
    state = random_state(100_003, 1)
    with WorkerTeam(num_threads) as team:
        assert bits_equal(stepped(state, PARAMS, 2, 0.9, team), stepped(state, PARAMS, 2, 0.9))


@pytest.mark.parametrize("grad_dtype", ["uint16", "float32"])
def test_nan_and_infinite_gradients_go_through(grad_dtype):
    state = random_state(300, 4, grad_dtype)
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    places = [0, 150, 299]  # the vectorised body and the remainder
    state[3][places] = narrow(bad) if grad_dtype == "uint16" else bad
    master, exp_avg, exp_avg_sq, weight = stepped(state, PARAMS, 1)

    np.testing.assert_array_equal(exp_avg[places], bad)
    np.testing.assert_array_equal(exp_avg_sq[places], [np.nan, np.inf, np.inf])
    for array in (master, widen(weight)):
        assert np.flatnonzero(np.isnan(array)).tolist() == places


def test_without_eps_an_untouched_parameter_becomes_nan_as_in_torch():
    state = [np.ones(100, np.float32), *np.zeros((3, 100), np.float32)]
    assert np.isnan(stepped(state, replace(PARAMS, eps=0.0), 1)[0]).all()


# --- errors ---------------------------------------------------------------------------------------------------------


def test_wrong_numbers_are_named():
    with pytest.raises(AssertionError):
        stepped(random_state(10, 0), PARAMS, 0)
    with pytest.raises(ValueError, match=r"beta2 is 1\.0"):
        AdamWParams(beta2=1.0)
    with pytest.raises(ValueError, match="lr is nan"):
        AdamWParams(lr=float("nan"))


# --- threads and compilation ----------------------------------------------------------------------------------------


def test_python_runs_on_while_a_kernel_works():
    state = random_state(2**22, 0)
    assert_python_runs_on(lambda: adamw_step(state[:3], state[3], None, PARAMS, 1))


def assert_python_runs_on(call):
    """Check that other threads run while a call of some milliseconds is under way."""
    call()  # it is compiled now
    ticks, done = [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    # With so long an interval no thread is made to hand over the GIL: a tick inside the call means it was released.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(30)
    ticker = threading.Thread(target=tick)
    try:
        ticker.start()
        during = 0
        deadline = time.perf_counter() + 10
        while during < 5 and time.perf_counter() < deadline:
            num_before = len(ticks)
            call()
            during += len(ticks) - num_before
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        ticker.join()
    assert during >= 5


def test_after_warm_up_nothing_is_compiled(tmp_path):
    (program := tmp_path / "program.py").write_text("""if True:
        import numpy as np, torch
        from executor.optimizer import adamw
        from executor.optimizer.adamw import AdamWParams, adamw_step
        from executor.optimizer.workers import WorkerTeam
        from executor.optimizer.table import ENTRIES
        entry = next(entry for entry in ENTRIES if entry.torch_class is torch.optim.AdamW)
        group = torch.optim.AdamW([torch.ones(1)]).param_groups[0]
        grads = {kind: np.ones(200, kind) for kind in (np.uint16, np.float32)}
        halves, singles = grads.values()
        for grad, weights in ((halves, (np.zeros(200, np.uint16), halves)), (singles, (None,))):
            entry.warm_up(grad.dtype, group, writes_bf16=weights[0] is not None)
            compiled = set(adamw._update.signatures)
            for weight in weights:
                with WorkerTeam(2) as team:
                    adamw_step(np.ones((3, 200), np.float32), grad, weight, AdamWParams(), 1, 0.5, team)
            assert set(adamw._update.signatures) == compiled, grad.dtype
        """)
    done = completed(script, str(program))
    assert done.returncode == 0, done.stderr
