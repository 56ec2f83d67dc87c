"""Fitting: what made the times is found again, and what they cannot tell is refused."""

import json
from pathlib import Path

import pytest
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.published.fit import main as fit_program
from benchmarks.published.fitting import MAX_PARAMETERS, FitError, fit, fitted_paths
from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from ullage.rivals.cases import Case, Metric, read_case
from ullage.rivals.cases.errors import fitted_runs

FILE = Path(__file__).parents[1] / "ullage" / "data" / "published_cases.json"
CASES = [case for case in json.loads(FILE.read_text())["cases"] if case["hardware"] == "a100x4-40g"]
PROFILE = load_profile("a100x4-40g")
PATHS = ("device.hook_s", "host.dram_bytes_per_s")
TRUTH = Provenance(origin="assumed", source="the truth of this test")


def made_by(profile: HardwareProfile) -> list[Case]:
    """Return cases that measured exactly what a profile predicts."""
    fields = {Metric.FORWARD: "forward_ms", Metric.BACKWARD: "backward_ms"}
    fields |= {Metric.UPDATE: "update_ms", Metric.ITERATION: "iteration_ms"}
    made: list[Case] = []
    for data in CASES:
        values = read_case(data).predict(profile).values
        measured = {field: 1e3 * values[metric] for metric, field in fields.items()}
        made.append(read_case(data | {"measured": measured}))
    return made


@settings(max_examples=examples(4, fewest=1), deadline=None)
@given(st.lists(st.floats(0.9, 2.0), min_size=2, max_size=2))  # shorter hooks hide behind the device
def test_what_made_the_times_is_found_again(factors: list[float]) -> None:
    wanted = {p: number(quantities(PROFILE)[p]) * f for p, f in zip(PATHS, factors, strict=True)}
    found = fit(PROFILE, made_by(replace(PROFILE, wanted, TRUTH)), PATHS, source="made")
    for item in found.fitted:
        assert item.value == pytest.approx(wanted[item.path], rel=0.02)
        assert number(quantities(found.profile)[item.path]) == pytest.approx(item.value)
    assert found.rms < 0.01


def test_the_profile_says_what_was_fitted_and_on_what() -> None:
    cases = made_by(PROFILE)
    found = fit(PROFILE, cases, PATHS, source="runs.json").profile
    for path, item in quantities(found).items():
        if path in PATHS:
            assert item.provenance.origin == "fitted"
            assert item.provenance.runs == tuple(case.id for case in cases)
            assert "runs.json" in item.provenance.source
        else:
            assert item == quantities(PROFILE)[path]
    assert set(PATHS) <= set(fitted_paths(found))
    assert fitted_runs(found) >= {case.id for case in cases}


def test_a_bound_holds_and_is_reported() -> None:
    truth = number(quantities(PROFILE)["device.hook_s"])
    cases = made_by(replace(PROFILE, {"device.hook_s": 2 * truth}, TRUTH))
    (item,) = fit(
        PROFILE, cases, ["device.hook_s"], source="made", ranges={"device.hook_s": (truth / 2, truth * 1.5)}
    ).fitted
    assert item.at_bound
    assert item.value == pytest.approx(truth * 1.5, rel=0.01)


def test_curves_keep_their_shape() -> None:
    curve = PROFILE.device.gemm["bf16"]
    faster = replace(PROFILE, {"device.gemm.bf16": 2 * curve.best_rate_per_s()}, TRUTH).device.gemm["bf16"]
    assert [p.size for p in faster.points] == [p.size for p in curve.points]
    assert [p.median_s for p in faster.points] == pytest.approx([p.median_s / 2 for p in curve.points])


REFUSED = {
    "cannot be fitted to": list(quantities(PROFILE))[: MAX_PARAMETERS + 1],
    "do not determine nvme.read": ["device.hook_s", "nvme.read"],
    "no quantity 'device.hooks'": ["device.hooks"],
    "no fitted quantity; name those to fit": [],
    "num_cores_per_copy is 0": ["host_link.num_cores_per_copy"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_runs_cannot_tell_is_refused(message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit(PROFILE, made_by(PROFILE), REFUSED[message], source="made")


def test_bounds_must_hold_what_is_there() -> None:
    with pytest.raises(FitError, match=r"must lie between the bounds 1 and 2"):
        fit(PROFILE, made_by(PROFILE), PATHS, source="made", ranges={"device.hook_s": (1.0, 2.0)})


def test_the_program_fits_and_shows_errors_on_other_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, paths = tmp_path / "fitted.json", ["device.hook_s", "host.dram_bytes_per_s"]
    arguments = [str(FILE), "--profile", "a100x4-40g", "--output", str(output), "--fit-on", "*blocking*"]
    result = fit_program([*arguments, "--parameters", *paths])
    assert set(result["quantities"]) == set(paths)
    assert result["errors"]["fitted"]["iteration"]["num"] == len(result["fitted_on"]) == 1
    assert result["errors"]["not fitted"]["iteration"]["num"] == 1
    fitted = load_profile(str(output)).device.hook_s.value
    assert fitted == pytest.approx(result["quantities"]["device.hook_s"]["value"])
    assert "not fitted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fit-on", "none"], "no case of a100x4-40g"),
        (["--parameters", "device.hook"], "no quantity 'device.hook'"),
        (["--output", "no/such/folder/x.json"], "there is no such folder; make it first"),
    ],
)
def test_fits_that_cannot_be(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        fit_program([str(FILE), "--profile", "a100x4-40g", *arguments])
    assert not list(tmp_path.iterdir())
