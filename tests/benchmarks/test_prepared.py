"""Plans that are made before a machine is at hand, and priced again by its own profile."""

import dataclasses
from pathlib import Path

import pytest

from benchmarks import prepared
from benchmarks.gpu.peers import FIRST
from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.models import resolve_model
from planner.plan.planning import make_plan
from planner.verification import verify
from ullage.analysis.simulation import simulate


def request(profile: HardwareProfile, micro_batch: int = 2) -> Request:
    return Request(resolve_model("demo-llama"), profile, seq_len=64, micro_batch=micro_batch)


@pytest.fixture
def slow_and_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HardwareProfile:
    """Plans for hosts with slow and with fast memory; return the profile, whose device holds a part of the model."""
    profile = load_profile("h100").with_device_memory(180_000_000)
    for rate in (2e9, 400e9):
        plan = make_plan(request(prepared.assumed(profile, 100e9, 16, rate)), max_simulations=40)
        path = tmp_path / f"{rate:.0f}" / "demo.json"
        path.parent.mkdir()
        path.write_text(plan.to_json())
    monkeypatch.setenv(prepared.FOLDER, str(tmp_path))
    return profile


def test_the_fastest_by_the_new_profile_is_taken(
    slow_and_fast: HardwareProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {rate: prepared.load_plan(tmp_path / rate / "demo.json") for rate in ("2000000000", "400000000000")}
    monkeypatch.setattr(prepared, "make_plan", None)  # no search
    for dram_bytes_per_s in (3e9, 200e9):
        wanted = request(prepared.assumed(slow_and_fast, 90e9, 14, dram_bytes_per_s))
        plan = prepared.planned(wanted, "demo")
        assert plan.hardware == wanted.hardware
        assert plan.prediction.iteration_s == pytest.approx(simulate(plan).period_s, rel=1e-6)
        known = [found for old in made.values() if (found := prepared.priced(old, wanted))]
        assert plan.prediction.iteration_s == min(found.prediction.iteration_s for found in known)
        assert plan.decisions in [old.decisions for old in made.values()]
        assert plan.certificate.bound_s <= plan.prediction.iteration_s * (1 + 1e-9)
        verify(plan)


def test_a_plan_whose_search_chose_split_master_copies_is_known_again() -> None:
    wanted = request(load_profile("h100").with_device_memory(180_000_000))
    plan = make_plan(dataclasses.replace(wanted, split_masters=True), max_simulations=40)
    assert plan.decisions.split_masters
    found = prepared.priced(plan, wanted)
    assert found is not None
    assert found.prediction.iteration_s == pytest.approx(plan.prediction.iteration_s)


def test_a_search_finds_what_none_of_them_is(slow_and_fast: HardwareProfile, tmp_path: Path) -> None:
    plan = prepared.load_plan(tmp_path / "2000000000" / "demo.json")
    for other in (
        request(slow_and_fast, micro_batch=1),  # another batch
        request(slow_and_fast.with_device_memory(60_000_000)),  # it does not fit any more
        Request(resolve_model("gpt2"), slow_and_fast, seq_len=64, micro_batch=2),  # another model of this name
    ):
        assert prepared.priced(plan, other) is None
    smaller = slow_and_fast.with_device_memory(60_000_000)
    found = prepared.planned(request(smaller), "demo", budget_s=0.1)
    assert found.prediction.fits
    assert found.hardware == smaller
    tiny = replace(slow_and_fast, {"host.memory_bytes": 1e6}, Provenance(origin="assumed", source="test"))
    with pytest.raises(ValueError, match="memory"):
        prepared.planned(request(tiny), "demo", budget_s=0.1)


def test_all_that_stages_plan_for_has_a_name() -> None:
    found = dict(prepared.requests(prepared.assumed(load_profile("h100"), 110e9, 16, 200e9)))
    assert {"planned", "planned-8B", "compiled"} < found.keys()
    assert len(found) == 4 + len(FIRST)
    assert {wanted.hardware.host.num_cores for wanted in found.values()} == {16}
    assert {wanted.hardware.host.memory_bytes.value for wanted in found.values()} == {110e9}
