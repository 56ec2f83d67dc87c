"""``ullage validate``: predict published runs, and show the errors."""

import argparse
import fnmatch
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ullage.analysis.comparison import Row
from ullage.cli.arguments import positive_float
from ullage.output.formatting import percent
from ullage.output.progress import progress_bar
from ullage.report.charts import Table
from ullage.report.terminal import answer
from ullage.rivals.cases import CaseError, Metric, read_file
from ullage.rivals.cases.beside import BesideCase
from ullage.rivals.cases.errors import checked, fitted_runs, profiles_of, summaries

DESCRIPTION = """\
Predict published runs, and show the errors: +10 % means that the prediction is 10 % too high. If a case
cannot be predicted, the command fails.
The thresholds apply to the totals of a run (iteration time, end-to-end time, throughput) over all cases.
If one is exceeded, the exit code is 1."""
EXAMPLES = """
    ullage validate cases.json
    ullage validate cases.json --hardware h100x4-80g --max-mean-error 15
    ullage validate nvme.json --case '*-cpu' --json
    ullage validate llmq.json --beside
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("files", type=Path, nargs="+", metavar="CASES", help="JSON files of cases")
    parser.add_argument("--hardware", metavar="NAME", help="only the cases of this machine")
    parser.add_argument("--case", metavar="PATTERN", help="only the cases whose id matches, as in '*-cpu'")
    parser.add_argument("--max-mean-error", type=positive_float, metavar="PCT", help="fail if the mean exceeds this")
    parser.add_argument("--max-error", type=positive_float, metavar="PCT", help="fail if any case exceeds this")
    parser.add_argument(
        "--beside",
        action="store_true",
        help="plan what engines with kernels of their own trained (LLMQ), and show our predicted iteration beside "
        "theirs (takes longer)",
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
    profiles = profiles_of(case for _, case in chosen)
    fitted = {name: fitted_runs(profile) for name, profile in profiles.items()}
    unread = [(name, reason) for file in files for name, reason in file.left_out.items()]
    left_out = {name: reason for name, reason in unread if fnmatch.fnmatchcase(name, pattern)}
    if args.beside:
        chosen = [(file, BesideCase.of(case) or case) for file, case in chosen]
    found: list[dict[str, Any]] = []
    with progress_bar() as show:
        for number, (file, case) in enumerate(chosen):
            show(case.id, number, len(chosen))
            profile, was_fitted = profiles[case.hardware], case.id in fitted[case.hardware]
            try:
                found.append(checked(file.path, case, profile, fitted=was_fitted, intervals=args.intervals))
            except ValueError as error:
                if not file.is_collection:
                    raise
                left_out[case.id] = str(error).removeprefix(f"case {case.id}: ")
    if not found:
        raise CaseError(f"no case can be predicted: {next(iter(left_out.values()))}")
    rows = summaries(found)
    failures = _failures(found, args.max_mean_error, args.max_error)
    data = {"cases": found, "left_out": left_out, "summaries": rows, "failures": failures}
    answer(args, data, *_shown(found, left_out, rows, failures))
    return 1 if failures else 0


def _failures(found: Sequence[dict[str, Any]], max_mean_pct: float | None, max_pct: float | None) -> list[str]:
    sizes = [(f"{c['id']} ({m})", abs(c[m]["error"])) for c in found for m in Metric if m in c and m.headline]
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
    found: Sequence[dict[str, Any]],
    left_out: Mapping[str, str],
    groups: Sequence[dict[str, Any]],
    failures: Sequence[str],
) -> tuple[str | Table, ...]:
    """Return a table for each quantity, one of all errors, and what is to be known about them."""
    tables = [
        Table(
            metric.value,
            ("case", "predicted", "measured", "error"),
            tuple(
                (c["id"], *Row("", c[metric]["predicted"], c[metric]["measured"], metric.unit).cells[1:])
                for c in found
                if metric in c
            ),
        )
        for metric in Metric
        if any(metric in c for c in found)
    ]
    sizes = ("mean", "median", "worst", *(["inside"] if any("inside" in row for row in groups) else []))
    columns = ("cases of", "quantity", "number", "mean", "median", "worst", "in 80 % interval")
    rows = tuple(
        (row["group"], row["quantity"], str(row["num_cases"]), *(percent(row[n]) if n in row else "" for n in sizes))
        for row in groups
    )
    odd = [
        f"warning: case {c['id']}: simulated iterations differ; the last one is shown"
        for c in found
        if not c["converged"]
    ]
    warnings = dict.fromkeys(f"warning: {text}" for c in found for text in c["warnings"])
    errors = Table("absolute errors", columns[: 3 + len(sizes)], rows)
    if left_out:
        tables.append(Table("left out", ("case", "because"), tuple(left_out.items())))
    return (*tables, errors, *odd, *warnings, *(f"failed: {failure}" for failure in failures))
