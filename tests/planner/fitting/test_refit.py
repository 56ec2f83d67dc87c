"""A profile fitted to the tasks of a run: what made their times is found again."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.choices.variants import variants
from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.fitting.refit import CLASSES, RANGE, Refit, refit
from planner.models import resolve_model
from planner.schedule.tasks import Lane
from planner.simulate.machine import Simulation, run_until_steady
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.lowering import lower

TRUTH = Provenance(origin="assumed", source="the truth of this test")
MACHINES = ("epyc-turin-2c", "a100-40")
PATHS = ("device.gemm.bf16", "device.optimizer", "host.optimizer", "host_link.down", "host_link.up")


@functools.cache
def planned(name: str) -> tuple[HardwareProfile, Request, Decisions]:
    """Return a machine, and decisions in which the device, the host and what joins them have work."""
    profile = load_profile(name)
    request = Request(resolve_model("opt-350m"), profile, seq_len=512, micro_batch=2)
    setup = variants(request)[0].setup
    decisions = next(iter(interleaved(setup, (2,))))
    return profile, request, decisions


def simulated(profile: HardwareProfile, request: Request, decisions: Decisions) -> Simulation:
    units = variants(request)[0].setup.units
    schedule = lower(units, decisions, asynchronous=profile.device.kind == "gpu")
    return run_until_steady(schedule, CostModel.of(profile, units, decisions))


def refitted(name: str, truth: HardwareProfile) -> tuple[Refit, Simulation]:
    """Return what is fitted to a run on the true machine, and that run."""
    profile, request, decisions = planned(name)
    run = simulated(truth, request, decisions)
    return refit(profile, variants(request)[0].setup.units, decisions, run.timeline, [run.steady]), run


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=examples(5), deadline=None)
@given(factors=st.tuples(*[st.floats(0.4, 1.6)] * 3, *[st.floats(0.4, 1.0)] * 2))
def test_a_run_is_predicted_by_what_was_fitted_to_it(name: str, factors: tuple[float, ...]) -> None:
    """Every class of tasks takes as long, and so does the iteration, whatever rates were wrong.

    Links are no faster than believed: what both directions share may bind then, and is not seen apart.
    """
    profile, request, decisions = planned(name)
    known = quantities(profile)
    wanted = {path: number(known[path]) * factor for path, factor in zip(PATHS, factors, strict=True)}
    found, run = refitted(name, replace(profile, wanted, TRUTH))
    again = simulated(found.profile, request, decisions)
    expected, got = (
        {name: sum(s.timeline.busy_s(s.steady).get(lane, 0.0) for lane in lanes) for name, lanes in CLASSES.items()}
        for s in (run, again)
    )
    assert got == pytest.approx(expected, rel=0.03)
    assert found.measured_s == run.timeline.period_s(run.steady)
    assert found.predicted_s == pytest.approx(found.measured_s, rel=0.03)


def test_what_was_right_stays_and_what_was_not_says_where_it_is_from() -> None:
    profile, _, _ = planned("a100-40")
    found, _ = refitted("a100-40", profile)
    assert found.profile == profile
    truth = replace(profile, {"host.optimizer": number(profile.host.optimizer) / 2}, TRUTH)
    found, _ = refitted("a100-40", truth)
    assert found.slower["host updates"] == pytest.approx(2, rel=0.02)
    fitted = {path for path, item in quantities(found.profile).items() if item != quantities(profile)[path]}
    assert "host.optimizer" in fitted
    assert "device.optimizer" not in fitted
    assert found.profile.host.optimizer.provenance.source == "tasks of 1 iterations of a run"


def test_latencies_are_fitted_in_the_direction_that_they_are_off() -> None:
    profile, _, _ = planned("a100-40")
    known = quantities(profile)
    latencies = [path for path in ("device.issue_s", "device.step_s", "device.hook_s") if path in known]
    truth = replace(profile, {path: 2 * number(known[path]) for path in latencies}, TRUTH)
    found, _ = refitted("a100-40", truth)
    assert found.slower["launching"] == pytest.approx(2, rel=0.02)
    for path in latencies:
        assert number(quantities(found.profile)[path]) == pytest.approx(2 * number(known[path]), rel=0.02)


def test_nothing_is_believed_to_be_off_by_more_than_a_stated_factor() -> None:
    profile, _, _ = planned("a100-40")
    truth = replace(profile, {"host.optimizer": number(profile.host.optimizer) / 30}, TRUTH)
    assert refitted("a100-40", truth)[0].slower["host updates"] == RANGE


@pytest.mark.parametrize(
    ("shares", "left"), [((0.6, 0.8, 1.0), 0.0), ((0.79, 0.8, 0.81), 1.0), ((0.7, 0.8, 0.9), 0.72)]
)
def test_a_factor_is_believed_as_far_as_it_stands_out(shares: tuple[float, ...], left: float) -> None:
    """Host updates take less in all iterations but one, which differ by more, by less, and by half of it."""
    profile, request, decisions = planned("a100-40")
    run = simulated(profile, request, decisions).timeline
    lanes = np.array([task.lane is Lane.CPU for task in run.schedule.tasks])
    end_s = run.end_s.copy()
    assert run.num_iterations > len(shares)
    for iteration, share in enumerate(shares):
        end_s[iteration, lanes] = (run.start_s + share * (run.end_s - run.start_s))[iteration, lanes]
    measured = dataclasses.replace(run, end_s=end_s)
    found = refit(profile, variants(request)[0].setup.units, decisions, measured, range(len(shares)))
    assert math.log(found.slower.get("host updates", 1.0)) == pytest.approx(left * math.log(0.8), abs=0.02)


def test_no_iterations() -> None:
    profile, request, decisions = planned("a100-40")
    run = simulated(profile, request, decisions)
    with pytest.raises(ValueError, match="no steady iteration was measured"):
        refit(profile, variants(request)[0].setup.units, decisions, run.timeline, [])
