"""Predicted against measured: what `ullage compare` tells, as pictures."""

from collections.abc import Iterable

from ullage.comparison import Comparison, Row
from ullage.formatting import si, signed_percent
from ullage.report.charts import Axis, Chart, Mark, Section, Table, Trace


def comparison_section(comparison: Comparison) -> Section:
    """Show phases, lanes and memory, predicted beside measured."""
    count = comparison.num_iterations
    words = (
        f"Measured figures are medians of {count} iterations. Errors are predicted over measured: +10 % means that a "
        "tenth too much was predicted."
    )
    note = "The error is behind the predicted figure."
    return Section(
        "comparison",
        "Measured",
        "Predicted against measured",
        (words,),
        (
            _bars("compared-phases", "Time by phase", Axis("time", "s"), note, comparison.phases),
            _bars(
                "compared-lanes", "Busy time of each lane", Axis("busy time per iteration", "s"), note, comparison.lanes
            ),
            _bars("compared-memory", "Peak memory of each tier", Axis("peak", "B"), note, comparison.memory),
            Table(
                "Predicted against measured, in figures",
                ("", "predicted", "measured", "error"),
                tuple(_cells(row) for row in (*comparison.phases, *comparison.lanes, *comparison.memory)),
            ),
        ),
    )


def _bars(key: str, title: str, axis: Axis, note: str, rows: Iterable[Row]) -> Chart:
    known = [row for row in rows if row.predicted is not None or row.measured is not None]
    names = [row.name for row in known]
    predicted = [row.predicted or 0.0 for row in known]
    measured = [row.measured or 0.0 for row in known]
    errors = ["" if row.error is None else f" ({signed_percent(row.error)})" for row in known]
    return Chart(
        key=key,
        title=title,
        note=note,
        x=axis,
        y=Axis(""),
        traces=(
            Trace(
                "predicted",
                predicted,
                names,
                Mark.BARS,
                "first",
                texts=[si(value, axis.unit) + error for value, error in zip(predicted, errors, strict=True)],
            ),
            Trace(
                "measured",
                measured,
                names,
                Mark.BARS,
                "second",
                measured=True,
                texts=[si(value, axis.unit) for value in measured],
            ),
        ),
    )


def _cells(row: Row) -> tuple[str, ...]:
    values = ("-" if value is None else si(value, row.unit) for value in (row.predicted, row.measured))
    return (row.name, *values, "-" if row.error is None else signed_percent(row.error))
