"""A comparison as tables: first the answer, then the causes, largest first."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from planner.fitting.attribution import Tasks
from ullage.analysis.comparison import Comparison, Explained, Row, Work, kind_words
from ullage.output.console import table
from ullage.output.formatting import LANE_WORDS, TIER_WORDS, percent, si, signed_s

_LEAST = 1e-3  # causes below this fraction of the iteration are left out of tables


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return tables of phases, lanes and memory, to print with :func:`ullage.output.console.console`."""
    count = comparison.num_iterations
    title = f"phases (measured: mean of the middle {comparison.num_read} of {count} iterations)"
    if not count:
        title = "phases (not measured: too few iterations, or none had all micro-batches in the planned shape)"
    return Group(
        _rows(title, comparison.phases, {}),
        "",
        _rows("busy time of lanes in an iteration", comparison.lanes, LANE_WORDS),
        "",
        _rows("peak memory", comparison.memory, TIER_WORDS),
        "error: predicted / measured - 1",
    )


def render_explained(explained: Explained) -> RenderableType:
    """Return the causes of the difference, all tables, and the effect of a refit."""
    found = explained.attribution
    spread = f"measured iterations: p10 {si(explained.p10_s, 's')}, p90 {si(explained.p90_s, 's')}"
    parts: list[RenderableType] = [spread, ""]
    parts += [_causes(explained), "", _tasks(explained), ""]
    if found.stalls_s:
        parts += [_stalls(explained), ""]
    parts += [_rows("critical path by lane", explained.critical, LANE_WORDS), ""]
    parts += [render_comparison(explained.comparison), ""]
    return Group(*parts, *_refit(explained))


def _rows(title: str, rows: Sequence[Row], words: Mapping[Any, str]) -> RenderableType:
    result = table(title, "", "predicted", "measured", "error")
    for row in rows:
        name, *cells = row.cells
        result.add_row(words.get(name, name), *cells)
    return result


def _causes(explained: Explained) -> RenderableType:
    found = explained.attribution
    result = table("causes of measured - predicted", "assumption", "what happened", "explains", num_text=2)
    least_s = _LEAST * found.measured_s
    rest_s = 0.0
    for cause in found.causes:
        if abs(cause.seconds) < least_s:
            rest_s += cause.seconds
        else:
            result.add_row(cause.kind, explained.reason(cause), signed_s(cause.seconds))
    if rest_s:
        result.add_row("", "all causes below 0.1 %", signed_s(rest_s))
    result.add_row("", "measured - predicted", signed_s(explained.error_s))
    return result


def _tasks(explained: Explained) -> RenderableType:
    columns = ("tasks", "work", "predicted", "measured", "rate", "of predicted", "explains")
    result = table("kinds of tasks, in one iteration", "", *columns)
    for tasks in explained.attribution.tasks:
        work = explained.work[tasks.lane, tasks.op]
        result.add_row(
            kind_words((tasks.lane, tasks.op)),
            count_words(tasks),
            si(work.amount, work.unit) if work.unit else "-",
            si(tasks.predicted_s, "s"),
            si(tasks.measured_s, "s"),
            _rate(tasks, work),
            f"{tasks.predicted_s / tasks.measured_s:.2f}" if tasks.measured_s else "-",
            "-" if tasks.explains_s is None else signed_s(tasks.explains_s),
        )
    return result


def count_words(tasks: Tasks) -> str:
    """Return how many tasks ran, and how many were planned if that differs."""
    return f"{tasks.num_ran}" + ("" if tasks.num_ran == tasks.num_planned else f" ({tasks.num_planned} planned)")


def _rate(tasks: Tasks, work: Work) -> str:
    if not work.unit or not tasks.measured_s or tasks.num_ran != tasks.num_planned:
        return "-"
    return si(work.amount / tasks.measured_s, f"{work.unit}/s")


def _stalls(explained: Explained) -> RenderableType:
    found = explained.attribution
    result = table("stalls in one iteration: gaps on the measured critical path", "before", "time", "share")
    shown = {kind: seconds for kind, seconds in found.stalls_s.items() if seconds >= _LEAST * found.measured_s}
    for kind, seconds in shown.items():
        result.add_row(kind_words(kind), si(seconds, "s"), percent(seconds / found.measured_s))
    total_s = sum(found.stalls_s.values())
    result.add_row("all of them", si(total_s, "s"), percent(total_s / found.measured_s))
    return result


def _refit(explained: Explained) -> list[RenderableType]:
    fit = explained.refitted
    if not explained.changes:
        return ["the profile needs no change: all lanes ran at its rates"]
    result = table("refit: the profile that this run proposes", "quantity", "from", "to", "change")
    for change in explained.changes:
        result.add_row(*change.cells)
    proposal = f"with this profile, the prediction would be {si(fit.predicted_s, 's')}; --refit PATH writes the profile"
    return [result, proposal]
