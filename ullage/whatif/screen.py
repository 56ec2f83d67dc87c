"""The screen of `ullage whatif`: the answer, then the table."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from planner.schedule.tasks import Tier
from ullage.output.console import console, table
from ullage.output.formatting import LANE_WORDS, UNIT_SYMBOLS, duration, percent, si
from ullage.whatif.money import run_seconds
from ullage.whatif.study import AS_GOOD_AS_NONE, Axis, Minimum, Point, Sensitivities, Study, Value
from ullage.whatif.tables import every_words

_MOST_ROWS, _MOST_ANSWERS = 48, 16
_COMMON = 5  # columns of every point after its settings
_STATUS_WORDS = {"lacks-memory": "lacks memory", "refused": "not possible", "failed": "the planner failed"}


def study_screen(study: Study, path: Path, table_path: Path | None) -> None:
    """Print a study: answer, table, notes, and the paths of the files."""
    out = console()
    if study.answer:
        for line in study.answer.words:
            out.print(line, style="bold", soft_wrap=True)
        out.print()
    if study.answer and study.answer.least:
        out.print(minimum_table(study, study.answer.least))
    else:
        shown = _points_to_show(study)
        out.print(points_table(study, shown))
        if len(shown) < len(study.points):
            which = "the best" if study.answer else "the fastest"
            out.print(f"{len(shown)} of {len(study.points)} points, {which}; all are in {path}")
    if study.sensitivities:
        out.print()
        out.print(sensitivity_table(study.sensitivities))
        out.print(
            "with less, with more: relative change of the iteration time, divided by that of the resource; planned at "
            f"1/{1 + study.sensitivities.step:g}x and {1 + study.sensitivities.step:g}x. Between "
            f"-{AS_GOOD_AS_NONE:g} and +{AS_GOOD_AS_NONE:g} it means no effect",
            soft_wrap=True,
        )
    for line in reasons(study):
        out.print(line, soft_wrap=True)
    for note in study.notes:
        out.print(f"note: {note}", soft_wrap=True)
    written = f"study written to {path}" + (f", its table to {table_path}" if table_path else "")
    out.print(written, soft_wrap=True)


def value_words(axis: Axis, value: Value) -> str:
    """Return a value of an axis as text with its unit."""
    if axis.relative:
        return f"{value:g}x"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) or (axis.unit and isinstance(value, int)):
        return si(float(value), UNIT_SYMBOLS.get(axis.unit, "")).strip()
    return str(value)


def points_table(study: Study, points: Sequence[Point]) -> Table:
    """Return a table with one row per point: settings, whether it fits, time, speed, bottleneck, memory, cost."""
    axes, money = study.axes, study.prices is not None
    certified, run = study.request.certify, study.request.tokens is not None
    currency = study.prices.currency if study.prices else ""
    columns = [*(axis.name for axis in axes), "iteration", "tokens/s", "device\nmemory", "host\nmemory", "bound by"]
    efficiency = study.answer.efficiency if study.answer else ()
    columns += ["efficiency"] if efficiency else []
    saves = any(point.figures and point.figures.checkpoints for point in study.points)
    columns += ["with\nfailures", "checkpoint\nevery"] if saves else []
    columns += ["gap"] if certified else []
    columns += [f"{currency}/h", f"{currency}/M\ntokens"] if money else []
    columns += ["run\ntakes"] if run else []
    columns += [f"run\n{currency}"] if money and run else []
    columns += [""] if money else []
    result = table("points, predicted", *columns, num_text=0)
    for point in points:
        row = _row(study, point, saves=saves, certified=certified, money=money, run=run)
        if efficiency and (share := efficiency[study.points.index(point)]) is not None:
            row.insert(len(axes) + _COMMON, percent(share))
        result.add_row(*row)
    for column in result.columns[: len(axes)]:
        column.no_wrap = True
    if money:
        result.caption = "* no other point is both faster and cheaper"
    return result


def minimum_table(study: Study, rows: Sequence[Minimum]) -> Table:
    """Return a table with the least memory and drives that every machine needs, beside the present amounts."""
    columns = ["devices", "device memory", "of", "host memory", "of", "iteration"]
    drives = any(row.num_drives is not None for row in rows)
    result = table(
        "smallest amounts with which a plan was found, each varied alone",
        "machine",
        *columns,
        *(["drives"] if drives else []),
    )
    points = {(point.settings["hardware"], point.settings["gpus"]): point for point in study.points}
    for row in rows:
        figures = points[row.hardware, row.num_devices].figures
        cells = [str(row.num_devices)]
        for tier, least_bytes in ((Tier.GPU, row.device_memory_bytes), (Tier.HOST, row.host_memory_bytes)):
            has = figures.memory.get(tier) if figures else None
            cells += [si(least_bytes, "B"), si(has.capacity_bytes, "B") if has else "-"]
        cells += [si(figures.iteration_s, "s") if figures else ""]
        cells += ["" if row.num_drives is None else str(row.num_drives)] if drives else []
        result.add_row(row.hardware, *cells)
    result.caption = "memory per device and per node; the iteration time is with the full memory of the machine"
    return result


def sensitivity_table(found: Sensitivities) -> Table:
    """Return a table with the effect of every resource, largest first."""
    columns = ("here", "with less", "with more", "effect of one more", "another lane binds from")
    result = table("sensitivities, predicted", "resource", *columns)
    for row in found.rows:
        unit = UNIT_SYMBOLS.get(row.unit, "")
        worth = "" if row.saved_s is None else f"{row.step_words}: {_saving_words(row.saved_s)}"
        moves = [
            f"{si(crossing.value, unit).strip()} ({LANE_WORDS[crossing.bound_by]})"
            for crossing in (row.below, row.above)
            if crossing and crossing.bound_by
        ]
        result.add_row(
            row.name,
            si(row.value, unit).strip(),
            _elasticity(row.elasticity_less),
            _elasticity(row.elasticity_more),
            worth,
            "; ".join(moves),
        )
    return result


def _elasticity(value: float | None) -> str:
    return "no plan" if value is None else f"{value + 0.0:+.2f}"


def _saving_words(seconds: float) -> str:
    return f"{'-' if seconds > 0 else '+'}{si(abs(seconds), 's')}" if seconds else "about nothing"


def reasons(study: Study) -> Iterator[str]:
    """Yield the reasons why points have no plan, one line per kind, most frequent first."""
    without = [point for point in study.points if point.result.status != "fits"]
    for status, count in Counter(point.result.status for point in without).most_common():
        first = next(point for point in without if point.result.status == status)
        proven = sum(point.result.proven for point in without if point.result.status == status)
        also = f" ({proven} proven)" if proven else ""
        yield f"{count} of {len(study.points)} points: {_STATUS_WORDS[status]}{also}; the first: {first.result.reason}"


def _row(study: Study, point: Point, *, saves: bool, certified: bool, money: bool, run: bool) -> list[str]:
    settings = [value_words(axis, point.settings[axis.name]) for axis in study.axes]
    figures, cost = point.figures, point.cost
    if figures is None:
        missing = point.result.missing_bytes
        lacks = {tier: f"lacks {si(missing[tier], 'B')}" if tier in missing else "" for tier in (Tier.GPU, Tier.HOST)}
        status = _STATUS_WORDS[point.result.status]
        return [*settings, "-", "-", lacks[Tier.GPU], lacks[Tier.HOST], status]
    used = {tier: percent(peak.peak_bytes / peak.capacity_bytes) for tier, peak in figures.memory.items()}
    row = [*settings, si(figures.iteration_s, "s"), f"{figures.tokens_per_s:,.0f}"]
    row += [used.get(Tier.GPU, "-"), used.get(Tier.HOST, "-"), LANE_WORDS[figures.bound_by]]
    if saves:
        saved = figures.checkpoints
        row += [f"{figures.goodput_tokens_per_s:,.0f}", every_words(saved)] if saved else ["", ""]
    row += [percent(figures.gap) if figures.gap is not None else ""] if certified else []
    row += [f"{cost.per_hour:,.2f}", f"{cost.per_million_tokens:,.3g}"] if cost else ["", ""] if money else []
    if run and study.request.tokens:
        row.append(duration(run_seconds(figures, study.request.tokens)))
    row += [_amount(cost.run) if cost and cost.run is not None else ""] if money and run else []
    row += ["*" if point.on_front else ""] if money else []
    return row


def _amount(money: float) -> str:
    return f"{money:,.2f}" if money < 100 else f"{money:,.0f}"


def _points_to_show(study: Study) -> list[Point]:
    """Return as many points as a screen has room for: those of the answer, then the fastest."""
    if study.answer and study.answer.points:
        return [study.points[position] for position in study.answer.points[:_MOST_ANSWERS]]
    if len(study.points) <= _MOST_ROWS:
        return list(study.points)
    return sorted(study.points, key=lambda p: -p.goodput_tokens_per_s)[:_MOST_ROWS]
