"""What a report shows, as data: charts, tables and words that any renderer can draw, and that a reader can check.

A value is in the SI base unit of its axis (seconds, bytes, bytes per second); renderers choose prefixes. Every chart
knows its table, which stands beside the picture for those who cannot or would rather not look at it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final, Literal

import numpy as np

from ullage.output.formatting import percent, si
from ullage.output.palette import Work

PREFIXED: Final = frozenset({"s", "B", "B/s", "FLOP", "FLOP/s", "params", "params/s"})
"""Units that take a prefix, as in GB; others (currencies, tokens per second) have plain numbers."""

_TABLE_ROWS = 24  # of a table over time


class Mark(StrEnum):
    """How the values of a trace are drawn."""

    AREA = "area"  # a step function, filled; areas are stacked upon one another
    STEPS = "steps"  # a step function
    LINE = "line"
    POINTS = "points"
    CURVE = "curve"  # a line with its points
    BARS = "bars"  # lying; y are names


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """An axis.

    Attributes:
        title: what is on it.
        unit: SI base unit (``s``, ``B``, ``B/s``, ``FLOP/s``), ``%`` for fractions, or ``""``.
        log: whether it is logarithmic.
    """

    title: str
    unit: str = ""
    log: bool = False


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Values of one kind.

    Attributes:
        name: for the legend.
        x, y: values, or names where an axis has those.
        mark: how they are drawn.
        colour: a key of :data:`ullage.output.palette.COLOURS`, or one for each value.
        measured: measured rather than predicted: drawn dashed, or hatched.
        texts: of each value, in words.
        faint: a detailed line drawn behind the line of the same name.
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
class Level:
    """A limit: a line across at one value of y."""

    value: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Band:
    """A stretch of the x axis with a name, such as a phase; ``colour`` is a key of the palette."""

    start: float
    end: float
    words: str
    colour: str


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows under columns; the first column is words, others are right-aligned unless they are words throughout."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    """A picture of some traces on common axes.

    Attributes:
        key: names it within its report, in letters, digits and dashes.
        title, note: what it shows, and how to read it.
        x, y: axes.
        traces: its lines; areas are ordered from the bottom up.
        levels, bands: limits and stretches with names.
        over_time: x is the time of one iteration, which all such charts of a report share.
        limits: values of x that end what there is.
        bars: how those of one name lie: beside one another, end to end, or each alone in its place.
        half: whether it does with half the width of a page.
    """

    key: str
    title: str
    note: str
    x: Axis
    traces: tuple[Trace, ...]
    y: Axis = Axis("")
    levels: tuple[Level, ...] = ()
    bands: tuple[Band, ...] = ()
    over_time: bool = False
    limits: tuple[Level, ...] = ()
    bars: Literal["group", "stack", "overlay"] = "group"
    half: bool = False

    @property
    def table(self) -> Table:
        """The same data as a table; a curve over time is sampled at equal distances."""
        shown = [trace for trace in self.traces if not trace.faint]
        if any(trace.mark is Mark.BARS for trace in shown):
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


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """The tasks of one lane over one iteration.

    Attributes:
        name: of the lane, and of what is in it: predicted or measured.
        start_s, end_s: of each task, ascending, within the iteration.
        work: what each is for.
        tasks: the name of each.
        measured: measured rather than predicted.
    """

    name: str
    start_s: Sequence[float]
    end_s: Sequence[float]
    work: Sequence[Work]
    tasks: Sequence[str]
    measured: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Gantt:
    """Every task of one iteration, lane by lane; see :class:`Chart` for the fields of the same names."""

    key: str
    title: str
    note: str
    x: Axis
    rows: tuple[Row, ...]
    period_s: float
    bands: tuple[Band, ...] = ()
    over_time: bool = True

    @property
    def table(self) -> Table:
        """How long each lane is busy, with what."""
        shown = [work for work in Work if any(work in row.work for row in self.rows)]
        rows = []
        for row in self.rows:
            seconds = dict.fromkeys(shown, 0.0)
            for start_s, end_s, work in zip(row.start_s, row.end_s, row.work, strict=True):
                seconds[work] += end_s - start_s
            busy_s = sum(seconds.values())
            cells = (si(seconds[work], "s") if seconds[work] else "" for work in shown)
            rows.append((row.name, str(len(row.tasks)), si(busy_s, "s"), percent(busy_s / self.period_s), *cells))
        return Table(self.title, ("lane", "tasks", "busy", "of the iteration", *shown), tuple(rows))


@dataclasses.dataclass(frozen=True, eq=False)
class HeatMap:
    """One value for every pair of values of two fields, as a colour; see :class:`Chart` for fields of the same names.

    Attributes:
        x, y: what varies from column to column, and from row to row, upwards.
        columns, rows: their values, in words.
        of: what the values are, and in which unit.
        values: one row of values for each of ``rows``, one value for each of ``columns``; ``None``: there is none.
        texts: of each value, or why there is none, in words.
    """

    key: str
    title: str
    note: str
    x: Axis
    y: Axis
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    of: Axis
    values: tuple[tuple[float | None, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    half: bool = True

    @property
    def words(self) -> tuple[tuple[str, ...], ...]:
        """The values as they are written into the cells: with a unit only where its prefix varies."""
        unit = self.of.unit if self.of.unit in {"%", *PREFIXED} else ""
        return tuple(tuple("-" if value is None else said(value, unit) for value in row) for row in self.values)

    @property
    def table(self) -> Table:
        """The same as a table."""
        rows = tuple((name, *words) for name, words in zip(self.rows, self.words, strict=True))
        return Table(self.title, (f"{self.y.title}, by {self.x.title}", *self.columns), rows, self.note)


Picture = Chart | Gantt | HeatMap


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        key, short, title: its name, in letters, digits and dashes; for the bar at the top; for its heading.
        words: paragraphs with the conclusions.
        parts: charts and tables.
    """

    key: str
    short: str
    title: str
    words: tuple[str, ...]
    parts: tuple[Picture | Table, ...]

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The charts among its parts."""
        return tuple(part for part in self.parts if not isinstance(part, Table))


@dataclasses.dataclass(frozen=True)
class Fact:
    """One figure of the first screen.

    Attributes:
        name, value: what it is, and how much.
        words: what stands behind it.
        verdict: whether that is good or bad news, if either.
    """

    name: str
    value: str
    words: str = ""
    verdict: Literal["good", "bad", ""] = ""


@dataclasses.dataclass(frozen=True)
class Summary:
    """The first screen.

    Attributes:
        title: what the report is about.
        kind: ``plan``, ``run`` or ``study``.
        sentence: the answer in words.
        facts: the answer in figures.
        about: where it comes from, name by name.
        warnings: what the reader should know about the numbers.
    """

    title: str
    kind: str
    sentence: str
    facts: tuple[Fact, ...]
    about: Mapping[str, str]
    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Part:
    """What a report says about one file."""

    summary: Summary
    sections: tuple[Section, ...]


def said(value: float, unit: str) -> str:
    """Return a value of an axis in words: with a prefix where its unit takes one."""
    if unit == "%":
        return percent(value)
    return si(value, unit) if unit in PREFIXED else f"{value:,.4g} {unit}".strip()


def _cell(value: float | str, unit: str) -> str:
    return value if isinstance(value, str) else said(value, unit)


def _values_at(trace: Trace, at: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> Sequence[float]:
    x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
    if trace.mark in {Mark.AREA, Mark.STEPS}:
        found: Sequence[float] = y[np.maximum(np.searchsorted(x, at, side="right") - 1, 0)].tolist()
    else:
        found = np.interp(at, x, y).tolist()
    return found
