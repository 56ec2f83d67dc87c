"""Areas under rates are what was moved, and a step function is what a brute-force sampler finds."""

import math
from collections import defaultdict

import numpy as np
import pytest
from amount import examples
from cases import Case, cases, random_prices
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.schedule.schedule import Schedule
from planner.schedule.series import PROCESSORS, Flow, busy, link_of, series, traffic
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.schedule.timeline import Timeline
from planner.simulate.machine import run

SLOW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def flows(draw: st.DrawFn) -> list[Flow]:
    """Flows on a grid of quarters, within eight seconds."""
    ends = st.integers(0, 32)
    pairs = draw(st.lists(st.tuples(ends, ends, st.floats(0.1, 1e9)), max_size=8))
    return [(min(a, b) / 4, max(a, b) / 4, rate) for a, b, rate in pairs]


@settings(max_examples=examples(200))
@given(flows())
def test_a_series_is_what_a_sampler_finds(listed: list[Flow]) -> None:
    found = series(listed, 8.0)
    assert found.times_s[0] == 0
    assert (np.diff(found.times_s) > 0).all()
    for eighth in range(1, 64, 2):
        at_s = eighth / 8
        wanted = sum(rate for start_s, end_s, rate in listed if start_s <= at_s < end_s)
        value = found.values[np.searchsorted(found.times_s, at_s, side="right") - 1]
        assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6)
        if not wanted:
            assert value == 0.0
    area = sum((end_s - start_s) * rate for start_s, end_s, rate in listed)
    assert found.integral == pytest.approx(area, rel=1e-9, abs=1e-6)
    for num_columns in (1, 7, 32):
        assert found.means(num_columns).sum() * 8.0 / num_columns == pytest.approx(area, rel=1e-9, abs=1e-6)


@settings(max_examples=examples(100))
@given(flows(), st.floats(0.01, 12.0))
def test_a_moving_mean_goes_around_and_has_the_same_area(listed: list[Flow], window_s: float) -> None:
    found = series(listed, 8.0)
    at_s = np.arange(800) / 100
    means = found.moving_means(at_s, window_s)
    assert means.min() >= -1e-6 * (found.peak + 1)
    assert means.max() <= found.peak * (1 + 1e-6) + 1e-6
    assert found.moving_means(at_s, 8.0) == pytest.approx(np.full(800, found.integral / 8.0), rel=1e-9, abs=1e-6)
    assert means == pytest.approx(found.moving_means(at_s + 8.0, window_s), rel=1e-6, abs=1e-6 * (found.peak + 1))


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1))
def test_traffic_of_an_iteration_is_the_bytes_of_its_tasks(case: Case, seed: int) -> None:
    simulated = run(case.schedule, *random_prices(case.schedule, seed), 3)
    assume(simulated.period_s(1) > 0)
    moved: dict[Lane, int] = defaultdict(int)
    for span in simulated.of_iteration(1):
        task = case.schedule.tasks[span.task]
        if task.num_bytes and span.end_s > span.start_s and (link := link_of(task.lane)):
            moved[link] += task.num_bytes
    found = traffic(simulated, 1)
    assert found.keys() == moved.keys()
    for link, num_bytes in moved.items():
        assert found[link].integral == pytest.approx(num_bytes, rel=1e-6)
        assert found[link].values.min() >= 0


@settings(SLOW, max_examples=examples(50))
@given(cases(), st.integers(0, 2**32 - 1))
def test_a_processor_is_busy_or_not(case: Case, seed: int) -> None:
    simulated = run(case.schedule, *random_prices(case.schedule, seed), 3)
    assume(simulated.period_s(1) > 0)
    running_s = simulated.busy_s(1)
    for name, found in busy(simulated, 1).items():
        assert set(found.values.tolist()) <= {0.0, 1.0}
        lanes = [running_s.get(lane, 0.0) for lane in PROCESSORS[name]]
        assert found.integral <= min(sum(lanes), found.period_s) * (1 + 1e-9)
        if math.isclose(simulated.period_s(0), found.period_s, rel_tol=1e-9):  # else a lane may outrun the period
            assert found.integral >= max(lanes) * (1 - 1e-6)


def test_lanes_of_one_link_are_seen_together() -> None:
    """PCIe is crossed by parameters, gradients, state and activations, the drives by state and the rest."""
    links = {
        Lane.H2D: {Lane.H2D, Lane.STATE_IN, Lane.ACTIVATION_IN},
        Lane.D2H: {Lane.D2H, Lane.STATE_OUT, Lane.ACTIVATION_OUT},
        Lane.NVME_READ: {Lane.NVME_READ, Lane.NVME_STATE_IN},
        Lane.NVME_WRITE: {Lane.NVME_WRITE, Lane.NVME_STATE_OUT},
    }
    assert {link: {lane for lane in Lane if link_of(lane) is link} for link in links} == links


def test_what_crosses_into_the_next_iteration_is_folded_back() -> None:
    tasks = (
        Task(0, Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, "a"),
        Task(1, Lane.D2H, Op.FLUSH, Phase.BACKWARD, "a", num_bytes=300),
        Task(2, Lane.STATE_OUT, Op.STORE, Phase.UPDATE, "a", num_bytes=40),
        Task(3, Lane.CPU, Op.PASS, Phase.UPDATE, "a", num_bytes=999),  # stays in host memory
    )
    starts_s = np.array([[0.0, 2.0, 3.0, 1.0], [4.0, 6.0, 7.0, 5.0]])
    ends_s = np.array([[2.0, 5.0, 4.0, 2.0], [6.0, 9.0, 8.0, 6.0]])
    found = traffic(Timeline(Schedule(tasks), starts_s, ends_s), 0)
    assert found.keys() == {Lane.D2H}  # state out is the same link
    assert found[Lane.D2H].times_s.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found[Lane.D2H].values.tolist() == [100.0, 0.0, 100.0, 140.0]
