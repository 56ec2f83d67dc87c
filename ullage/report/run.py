"""A run against its prediction as sections: the answer, the causes of the difference, tasks, and all figures."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from planner.fitting.attribution import TasksOfKind
from planner.plan.document import Plan, describe
from ullage.analysis.comparison import Comparison, Explained, Row, kind_words
from ullage.output.formatting import LANE_WORDS, TIER_WORDS, percent, si, signed_percent, signed_s
from ullage.report.charts import Axis, Chart, Section, Table, Trace, bars

if TYPE_CHECKING:
    from ullage.training.out_of_memory import OutOfMemoryError  # torch, which `ullage compare` does without
    from ullage.training.replanning import Replanned

_LEAST = 1e-3  # fraction of the iteration; smaller causes and stalls are merged


def explained_sections(explained: Explained) -> tuple[Section, ...]:
    """Show the causes of the difference, predicted and measured figures, and the effect of a refit."""
    words = [f"{explained.answer[0].upper()}{explained.answer[1:]}."]
    if explained.before:
        words.append(f"Before the plan was changed during training: {explained.before.answer}.")
    words.append(
        f"Measured iterations: p10 {si(explained.p10_s, 's')}, p90 {si(explained.p90_s, 's')}. An error of +10 % means "
        "that the prediction is 10 % too high."
    )
    parts = (
        *_causes(explained),
        _tasks(explained),
        *_stalls(explained),
        _table("critical path by lane", explained.critical, LANE_WORDS),
    )
    return (
        Section("causes", "Causes", "Why the prediction was wrong", tuple(words), parts),
        comparison_section(explained.comparison),
        _refit(explained),
    )


def comparison_section(comparison: Comparison) -> Section:
    """Show predicted and measured phases, lanes and memory."""
    count = comparison.num_iterations
    phases = f"phases (measured: mean of the middle {comparison.num_read} of {count} iterations)"
    if not count:
        phases = "phases (not measured: too few iterations, none had the planned micro-batches, or updates waited)"
    parts = (
        _bars("compared-phases", "Time by phase", Axis("time", "s"), comparison.phases),
        _table(phases, comparison.phases),
        _bars("compared-lanes", "Busy time of each lane in an iteration", Axis("time", "s"), comparison.lanes),
        _table("busy time of lanes in an iteration", comparison.lanes, LANE_WORDS),
        _bars("compared-memory", "Peak memory of each tier", Axis("peak", "B"), comparison.memory),
        _table("peak memory", comparison.memory, TIER_WORDS, "error: predicted / measured - 1"),
    )
    return Section("comparison", "Measured", "Predicted against measured", (), parts)


def _table(title: str, rows: Sequence[Row], words: Mapping[Any, str] | None = None, note: str = "") -> Table:
    named = {str(key): word for key, word in (words or {}).items()}
    cells = tuple((named.get(row.name, row.name), *row.cells[1:]) for row in rows)
    return Table(title, ("", "predicted", "measured", "error"), cells, note)


def _causes(explained: Explained) -> tuple[Chart | Table, ...]:
    """Show the steps from the predicted iteration to the measured one."""
    found = explained.attribution
    shown = [cause for cause in found.causes if abs(cause.seconds) >= _LEAST * found.measured_s]
    rows = [(str(cause.kind), explained.reason(cause), signed_s(cause.seconds)) for cause in shown]
    if rest_s := sum(cause.seconds for cause in found.causes if cause not in shown):
        rows.append(("", "all causes below 0.1 %", signed_s(rest_s)))
    rows.append(("", "measured - predicted", signed_s(explained.error_s)))
    columns = ("assumption", "what happened", "explains")
    table = Table("causes of measured - predicted", columns, tuple(rows))
    if not shown:
        return (table,)
    chart = bars(
        "causes",
        "Which assumption was wrong",
        "The part of measured - predicted that each cause explains. The parts add up to the difference.",
        Axis("measured - predicted", "s"),
        {
            cause.kind + (f": {kind_words(cause.of)}" if cause.of else ""): (cause.seconds, signed_s(cause.seconds))
            for cause in shown
        },
        ["second" if cause.seconds > 0 else "third" for cause in shown],
    )
    return (chart, table)


def _tasks(explained: Explained) -> Table:
    rows = []
    for tasks in explained.attribution.tasks:
        amount, unit = explained.work[tasks.lane, tasks.op]
        rows.append(
            (
                kind_words((tasks.lane, tasks.op)),
                count_words(tasks),
                si(amount, unit) if unit else "-",
                si(tasks.predicted_s, "s"),
                si(tasks.measured_s, "s"),
                _rate(tasks, amount, unit),
                f"{tasks.predicted_s / tasks.measured_s:.2f}" if tasks.measured_s else "-",
                "-" if tasks.explains_s is None else signed_s(tasks.explains_s),
            )
        )
    columns = ("", "tasks", "work", "predicted", "measured", "rate", "of predicted", "explains")
    return Table("kinds of tasks, in one iteration", columns, tuple(rows))


def count_words(tasks: TasksOfKind) -> str:
    """Return how many tasks ran, and how many were planned if that differs."""
    return f"{tasks.num_ran}" + ("" if tasks.num_ran == tasks.num_planned else f" ({tasks.num_planned} planned)")


def _rate(tasks: TasksOfKind, amount: float, unit: str) -> str:
    if not unit or not tasks.measured_s or tasks.num_ran != tasks.num_planned:
        return "-"
    return si(amount / tasks.measured_s, f"{unit}/s")


def _stalls(explained: Explained) -> tuple[Table, ...]:
    found = explained.attribution
    if not found.stalls_s:
        return ()
    shown = {kind_words(kind): s for kind, s in found.stalls_s.items() if s >= _LEAST * found.measured_s}
    shown["all of them"] = sum(found.stalls_s.values())
    rows = tuple((words, si(s, "s"), percent(s / found.measured_s)) for words, s in shown.items())
    title = "stalls in one iteration: gaps on the measured critical path"
    return (Table(title, ("before", "time", "share"), rows),)


def replanned_table(found: "Replanned", measured_s: float | None) -> Table:
    """Show the plan before and after it was changed during training; ``measured_s``: of an iteration at the end."""

    def row(name: str, plan: Plan, *seconds: float | None) -> tuple[str, ...]:
        return (name, describe(plan.decisions, plan.units()), *("-" if s is None else si(s, "s") for s in seconds))

    before, after = found.before, found.after
    rows = [row("first", before, before.prediction.iteration_s, found.refit.predicted_s, found.refit.measured_s)]
    if after is not None:
        rows.append(row("new", after, None, after.prediction.iteration_s, measured_s if found.switched else None))
    return Table("planned again", ("plan", "decides", "predicted", "at measured rates", "measured"), tuple(rows))


def out_of_memory(error: "OutOfMemoryError") -> tuple[str | Table, ...]:
    """Show the bytes by class of a tier that was too small, predicted and actual, and the remedy."""
    sides = (error.predicted_bytes, error.actual_bytes)
    rows: list[tuple[str, ...]] = [
        (name, si(sides[0].get(name, 0), "B"), si(sides[1][name], "B") if name in sides[1] else "not measured")
        for name in {**sides[0], **sides[1]}
    ]
    rows.append(("in all", *(si(sum(side.values()), "B") for side in sides)))
    rows.append(("capacity", si(error.capacity_bytes, "B"), ""))
    title = f"memory of the {error.tier}, one process"
    table = Table(title, ("", "predicted", "actual"), tuple(rows))
    return f"out of memory: {error.what}", table, "", f"remedy: {error.remedy}"


def _refit(explained: Explained) -> Section:
    """List the quantities of the profile that a fit to this run changes."""
    if not explained.changes:
        words = ("The profile needs no change: all lanes ran at its rates.",)
        return Section("refit", "Profile", "The profile that this run proposes", words, ())
    predicted = si(explained.refitted.predicted_s, "s")
    note = f"with this profile, the prediction would be {predicted}; `ullage compare RUN --refit PATH` writes it"
    columns = ("quantity", "from", "to", "change")
    rows = tuple(
        (path, *(si(x, unit) if unit else f"{x:.3g}" for x in (before, after)), signed_percent(after / before - 1))
        for path, before, after, unit in explained.changes
    )
    table = Table("refit: the profile that this run proposes", columns, rows, note)
    return Section("refit", "Profile", "The profile that this run proposes", (), (table,))


def _bars(key: str, title: str, axis: Axis, rows: Sequence[Row]) -> Chart:
    known = [row for row in rows if row.predicted is not None or row.measured is not None]
    names = [row.name for row in known]
    predicted, measured = [row.predicted or 0.0 for row in known], [row.measured or 0.0 for row in known]
    errors = ["" if row.error is None else f" ({signed_percent(row.error)})" for row in known]
    texts = [si(value, axis.unit) + error for value, error in zip(predicted, errors, strict=True)]
    traces = (
        Trace("predicted", predicted, names, "bars", "first", texts=texts),
        Trace(
            "measured",
            measured,
            names,
            "bars",
            "second",
            measured=True,
            texts=[si(value, axis.unit) for value in measured],
        ),
    )
    return Chart(key, title, "In parentheses: the error of the prediction.", axis, traces)
