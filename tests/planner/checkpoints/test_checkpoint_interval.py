"""How often to checkpoint: formulas against published intervals, simulated failures, and all that could be chosen."""

import dataclasses
import itertools
import math

import numba
import numpy as np
import pytest
from amount import ALL
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.checkpoints.interval import (
    CheckpointsError,
    Protection,
    daly_s,
    expected_waste,
    most_lost_s,
    nest,
    overhead,
)

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
seconds = st.floats(0.01, 1e5)


def young_s(cost_s, mtbf_s):
    """The first order: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def waste(interval_s, cost_s, mtbf_s, *, latency_s, restart_s):
    """The fraction of time that is not progress, to the first order in 1 / mtbf_s."""
    period_s = interval_s + cost_s
    return cost_s / period_s + (period_s / 2 + latency_s + restart_s) / mtbf_s


@pytest.mark.parametrize(
    ("mtbf_s", "exact_min", "published_min"),
    [(24 * HOUR, 116.7, 117), (6 * HOUR, 56.7, 57), (15 * MINUTE, 9.14, 9.1)],
)
def test_higher_order_form_gives_published_intervals(mtbf_s, exact_min, published_min):
    """A checkpoint of five minutes, and failures once a day, every six hours, every quarter of an hour."""
    minutes = daly_s(5 * MINUTE, mtbf_s) / MINUTE
    assert minutes == pytest.approx(exact_min, rel=5e-4)
    assert round(minutes, 1 if published_min < 10 else 0) == published_min


@given(seconds, seconds)
def test_higher_order_form_approaches_the_first_order(cost_s, factor):
    mtbf_s = cost_s * (1e4 + factor)
    assert daly_s(cost_s, mtbf_s) == pytest.approx(young_s(cost_s, mtbf_s), rel=0.01)


def test_a_checkpoint_longer_than_failures_are_apart():
    assert daly_s(3.0, 1.0) == 1.0


@given(st.floats(0.1, 100.0), st.floats(1e3, 1e6), st.floats(0.2, 5.0))
def test_waste_is_least_at_the_first_order_optimum(cost_s, ratio, factor):
    """Of ``T + o``, since that is the period in the formula; latency and restart do not move it."""
    mtbf_s = cost_s * ratio
    best_s = young_s(cost_s, mtbf_s) - cost_s
    least = waste(best_s, cost_s, mtbf_s, latency_s=30.0, restart_s=60.0)
    assert waste(best_s * factor, cost_s, mtbf_s, latency_s=30.0, restart_s=60.0) >= least - 1e-12


@given(st.floats(0.1, 100.0), st.floats(1e3, 1e6), st.floats(0.5, 2.0))
def test_exact_waste_is_least_at_the_higher_order_optimum(cost_s, ratio, factor):
    level = Protection(cost_s, 30.0, 60.0, 1 / (cost_s * ratio))
    best_s = daly_s(cost_s, cost_s * ratio)
    assert expected_waste([level], [best_s]) <= expected_waste([level], [best_s * factor]) * (1 + 1e-6)


# --- simulated failures


@numba.njit(cache=True)
def training_left(lives_s, kinds, work_s, ratios, cost_s, latency_s, restart_s):  # pragma: no cover - compiled
    """Return the training that is left after so many lives, walked from checkpoint to checkpoint.

    Every ``ratios[l]``-th checkpoint of the fastest level goes to level ``l`` too, and is safe there after its latency.
    A failure of kind ``k`` leaves what is safe at level ``k`` and slower ones; the newest of that is gone back to, and
    what was on its way is lost.
    """
    num_levels = len(ratios)
    safe = np.zeros(num_levels, np.int64)  # checkpoints of the fastest level that lie behind what each level has
    coming, coming_s = np.zeros(num_levels, np.int64), np.full(num_levels, np.inf)
    step, restart = 0, 0.0
    for life in range(len(lives_s)):
        now, end = restart, lives_s[life]
        while True:
            spent = work_s
            for level in range(num_levels):
                if (step + 1) % ratios[level] == 0:
                    spent += cost_s[level]
            for level in range(num_levels):
                if coming_s[level] <= min(now + spent, end):
                    safe[level], coming_s[level] = coming[level], np.inf
            if now + spent > end:
                break
            now += spent
            step += 1
            for level in range(num_levels):
                if step % ratios[level] == 0:
                    coming[level], coming_s[level] = step, now + latency_s[level]
        kind = kinds[life]
        step = safe[kind:].max()
        safe[:kind] = 0
        restart = restart_s[kind]
        coming_s[:] = np.inf
    return step * work_s


def simulated_waste(levels: list[Protection], work_s: list[float], num_failures: int = 60_000) -> float:
    """Return what exponential failures of all kinds waste."""
    rng = np.random.default_rng(5)
    rates = np.array([level.failures_per_s for level in levels])
    lives_s = rng.exponential(1 / rates.sum(), num_failures)
    kinds = rng.choice(len(levels), num_failures, p=rates / rates.sum())
    ratios = np.array([round(between_s / work_s[0]) for between_s in work_s])
    columns = [np.array([getattr(level, name) for level in levels]) for name in ("cost_s", "latency_s", "restart_s")]
    return 1 - training_left(lives_s, kinds, work_s[0], ratios, *columns) / lives_s.sum()


GRID = [
    (cost_s, latency_s, restart_s, mtbf_s, factor)
    for cost_s, latency_s, restart_s, mtbf_s, factor in itertools.product(
        (0.5, 3.0, 60.0), (1.0, 30.0, 300.0), (10.0, 120.0), (30 * MINUTE, 2 * HOUR, DAY), (0.5, 1.0, 2.0)
    )
    # One checkpoint is on its way at a time, so that it is safe before the next one.
    if latency_s <= factor * young_s(cost_s, mtbf_s)
]


def test_waste_agrees_with_simulated_failures():
    """Within 5 % of itself, at and about the best intervals; the first-order form where failures are rare."""
    assert len(GRID) > 100
    for cost_s, latency_s, restart_s, mtbf_s, factor in GRID if ALL else GRID[::8]:
        level, work_s = Protection(cost_s, latency_s, restart_s, 1 / mtbf_s), factor * young_s(cost_s, mtbf_s)
        simulated = simulated_waste([level], [work_s])
        assert expected_waste([level], [work_s]) == pytest.approx(simulated, rel=0.05)
        first_order = waste(work_s, cost_s, mtbf_s, latency_s=latency_s, restart_s=restart_s)
        if first_order < 0.08:
            assert first_order == pytest.approx(simulated, rel=0.05)


def test_the_worked_example():
    """Of a checkpoint of 3 s that is safe after 30 s, and a failure every two hours; a restart takes 120 s."""
    work_s = young_s(3.0, 2 * HOUR)
    wanted = waste(work_s, 3.0, 2 * HOUR, latency_s=30.0, restart_s=120.0)
    assert wanted == pytest.approx(0.0497, abs=5e-5)
    exact = expected_waste([Protection(3.0, 30.0, 120.0, 1 / (2 * HOUR))], [work_s])
    assert exact == pytest.approx(0.0485, abs=2e-4)
    simulated = simulated_waste([Protection(3.0, 30.0, 120.0, 1 / (2 * HOUR))], [work_s], 500_000)
    assert simulated == pytest.approx(exact, rel=0.01)


LEVELS = [
    # failures every so often; costs; latencies; restarts; ratios of intervals
    ((2 * HOUR, DAY), (1.0, 4.0), (5.0, 60.0), (30.0, 60.0), (5,)),
    ((HOUR, 6 * HOUR), (3.0, 3.0), (30.0, 120.0), (60.0, 120.0), (4,)),
    ((2 * HOUR, DAY, 30 * DAY), (0.5, 3.0, 20.0), (2.0, 30.0, 300.0), (20.0, 60.0, 300.0), (6, 5)),
    ((30 * MINUTE, 3 * HOUR, DAY), (1.0, 5.0, 10.0), (5.0, 60.0, 300.0), (30.0, 60.0, 120.0), (3, 4)),
    # What is often lost on its way to the slowest level is lost by failures of the fastest kind.
    ((HOUR, 12 * HOUR, 6 * HOUR), (1.0, 3.0, 10.0), (5.0, 60.0, 900.0), (30.0, 60.0, 120.0), (5, 5)),
    ((20 * MINUTE, HOUR, 6 * HOUR), (2.0, 6.0, 20.0), (10.0, 60.0, 200.0), (30.0, 60.0, 200.0), (2, 3)),
]


@pytest.mark.part(2)
@pytest.mark.parametrize("case", LEVELS)
def test_waste_of_several_levels_agrees_with_simulated_failures(case):
    mtbfs_s, costs_s, latencies_s, restarts_s, ratios = case
    columns = zip(costs_s, latencies_s, restarts_s, mtbfs_s, strict=True)
    levels = [Protection(o, latency, restart, 1 / mtbf) for o, latency, restart, mtbf in columns]
    for factor in (0.7, 1.0, 1.5):
        work_s = [factor * young_s(costs_s[0], mtbfs_s[0])]
        for ratio in ratios:
            work_s.append(work_s[-1] * ratio)
        simulated = simulated_waste(levels, work_s, 300_000)
        assert expected_waste(levels, work_s) == pytest.approx(simulated, rel=0.05)
        first_order = sum(
            waste(T, o, mtbf, latency_s=latency, restart_s=restart)
            for T, o, latency, restart, mtbf in zip(work_s, costs_s, latencies_s, restarts_s, mtbfs_s, strict=True)
        )
        if first_order < 0.08:
            assert first_order == pytest.approx(simulated, rel=0.05)


# --- what is chosen


@st.composite
def protections(draw: st.DrawFn, num_levels: int | None = None) -> list[Protection]:
    """Return levels that are ever slower, rarer needed and dearer."""
    count = num_levels or draw(st.integers(1, 3))
    return [
        Protection(
            draw(st.floats(0.0, 20.0)) * 2**number,
            draw(st.floats(0.1, 60.0)) * 3**number,
            draw(st.floats(1.0, 300.0)),
            1 / (draw(st.floats(0.05, 5.0)) * HOUR * 4**number),
            least_s=1.0,
        )
        for number in range(count)
    ]


@settings(deadline=None)
@given(protections(), st.floats(20.0, 400.0), st.data())
def test_nothing_wastes_less_than_what_is_chosen(levels, iteration_s, data):
    """Of all nested multiples, tried one by one."""
    least_s = tuple(data.draw(st.floats(1.0, 3 * iteration_s)) for _ in levels)
    levels = [dataclasses.replace(level, least_s=least) for level, least in zip(levels, least_s, strict=True)]
    max_overhead = data.draw(st.sampled_from([None, 0.002, 0.02, 0.2]))
    max_lost_s = data.draw(st.sampled_from([None, 600.0, 3600.0, 20_000.0]))
    tried = []
    for every in itertools.product(range(1, 25), *[range(1, 9)] * (len(levels) - 1)):
        counts = list(itertools.accumulate(every, lambda a, b: a * b))
        work_s = [n * iteration_s for n in counts]
        if any(work < least * (1 - 1e-9) for work, least in zip(work_s, least_s, strict=True)):
            continue
        if max_overhead is not None and overhead(levels, work_s) > max_overhead:
            continue
        if max_lost_s is not None and most_lost_s(levels, work_s) > max_lost_s:
            continue
        tried.append(float(expected_waste(levels, work_s)))
    try:
        chosen = nest(levels, iteration_s, max_overhead, max_lost_s)
    except CheckpointsError:
        assert not tried
        return
    assert chosen.waste <= min(tried, default=1.0) * (1 + 1e-12)
    assert all(b % a == 0 for a, b in itertools.pairwise(chosen.every))
    assert all(n * iteration_s >= least * (1 - 1e-9) for n, least in zip(chosen.every, least_s, strict=True))
    assert max_overhead is None or chosen.overhead <= max_overhead * (1 + 1e-9)
    assert max_lost_s is None or chosen.most_lost_s <= max_lost_s * (1 + 1e-9)


@settings(deadline=None)
@given(protections(1), st.floats(0.1, 400.0), st.floats(1.0, 20.0))
def test_more_failures_never_make_intervals_longer(levels, iteration_s, factor):
    level = levels[0]
    often = dataclasses.replace(level, failures_per_s=level.failures_per_s * factor)
    rare, more = (nest([each], iteration_s) for each in (level, often))
    assert more.every[0] <= rare.every[0]
    assert more.waste >= rare.waste * (1 - 1e-12)


@settings(deadline=None)
@given(protections(), st.floats(0.5, 400.0), st.floats(0.05, 0.95))
def test_tighter_limits_never_waste_less(levels, iteration_s, factor):
    free = nest(levels, iteration_s)
    for limit in ({"max_overhead": free.overhead * factor}, {"max_lost_s": free.most_lost_s * factor}):
        try:
            assert nest(levels, iteration_s, **limit).waste >= free.waste * (1 - 1e-12)
        except CheckpointsError as error:
            assert error.least_overhead is None or error.least_lost_s is None


def test_a_long_interval_is_as_good_as_the_best_of_all():
    """Far more iterations than are tried at first: within a hair of the best of one level, tried one by one."""
    level, iteration_s = Protection(3.0, 30.0, 60.0, 1 / DAY, least_s=1.0), 0.01
    chosen = nest([level], iteration_s)
    every = np.arange(100, 400_000)
    assert chosen.waste <= float(np.min(expected_waste([level], [every * iteration_s]))) * (1 + 1e-9)


def test_limits_that_contradict_each_other_say_what_would_do():
    level = Protection(3.0, 30.0, 60.0, 1 / DAY)
    with pytest.raises(CheckpointsError) as caught:
        nest([level], 10.0, max_overhead=0.001, max_lost_s=600.0)
    work_s = math.floor((600 - 30 - 3) / 10) * 10
    assert caught.value.least_overhead == pytest.approx(3 / work_s)
    assert caught.value.least_lost_s == pytest.approx(3000 + 3 + 30)
    with pytest.raises(CheckpointsError) as caught:
        nest([level], 10.0, max_lost_s=20.0)
    assert caught.value.least_overhead is None
    assert caught.value.least_lost_s == pytest.approx(10 + 3 + 30)


@pytest.mark.parametrize("name", ["cost_s", "mtbf_s"])
def test_times_must_be_positive(name):
    values = {"cost_s": 1.0, "mtbf_s": 1.0} | {name: 0.0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        daly_s(**values)
