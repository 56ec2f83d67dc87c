"""Published runs with NVMe: what is swapped, what is refused, and how near predictions come."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import machine

from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place
from planner.schedule.tasks import Op, Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.cases import CaseError, Metric, load_cases, read_case
from ullage.rivals.cases.layouts import MODEL_SIZES
from ullage.rivals.cases.training import TrainingCase, lowest
from ullage.rivals.decisions import GradientPath
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.lowering import lower

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"
MACHINES = {"h100x4-80g": load_profile("h100x4-80g"), "round": machine(nvme_drives=None)}
SWAPPED = {case.id: case for case in load_cases(PUBLISHED / "activation_swapping.json")}
STORED = {case.id: case for case in load_cases(PUBLISHED / "nvme_offload.json")}


ENTRY = {"id": "one", "hardware": "rtx4090-12ssd", "source": "a test", "model": "13b", "batch": 32, "ssds": 12}
ENTRY |= {"measured": {"tflops": 100.0}}


def swapping(**fields: object) -> TrainingCase:
    case = read_case(ENTRY | fields)
    assert isinstance(case, TrainingCase)
    return case


def rate(**fields: object) -> float:
    return swapping(**fields).predict(load_profile("rtx4090-12ssd")).values[Metric.COMPUTE_RATE]


@pytest.mark.parametrize("name", SWAPPED)
def test_published_rates_are_predicted(name: str) -> None:
    case = SWAPPED[name]
    assert isinstance(case, TrainingCase)
    outcome = case.predict(load_profile(case.hardware))
    assert outcome.converged
    assert outcome.values[Metric.COMPUTE_RATE] == pytest.approx(case.measured["tflops"] * 1e12, rel=0.06)


@pytest.mark.parametrize("name", STORED)
def test_published_phases_are_predicted(name: str) -> None:
    case = STORED[name]
    values = case.predict(load_profile(case.hardware)).values
    for metric, measured in case.measurements().items():
        assert values[metric] == pytest.approx(measured, rel=0.1), metric


def test_drives_help_until_the_device_is_busy() -> None:
    """The relation holds by itself: rates rise with drives, at last by nothing, and sooner the larger the batch."""
    for batch, enough in ((32, 10), (128, 3)):
        rates = [rate(batch=batch, ssds=ssds) for ssds in (1, 2, enough, 12)]
        assert rates == sorted(rates)
        assert rates[1] > 1.2 * rates[0]
        assert rates[2] > 0.98 * rates[3]


def test_small_batches_leave_the_device_waiting() -> None:
    rates = [rate(batch=batch) for batch in (8, 16, 32, 64, 128)]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1] / 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "14b"}, "case one: model is '14b', whose sizes are unknown; it may be 6b, 13b"),
        ({"ssds": 13}, "case one: ssds is 13, but rtx4090-12ssd has 12"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CaseError, match=message):
        rate(**fields)


@pytest.mark.parametrize(
    ("hardware", "message"), [("h100x4-80g", "has 4 devices per node"), ("round", "nvme.num_drives")]
)
def test_machines_that_do_not_suit_are_refused(hardware: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        swapping().predict(MACHINES[hardware])


def test_a_field_that_is_not_known_is_named(tmp_path: Path) -> None:
    entry = ENTRY | {"seq_len": 2048}
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"schema_version": 1, "cases": [entry]}))
    with pytest.raises(CaseError, match="case one: seq_len: such a field cannot be predicted from"):
        load_cases(path)


def test_models_have_the_sizes_of_their_names() -> None:
    for name, (layers, heads, hidden) in MODEL_SIZES.items():
        assert hidden % heads == 0
        # Twelve squares of the hidden size per layer, but for the embedding (a third of a billion at most... of 6B).
        assert 12 * layers * hidden**2 == pytest.approx(float(name[:-1]) * 1e9, rel=0.1)


def decided(case: TrainingCase, count: int, num_on_host: int | None = None) -> tuple[Decisions, CostModel]:
    setup = case.setup(load_profile(case.hardware))
    (decisions,) = ratel(setup, (count,), num_on_host)
    return decisions, CostModel(load_profile(case.hardware), setup.units, decisions)


def test_what_the_host_cannot_hold_goes_on_to_nvme() -> None:
    case = swapping(model="6b", batch=8)
    setup = case.setup(load_profile(case.hardware))
    tiers = {}
    for num_on_host in (28, 0):
        decisions, cost = decided(case, 28, num_on_host)
        simulation = run_until_steady(lower(setup.units, decisions, asynchronous=True), cost)
        peaks = memory_peaks(simulation.timeline, simulation.steady, cost)
        tiers[num_on_host] = {tier: use.peak_bytes for tier, use in peaks.items()}
    moved = sum(unit.swap_bytes for unit in setup.units if unit.recompute)
    assert tiers[28][Tier.HOST] - tiers[0][Tier.HOST] > 0.8 * moved
    assert tiers[0][Tier.NVME] - tiers[28][Tier.NVME] > 0.8 * moved


def test_a_model_too_large_for_the_drives_misses_bytes_there() -> None:
    case = swapping(model="412b", batch=1)
    setup = case.setup(load_profile(case.hardware))
    (decisions,) = ratel(setup, (0,))
    whole = load_profile(case.hardware)
    assert whole.nvme is not None
    small = whole.model_copy(update={"nvme": whole.nvme.striped(1)})
    cost = CostModel(small, setup.units, decisions)
    simulation = run_until_steady(lower(setup.units, decisions, asynchronous=True), cost)
    nvme = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.NVME]
    assert nvme.peak_bytes == pytest.approx(14 * 412e9, rel=0.02)
    assert nvme.missing_bytes == nvme.peak_bytes - nvme.capacity_bytes > 0


@given(st.integers(0, 60), st.integers(-5, 70), st.integers(0, 5))
def test_the_lowest_of_a_convex_function_is_found(last: int, centre: int, width: int) -> None:
    def value(i: int) -> float:
        return max(abs(i - centre) - width, 0) + 0.01 * abs(i - centre)

    assert value(lowest(value, last)) == min(map(value, range(last + 1)))


def test_an_optimizer_on_nvme_is_swapped_in_turn() -> None:
    case = STORED["h100x4-nvme-host-20b-nvme"]
    assert isinstance(case, TrainingCase)
    setup, decisions = case.decided(load_profile(case.hardware))
    assert decisions.gradient_path is GradientPath.ZERO3_PINNED
    assert {place for unit in decisions.units.values() for place in unit.update} == {Place.NVME}
    cost = CostModel(load_profile(case.hardware), setup.units, decisions)
    simulation = run_until_steady(lower(setup.units, decisions, asynchronous=True), cost)
    swaps = sorted(
        (span.start_s, span.end_s)
        for span in simulation.timeline.of_iteration(simulation.steady)
        if simulation.timeline.schedule.tasks[span.task].op in {Op.SWAP_IN, Op.SWAP_OUT}
    )
    assert all(end_s <= start_s + 1e-9 for (_, end_s), (start_s, _) in itertools.pairwise(swaps))


def test_only_one_optimizer_fraction_can_be_swapped() -> None:
    data = json.loads((PUBLISHED / "nvme_offload.json").read_text())["cases"][1]
    data["engine"]["cpu_optimizer_fraction"] = 0.5
    with pytest.raises(CaseError, match=r"engine.cpu_optimizer_fraction is 0.5, but only 1.0"):
        read_case(data)
