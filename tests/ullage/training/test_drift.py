"""Lanes that leave their prediction are told, each once, and only those."""

import re
from collections import Counter
from pathlib import Path

import forked
import numpy as np
import pytest
from forked import completed
from narrow import narrow_llama

from executor.devices.lanes import NUM_RECORDED
from executor.session import Session
from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.plan.document import Plan
from planner.plan.planning import make_plan
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation
from ullage.analysis.comparison import Row
from ullage.analysis.simulation import simulate
from ullage.output.formatting import si
from ullage.training.drift import MIN_SHARE, THRESHOLD, DriftWatch, warning


def scaled(timeline: Timeline, lane: Lane, factor: float) -> Timeline:
    """Return a timeline in which the tasks of a lane take so many times as long, from the same starts on."""
    of_lane = np.array([task.lane is lane for task in timeline.schedule.tasks])
    seconds = timeline.end_s - timeline.start_s
    return Timeline(timeline.schedule, timeline.start_s, timeline.start_s + seconds * np.where(of_lane, factor, 1.0))


@pytest.fixture(scope="module")
def predicted(plan: Plan) -> Timeline:
    return simulate(plan, 8).timeline


def watching(predicted: Timeline) -> DriftWatch:
    return DriftWatch(Simulation(predicted, range(4, 5), converged=True))


def test_a_prediction_does_not_drift_from_itself(predicted: Timeline) -> None:
    assert list(watching(predicted).drifts(predicted, [4])) == []


def test_a_lane_is_reported_once_and_only_beyond_the_threshold(predicted: Timeline) -> None:
    share = {lane: busy_s / predicted.period_s(4) for lane, busy_s in predicted.busy_s(4).items()}
    lane = max(share, key=lambda lane: share[lane])
    assert share[lane] * THRESHOLD > MIN_SHARE
    for factor in (1 + THRESHOLD, 1 - THRESHOLD):
        watch = watching(predicted)
        inside, outside = (scaled(predicted, lane, 1 + (factor - 1) * x) for x in (0.95, 1.05))
        assert list(watch.drifts(inside, [4])) == []
        (drift,) = watch.drifts(outside, [4])
        assert drift.name == lane
        assert drift.measured / drift.predicted == pytest.approx(1 + (factor - 1) * 1.05, rel=1e-3)
        assert list(watch.drifts(outside, [4])) == []
        assert f"(lane {lane})" in warning([drift])


def test_a_lane_that_hardly_matters_is_not_reported(predicted: Timeline) -> None:
    busy_s = predicted.busy_s(4)
    lane = min(busy_s, key=lambda lane: busy_s[lane])
    enough = 1 + MIN_SHARE * predicted.period_s(4) / busy_s[lane]
    assert enough > 1.5
    watch = watching(predicted)
    assert list(watch.drifts(scaled(predicted, lane, 1 + (enough - 1) * 0.9), [4])) == []
    assert [d.name for d in watch.drifts(scaled(predicted, lane, 1 + (enough - 1) * 1.1), [4])] == [lane]


@pytest.mark.parametrize("count", range(1, 7))
def test_lanes_that_drift_together_are_one_line(count: int) -> None:
    """It names the worst, and says how many more there are and what to do."""
    drifts = [Row(lane.value, 1.0, 1.0 + (number + 1) / 2, "s") for number, lane in enumerate(list(Lane)[:count])]
    line = warning(drifts)
    assert "\n" not in line
    assert len(line) < 500
    named = re.findall(r"\(lane (\S+)\)", line)
    assert named == [drift.name for drift in reversed(drifts)][:3]
    assert (f"{count - 3} more lane(s)" in line) == (count > 3)
    assert line.startswith("warning: ")
    assert line.endswith("Run `ullage calibrate`, then plan again")


class Recording:
    """What a watch sees of a session."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.record = True
        self.requests: list[tuple[int, int]] = []

    def timeline(self, first: int, last: int) -> Timeline:
        self.requests.append((first, last))
        return Timeline(self._timeline.schedule, self._timeline.start_s[:5], self._timeline.end_s[:5])


def test_what_is_read_was_recorded_and_recording_is_bounded(predicted: Timeline) -> None:
    session, recorded = Recording(predicted), set()
    watch = watching(predicted)
    for iteration in range(1000):
        if session.record:
            recorded.add(iteration)
        watch.after(session, iteration)  # type: ignore[arg-type]
    assert len(session.requests) == 10
    assert all(recorded >= set(range(first, last + 1)) for first, last in session.requests)
    assert set(range(NUM_RECORDED)) <= recorded
    assert len(recorded) == NUM_RECORDED + 8 * 5
    assert Session.record.fset is not None  # what is stood in for can be switched


def wrong(machine: HardwareProfile) -> HardwareProfile:
    """Return a machine whose CPU updates at a thirtieth of the rate."""
    path = "host.optimizer"
    slow = number(quantities(machine)[path]) / 30
    return replace(machine, {path: slow}, Provenance(origin="assumed", source="a mistake"))


def test_a_run_names_the_lane_that_was_mispredicted(tmp_path: Path) -> None:
    model = narrow_llama(2)
    machine = load_profile("epyc-turin-2c").with_device_memory(22_000_000)
    plan = make_plan(Request(model, machine, seq_len=32, micro_batch=1, precision=FP32), max_simulations=50)
    path = tmp_path / "plan.json"
    path.write_text(plan.model_copy(update={"hardware": wrong(machine)}).sealed().to_json(), encoding="utf-8")
    done = completed(forked.ullage, "execute", str(path), "--output-dir", str(tmp_path), "--iterations", "106")
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    (line,) = [line for line in warnings if "(lane cpu)" in line]  # looked at twice
    assert len(warnings) <= 2, "one for each time that it was looked"
    assert "optimizer steps on the CPU" in line
    assert " measured, " in line
    assert line.endswith("Run `ullage calibrate`, then plan again")
    lanes = Counter(lane for line in warnings for lane in re.findall(r"\(lane (\S+)\)", line))
    assert set(lanes.values()) == {1}
    shown = re.search(r"106/106 loss [\d.]+, [\d.]+ m?s \(([\d.]+ m?s) predicted, [\d.]+ x\)", done.stderr)
    assert shown
    assert shown[1] == si(plan.prediction.iteration_s, "s")
