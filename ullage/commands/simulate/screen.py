"""The screen of `ullage simulate`: one iteration in tables, and over time as lines of bars."""

from collections.abc import Iterator, Mapping

from rich.table import Table

from planner.models.captured import counted
from planner.schedule.tasks import Lane, Phase
from ullage.analysis.iteration import Iteration, most_held
from ullage.commands.plan.screen import memory_table
from ullage.output.console import console, facts, table
from ullage.output.formatting import percent, si, sparkline
from ullage.rivals.decisions import RivalDecisions

_LABEL_COLUMNS = 11  # the longest name: "collective", "activations"
_NOTE_COLUMNS = 28  # width of the note behind a line of bars
_CHART_COLUMNS = (16, 72)
# Parts of the critical path below this share of the iteration are merged into one row.
_SMALL = 0.005


def iteration_screen(seen: Iteration) -> None:
    """Print an iteration."""
    out = console()
    out.print(facts(_summary(seen)))
    if seen.missing:
        out.print(f"does not fit: {seen.missing}", style="bold", soft_wrap=True)
    for part in (_lanes(seen), _critical(seen), memory_table(seen.peaks)):
        out.print()
        out.print(part)
    room = out.width - _LABEL_COLUMNS - _NOTE_COLUMNS - 3
    num_columns = min(max(room, _CHART_COLUMNS[0]), _CHART_COLUMNS[1])
    for chart in _charts(seen, num_columns):
        out.print()
        for line in chart:
            out.print(line, soft_wrap=True)
    for warning in seen.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)


def _summary(seen: Iteration) -> dict[str, str]:
    subject, timeline = seen.subject, seen.simulation.timeline
    present = _phases(seen)
    decided = subject.decisions
    num_steps, numerics = (decided.num_steps, decided.numerics) if isinstance(decided, RivalDecisions) else (1, None)
    each = f" for {num_steps} iterations, {si(seen.period_s / num_steps, 's')} each" if num_steps > 1 else ""
    return {
        "schedule": f"{subject.model.name} on {decided.num_devices} device(s) of {subject.hardware.name} by "
        f"{subject.engine}: {len(timeline.schedule.tasks)} tasks, iteration {seen.simulation.steady + 1} of "
        f"{timeline.num_iterations}",
        "iteration": f"{si(seen.period_s, 's')}{each}, {subject.workload.tokens(decided) / seen.period_s:,.0f} "
        f"{counted(subject.model)}/s",
        **{p: f"{si(s, 's')} ({percent(s / seen.period_s)})" for p, s in seen.phases.by_phase.items() if p in present},
        **({"numerics": f"changed: {numerics}"} if numerics else {}),
        "verdict": seen.verdict,
        "would help": seen.relief,
        **({"sharing": seen.sharing} if seen.sharing else {}),
    }


def _phases(seen: Iteration) -> list[Phase]:
    """Return the phases of the schedule; only published runs have ``loop``."""
    present = {task.phase for task in seen.simulation.timeline.schedule.tasks}
    return [phase for phase in Phase if phase in present]


def _lanes(seen: Iteration) -> Table:
    result = table("lanes", "lane", "busy", "idle", "busy share")
    for lane, busy_s in seen.busy_s.items():
        idle_s = max(seen.period_s - busy_s, 0.0)
        result.add_row(lane.value, si(busy_s, "s"), si(idle_s, "s"), percent(busy_s / seen.period_s))
    return result


def _critical(seen: Iteration) -> Table:
    result = table("critical path", "phase", "lane", "work", "tasks", "time", "share", "slowed by", num_text=3)
    period_s = seen.period_s
    shown = [part for part in seen.parts if part.length_s >= _SMALL * period_s]
    for part in shown:
        slowed = ""
        if part.shared is not None and part.slowed_s >= _SMALL * part.length_s:
            slowed = f"{part.shared.name.lower()} {si(part.slowed_s, 's')}"
        names = (part.phase.value, part.lane.value, part.op.value)
        result.add_row(*names, str(part.num_tasks), si(part.length_s, "s"), percent(part.length_s / period_s), slowed)
    if rest := [part for part in seen.parts if part not in shown]:
        length_s, num_tasks = sum(part.length_s for part in rest), sum(part.num_tasks for part in rest)
        result.add_row("others", "", "", str(num_tasks), si(length_s, "s"), percent(length_s / period_s), "")
    return result


def _charts(seen: Iteration, num_columns: int) -> Iterator[list[str]]:
    letters = _letters(seen)
    phases = "".join(phase[0] for phase in seen.phase_columns(num_columns))
    yield [
        f"over the iteration, 0 to {si(seen.period_s, 's')}",
        _line("phase", phases, ", ".join(f"{phase[0]} {phase}" for phase in _phases(seen))),
        _line("critical", "".join(letters[lane] for lane in seen.critical_columns(num_columns))),
        " " * (_LABEL_COLUMNS + 2) + ", ".join(f"{letter} {lane}" for lane, letter in letters.items()),
    ]
    yield [
        "busy",
        *(
            _line(name, sparkline(series.means(num_columns).tolist(), 1.0), percent(series.integral / seen.period_s))
            for name, series in seen.busy.items()
            if series.peak
        ),
    ]
    traffic = ["traffic of one rank"]
    for link, series in seen.traffic.items():
        means = series.means(num_columns).tolist()
        note = f"peak {si(series.peak, 'B/s')}, {si(series.integral, 'B')}"
        traffic.append(_line(link.value, sparkline(means, max(means)), note))
    yield traffic
    for tier, use in seen.memory.items():
        lines = [f"{tier} memory of one rank, full height {si(use.peak_bytes, 'B')}"]
        held = {name.value: values for name, values in use.num_bytes.items()}
        held["all"] = tuple(map(sum, zip(*use.num_bytes.values(), strict=True)))
        for name, values in held.items():
            columns = most_held(use, values, seen.period_s, num_columns).tolist()
            lines.append(_line(name, sparkline(columns, use.peak_bytes), f"peak {si(max(values), 'B')}"))
        yield lines


def _line(name: str, bars: str, note: str = "") -> str:
    return f"{name:<{_LABEL_COLUMNS}} |{bars}| {note}".rstrip()


def _letters(seen: Iteration) -> Mapping[Lane, str]:
    """Return one letter for each lane on the critical path: the first unused letter of its name."""
    letters: dict[Lane, str] = {}
    for name in seen.critical_s:
        candidates = [c for c in name + name.upper() + "0123456789" if c not in letters.values() and c != "-"]
        letters[Lane(name)] = candidates[0]
    return letters
