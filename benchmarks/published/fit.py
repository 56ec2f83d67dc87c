"""Fit a profile to whole runs, if its quantities cannot be measured alone, and show its errors on these and on others.

Usage: python -m benchmarks.published.fit cases.json --profile a100x4-40g --fit-on '*-blocking-*' '*-k2'
"""

import argparse
import fnmatch
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.published.fitting import Fit, FitError, fit, fitted_paths, predictions
from hwprofiles.files import check_output
from hwprofiles.paths import number, quantities
from hwprofiles.registry import load_profile, save_profile
from ullage.output.progress import progress_bar
from ullage.rivals.cases import Case, CaseError, Metric, load_cases, repeated_id

Errors = dict[Metric, list[float]]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed arguments."""
    group = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group.add_argument("files", type=Path, nargs="+", metavar="CASES", help="JSON files of cases")
    group.add_argument(
        "--profile", required=True, metavar="NAME", help="the profile to fit; cases with other hardware are ignored"
    )
    group.add_argument("--output", type=Path, metavar="PATH", help="file for the profile (its name)")
    group.add_argument(
        "--fit-on",
        nargs="+",
        metavar="PATTERN",
        help="ids of the cases to fit to, as in '*-dp1-*'; other cases are only predicted (default: fit to all)",
    )
    group.add_argument(
        "--parameters",
        nargs="+",
        metavar="QUANTITY",
        help="quantities to fit, as in host.dram_bytes_per_s (default: those with origin 'fitted' in the profile)",
    )
    group.add_argument(
        "--bounds",
        nargs="+",
        type=parse_bounds,
        metavar="QUANTITY=LOW:HIGH",
        help="bounds in the unit of the quantity (default: from an eighth of its present value to eight times it)",
    )
    return group.parse_args(arguments)


def parse_bounds(text: str) -> tuple[str, tuple[float, float]]:
    """Return a quantity and its bounds, from ``device.hook_s=1e-5:1e-2``.

    Raises:
        argparse.ArgumentTypeError: the text has another form.
    """
    path, _, bounds = text.partition("=")
    low, _, high = bounds.partition(":")
    try:
        return path, (float(low), float(high))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form QUANTITY=LOW:HIGH") from None


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Fit, write the profile, and print the fitted quantities and the errors on fitted and other cases.

    Returns:
        What is printed, as plain data.
    """
    args = parsed(arguments)
    path: Path = args.output or Path(f"{Path(args.profile).stem}.json")
    check_output("--output", path)
    profile = load_profile(args.profile)
    cases = [case for file in args.files for case in load_cases(file) if case.hardware == profile.name]
    if repeated := repeated_id(cases):
        raise CaseError(f"case {repeated}: two cases in the files have this id; give each its own")
    patterns = args.fit_on or ["*"]
    chosen = [case for case in cases if any(fnmatch.fnmatchcase(case.id, pattern) for pattern in patterns)]
    if not chosen:
        raise CaseError(
            f"no case of {profile.name} in {', '.join(map(str, args.files))} matches {' '.join(patterns)}; "
            "choose another --profile or --fit-on"
        )
    ids = {case.id for case in chosen}
    others = [case for case in cases if case.id not in ids]
    for case in others:
        case.check()  # all cases, before any work
    paths = args.parameters or fitted_paths(profile)
    with progress_bar() as show:
        result = fit(
            profile,
            chosen,
            paths,
            source=f"least squares on runs of {', '.join(file.name for file in args.files)}",
            ranges=_ranges(args.bounds or []),
            progress=lambda count: show(f"{count} runs simulated", 0, 0),
        )
    groups = {"fitted": errors(result, chosen), "not fitted": errors(result, others)}
    save_profile(result.profile, path)  # after all work, so that an error leaves no file behind
    _print(result, chosen, groups, path)
    return _plain(result, chosen, groups)


def _ranges(bounds: Sequence[tuple[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    ranges = dict(bounds)
    if len(ranges) < len(bounds):
        raise FitError(f"--bounds {' '.join(path for path, _ in bounds)}: give each quantity one pair of bounds")
    return ranges


def errors(result: Fit, cases: Sequence[Case]) -> Errors:
    """Return the signed relative errors of a fitted profile on cases, by metric."""
    found: Errors = {}
    outcomes = predictions(result.profile, cases)
    for case in cases:
        for metric, measured in case.measurements().items():
            found.setdefault(metric, []).append(outcomes[case.id].values[metric] / measured - 1)
    return found


def _plain(result: Fit, chosen: Sequence[Case], groups: dict[str, Errors]) -> dict[str, Any]:
    return {
        "profile": result.profile.name,
        "fitted_on": [case.id for case in chosen],
        "num_simulations": result.num_simulations,
        "rms_residual": result.rms,
        "quantities": {
            item.path: {
                "start": item.start,
                "value": item.value,
                "bounds": [item.low, item.high],
                "relative_standard_error": item.relative_error,
                "at_bound": item.at_bound,
            }
            for item in result.fitted
        },
        "errors": {
            group: {metric.value: _statistics(values) for metric, values in found.items()}
            for group, found in groups.items()
        },
    }


def _statistics(values: Sequence[float]) -> dict[str, float]:
    sizes = [abs(value) for value in values]
    return {"num": len(sizes), "mean": statistics.mean(sizes), "worst": max(sizes)}


def _print(result: Fit, chosen: Sequence[Case], groups: dict[str, Errors], path: Path) -> None:
    from ullage.analysis.provenance import unit_and_value  # noqa: PLC0415
    from ullage.output.console import console, table  # noqa: PLC0415 - slow to import
    from ullage.output.formatting import percent, si  # noqa: PLC0415

    out = console()
    out.print(f"{result.profile.name}: fitted to {len(chosen)} run(s)")
    for case in chosen:
        out.print(f"  {case.id}", soft_wrap=True)
    out.print()
    known = quantities(result.profile)
    rows = table("fitted", "quantity", "before", "now", "standard error", "bounds")
    for item in result.fitted:
        unit, _ = unit_and_value(known[item.path])
        stopped = " (reached)" if item.at_bound else ""
        rows.add_row(
            item.path,
            si(item.start, unit),
            si(number(known[item.path]), unit),
            percent(item.relative_error),
            f"{si(item.low, unit)} to {si(item.high, unit)}{stopped}",
        )
    out.print(rows)
    out.print()
    summary = table("absolute errors", "runs", "quantity", "values", "mean", "worst", num_text=2)
    for group, found in groups.items():
        for metric in (metric for metric in Metric if metric in found):
            row = _statistics(found[metric])
            summary.add_row(group, metric.value, str(row["num"]), percent(row["mean"]), percent(row["worst"]))
    out.print(summary)
    out.print(f"residuals of the fit: {percent(result.rms)} (root mean square)")
    out.print(f"profile written to {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
