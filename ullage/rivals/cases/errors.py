"""Errors of predicted cases, as data for JSON: of each, and of all of a file or a machine."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hwprofiles.paths import quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.simulate.uncertainty import interval_s
from ullage.rivals.cases.base import Case, CaseError, Metric


def fitted_runs(profile: HardwareProfile) -> frozenset[str]:
    """Return the ids of all runs to which a profile was fitted; for these it makes no real prediction."""
    return frozenset(run for item in quantities(profile).values() for run in item.provenance.runs or ())


def profiles_of(cases: Iterable[Case]) -> dict[str, HardwareProfile]:
    """Return the profiles of the cases' machines, by their names in the cases."""
    profiles: dict[str, HardwareProfile] = {}
    for case in cases:
        if case.hardware not in profiles:
            try:
                profiles[case.hardware] = load_profile(case.hardware)
            except ValueError as error:
                raise CaseError(f"case {case.id}: hardware: {error}") from error
    return profiles


def checked(path: Path, case: Case, profile: HardwareProfile, *, fitted: bool, intervals: bool) -> dict[str, Any]:
    """Return a case with its prediction, and whether its profile was fitted to it, as data for JSON."""
    outcome, measurements = case.predict(profile), case.measurements()
    found: dict[str, Any] = {
        "id": case.id,
        "file": str(path),
        "hardware": case.hardware,
        "fitted": fitted,
        "converged": outcome.converged,
        "warnings": outcome.warnings,
        **({"differs": differs} if (differs := getattr(case, "differs", "")) else {}),
    }
    if intervals and outcome.iteration_s is not None and Metric.ITERATION in measurements:
        low_s, high_s = interval_s(profile, outcome.iteration_s, outcome.values[Metric.ITERATION])
        found["interval_s"] = low_s, high_s
        found["inside"] = low_s <= measurements[Metric.ITERATION] <= high_s
    for metric, measured in measurements.items():
        predicted = outcome.values[metric]
        found[metric.value] = {"predicted": predicted, "measured": measured, "error": predicted / measured - 1}
    return found


def summaries(checked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean, median and worst absolute error of each quantity, by file, by machine, and of all together."""
    files = list(dict.fromkeys(Path(c["file"]) for c in checked))
    unique = len({path.name for path in files}) == len(files)
    groups = {f"file {p.name if unique else p}": [c for c in checked if c["file"] == str(p)] for p in files}
    for name in dict.fromkeys(c["hardware"] for c in checked):
        groups[f"hardware {name}"] = [c for c in checked if c["hardware"] == name]
    groups["all"] = list(checked)
    for name, members in list(groups.items()):
        if any(c["fitted"] for c in members):
            groups[f"{name}, not fitted to"] = [c for c in members if not c["fitted"]]
    return [
        {
            "group": group,
            "quantity": metric.value,
            "num_cases": len(errors),
            **_statistics(errors),
            **(_share_inside(members) if metric is Metric.ITERATION else {}),
        }
        for group, members in groups.items()
        for metric in Metric
        if metric is not Metric.OURS and (errors := [c[metric]["error"] for c in members if metric in c])
    ]


def _share_inside(members: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the share of iterations within their intervals, if these are known."""
    known = [c["inside"] for c in members if "inside" in c]
    return {"inside": statistics.mean(known)} if known else {}


def _statistics(errors: Iterable[float]) -> dict[str, float]:
    sizes = [abs(error) for error in errors]
    return {"mean": statistics.mean(sizes), "median": statistics.median(sizes), "worst": max(sizes)}
