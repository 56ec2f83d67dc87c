"""A study as sections: the answer, points, curves along every axis, effects of resources, and cost."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from hwprofiles import __version__
from planner.schedule.tasks import Tier
from ullage.output.formatting import LANE_WORDS, UNIT_SYMBOLS, duration, percent, si
from ullage.output.palette import ORDINALS
from ullage.report.charts import Axis as ChartAxis
from ullage.report.charts import Chart, Fact, Mark, Part, Section, Table, Trace, bars
from ullage.whatif.fields import Field
from ullage.whatif.money import run_seconds
from ullage.whatif.study import AS_GOOD_AS_NONE, Axis, Figures, Minimum, Point, Sensitivities, Sensitivity, Study, Value
from ullage.whatif.tables import every_words

MOST_ROWS: Final = 400
"""Rows of the table of points on a page."""
_MOST_CURVES = len(ORDINALS)
_MOST_POINTS = 2000
_MOST_CELLS = 40  # cells along one side of a map; more would be too small to see
_MOST_REASONS = 5
_STATUS_WORDS = {"lacks-memory": "lacks memory", "refused": "not possible", "failed": "the planner failed"}


def study_part(study: Study, most_rows: int = MOST_ROWS) -> Part:
    """Return a study. Its table has the points of the answer first, and at most ``most_rows`` points."""
    fitting = [point for point in study.points if point.figures is not None]
    sections = [_answer_section(study, most_rows)]
    if fitting:
        maps = _maps(study)
        sections += [Section("maps", "Maps", "Two fields at once", (), maps)] if maps else []
        sections += [*_curve_sections(study, fitting), _bottleneck_section(fitting)]
    if (found := study.sensitivities) is not None:
        parts = (_sensitivity_chart(found), sensitivity_table(found))
        sections.append(Section("sensitivities", "Sensitivities", "What each resource is worth", (), parts))
    if study.prices is not None and any(point.cost for point in fitting):
        sections.append(_money_section(study, fitting, study.prices.currency))
    if study.notes:
        sections.append(Section("notes", "Notes", "Notes", tuple(f"note: {note}" for note in study.notes), ()))
    return _part(study, fitting, tuple(sections))


def _part(study: Study, fitting: Sequence[Point], sections: tuple[Section, ...]) -> Part:
    models, request = dict.fromkeys(point.model for point in study.points), study.request
    count = len(study.points)
    facts = [
        Fact("points that fit", f"{len(fitting)} of {count}", "every point is planned anew", "" if fitting else "bad")
    ]
    if fitting:
        fastest = max(fitting, key=_speed)
        figures = _figures(fastest)
        share = percent(figures.critical_s[figures.bound_by] / sum(figures.critical_s.values()))
        facts += [
            Fact(
                "fastest", f"{_speed(fastest):,.0f} tokens/s", f"with {_settings(study, fastest)}", origin="predicted"
            ),
            Fact("binds it", LANE_WORDS[figures.bound_by], f"{share} of its iteration", origin="predicted"),
        ]
    if study.prices is not None and (priced := [point for point in fitting if point.cost is not None]):
        cheapest = min(priced, key=_cost)
        cost = f"{_cost(cheapest):,.3g} {study.prices.currency} per million tokens"
        facts.append(
            Fact("cheapest", cost, f"at the given prices, with {_settings(study, cheapest)}", origin="predicted")
        )
    sentence = " ".join(study.answer.words) if study.answer else ""
    if not sentence:
        axes = " x ".join(f"{len(axis.values)} of {axis.name}" for axis in study.axes)
        sentence = f"{count} points ({axes or 'one request'}), of which {len(fitting)} fit."
    if any(_figures(point).checkpoints for point in fitting):
        sentence += " Speeds include failures, and the checkpoints with which failures lose least time."
    if not study.complete and count:
        sentence += " The study is not finished: only finished points are shown."
    about = {
        **({"fixed": ", ".join(f"{name} {value}" for name, value in request.set.items())} if request.set else {}),
        "varied": "; ".join(f"{axis.name}{axis.words and f': {axis.words}'}" for axis in study.axes) or "nothing",
        "design": request.design,
        "made by": f"ullage {study.program_version or __version__}",
    }
    title = f"What if: {', '.join([*models][:3]) or request.set.get('model', 'a study')}"
    return Part(title, "study", sentence, tuple(facts), about, sections)


def _figures(point: Point) -> Figures:
    assert point.figures is not None, "only points that fit are drawn"
    return point.figures


def value_words(axis: Axis | Field, value: Value) -> str:
    """Return a value of an axis or a field as text with its unit."""
    if isinstance(axis, Axis) and axis.relative:
        return f"{value:g}x"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (axis.unit and isinstance(value, int)):
        return si(float(value), UNIT_SYMBOLS.get(axis.unit, "")).strip()
    return str(value)


def fields_table(fields: Sequence[Field]) -> Table:
    """List fields that can be varied, with their present values."""
    rows = tuple((f.name, "" if f.present is None else value_words(f, f.present), f.words) for f in fields)
    return Table("fields", ("field", "here", "what it is"), rows)


def _settings(study: Study, point: Point) -> str:
    settings = [f"{axis.name} {value_words(axis, point.settings[axis.name])}" for axis in study.axes]
    return ", ".join(settings) or point.hardware


# -- the answer and the points ------------------------------------------------------------------------------------


def _answer_section(study: Study, most_rows: int) -> Section:
    words = (*(study.answer.words if study.answer else ()), *_reasons(study))
    if study.answer and study.answer.least:
        table = _minimum_table(study, study.answer.least)
    else:
        table = _points_table(study, most_rows)
    return Section("answer", "Points", "All points", words, (table,))


def _reasons(study: Study) -> Iterator[str]:
    """Yield the reasons why points have no plan, most frequent first."""
    without = [point.result for point in study.points if point.result.status != "fits"]
    counts = Counter((result.status, result.reason) for result in without)
    for status, count in Counter(result.status for result in without).most_common():
        proven = sum(result.proven for result in without if result.status == status)
        reasons = [reason or "" for (of, reason), _ in counts.most_common() if of == status]
        more = f"; and {len(reasons) - _MOST_REASONS} others" if len(reasons) > _MOST_REASONS else ""
        known = f"{_STATUS_WORDS[status]}{f' ({proven} proven)' if proven else ''}"
        yield f"{count} of {len(study.points)} points: {known}: {'; '.join(reasons[:_MOST_REASONS])}{more}"


def _points_table(study: Study, most_rows: int) -> Table:
    """List the points: those of the answer first; if there are too many, the fastest."""
    places = list(study.answer.points if study.answer else ())
    others = [place for place in range(len(study.points)) if place not in places]
    if len(study.points) > most_rows:
        others.sort(key=lambda place: -study.points[place].goodput_tokens_per_s)
    shown = [*places, *others][:most_rows]
    rows = [_row(study, place) for place in shown]
    columns = max(rows, key=len) if rows else {}
    more = len(study.points) - len(shown)
    notes = [f"{more} slower points are in the study's file"] if more else []
    notes += ["* no other point is both faster and cheaper"] if study.prices else []
    cells = tuple(tuple(row.get(column, "-") for column in columns) for row in rows)
    return Table("points, predicted", tuple(columns), cells, "; ".join(notes))


def _row(study: Study, place: int) -> dict[str, str]:
    """Return the cells of a point by column."""
    point, request = study.points[place], study.request
    figures, cost = point.figures, point.cost
    row = {axis.name: value_words(axis, point.settings[axis.name]) for axis in study.axes} or {
        "machine": point.hardware
    }
    if figures is None:
        names = {Tier.GPU: "device memory", Tier.HOST: "host memory"}
        lacks = {names[tier]: f"lacks {si(n, 'B')}" for tier, n in point.result.missing_bytes.items() if tier in names}
        return row | lacks | {"bound by": _STATUS_WORDS[point.result.status]}
    used = {tier: percent(peak.peak_bytes / peak.capacity_bytes) for tier, peak in figures.memory.items()}
    row |= {"iteration": si(figures.iteration_s, "s"), "tokens/s": f"{figures.tokens_per_s:,.0f}"}
    if figures.checkpoints:
        row |= {
            "with failures": f"{point.goodput_tokens_per_s:,.0f}",
            "checkpoint every": every_words(figures.checkpoints),
        }
    row |= {"device memory": used.get(Tier.GPU, "-"), "host memory": used.get(Tier.HOST, "-")}
    row["bound by"] = LANE_WORDS[figures.bound_by]
    if study.answer and study.answer.efficiency and (share := study.answer.efficiency[place]) is not None:
        row["efficiency"] = percent(share)
    if figures.gap is not None:
        row["gap"] = percent(figures.gap)
    if request.tokens:
        row["run takes"] = duration(run_seconds(figures, request.tokens))
    if cost and study.prices:
        currency = study.prices.currency
        row |= {f"{currency}/h": f"{cost.per_hour:,.2f}", f"{currency}/M tokens": f"{cost.per_million_tokens:,.3g}"}
        if cost.run is not None:
            row[f"run {currency}"] = f"{cost.run:,.2f}" if cost.run < 100 else f"{cost.run:,.0f}"
        row[""] = "*" if point.on_front else ""
    return row


def _minimum_table(study: Study, rows: Sequence[Minimum]) -> Table:
    """List the least memory and drives that every machine needs, beside the present amounts."""
    points = {(point.settings["hardware"], point.settings["gpus"]): point for point in study.points}
    found = []
    for row in rows:
        figures = points[row.hardware, row.num_devices].figures
        cells = [row.hardware, str(row.num_devices)]
        for tier, least_bytes in ((Tier.GPU, row.device_memory_bytes), (Tier.HOST, row.host_memory_bytes)):
            has = figures.memory.get(tier) if figures else None
            cells += [si(least_bytes, "B"), si(has.capacity_bytes, "B") if has else "-"]
        drives = "-" if row.num_drives is None else str(row.num_drives)
        found.append((*cells, si(figures.iteration_s, "s") if figures else "", drives))
    columns = ("machine", "devices", "device memory", "of", "host memory", "of", "iteration", "drives")
    title = "smallest amounts with which a plan was found, each varied alone"
    note = "memory per device and per node; the iteration time is with the full memory of the machine"
    return Table(title, columns, tuple(found), note)


# -- what is compared --------------------------------------------------------------------------------------------

_Measure = tuple[str, ChartAxis, Callable[..., Point], Callable[[Point], float]]
"""A key, title and unit, what is best (``min`` or ``max``), and the function that reads the value of a point."""


def _measures(study: Study) -> list[_Measure]:
    found: list[_Measure] = [
        ("speed", ChartAxis("speed", "tokens/s"), max, _speed),
        ("iteration", ChartAxis("iteration", "s"), min, lambda point: _figures(point).iteration_s),
    ]
    if study.prices is not None and all(point.cost for point in study.points if point.figures):
        currency = study.prices.currency
        found.append(("cost", ChartAxis(f"{currency} per million tokens", currency), min, _cost))
    return found


def _speed(point: Point) -> float:
    return point.goodput_tokens_per_s


def _cost(point: Point) -> float:
    assert point.cost is not None
    return point.cost.per_million_tokens


# -- maps ---------------------------------------------------------------------------------------------------------


def _maps(study: Study) -> tuple[Chart, ...]:
    """Return maps of speed and cost for each pair of fields, if most pairs of values were planned."""
    found = []
    for x, y in itertools.combinations(study.axes, 2):
        cells: dict[tuple[Value, Value], list[Point]] = {}
        for point in study.points:
            cells.setdefault((point.settings[x.name], point.settings[y.name]), []).append(point)
        columns, rows = {pair[0] for pair in cells}, {pair[1] for pair in cells}
        if not all(1 < len(values) <= _MOST_CELLS for values in (columns, rows)):
            continue
        if 2 * len(cells) < len(columns) * len(rows):
            continue
        found += [_map(study, x, y, cells, measure) for measure in _measures(study) if measure[0] != "iteration"]
    return tuple(found)


def _map(
    study: Study,
    x: Axis,
    y: Axis,
    cells: Mapping[tuple[Value, Value], Sequence[Point]],
    measure: _Measure,
) -> Chart:
    """Return one map. Each cell shows the best of its points."""
    key, of, best, read = measure
    columns = [value for value in x.values if any(pair[0] == value for pair in cells)]
    names, traces = [value_words(x, column) for column in columns], []
    for row in (value for value in y.values if any(pair[1] == value for pair in cells)):
        points = [cells.get((column, row), ()) for column in columns]
        fitting = [[point for point in of_cell if point.figures] for of_cell in points]
        chosen = [best(of_cell, key=read) if of_cell else None for of_cell in fitting]
        values = [math.nan if point is None else read(point) for point in chosen]
        texts = [
            _point_words(study, point) if point else _no_plan(study, of_cell)
            for point, of_cell in zip(chosen, points, strict=True)
        ]
        traces.append(Trace(value_words(y, row), names, values, "cells", "", texts=texts))
    others = [axis.name for axis in study.axes if axis not in (x, y)]
    rest = f", with the best value of {', '.join(others)}" if others else ""
    return Chart(
        key=f"map-{_key(x.name)}-{_key(y.name)}-{key}",
        title=f"{of.title[0].upper()}{of.title[1:]} by {x.name} and {y.name}",
        note=f"In {of.unit}. Every cell is planned anew{rest}. A dash means that no plan was found.",
        x=ChartAxis(x.name),
        y=ChartAxis(y.name, of.unit),
        traces=tuple(traces),
        half=True,
    )


def _no_plan(study: Study, points: Sequence[Point]) -> str:
    if not points:
        return "not planned"
    return f"{_settings(study, points[0])}: {points[0].result.reason or points[0].result.status}"


# -- curves -------------------------------------------------------------------------------------------------------


def _curve_sections(study: Study, fitting: Sequence[Point]) -> Iterator[Section]:
    """Yield a section with speed and cost for every axis that has several values."""
    for axis in study.axes:
        if len({point.settings[axis.name] for point in fitting}) < 2:
            continue
        charts = tuple(_along(study, axis, fitting, measure) for measure in _measures(study))
        yield Section(f"along-{_key(axis.name)}", axis.name, f"Along {axis.name}", (), charts)


def _along(study: Study, axis: Axis, fitting: Sequence[Point], measure: _Measure) -> Chart:
    """Draw one curve per combination of the other axes. If there are too many, draw all points and the best of each."""
    key, up, best, read = measure
    others = [other for other in study.axes if other is not axis]

    def combination(point: Point) -> str:
        return ", ".join(f"{other.name} {value_words(other, point.settings[other.name])}" for other in others)

    named = not all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    curves: dict[str, list[Point]] = {}
    for point in fitting:
        curves.setdefault(combination(point) or "predicted", []).append(point)
    traces: list[Trace] = []
    if len(curves) > _MOST_CURVES:
        shown = fitting[:: -(-len(fitting) // _MOST_POINTS)]
        if not named:
            traces.append(_trace(study, axis, "all points", shown, read, "quiet", "points"))
        by_value = itertools.groupby(
            sorted(fitting, key=lambda p: axis.values.index(p.settings[axis.name])), key=lambda p: p.settings[axis.name]
        )
        curves = {"the best of all others": [best(points, key=read) for _, points in by_value]}
    for (name, points), colour in zip(curves.items(), ORDINALS, strict=False):
        ordered = sorted(points, key=lambda point: _x(axis, point) if not named else 0.0)
        traces.append(_trace(study, axis, name, ordered, read, colour, "bars" if named else "curve"))
    along = ChartAxis(axis.name, _unit(axis))
    return Chart(
        key=f"along-{_key(axis.name)}-{key}",
        title=f"{up.title[0].upper()}{up.title[1:]} along {axis.name}",
        note=f"{axis.name}: {axis.words}. Every point is planned anew. Points that do not fit are left out.",
        x=up if named else along,
        y=ChartAxis("") if named else up,
        traces=tuple(traces),
        half=True,
    )


def _trace(
    study: Study,
    axis: Axis,
    name: str,
    points: Sequence[Point],
    read: Callable[[Point], float],
    colour: str,
    mark: Mark,
) -> Trace:
    values = [read(point) for point in points]
    texts = [_point_words(study, point) for point in points]
    if mark == "bars":
        names = [value_words(axis, point.settings[axis.name]) for point in points]
        return Trace(name, values, names, mark, colour)
    return Trace(name, [_x(axis, point) for point in points], values, mark, colour, texts=texts)


def _point_words(study: Study, point: Point) -> str:
    figures = _figures(point)
    return (
        f"{_settings(study, point)}: {si(figures.iteration_s, 's')}, {figures.goodput_tokens_per_s:,.0f} tokens/s, "
        f"bound by {LANE_WORDS[figures.bound_by]}"
    )


def _x(axis: Axis, point: Point) -> float:
    """Return a point's position on an axis of numbers: its value, or the factor if the value is not a number."""
    value: Value | None = point.settings[axis.name]
    if axis.relative and (varied := point.varied.get(axis.name)) is not None and _unit(axis) != "x":
        value = varied.after
    assert isinstance(value, int | float)
    return float(value)


def _unit(axis: Axis) -> str:
    return UNIT_SYMBOLS.get(axis.unit, "x" if axis.relative else "")


def _key(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


# -- bottlenecks, effects of resources, cost ----------------------------------------------------------------------


def _bottleneck_section(fitting: Sequence[Point]) -> Section:
    counts = Counter(point.figures.bound_by for point in fitting if point.figures is not None)
    chart = bars(
        "bottlenecks",
        "Number of points by the lane that bounds them",
        "The lane with the largest share of a plan's critical path.",
        ChartAxis("share of the points that fit", "%"),
        {LANE_WORDS[lane]: (count / len(fitting), f"{count} points") for lane, count in counts.most_common()},
    )
    return Section("bottlenecks", "Bottlenecks", "Where the bottleneck is", (), (chart,))


def _sensitivity_chart(found: Sensitivities) -> Chart:
    """Show the effect of more and less of every resource on the iteration time."""
    sides = (
        ("with more of it", "first", [row.elasticity_more for row in found.rows]),
        ("with less of it", "fourth", [row.elasticity_less for row in found.rows]),
    )
    names = [row.words for row in found.rows]
    traces = tuple(
        Trace(name, [v or 0.0 for v in values], names, "bars", colour, texts=[_elasticity(v) for v in values])
        for name, colour, values in sides
    )
    note = (
        "Relative change of the iteration time per relative change of the resource, each side planned anew. -1: twice "
        "as fast with twice as much; 0: no effect."
    )
    return Chart("sensitivities", "What each resource is worth", note, ChartAxis("elasticity of the iteration"), traces)


def sensitivity_table(found: Sensitivities) -> Table:
    """List the effect of every resource, and where the bottleneck moves."""
    rows = tuple(
        (
            row.name,
            si(row.value, UNIT_SYMBOLS.get(row.unit, "")).strip(),
            _elasticity(row.elasticity_less),
            _elasticity(row.elasticity_more),
            _saving(row),
            _moves(row),
        )
        for row in found.rows
    )
    note = (
        "with less, with more: relative change of the iteration time, divided by that of the resource; planned at "
        f"1/{1 + found.step:g}x and {1 + found.step:g}x. Between -{AS_GOOD_AS_NONE:g} and +{AS_GOOD_AS_NONE:g} it "
        f"means no effect. Other lanes were looked for within a factor of {found.range:g}"
    )
    columns = ("resource", "here", "with less", "with more", "effect of one more", "another lane binds from")
    return Table("sensitivities, predicted", columns, rows, note)


def _elasticity(value: float | None) -> str:
    return "no plan" if value is None else f"{value + 0.0:+.2f}"


def _saving(row: Sensitivity) -> str:
    if row.saved_s is None:
        return ""
    effect = f"{'-' if row.saved_s > 0 else '+'}{si(abs(row.saved_s), 's')}" if row.saved_s else "about nothing"
    return f"{row.step_words}: {effect}"


def _moves(row: Sensitivity) -> str:
    unit = UNIT_SYMBOLS.get(row.unit, "")
    sides = (side for side in (row.below, row.above) if side and side.bound_by)
    return "; ".join(f"{si(side.value, unit).strip()} ({LANE_WORDS[side.bound_by]})" for side in sides if side.bound_by)


def _money_section(study: Study, fitting: Sequence[Point], currency: str) -> Section:
    """Show cost against time, and the Pareto front."""
    priced = [point for point in fitting if point.cost is not None]
    front = sorted((point for point in priced if point.on_front), key=lambda point: point.goodput_tokens_per_s)
    others = [point for point in priced if not point.on_front]
    others = others[:: max(math.ceil(len(others) / _MOST_POINTS), 1)]

    def trace(name: str, points: Sequence[Point], mark: Mark, colour: str) -> Trace:
        x = [point.goodput_tokens_per_s for point in points]
        texts = [f"{_point_words(study, point)}, {_cost(point):,.3g} {currency} per million tokens" for point in points]
        return Trace(name, x, [_cost(point) for point in points], mark, colour, texts=texts)

    traces = [trace("other points", others, "points", "quiet")] if others else []
    traces.append(trace("nothing is both faster and cheaper", front, "curve", "second"))
    chart = Chart(
        key="pareto",
        title="Cost against speed",
        note="At the given prices and the predicted speed. No other point is both faster and cheaper than a point on "
        "the line.",
        x=ChartAxis("speed", "tokens/s"),
        y=ChartAxis(f"{currency} per million tokens", currency),
        traces=tuple(traces),
    )
    return Section("money", "Cost", "Cost against speed", (), (chart,))
