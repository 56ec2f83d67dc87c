"""The report about a study: the answer, curves along every axis, effects of resources, and cost."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from hwprofiles import __version__
from planner.schedule.tasks import Tier
from ullage.output.formatting import LANE_WORDS, UNIT_SYMBOLS, duration, percent, si
from ullage.output.palette import ORDINALS
from ullage.report.charts import Axis as ChartAxis
from ullage.report.charts import Chart, Fact, HeatMap, Mark, Part, Section, Table, Trace
from ullage.whatif.money import run_seconds
from ullage.whatif.screen import reasons, value_words
from ullage.whatif.study import Axis, Figures, Point, Sensitivities, Sensitivity, Study, Value
from ullage.whatif.tables import every_words

_MOST_CURVES = len(ORDINALS)
_MOST_ROWS = 400
_MOST_POINTS = 2000
_MOST_CELLS = 40  # cells along one side of a map; more would be too small to see


def study_part(study: Study) -> Part:
    """Return the part of a report about a study."""
    fitting = [point for point in study.points if point.figures is not None]
    sections = [_answer_section(study)]
    if fitting:
        maps = _maps(study)
        sections += [Section("maps", "Maps", "Two fields at once", (), maps)] if maps else []
        sections += [*_curve_sections(study, fitting), _bottleneck_section(fitting)]
    if study.sensitivities is not None:
        sections.append(_sensitivity_section(study.sensitivities))
    if study.prices is not None and any(point.cost for point in fitting):
        sections.append(_money_section(study, fitting, study.prices.currency))
    return _part(study, fitting, tuple(sections))


def _part(study: Study, fitting: Sequence[Point], sections: tuple[Section, ...]) -> Part:
    models = list(dict.fromkeys(point.model for point in study.points))
    title = f"What if: {', '.join(models[:3]) or study.request.set.get('model', 'a study')}"
    count = len(study.points)
    facts = [
        Fact(
            "Points that fit",
            f"{len(fitting)} of {count}",
            "predicted; every point is planned anew",
            "" if fitting else "bad",
        )
    ]
    if fitting:
        fastest = max(fitting, key=lambda point: point.goodput_tokens_per_s)
        figures = _figures(fastest)
        facts.append(
            Fact(
                "Fastest",
                f"{figures.goodput_tokens_per_s:,.0f} tokens/s",
                f"predicted, with {_settings(study, fastest)}",
            )
        )
        facts.append(
            Fact(
                "What binds it",
                LANE_WORDS[figures.bound_by],
                f"{percent(next(iter(figures.critical_shares.values()), 0.0))} of its iteration, predicted",
            )
        )
    priced = [(point.cost.per_million_tokens, point) for point in fitting if point.cost is not None]
    if priced and study.prices is not None:
        cost, cheapest = min(priced, key=lambda item: item[0])
        facts.append(
            Fact(
                "Cheapest",
                f"{cost:,.3g} {study.prices.currency} per million tokens",
                f"at the given prices and the predicted speed, with {_settings(study, cheapest)}",
            )
        )
    sentence = " ".join(study.answer.words) if study.answer else ""
    if not sentence:
        axes = " x ".join(f"{len(axis.values)} of {axis.name}" for axis in study.axes)
        sentence = f"{count} points ({axes or 'one request'}), of which {len(fitting)} fit."
    if any(_figures(point).checkpoints for point in fitting):
        sentence += " Speeds include failures, and the checkpoints with which failures lose least time."
    if not study.complete and count:
        sentence += " The study is not finished: only finished points are shown."
    request = study.request
    about = {
        **({"fixed": ", ".join(f"{name} {value}" for name, value in request.set.items())} if request.set else {}),
        "varied": "; ".join(f"{axis.name}: {axis.words}" for axis in study.axes) or "nothing",
        "design": request.design,
        "made by": f"ullage {study.program_version or __version__}",
    }
    return Part(title, "study", sentence, tuple(facts), about, sections, study.notes)


def _figures(point: Point) -> Figures:
    assert point.figures is not None, "only points that fit are drawn"
    return point.figures


def _settings(study: Study, point: Point) -> str:
    settings = [f"{axis.name} {value_words(axis, point.settings[axis.name])}" for axis in study.axes]
    return ", ".join(settings) or point.hardware


def _answer_section(study: Study) -> Section:
    """List all points, the fastest first."""
    axes, currency = study.axes, study.prices.currency if study.prices else ""
    ordered = sorted(study.points, key=lambda point: -point.goodput_tokens_per_s)
    columns = [axis.name for axis in axes] or ["machine"]
    saves = any(point.figures and point.figures.checkpoints for point in study.points)
    columns += ["iteration", "tokens/s", *(["checkpoint every"] if saves else [])]
    columns += ["device memory", "host memory", "bound by"]
    columns += [f"{currency}/h", f"{currency}/M tokens"] if currency else []
    rows = []
    for point in ordered[:_MOST_ROWS]:
        settings = [value_words(axis, point.settings[axis.name]) for axis in axes] or [point.hardware]
        figures, cost = point.figures, point.cost
        if figures is None:
            found = [*(["-"] * (5 if saves else 4)), point.result.reason or point.result.status]
        else:
            used = {tier: percent(peak.peak_bytes / peak.capacity_bytes) for tier, peak in figures.memory.items()}
            found = [si(figures.iteration_s, "s"), f"{figures.goodput_tokens_per_s:,.0f}"]
            found += [every_words(figures.checkpoints) if figures.checkpoints else "-"] if saves else []
            found += [used.get(Tier.GPU, "-"), used.get(Tier.HOST, "-"), LANE_WORDS[figures.bound_by]]
        if currency:
            found += [f"{cost.per_hour:,.2f}", f"{cost.per_million_tokens:,.3g}"] if cost else ["-", "-"]
        rows.append((*settings, *found))
    more = len(ordered) - len(rows)
    note = f"{more} slower points are in the study's file." if more > 0 else ""
    words = (*(study.answer.words if study.answer else ()), *reasons(study))
    return Section(
        "answer", "Points", "All points", words, (Table("Points, predicted", tuple(columns), tuple(rows), note),)
    )


# -- maps ---------------------------------------------------------------------------------------------------------


def _maps(study: Study) -> tuple[HeatMap, ...]:
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
        found.append(_map(study, x, y, cells, "speed", ChartAxis("speed", "tokens/s"), max, _speed))
        if study.prices is not None and all(point.cost for point in study.points if point.figures):
            of = ChartAxis(f"{study.prices.currency} per million tokens", study.prices.currency)
            found.append(_map(study, x, y, cells, "cost", of, min, _cost))
    return tuple(found)


def _map(
    study: Study,
    x: Axis,
    y: Axis,
    cells: Mapping[tuple[Value, Value], Sequence[Point]],
    key: str,
    of: ChartAxis,
    best: Callable[..., Point],
    read: Callable[[Point], float],
) -> HeatMap:
    """Return one map. Each cell shows the best of its points."""
    columns = [value for value in x.values if any(pair[0] == value for pair in cells)]
    rows = [value for value in y.values if any(pair[1] == value for pair in cells)]
    values, texts = [], []
    for row in rows:
        points = [cells.get((column, row), ()) for column in columns]
        fitting = [[point for point in of_cell if point.figures] for of_cell in points]
        chosen = [best(of_cell, key=read) if of_cell else None for of_cell in fitting]
        values.append(tuple(None if point is None else read(point) for point in chosen))
        texts.append(
            tuple(
                _point_words(study, point) if point else _no_plan(study, of_cell)
                for point, of_cell in zip(chosen, points, strict=True)
            )
        )
    others = [axis.name for axis in study.axes if axis not in (x, y)]
    rest = f", with the best value of {', '.join(others)}" if others else ""
    return HeatMap(
        key=f"map-{_key(x.name)}-{_key(y.name)}-{key}",
        title=f"{of.title[0].upper()}{of.title[1:]} by {x.name} and {y.name}",
        note=f"In {of.unit}. Every cell is planned anew{rest}. A dash means that no plan was found.",
        x=ChartAxis(x.name),
        y=ChartAxis(y.name),
        columns=tuple(value_words(x, value) for value in columns),
        rows=tuple(value_words(y, value) for value in rows),
        of=of,
        values=tuple(values),
        texts=tuple(texts),
    )


def _no_plan(study: Study, points: Sequence[Point]) -> str:
    if not points:
        return "not planned"
    return f"{_settings(study, points[0])}: {points[0].result.reason or points[0].result.status}"


def _speed(point: Point) -> float:
    return point.goodput_tokens_per_s


# -- curves -------------------------------------------------------------------------------------------------------


def _curve_sections(study: Study, fitting: Sequence[Point]) -> Iterator[Section]:
    """Yield a section with speed and cost for every axis that has several values."""
    for axis in study.axes:
        if len({point.settings[axis.name] for point in fitting}) < 2:
            continue
        charts = [_along(study, axis, fitting, "speed", "speed", "tokens/s", _speed)]
        charts.append(_along(study, axis, fitting, "iteration", "iteration", "s", lambda p: _figures(p).iteration_s))
        if study.prices is not None and all(point.cost for point in fitting):
            currency = study.prices.currency
            title = f"{currency} per million tokens"
            charts.append(_along(study, axis, fitting, "cost", title, currency, _cost))
        yield Section(f"along-{_key(axis.name)}", axis.name, f"Along {axis.name}", (), tuple(charts))


def _cost(point: Point) -> float:
    assert point.cost is not None
    return point.cost.per_million_tokens


def _along(
    study: Study, axis: Axis, fitting: Sequence[Point], key: str, title: str, unit: str, read: Callable[[Point], float]
) -> Chart:
    """Draw one curve per combination of the other axes. If there are too many, draw all points and the best of each."""
    others = [other for other in study.axes if other is not axis]

    def combination(point: Point) -> str:
        return ", ".join(f"{other.name} {value_words(other, point.settings[other.name])}" for other in others)

    named = not all(isinstance(value, int | float) and not isinstance(value, bool) for value in axis.values)
    best = min if key in {"iteration", "cost"} else max
    curves: dict[str, list[Point]] = {}
    for point in fitting:
        curves.setdefault(combination(point) or "predicted", []).append(point)
    traces: list[Trace] = []
    if len(curves) > _MOST_CURVES:
        shown = fitting[:: -(-len(fitting) // _MOST_POINTS)]
        if not named:
            traces.append(_trace(study, axis, "all points", shown, read, "quiet", Mark.POINTS))
        by_value = itertools.groupby(
            sorted(fitting, key=lambda p: axis.values.index(p.settings[axis.name])), key=lambda p: p.settings[axis.name]
        )
        curves = {"the best of all others": [best(points, key=read) for _, points in by_value]}
    for (name, points), colour in zip(curves.items(), ORDINALS, strict=False):
        ordered = sorted(points, key=lambda point: _x(axis, point) if not named else 0.0)
        traces.append(_trace(study, axis, name, ordered, read, colour, Mark.BARS if named else Mark.CURVE))
    along = ChartAxis(axis.name, _unit(axis))
    up = ChartAxis(title, unit)
    return Chart(
        key=f"along-{_key(axis.name)}-{key}",
        title=f"{title[0].upper()}{title[1:]} along {axis.name}",
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
    if mark is Mark.BARS:
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
    found = counts.most_common()
    chart = Chart(
        key="bottlenecks",
        title="Number of points by the lane that bounds them",
        note="The lane with the largest share of a plan's critical path.",
        x=ChartAxis("share of the points that fit", "%"),
        traces=(
            Trace(
                "points",
                [count / len(fitting) for _, count in found],
                [LANE_WORDS[lane] for lane, _ in found],
                Mark.BARS,
                "first",
                texts=[f"{count} points" for _, count in found],
            ),
        ),
    )
    return Section("bottlenecks", "Bottlenecks", "Where the bottleneck is", (), (chart,))


def _sensitivity_section(found: Sensitivities) -> Section:
    """Show the effect of more and less of every resource on the iteration time."""
    rows = found.rows
    traces = [
        Trace(
            name,
            [0.0 if value is None else value for value in values],
            [row.words for row in rows],
            Mark.BARS,
            colour,
            texts=["nothing fits" if value is None else f"{value:+.2f}" for value in values],
        )
        for name, colour, values in (
            ("with more of it", "first", [row.elasticity_more for row in rows]),
            ("with less of it", "fourth", [row.elasticity_less for row in rows]),
        )
    ]
    chart = Chart(
        key="sensitivities",
        title="What each resource is worth",
        note="Relative change of the iteration time per relative change of the resource, each side planned anew. -1: "
        "twice as fast with twice as much; 0: no effect.",
        x=ChartAxis("elasticity of the iteration"),
        traces=tuple(traces),
    )
    table = Table(
        "Effect of resources, and where the bottleneck moves",
        ("resource", "now", "one step more", "saves", "less: from", "more: from"),
        tuple(
            (
                row.words,
                si(row.value, UNIT_SYMBOLS.get(row.unit, "")).strip(),
                row.step_words,
                "-" if row.saved_s is None else si(row.saved_s, "s") if row.saved_s else "about nothing",
                _crossing(row, less=True),
                _crossing(row, less=False),
            )
            for row in rows
        ),
        f"Resources vary by {percent(found.step)}; crossings were searched within a factor of {found.range:g}.",
    )
    return Section("sensitivities", "Sensitivities", "What each resource is worth", (), (chart, table))


def _crossing(row: Sensitivity, *, less: bool) -> str:
    crossing = row.below if less else row.above
    if crossing is None:
        return "-"
    lane = LANE_WORDS[crossing.bound_by] if crossing.bound_by else "nothing"
    return f"{si(crossing.value, UNIT_SYMBOLS.get(row.unit, '')).strip()}: {lane}"


def _money_section(study: Study, fitting: Sequence[Point], currency: str) -> Section:
    """Show cost against time, and the Pareto front."""
    tokens = study.request.tokens
    priced = [point for point in fitting if point.cost is not None]
    front = sorted((point for point in priced if point.on_front), key=lambda point: point.goodput_tokens_per_s)
    others = [point for point in priced if not point.on_front]
    others = others[:: max(math.ceil(len(others) / _MOST_POINTS), 1)]

    def trace(name: str, points: Sequence[Point], mark: Mark, colour: str) -> Trace:
        x = [point.goodput_tokens_per_s for point in points]
        texts = [f"{_point_words(study, point)}, {_cost(point):,.3g} {currency} per million tokens" for point in points]
        return Trace(name, x, [_cost(point) for point in points], mark, colour, texts=texts)

    traces = [trace("other points", others, Mark.POINTS, "quiet")] if others else []
    traces.append(trace("nothing is both faster and cheaper", front, Mark.CURVE, "second"))
    chart = Chart(
        key="pareto",
        title="Cost against speed",
        note="At the given prices and the predicted speed. No other point is both faster and cheaper than a point on "
        "the line.",
        x=ChartAxis("speed", "tokens/s"),
        y=ChartAxis(f"{currency} per million tokens", currency),
        traces=tuple(traces),
    )
    columns = ["", "tokens/s", f"{currency}/h", f"{currency} per million tokens"]
    columns += ["run takes", f"run {currency}", "in time"] if tokens else []
    rows = []
    for point in reversed(front):
        figures, cost = _figures(point), point.cost
        assert cost is not None
        row = [_settings(study, point), f"{figures.goodput_tokens_per_s:,.0f}", f"{cost.per_hour:,.2f}"]
        row.append(f"{cost.per_million_tokens:,.3g}")
        if tokens:
            run = "-" if cost.run is None else f"{cost.run:,.0f}"
            in_time = {True: "yes", False: "no", None: "-"}[cost.in_time]
            row += [duration(run_seconds(figures, tokens)), run, in_time]
        rows.append(tuple(row))
    table = Table("The front: nothing is both faster and cheaper", tuple(columns), tuple(rows))
    return Section("money", "Cost", "Cost against speed", (), (chart, table))
