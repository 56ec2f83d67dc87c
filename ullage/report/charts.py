"""The content of a report as data: charts, tables and text, independent of a renderer.

A value is in the SI base unit of its axis (seconds, bytes, bytes per second); renderers choose prefixes. Every chart
has a table with the same data, which stands beside the picture.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from ullage.output.formatting import percent, si
from ullage.output.palette import Work

PREFIXED: Final = frozenset({"s", "B", "B/s", "FLOP", "FLOP/s", "params", "params/s"})
"""Units that take a prefix, as in GB. Values in other units (currencies, tokens per second) have no prefix."""

Mark = Literal["area", "steps", "line", "points", "curve", "bars", "tasks", "cells"]
"""How the values of a trace are drawn.

Areas are filled step functions, stacked; curves are lines with markers; bars are horizontal, and their y are names.
Tasks are a row of bars from x to y: their starts and ends, ascending. Cells are a row of a map: x are the names of its
columns, and y their values, NaN where there is none.
"""

_TABLE_ROWS = 24  # rows of a table over time
_NUMBER = re.compile(r"^(up to )?[+-]?[\d.,]+(e[+-]?\d+)?( ?[^\s\d]\S*){0,2}$")


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis of a chart.

    Attributes:
        title: title of the axis.
        unit: SI base unit (``s``, ``B``, ``B/s``, ``FLOP/s``), ``%`` for fractions, or ``""``.
        log: whether the scale is logarithmic.
    """

    title: str
    unit: str = ""
    log: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """One series of values in a chart.

    Attributes:
        name: name in the legend.
        x, y: values, or names if the axis has names.
        mark: how they are drawn.
        colour: a key of :data:`ullage.output.palette.COLOURS`, or one for each value; of tasks, what each is for.
        measured: values are measured, not predicted; they are drawn dashed or hatched.
        texts: text for each value.
        faint: a detailed line behind the line of the same name.
    """

    name: str
    x: Sequence[float | str]
    y: Sequence[float | str]
    mark: Mark
    colour: str | Sequence[str]
    measured: bool = False
    texts: Sequence[str] = ()
    faint: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """A line across a chart at one value of an axis, such as a capacity."""

    value: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A named interval of the x axis, such as a phase. ``colour`` is a key of the palette."""

    start: float
    end: float
    words: str
    colour: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table. The first column is text; other columns are right-aligned unless a cell is text.

    Attributes:
        title, note: what stands above and below it.
        columns, rows: names of columns, and cells.
        bold: positions of rows that stand out.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    bold: tuple[int, ...] = ()

    @property
    def words(self) -> tuple[bool, ...]:
        """For each column, whether it is text."""
        return tuple(
            not place or any(row[place] not in {"", "-"} and not _NUMBER.match(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """A picture of some traces on common axes.

    Attributes:
        key: unique name in its report, of letters, digits and dashes.
        title, note: title, and a note on how to read the chart.
        x, y: axes. Of cells, y is the title of the rows, and the unit of values.
        traces: lines; areas are ordered from the bottom up.
        levels, limits: lines at values of y, and of x.
        bands: named intervals.
        over_time: x is the time of one iteration. All such charts of a report share this axis.
        period_s: length of the iteration; only charts of tasks need it.
        bars: how bars of one name are arranged: side by side, stacked, or overlaid.
        half: whether half the width of a page is enough.
    """

    key: str
    title: str
    note: str
    x: Axis
    traces: tuple[Trace, ...]
    y: Axis = Axis("")
    levels: tuple[Line, ...] = ()
    bands: tuple[Band, ...] = ()
    over_time: bool = False
    period_s: float = 0.0
    limits: tuple[Line, ...] = ()
    bars: Literal["group", "stack", "overlay"] = "group"
    half: bool = False

    @property
    def has_tasks(self) -> bool:
        """Whether it shows tasks, a lane in each row."""
        return any(trace.mark == "tasks" for trace in self.traces)

    @property
    def has_cells(self) -> bool:
        """Whether it is a map: a colour for every pair of a column and a row."""
        return any(trace.mark == "cells" for trace in self.traces)

    def cell_words(self, row: Trace) -> tuple[str, ...]:
        """Return the values of a row of cells as text. They have a unit only if its prefix varies."""
        unit = self.y.unit if self.y.unit in {"%", *PREFIXED} else ""
        return tuple("-" if math.isnan(value) else value_text(value, unit) for value in map(float, row.y))

    @property
    def table(self) -> Table:
        """The same data as a table. A curve over time is sampled at equal distances; of tasks, times are summed up."""
        if self.has_tasks:
            return self._of_tasks()
        if self.has_cells:
            names = (f"{self.y.title}, by {self.x.title}", *map(str, self.traces[0].x))
            return Table(self.title, names, tuple((row.name, *self.cell_words(row)) for row in self.traces), self.note)
        shown = [trace for trace in self.traces if not trace.faint]
        if any(trace.mark == "bars" for trace in shown):
            return self._of_bars(shown)
        if self.over_time:
            return self._sampled(shown)
        rows: list[tuple[str, ...]] = []
        for trace in shown:
            texts = trace.texts or [""] * len(trace.x)
            for x, y, text in zip(trace.x, trace.y, texts, strict=True):
                rows.append((trace.name, _cell(x, self.x.unit), _cell(y, self.y.unit), text))
        width = 4 if any(row[3] for row in rows) else 3
        columns = ("", self.x.title, self.y.title, "")
        return Table(self.title, columns[:width], tuple(row[:width] for row in rows), self._levels_words)

    @property
    def _levels_words(self) -> str:
        return "; ".join(f"{level.words}: {_cell(level.value, self.y.unit)}" for level in self.levels)

    def _of_tasks(self) -> Table:
        """Return the busy time of each lane by purpose."""
        shown = [work for work in Work if any(work in row.colour for row in self.traces)]
        rows = []
        for row in self.traces:
            seconds = dict.fromkeys(shown, 0.0)
            for start_s, end_s, work in zip(row.x, row.y, row.colour, strict=True):
                seconds[Work(work)] += float(end_s) - float(start_s)
            busy_s = sum(seconds.values())
            cells = (si(seconds[work], "s") if seconds[work] else "" for work in shown)
            rows.append((row.name, str(len(row.texts)), si(busy_s, "s"), percent(busy_s / self.period_s), *cells))
        return Table(self.title, ("lane", "tasks", "busy", "of the iteration", *shown), tuple(rows))

    def _of_bars(self, shown: Sequence[Trace]) -> Table:
        names = list(dict.fromkeys(name for trace in shown for name in map(str, trace.y)))
        found = {(trace.name, str(name)): i for trace in shown for i, name in enumerate(trace.y)}

        def cell(trace: Trace, name: str) -> str:
            if (i := found.get((trace.name, name))) is None:
                return ""
            return trace.texts[i] if trace.texts else _cell(trace.x[i], self.x.unit)

        rows = tuple((name, *(cell(trace, name) for trace in shown)) for name in names)
        return Table(self.title, ("", *(trace.name for trace in shown)), rows, self._levels_words)

    def _sampled(self, shown: Sequence[Trace]) -> Table:
        end = max((float(trace.x[-1]) for trace in shown if len(trace.x)), default=0.0)
        at = np.linspace(0.0, end, _TABLE_ROWS, endpoint=False)
        columns = [_values_at(trace, at) for trace in shown]
        rows = tuple(
            (_cell(float(moment), self.x.unit), *(_cell(float(values[i]), self.y.unit) for values in columns))
            for i, moment in enumerate(at)
        )
        names = (trace.name for trace in shown)
        return Table(self.title, (self.x.title, *names), rows, self._levels_words)


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        key, short, title: unique name of letters, digits and dashes; name in the bar at the top; heading.
        words: paragraphs with conclusions.
        parts: charts and tables.
    """

    key: str
    short: str
    title: str
    words: tuple[str, ...]
    parts: tuple[Chart | Table, ...]

    @property
    def pictures(self) -> tuple[Chart, ...]:
        """The charts of the section."""
        return tuple(part for part in self.parts if not isinstance(part, Table))


@dataclasses.dataclass(frozen=True)
class Fact:
    """One figure of a summary.

    Attributes:
        name, value: name and value of the figure.
        words: an explanation.
        verdict: whether the value is good or bad, if either.
        origin: where the value comes from, if it is a measurement or a forecast.
    """

    name: str
    value: str
    words: str = ""
    verdict: Literal["good", "bad", ""] = ""
    origin: Literal["predicted", "measured", ""] = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """A result: a summary and its sections. A report has one for each file.

    Attributes:
        title: subject of the result.
        kind: ``plan``, ``run``, ``study``, ``iteration``, ...
        sentence: the result in a sentence.
        facts: the result in figures.
        about: facts about the origin (machine, batch, versions), by name.
        sections: details.
        warnings: warnings about the numbers.
    """

    title: str
    kind: str
    sentence: str
    facts: tuple[Fact, ...]
    about: Mapping[str, str]
    sections: tuple[Section, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def pictures(self) -> dict[str, Chart]:
        """All charts by their keys."""
        return {picture.key: picture for section in self.sections for picture in section.pictures}


def value_text(value: float, unit: str) -> str:
    """Return a value of an axis as text, with a prefix if its unit takes one."""
    if unit == "%":
        return percent(value)
    if unit in PREFIXED:
        return si(value, unit)
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 1000 else f"{value:.4g} {unit}".strip()


def _cell(value: float | str, unit: str) -> str:
    return value if isinstance(value, str) else value_text(value + 0.0, unit)  # -0.0 becomes 0.0


def _values_at(trace: Trace, at: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Sequence[float]:
    x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
    if trace.mark in {"area", "steps"}:
        found: Sequence[float] = y[np.maximum(np.searchsorted(x, at, side="right") - 1, 0)].tolist()
    else:
        found = np.interp(at, x, y).tolist()
    return found


def bars(
    key: str,
    title: str,
    note: str,
    x: Axis,
    values: Mapping[str, tuple[float, str]],
    colours: str | Sequence[str] = "first",
) -> Chart:
    """Return a chart with one bar for each name, given its value and the text beside it."""
    lengths, texts = [value for value, _ in values.values()], [text for _, text in values.values()]
    return Chart(key, title, note, x, (Trace(x.title, lengths, [*values], "bars", colours, texts=texts),))
