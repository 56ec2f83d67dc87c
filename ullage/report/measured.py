"""Predicted against measured, and the wrong assumption: the results of `ullage compare` as charts."""

from collections.abc import Iterable

from ullage.analysis.comparison import Explained, Row, kind_words
from ullage.output.formatting import si, signed_percent, signed_s
from ullage.report.charts import Axis, Chart, Mark, Section, Table, Trace

_LEAST = 1e-3  # fraction of the iteration; smaller causes are only in the table


def comparison_section(explained: Explained) -> Section:
    """Show predicted and measured phases, lanes and memory, and the causes of the difference."""
    comparison = explained.comparison
    measured = (
        f"Measured figures are means of the middle {comparison.num_read} of {comparison.num_iterations} iterations "
        f"(p10 {si(explained.p10_s, 's')}, p90 {si(explained.p90_s, 's')}). An error of +10 % means that the "
        "prediction is 10 % too high."
    )
    words = [f"{explained.answer[0].upper()}{explained.answer[1:]}.", measured]
    if explained.before:
        words.append(f"Before the plan was changed during training: {explained.before.answer}.")
    note = "In parentheses: the error of the prediction."
    time = Axis("time", "s")
    return Section(
        "comparison",
        "Measured",
        "Predicted against measured",
        tuple(words),
        (
            *_causes(explained),
            _bars("compared-phases", "Time by phase", time, note, comparison.phases),
            _bars("compared-lanes", "Busy time of each lane in an iteration", time, note, comparison.lanes),
            _bars("compared-memory", "Peak memory of each tier", Axis("peak", "B"), note, comparison.memory),
            Table(
                "Predicted against measured, in figures",
                ("", "predicted", "measured", "error"),
                tuple(row.cells for row in (*comparison.phases, *comparison.lanes, *comparison.memory)),
            ),
            *_refit(explained),
        ),
    )


def _causes(explained: Explained) -> tuple[Chart | Table, ...]:
    """Show the steps from the predicted iteration to the measured one."""
    found = explained.attribution
    shown = [cause for cause in found.causes if abs(cause.seconds) >= _LEAST * found.measured_s]
    rows = tuple((cause.kind, explained.reason(cause), signed_s(cause.seconds)) for cause in found.causes)
    total = ("", "measured - predicted", signed_s(explained.error_s))
    table = Table(
        "Wrong assumptions and the difference that each explains", ("", "what happened", "explains"), (*rows, total)
    )
    if not shown:
        return (table,)
    chart = Chart(
        key="causes",
        title="Which assumption was wrong",
        note="The part of measured - predicted that each cause explains. The parts add up to the difference.",
        x=Axis("measured - predicted", "s"),
        traces=(
            Trace(
                "explains",
                [cause.seconds for cause in shown],
                [cause.kind + (f": {kind_words(cause.of)}" if cause.of else "") for cause in shown],
                Mark.BARS,
                ["second" if cause.seconds > 0 else "third" for cause in shown],
                texts=[signed_s(cause.seconds) for cause in shown],
            ),
        ),
    )
    return (chart, table)


def _refit(explained: Explained) -> tuple[Table, ...]:
    """List the quantities of the profile that a fit to this run changes."""
    if not explained.changes:
        return ()
    rows = tuple(change.cells for change in explained.changes)
    predicted = si(explained.refitted.predicted_s, "s")
    note = (
        f"With this profile, the prediction would be {predicted}. `ullage compare RUN --refit PATH` writes the profile."
    )
    return (Table("The profile that this run proposes", ("quantity", "from", "to", "change"), rows, note),)


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
