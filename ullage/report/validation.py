"""Errors of predictions of published runs, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.analysis.comparison import Row
from ullage.output.formatting import percent
from ullage.report.charts import Table
from ullage.rivals.cases import Metric


def shown(
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
