"""``ullage validate``: predict published runs, and show the errors."""

import argparse
import fnmatch
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hwprofiles.paths import quantities
from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.simulate.uncertainty import interval_s
from ullage.analysis.comparison import Row
from ullage.cli.arguments import positive_float
from ullage.commands import Subparsers, command_parser
from ullage.output.formatting import percent
from ullage.output.progress import progress_bar
from ullage.report.charts import Table
from ullage.report.terminal import answer
from ullage.rivals.cases import Case, CaseError, Metric, read_file
from ullage.rivals.cases.beside import BesideCase


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of this command."""
    parser = command_parser(
        subparsers,
        "validate",
        run,
        "Predict published runs, and show the errors: +10 % means that the prediction is 10 % too high. If a case\n"
        "cannot be predicted, the command fails.\n"
        "The thresholds apply to the totals of a run (iteration time, end-to-end time, throughput) over all cases.\n"
        "If one is exceeded, the exit code is 1.",
        """
        ullage validate cases.json
        ullage validate cases.json --hardware h100x4-80g --max-mean-error 15
        ullage validate nvme.json --case '*-cpu' --json
        ullage validate llmq.json --beside
        """,
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="CASES", help="JSON files of cases")
    parser.add_argument("--hardware", metavar="NAME", help="only the cases of this machine")
    parser.add_argument("--case", metavar="PATTERN", help="only the cases whose id matches, as in '*-cpu'")
    parser.add_argument("--max-mean-error", type=positive_float, metavar="PCT", help="fail if the mean exceeds this")
    parser.add_argument("--max-error", type=positive_float, metavar="PCT", help="fail if any case exceeds this")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="plan what engines without a row trained, and show our predicted iteration beside theirs (takes longer)",
    )
    parser.add_argument(
        "--intervals",
        action="store_true",
        help="simulate each iteration with other rates too: within which interval 8 of 10 should be, and how many are",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(args: argparse.Namespace) -> int:
    """Predict all cases, print errors, apply thresholds."""
    files, pattern = [read_file(path) for path in dict.fromkeys(args.files)], args.case or "*"
    chosen = [
        (file, case)
        for file in files
        for case in file.cases
        if args.hardware in {None, case.hardware} and fnmatch.fnmatchcase(case.id, pattern)
    ]
    if not chosen:
        raise CaseError("no case is left; choose another --hardware or --case")
    for file, case in chosen:
        if not file.is_collection:
            case.check()  # before any work
    profiles = _profiles(case for _, case in chosen)
    fitted = {name: fitted_runs(profile) for name, profile in profiles.items()}
    unread = [(name, reason) for file in files for name, reason in file.left_out.items()]
    left_out = {name: reason for name, reason in unread if fnmatch.fnmatchcase(name, pattern)}
    if not args.beside:
        unlike = "there is no row for its engine; --beside shows our plan in its place"
        left_out |= {case.id: unlike for _, case in chosen if isinstance(case, BesideCase)}
        chosen = [(file, case) for file, case in chosen if not isinstance(case, BesideCase)]
    checked: list[dict[str, Any]] = []
    with progress_bar() as show:
        for number, (file, case) in enumerate(chosen):
            show(case.id, number, len(chosen))
            profile, was_fitted = profiles[case.hardware], case.id in fitted[case.hardware]
            try:
                checked.append(_checked(file.path, case, profile, was_fitted, intervals=args.intervals))
            except ValueError as error:
                if not file.is_collection:
                    raise
                left_out[case.id] = str(error).removeprefix(f"case {case.id}: ")
    if not checked:
        raise CaseError(f"no case can be predicted: {next(iter(left_out.values()))}")
    summaries = _summaries(checked)
    failures = _failures(checked, args.max_mean_error, args.max_error)
    data = {"cases": checked, "left_out": left_out, "summaries": summaries, "failures": failures}
    answer(args, data, *_shown(checked, left_out, summaries, failures))
    return 1 if failures else 0


def fitted_runs(profile: HardwareProfile) -> frozenset[str]:
    """Return the ids of all runs to which a profile was fitted; for these it makes no real prediction."""
    return frozenset(run for item in quantities(profile).values() for run in item.provenance.runs or ())


def _checked(path: Path, case: Case, profile: HardwareProfile, fitted: bool, *, intervals: bool) -> dict[str, Any]:
    """Return a case with its prediction, and whether its profile was fitted to it, as data for JSON."""
    outcome, measurements = case.predict(profile), case.measurements()
    checked: dict[str, Any] = {
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
        checked["interval_s"] = low_s, high_s
        checked["inside"] = low_s <= measurements[Metric.ITERATION] <= high_s
    for metric, measured in measurements.items():
        row = Row(metric.value, outcome.values[metric], measured, metric.unit)
        checked[row.name] = {"predicted": row.predicted, "measured": row.measured, "error": row.error}
    return checked


def _profiles(cases: Iterable[Case]) -> dict[str, HardwareProfile]:
    """Return the profiles of the cases' machines, by their names in the cases."""
    profiles: dict[str, HardwareProfile] = {}
    for case in cases:
        if case.hardware not in profiles:
            try:
                profiles[case.hardware] = load_profile(case.hardware)
            except ValueError as error:
                raise CaseError(f"case {case.id}: hardware: {error}") from error
    return profiles


def _summaries(checked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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


def _failures(checked: Sequence[dict[str, Any]], max_mean_pct: float | None, max_pct: float | None) -> list[str]:
    sizes = [(f"{c['id']} ({m})", abs(c[m]["error"])) for c in checked for m in Metric if m in c and m.headline]
    failures = []
    if not sizes:
        return ["no whole run is predicted"] if max_mean_pct or max_pct else []
    mean = statistics.mean(size for _, size in sizes)
    if max_mean_pct is not None and 100 * mean > max_mean_pct:
        failures.append(f"the mean error of whole runs is {percent(mean)}, more than {max_mean_pct:g} %")
    if max_pct is not None:
        failures += [f"{name} is {percent(s)} off, more than {max_pct:g} %" for name, s in sizes if 100 * s > max_pct]
    return failures


def _shown(
    checked: Sequence[dict[str, Any]],
    left_out: Mapping[str, str],
    summaries: Sequence[dict[str, Any]],
    failures: Sequence[str],
) -> tuple[str | Table, ...]:
    """Return a table for each quantity, one of all errors, and what is to be known about them."""
    tables = [
        Table(
            metric.value,
            ("case", "predicted", "measured", "error"),
            tuple(
                (c["id"], *Row("", c[metric]["predicted"], c[metric]["measured"], metric.unit).cells[1:])
                for c in checked
                if metric in c
            ),
        )
        for metric in Metric
        if any(metric in c for c in checked)
    ]
    sizes = ("mean", "median", "worst", *(["inside"] if any("inside" in row for row in summaries) else []))
    columns = ("cases of", "quantity", "number", "mean", "median", "worst", "in 80 % interval")
    rows = tuple(
        (row["group"], row["quantity"], str(row["num_cases"]), *(percent(row[n]) if n in row else "" for n in sizes))
        for row in summaries
    )
    odd = [
        f"warning: case {c['id']}: simulated iterations differ; the last one is shown"
        for c in checked
        if not c["converged"]
    ]
    warnings = dict.fromkeys(f"warning: {text}" for c in checked for text in c["warnings"])
    errors = Table("absolute errors", columns[: 3 + len(sizes)], rows)
    if left_out:
        tables.append(Table("left out", ("case", "because"), tuple(left_out.items())))
    return (*tables, errors, *odd, *warnings, *(f"failed: {failure}" for failure in failures))
