"""The figures of a report as files, SVG and PNG, drawn without a browser."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hwprofiles.files import make_folder, write_whole
from ullage.output.palette import COLOURS, SCALE, Work
from ullage.report.charts import PREFIXED, Axis, Chart, Gantt, HeatMap, Mark, Part, Picture, Trace, value_text

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import LinearSegmentedColormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("figures need matplotlib; pip install 'ullage[figure]'", name="matplotlib") from error

_WIDTH_INCHES, _HEIGHT_INCHES, _DPI = 9.0, 3.8, 150
_BAR_INCHES, _ROW_INCHES = 0.2, 0.26
_MOST_WRITTEN = 10  # a map with at most this many columns has room for figures in its cells
_DARK = 0.65  # above this part of the colour scale, white text is more readable
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


def save_figures(parts: Sequence[Part], folder: Path) -> list[Path]:
    """Write every figure of a report as SVG and PNG, each in one step, and return the paths.

    Equal figures give equal bytes (with the same version of matplotlib). If the report is about several files, the
    names of figures begin with the number of the file.

    Raises:
        OSError: a figure cannot be written.
        ValueError: the folder cannot be made.
    """
    make_folder("--figures", folder)
    written = []
    for number, part in enumerate(parts, start=1):
        begin = f"{number}-" if len(parts) > 1 else ""
        for section in part.sections:
            for picture in section.pictures:
                drawn = draw(picture, part.summary.title)
                for kind in ("svg", "png"):
                    path = folder / f"{begin}{_NOT_IN_NAMES.sub('-', picture.key)}.{kind}"
                    write_whole(path, to_bytes(drawn, kind))
                    written.append(path)
    return written


def to_bytes(drawn: Figure, kind: str) -> bytes:
    """Return the bytes of a figure as ``svg`` or ``png``. Equal figures give equal bytes."""
    data = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "ullage"}):
        drawn.savefig(data, format=kind, dpi=_DPI, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return data.getvalue()


def draw(picture: Picture, subject: str) -> Figure:
    """Return a picture with ``subject`` in its title."""
    figure = Figure(figsize=(_WIDTH_INCHES, _height_inches(picture)), layout="constrained")
    axes = figure.subplots()
    draw_on(axes, picture)
    figure.suptitle(_plain(f"{picture.title}: {subject}"), x=0.01, ha="left", fontsize=11, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    return figure


def draw_on(axes: Axes, picture: Picture) -> None:
    """Draw a picture without its title and legend."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if isinstance(picture, HeatMap):
        _draw_map(axes, picture)
        return
    if isinstance(picture, Gantt):
        _draw_gantt(axes, picture)
    else:
        _draw_chart(axes, picture)
    _draw_bands(axes, picture)


def _height_inches(picture: Picture) -> float:
    if isinstance(picture, Gantt):
        return 1.6 + _ROW_INCHES * len(picture.rows)
    if isinstance(picture, HeatMap):
        return max(_HEIGHT_INCHES, 1.4 + _ROW_INCHES * len(picture.rows))
    if names := _names(picture):
        per_name = len(picture.traces) if picture.bars == "group" else 1
        return 1.6 + len(names) * (per_name * _BAR_INCHES + 0.12)
    return _HEIGHT_INCHES


def _names(chart: Chart) -> list[str]:
    return list(dict.fromkeys(str(y) for trace in chart.traces if trace.mark is Mark.BARS for y in trace.y))


def _draw_gantt(axes: Axes, gantt: Gantt) -> None:
    """Draw all tasks; tasks of one kind are one collection."""
    for work in Work:
        boxes = []
        for number, row in enumerate(gantt.rows):
            low, high = number - 0.38, number + 0.38
            for start_s, end_s, what in zip(row.start_s, row.end_s, row.work, strict=True):
                if what is work:
                    boxes.append(((start_s, low), (start_s, high), (end_s, high), (end_s, low)))
        if boxes:
            colour = COLOURS[work].light
            axes.add_collection(
                PolyCollection(boxes, facecolors=colour, edgecolors=colour, linewidths=0.3, label=work.value)
            )
    axes.set_yticks(range(len(gantt.rows)), [_plain(row.name) for row in gantt.rows], fontsize=9)
    axes.set_ylim(len(gantt.rows) - 0.4, -0.6)
    axes.set_xlim(0.0, gantt.period_s)
    _name(axes, gantt.x, "x")


def _draw_map(axes: Axes, shown: HeatMap) -> None:
    """Colour the cells, and write their values if there is room."""
    values = np.array([[np.nan if value is None else value for value in row] for row in shown.values])
    scale = LinearSegmentedColormap.from_list("amounts", [COLOURS[name].light for name in SCALE])
    norm = Normalize(float(np.nanmin(values)), float(np.nanmax(values)))
    drawn = axes.pcolormesh(values, cmap=scale, norm=norm, edgecolors="white", linewidth=0.6)
    if len(shown.columns) <= _MOST_WRITTEN:
        for (y, x), value in np.ndenumerate(values):
            colour = COLOURS["paper" if norm(value) > _DARK else "ink"].light  # ink if the cell has no value
            words = _plain(shown.words[y][x])
            axes.text(x + 0.5, y + 0.5, words, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(np.arange(len(shown.columns)) + 0.5, [_plain(name) for name in shown.columns], fontsize=9)
    axes.set_yticks(np.arange(len(shown.rows)) + 0.5, [_plain(name) for name in shown.rows], fontsize=9)
    axes.set_xlabel(_plain(shown.x.title), fontsize=9)
    axes.set_ylabel(_plain(shown.y.title), fontsize=9)
    axes.tick_params(length=0)
    assert isinstance(axes.figure, Figure)
    bar = axes.figure.colorbar(drawn, ax=axes, format=lambda value, _: _tick(value, shown.of), aspect=30)
    bar.set_label(_plain(f"{shown.of.title} ({shown.of.unit})" if shown.of.unit else shown.of.title), fontsize=9)
    bar.ax.tick_params(labelsize=9)


def _draw_chart(axes: Axes, chart: Chart) -> None:
    if names := _names(chart):
        _draw_bars(axes, chart, names)
        _name(axes, chart.x, "x")
        return
    base: np.ndarray[tuple[int], np.dtype[np.float64]] | float = 0.0
    for trace in chart.traces:
        if trace.mark is Mark.AREA:
            x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
            colour = COLOURS[str(trace.colour)].light
            axes.fill_between(x, base, base + y, step="post", color=colour, linewidth=0, label=_plain(trace.name))
            base = base + y
        else:
            _draw_line(axes, trace)
    for level in chart.levels:
        axes.axhline(level.value, color=COLOURS["ink"].light, linewidth=1.0, linestyle="--")
        words = _plain(f"{level.words} {value_text(abs(level.value), chart.y.unit)}")
        va = "top" if level.value < 0 else "bottom"
        axes.annotate(words, (1.0, level.value), xycoords=("axes fraction", "data"), ha="right", va=va, fontsize=8)
    if chart.over_time:
        axes.set_xlim(0.0, max((float(trace.x[-1]) for trace in chart.traces), default=chart.bands[-1].end))
    axes.grid(color=COLOURS["grid"].light, linewidth=0.6)
    for axis, which in ((chart.x, "x"), (chart.y, "y")):
        _name(axes, axis, which)
    if not chart.y.log and not any(float(y) < 0 for trace in chart.traces for y in trace.y):
        axes.set_ylim(bottom=0.0)


def _draw_line(axes: Axes, trace: Trace) -> None:
    x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
    colour, style = COLOURS[str(trace.colour)].light, ":" if trace.measured else "-"
    if trace.faint:
        axes.fill_between(x, 0.0, y, step="post", color=colour, alpha=0.22, linewidth=0)
        return
    marker = ("D" if trace.measured else "o") if trace.mark in {Mark.POINTS, Mark.CURVE} else ""
    line = "" if trace.mark is Mark.POINTS else style
    drawn = "steps-post" if trace.mark is Mark.STEPS else "default"
    face = "none" if trace.measured else colour
    axes.plot(
        x, y, color=colour, linestyle=line, marker=marker, markersize=4, markerfacecolor=face, drawstyle=drawn,
        linewidth=1.6, label=_plain(trace.name), clip_on=trace.mark is not Mark.POINTS,
    )  # fmt: skip


def _draw_bars(axes: Axes, chart: Chart, names: Sequence[str]) -> None:
    num_beside = len(chart.traces) if chart.bars == "group" else 1
    height = 0.82 / num_beside
    reached = dict.fromkeys(names, 0.0)
    for number, trace in enumerate(chart.traces):
        colours = [trace.colour] * len(trace.x) if isinstance(trace.colour, str) else trace.colour
        first = True
        for i, (value, name) in enumerate(zip(trace.x, trace.y, strict=True)):
            offset = (number - (num_beside - 1) / 2) * height if chart.bars == "group" else 0.0
            at, left = names.index(str(name)) + offset, reached[str(name)] if chart.bars == "stack" else 0.0
            axes.barh(
                at, float(value), left=left, height=height, color=COLOURS[colours[i]].light, edgecolor="white",
                linewidth=0.4, hatch="////" if trace.measured else "", label=_plain(trace.name) if first else None,
            )  # fmt: skip
            first = False
            reached[str(name)] += float(value)
            if chart.bars != "stack":
                words = trace.texts[i] if trace.texts else value_text(float(value), chart.x.unit)
                axes.annotate(
                    _plain(words),
                    (max(float(value), 0.0), at),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
    for limit in chart.limits:
        axes.axvline(limit.value, color=COLOURS["ink"].light, linewidth=1.0, linestyle="--")
    axes.set_yticks(range(len(names)), [_plain(name) for name in names], fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.18)
    axes.grid(axis="x", color=COLOURS["grid"].light, linewidth=0.6)


def _draw_bands(axes: Axes, picture: Chart | Gantt) -> None:
    for band in picture.bands:
        axes.axvspan(band.start, band.end, color=COLOURS[band.colour].light, linewidth=0, zorder=0)
        if band.words and band.end - band.start > 0.09 * picture.bands[-1].end:
            middle = (band.start + band.end) / 2
            axes.text(
                middle,
                1.01,
                _plain(band.words),
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="bottom",
                fontsize=8,
            )


def _name(axes: Axes, axis: Axis, which: str) -> None:
    """Set the title and scale of an axis, and its tick labels with prefixes of the unit."""
    label = _plain(f"{axis.title} ({axis.unit})" if axis.unit else axis.title)
    (axes.set_xlabel if which == "x" else axes.set_ylabel)(label, fontsize=9)
    of = axes.xaxis if which == "x" else axes.yaxis
    if axis.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        of.set_major_locator(LogLocator(subs=(1, 2, 5)))
        of.set_minor_formatter(NullFormatter())
    of.set_major_formatter(lambda value, _: _tick(value, axis))
    of.set_tick_params(labelsize=9)


def _tick(value: float, axis: Axis) -> str:
    if axis.unit == "%":
        return f"{100 * value:.0f} %"
    number, _, unit = value_text(value, axis.unit if axis.unit in PREFIXED else "").replace(",", "").partition(" ")
    return f"{float(number):g} {unit}".strip()


def _plain(text: str) -> str:
    """Escape a name so that matplotlib does not parse it as mathematics."""
    return text.replace("$", r"\$")
