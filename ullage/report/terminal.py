"""The terminal: facts, tables, and charts over time as lines of bars. Other charts are only on the page."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Grid

from ullage.output.console import console, write_json
from ullage.output.formatting import percent, sparkline
from ullage.report.charts import (
    Band,
    Chart,
    Fact,
    Part,
    Section,
    Table,
    Trace,
    value_text,
)

Shown = str | Mapping[str, str] | Chart | Table | Section | Part
"""A line of text, facts by name, a chart, a table, or whole sections and results."""

_LABEL_COLUMNS = 11  # the longest name of a lane or class: "collective", "activations"
_NOTE_COLUMNS = 28  # width of the note behind a line of bars
_CHART_COLUMNS = (16, 72)


def answer(args: argparse.Namespace, data: Any, *shown: Shown) -> None:
    """Print the result of a command: its data with ``--json``, otherwise what people read."""
    if args.json:
        write_json(data)
    else:
        show(*shown)


def show(*shown: Shown, stderr: bool = False) -> None:
    """Print to stdout. Tables and facts have an empty line between them; a line of text follows what is before it."""
    out, begun = console(stderr=stderr), False
    bands: tuple[Band, ...] = ()  # those of a chart that the next one repeats are not drawn again
    for piece in _pieces(shown):
        if isinstance(piece, str):
            out.print(piece, soft_wrap=True)
            begun = begun or bool(piece)
            continue
        if begun:
            out.print()
        begun = True
        if isinstance(piece, Table):
            out.print(_table(piece))
        elif isinstance(piece, Chart):
            drawn = _tasks(piece, out) if piece.has_tasks else _over_time(piece, out, repeats=piece.bands == bands)
            for line in drawn:
                out.print(line, soft_wrap=True)
            bands = bands if piece.has_tasks else piece.bands
        else:
            out.print(_facts(piece))


def _pieces(shown: Sequence[Shown]) -> Iterator[str | Mapping[str, str] | Table | Chart]:
    for piece in shown:
        if isinstance(piece, Part):
            yield {**{fact.name: _fact(fact) for fact in piece.facts}, **piece.about}
            yield from _pieces(piece.sections)
            yield from (f"warning: {warning}" for warning in piece.warnings)
        elif isinstance(piece, Section):
            if piece.words:
                yield ""
            yield from piece.words
            yield from _pieces(piece.parts)
        elif isinstance(piece, Chart):
            if piece.over_time and not (piece.has_tasks and len(piece.traces) > 1):
                yield piece
        else:
            yield piece


def _fact(fact: Fact) -> str:
    return f"{fact.value}; {fact.words}" if fact.words else fact.value


def _facts(rows: Mapping[str, str]) -> Grid:
    result = Grid.grid(padding=(0, 2, 0, 0))
    result.add_column(style="bold", no_wrap=True)
    result.add_column()
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def _table(shown: Table) -> Grid:
    result = Grid(
        title=shown.title,
        title_justify="left",
        title_style="bold",
        caption=shown.note or None,
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        min_width=len(shown.title),  # otherwise a narrow table folds its title
    )
    for column, is_text in zip(shown.columns, shown.words, strict=True):
        # In a narrow terminal, fold a long word instead of truncating it, because truncated names are useless.
        result.add_column(column, justify="left" if is_text else "right", header_style="dim", overflow="fold")
    for place, row in enumerate(shown.rows):
        result.add_row(*row, style="bold" if place in shown.bold else "")
    return result


def _title(picture: Chart) -> str:
    return f"{picture.title}. {picture.note}" if picture.note else picture.title


def _columns_of(name: str, out: Console) -> tuple[int, int]:
    """Return the columns for names, of which this is the longest, and for bars."""
    label = max(_LABEL_COLUMNS, len(name))
    return label, min(max(out.width - label - _NOTE_COLUMNS - 3, _CHART_COLUMNS[0]), _CHART_COLUMNS[1])


def _tasks(chart: Chart, out: Console) -> Iterator[str]:
    """Yield the title of a chart of one row of tasks, and lines with a letter for each."""
    (row,) = chart.traces
    yield _title(chart)
    yield from _letters([float(start_s) for start_s in row.x], row.texts, chart.period_s, *_columns_of(row.name, out))


def _over_time(chart: Chart, out: Console, *, repeats: bool) -> Iterator[str]:
    """Yield the title of a chart, a line with one letter for each interval, and a line of bars for each trace.

    If it ``repeats`` the intervals of the chart before it, they are not drawn again.
    """
    bands = () if repeats else chart.bands
    label, num_columns = _columns_of(max((t.name for t in chart.traces if not t.faint), key=len, default=""), out)
    yield _title(chart)
    if bands:
        yield from _letters([b.start for b in bands], [b.words for b in bands], bands[-1].end, label, num_columns)
    shown = {trace.name: _columns(trace, num_columns) for trace in chart.traces if not trace.faint}
    if stacked := any(trace.mark == "area" for trace in chart.traces):
        areas = [trace for trace in chart.traces if trace.mark == "area"]
        total = np.sum([trace.y for trace in areas], axis=0).tolist()
        shown["all"] = _columns(Trace("all", areas[0].x, total, "area", "ink"), num_columns)
    for name, heights in shown.items():
        top, note = max(heights), ""
        if chart.y.unit == "%":
            top, note = 1.0, percent(sum(heights) / len(heights))
        elif stacked:
            top, note = max(map(max, shown.values())), f"peak {value_text(top, chart.y.unit)}"
        yield f"{name:<{label}} |{sparkline(heights, top or 1.0)}| {note}".rstrip()


def _columns(trace: Trace, num_columns: int) -> list[float]:
    """Divide the axis into equal parts: the highest value of a step function in each, or a curve's value amid it."""
    x, y = np.asarray(trace.x, np.float64), np.abs(np.asarray(trace.y, np.float64))
    width = x[-1] / num_columns
    if trace.mark == "line":
        found: list[float] = np.interp((np.arange(num_columns) + 0.5) * width, x, y).tolist()
        return found
    result = y[np.maximum(np.searchsorted(x, np.arange(num_columns) * width, side="right") - 1, 0)]
    np.maximum.at(result, np.minimum((x[:-1] / width).astype(np.int64), num_columns - 1), y[:-1])
    heights: list[float] = result.tolist()
    return heights


def _letters(starts: Sequence[float], names: Sequence[str], end: float, label: int, num_columns: int) -> Iterator[str]:
    """Yield one letter for the interval at the middle of each column, and what the letters mean."""
    lengths: dict[str, float] = defaultdict(float)
    for name, length in zip(names, np.diff([*starts, end]), strict=True):
        lengths[name] += length
    letters: dict[str, str] = {}
    for name in sorted(lengths, key=lambda name: -lengths[name]):
        free = (c for c in name + name.upper() + "0123456789" if c.isalnum() and c not in letters.values())
        letters[name] = next(free)
    middles = (np.arange(num_columns) + 0.5) * end / num_columns
    at = np.maximum(np.searchsorted(starts, middles, side="right") - 1, 0)
    yield f"{'':<{label}} |{''.join(letters[names[i]] for i in at)}|"
    yield " " * (label + 2) + ", ".join(f"{letter} {name}" for name, letter in letters.items())
