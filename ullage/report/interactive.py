"""Charts as data for plotly.js.

A colour is written ``@name`` or ``@name/opacity`` with a name of :data:`ullage.output.palette.COLOURS`. The page
substitutes the colours of its theme. plotly.js interprets some tags in texts, so ``<`` and ``&`` are escaped.
"""

import html
import math
import textwrap
from collections.abc import Sequence
from typing import Any

from ullage.output.palette import COLOURS, ORDINALS, SCALE, Work
from ullage.report.charts import PREFIXED, Axis, Chart, Trace, value_text

_NAME_COLUMNS = 26  # columns for the name of a bar, so that a phone has room for the bar
_BAR_PX, _LINE_PX, _GROUP_PX, _ROW_PX = 17, 15, 12, 24
_TICKS = 10_000_000  # per iteration: times are whole ticks, which are short numbers and finer than a screen
_PLAIN = ",.4~r"  # 24,450 and 0.1453
_MANY = 20  # more points than this are drawn smaller
_DASHES = {False: "solid", True: "dot"}


THEMES = {theme: {name: colour[i] for name, colour in COLOURS.items()} for i, theme in enumerate(("light", "dark"))}
"""Every colour of a theme by its name."""


def figure(chart: Chart) -> dict[str, Any]:
    """Return the data that the page draws: ``data`` and ``layout`` of plotly.js, or the rows of a Gantt chart."""
    if chart.has_cells:
        return _map(chart)
    return _gantt(chart) if chart.has_tasks else _chart(chart)


def _chart(chart: Chart) -> dict[str, Any]:
    bars = any(trace.mark == "bars" for trace in chart.traces)
    names = list(dict.fromkeys(str(name) for trace in chart.traces if bars for name in trace.y))
    shown_of = {trace.name for trace in chart.traces}
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x, [x for trace in chart.traces for x in trace.x if not isinstance(x, str)])
        | ({"rangemode": "tozero"} if bars else {}),
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [_wrapped(name) for name in names],
            "autorange": "reversed",
            "dtick": 1,
            "automargin": True,
            "fixedrange": True,
            "tickfont": {"size": 12},
        }
        if bars
        else _axis(chart.y, [y for trace in chart.traces for y in trace.y if not isinstance(y, str)])
        | ({} if chart.y.log else {"rangemode": "tozero"})
        | {"fixedrange": chart.over_time},
        "showlegend": len(shown_of) > 1 or chart.bars == "stack",
        "hovermode": "x unified" if chart.over_time else "closest",
        "shapes": [*_bands(chart), *_levels(chart)],
        "annotations": _annotations(chart),
        "barmode": chart.bars,
        "bargap": 0.18,
        "bargroupgap": 0.04,
    }
    if chart.over_time:
        end = max((float(trace.x[-1]) for trace in chart.traces if len(trace.x)), default=0.0)
        layout["xaxis"] |= {"range": [0.0, max(end, *(band.end for band in chart.bands), 1e-9)]}
    if bars:
        per_name = len(chart.traces) if chart.bars == "group" else 1
        lines = (max(per_name * _BAR_PX, (1 + _wrapped(name).count("<br>")) * _LINE_PX) + _GROUP_PX for name in names)
        layout["height"] = 90 + sum(lines)
    else:
        layout["height"] = 340
    return {
        "key": chart.key,
        "kind": "bars" if bars else "chart",
        "linked": chart.over_time,
        "data": [_trace(chart, trace, bars=bars) for trace in chart.traces],
        "layout": layout,
    }


def _map(shown: Chart) -> dict[str, Any]:
    columns, rows = [_plain(str(name)) for name in shown.traces[0].x], [_plain(row.name) for row in shown.traces]
    cells: dict[str, Any] = {
        "type": "heatmap",
        "x": columns,
        "y": rows,
        "z": [[None if math.isnan(value) else value for value in _values(row.y)] for row in shown.traces],
        "text": [shown.cell_words(row) for row in shown.traces],
        "texttemplate": "%{text}",
        "hovertext": [[_plain(text) for text in row.texts] for row in shown.traces],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "hoverongaps": True,
        "colorscale": [[place / (len(SCALE) - 1), f"@{name}"] for place, name in enumerate(SCALE)],
        "colorbar": {"thickness": 10, "outlinewidth": 0, **_ticks(shown.y)},
        "xgap": 1,
        "ygap": 1,
    }
    return {
        "key": shown.key,
        "kind": "map",
        "linked": False,
        "data": [cells],
        "layout": {
            axis: _titled(Axis(title))
            | {"type": "category", "categoryorder": "array", "categoryarray": names, "showgrid": False}
            for axis, title, names in (("xaxis", shown.x.title, columns), ("yaxis", shown.y.title, rows))
        }
        | {"showlegend": False, "hovermode": "closest", "height": max(300, 130 + _ROW_PX * len(rows))},
    }


def _titled(axis: Axis) -> dict[str, Any]:
    words = f"{axis.title} ({axis.unit})" if axis.unit else axis.title
    return {"title": {"text": _plain(words)}, "automargin": True}


def _ticks(axis: Axis) -> dict[str, Any]:
    if axis.unit == "%":
        return {"tickformat": ".0%"}
    return {"tickformat": "~s", "ticksuffix": axis.unit} if axis.unit in PREFIXED else {"tickformat": _PLAIN}


def _axis(axis: Axis, values: Sequence[float] = ()) -> dict[str, Any]:
    result = _titled(axis)
    if axis.log:
        shown = _round_values(min(values), max(values))
        result |= {"type": "log", "tickvals": shown, "ticktext": [value_text(value, axis.unit) for value in shown]}
        result |= {"tickangle": 0}
        low, high = (math.log10(value) for value in (min(values), max(values)))
        return result | {"range": [low - 0.05 * (high - low) - 0.02, high + 0.05 * (high - low) + 0.02]}
    return result | _ticks(axis)


def _round_values(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times every power of ten between two values, or only the powers if those are too many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    digits = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [digit * 10.0**power for power in powers for digit in digits]


def _trace(chart: Chart, trace: Trace, *, bars: bool) -> dict[str, Any]:
    result = {"name": _plain(trace.name), "x": _values(trace.x), "y": _values(trace.y)}
    return result | (_bars(chart, trace) if bars else _line(chart, trace))


def _bars(chart: Chart, trace: Trace) -> dict[str, Any]:
    single = isinstance(trace.colour, str)
    colour = f"@{trace.colour}" if single else [f"@{name}" for name in trace.colour]
    marker: dict[str, Any] = {"color": colour, "line": {"width": 0}}
    if trace.measured:
        marker["pattern"] = {"shape": "/", "size": 6, "solidity": 0.3, "fgcolor": "@paper", "fillmode": "overlay"}
    result = {
        "type": "bar",
        "orientation": "h",
        "marker": marker,
        "y": [_wrapped(str(name)) for name in trace.y],
        "constraintext": "none",
        "textangle": 0,
        "textfont": {"size": 11},
        "cliponaxis": False,
        "textposition": "none" if chart.bars == "stack" else "outside",
    }
    number = _number("x", chart.x.unit)
    if not trace.texts:
        texttemplate = "%{x:.0%}" if chart.x.unit == "%" else number
        return result | {"texttemplate": texttemplate, "hovertemplate": f"%{{fullData.name}}: {number}<extra></extra>"}
    words = f"%{{text}}, {number}" if chart.bars == "stack" else "%{text}"
    texts = [_plain(text) for text in trace.texts]
    return result | {"text": texts, "hovertemplate": f"%{{fullData.name}}: {words}<extra></extra>"}


def _line(chart: Chart, trace: Trace) -> dict[str, Any]:
    assert isinstance(trace.colour, str), "lines have one colour"
    name, colour = _plain(trace.name), f"@{trace.colour}"
    line: dict[str, Any] = {"color": colour, "width": 2, "dash": _DASHES[trace.measured]}
    result = {"type": "scatter", "mode": "lines", "line": line, "legendgroup": name}
    if trace.faint:
        line |= {"shape": "hv", "width": 0}
        shade = {"fill": "tozeroy", "fillcolor": f"{colour}/0.22"}
        return result | shade | {"showlegend": False, "hoverinfo": "skip"}
    result["hovertemplate"] = _number("y", chart.y.unit)
    if trace.mark == "area":
        line |= {"shape": "hv", "width": 0.5, "dash": "solid"}
        result |= {"stackgroup": "one", "fillcolor": f"{colour}/0.85"}
    elif trace.mark == "steps":
        line |= {"shape": "hv"}
    elif trace.mark in {"curve", "points"}:
        many = len(trace.x) > _MANY
        symbol = "diamond-open" if trace.measured else "circle"
        result["marker"] = {"color": colour, "size": 7 if many else 9, "symbol": symbol, "opacity": 0.6 if many else 1}
        result["mode"] = "lines+markers" if trace.mark == "curve" else "markers"
        if trace.texts:
            texts = [_plain(text) for text in trace.texts]
            result |= {"text": texts, "hovertemplate": "%{text}<extra>%{fullData.name}</extra>"}
    return result


def _number(of: str, unit: str) -> str:
    if unit == "%":
        return f"%{{{of}:.1%}}"
    return f"%{{{of}:.3s}}{unit}" if unit in PREFIXED else f"%{{{of}:{_PLAIN}}} {unit}"


def _levels(chart: Chart) -> list[dict[str, Any]]:
    line = {"color": "@ink", "width": 1.2, "dash": "dash"}
    lying = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level.value, "y1": level.value, "line": line}
        for level in chart.levels
    ]
    standing = [
        {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": level.value, "x1": level.value, "line": line}
        for level in chart.limits
    ]
    return lying + standing


def _bands(chart: Chart) -> list[dict[str, Any]]:
    return [
        {
            "type": "rect",
            "layer": "below",
            "xref": "x",
            "yref": "paper",
            "x0": band.start,
            "x1": band.end,
            "y0": 0,
            "y1": 1,
            "fillcolor": f"@{band.colour}",
            "line": {"width": 0},
        }
        for band in chart.bands
    ]


def _annotations(chart: Chart) -> list[dict[str, Any]]:
    words = [
        {
            "xref": "x",
            "yref": "paper",
            "x": (band.start + band.end) / 2,
            "y": 1,
            "yanchor": "bottom",
            "text": _plain(f"{band.words} {value_text(band.end - band.start, chart.x.unit)}"),
            "showarrow": False,
            "font": {"size": 11, "color": "@soft"},
            "share": (band.end - band.start) / max(chart.bands[-1].end, 1e-30),
        }
        for band in chart.bands
        if band.words
    ]
    return words + [
        {
            "xref": "paper",
            "yref": "y",
            "x": 1,
            "xanchor": "right",
            "y": level.value,
            "yanchor": "top" if level.value < 0 else "bottom",
            "text": _plain(f"{level.words} {value_text(abs(level.value), chart.y.unit)}"),
            "showarrow": False,
            "font": {"size": 11, "color": "@ink"},
            "bgcolor": "@paper/0.7",
        }
        for level in chart.levels
    ]


def _gantt(gantt: Chart) -> dict[str, Any]:
    names: dict[str, int] = {}
    kinds = [work for work in Work if any(work in row.colour for row in gantt.traces)]
    number: dict[str, int] = {work: i for i, work in enumerate(kinds)}
    tick_s = gantt.period_s / _TICKS
    rows = [
        {
            "name": _plain(row.name),
            "start": [round(float(start_s) / tick_s) for start_s in row.x],
            "end": [round(float(end_s) / tick_s) for end_s in row.y],
            "work": [number[work] for work in row.colour],
            "task": [names.setdefault(name, len(names)) for name in row.texts],
        }
        for row in gantt.traces
    ]
    return {
        "key": gantt.key,
        "kind": "gantt",
        "linked": True,
        "tick": tick_s,
        "rows": rows,
        "names": [_plain(name) for name in names],
        "work": [{"name": work.value, "color": f"@{work}"} for work in kinds],
        "layout": {
            "xaxis": _axis(gantt.x) | {"range": [0.0, gantt.period_s]},
            "yaxis": {
                "tickvals": list(range(len(rows))),
                "ticktext": [row["name"] for row in rows],
                "range": [len(rows) - 0.4, -0.6],
                "fixedrange": True,
                "automargin": True,
                "showgrid": False,
                "zeroline": False,
            },
            "shapes": _bands(gantt),
            "annotations": _annotations(gantt),
            "showlegend": True,
            "hovermode": "closest",
            "height": 130 + _ROW_PX * len(rows),
        },
    }


def _values(values: Sequence[float | str]) -> list[Any]:
    """Return values rounded to the digits that a screen can show."""
    return [value if isinstance(value, str) else float(f"{value:.7g}") for value in values]


def _wrapped(name: str) -> str:
    lines = textwrap.wrap(name, _NAME_COLUMNS, break_long_words=True) or [name]
    return "<br>".join(_plain(line) for line in lines)


def _plain(text: str) -> str:
    return html.escape(text, quote=False)


assert set(ORDINALS) <= set(COLOURS)
