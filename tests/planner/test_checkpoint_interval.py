import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.checkpoints.interval import choose, daly_s, waste, young_s

MINUTE, HOUR = 60.0, 3600.0
seconds = st.floats(0.01, 1e5)


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


def test_waste_agrees_with_simulated_failures():
    """Exponential failures; each falls back to the last checkpoint that was written, and restarts."""
    cost_s, latency_s, restart_s, mtbf_s = 3.0, 30.0, 120.0, 2 * HOUR
    interval_s = young_s(cost_s, mtbf_s)
    lives_s = np.random.default_rng(1).exponential(mtbf_s, 200_000)
    # A life starts with a restart and computes until it fails; what was written in time is kept.
    kept = np.floor(np.maximum(lives_s - restart_s - latency_s, 0) / (interval_s + cost_s))
    simulated = 1 - kept.sum() * interval_s / lives_s.sum()
    wanted = waste(interval_s, cost_s, mtbf_s, latency_s=latency_s, restart_s=restart_s)
    assert wanted == pytest.approx(0.0497, abs=5e-5)
    assert simulated == pytest.approx(wanted, rel=0.05)


@given(seconds, seconds, seconds, seconds, st.integers(1, 4))
def test_an_interval_is_whole_iterations_that_storage_keeps_up_with(cost_s, latency_s, iteration_s, mtbf_s, in_flight):
    chosen = choose(cost_s, latency_s, iteration_s, mtbf_s, in_flight=in_flight)
    assert chosen.every >= 1
    assert chosen.interval_s == chosen.every * iteration_s
    assert chosen.interval_s * in_flight >= latency_s * (1 - 1e-9)
    if chosen.bound == "waste":
        assert abs(chosen.interval_s - daly_s(cost_s, mtbf_s)) <= iteration_s
    if chosen.bound == "iteration":
        assert chosen.every <= math.ceil(latency_s / in_flight / iteration_s) or chosen.every == 1


def test_what_bounds_an_interval_is_named():
    assert choose(3.0, 30.0, 10.0, 2 * HOUR).bound == "waste"
    assert choose(3.0, 900.0, 10.0, 2 * HOUR) == choose(3.0, 899.99, 10.0, 2 * HOUR)
    assert choose(3.0, 900.0, 10.0, 2 * HOUR).bound == "drain"
    assert choose(3.0, 900.0, 10.0, 2 * HOUR).every == 90
    assert choose(3.0, 900.0, 10.0, 2 * HOUR, in_flight=2).every == 45
    assert choose(3.0, 1.0, 999.0, 2 * HOUR).bound == "iteration"


@pytest.mark.parametrize("name", ["cost_s", "latency_s", "iteration_s", "mtbf_s"])
def test_times_must_be_positive(name):
    values = {"cost_s": 1.0, "latency_s": 1.0, "iteration_s": 1.0, "mtbf_s": 1.0} | {name: 0.0}
    with pytest.raises(ValueError, match=f"{name} is 0"):
        choose(**values)
