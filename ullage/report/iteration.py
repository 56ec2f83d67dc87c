"""A simulated iteration as sections: lanes, the critical path, memory, traffic and processors over time."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from planner.costs.resources import Resource
from planner.models.captured import counted
from planner.schedule.timeline import Span
from ullage.analysis.iteration import Iteration
from ullage.output.formatting import LANE_WORDS, percent, si
from ullage.output.palette import WORK
from ullage.report.charts import Chart, Fact, Part, Section, Table, Trace
from ullage.report.over_time import TIME, gantt_section, memory_over_time, resources_section, traffic_section
from ullage.report.plan import memory_section
from ullage.rivals.decisions import RivalDecisions

# Parts of the critical path below this share of the iteration are merged into one row.
_SMALL = 0.005


def iteration_part(seen: Iteration) -> Part:
    """Return one iteration."""
    timeline, views, cost = seen.simulation.timeline, [seen.view], seen.cost
    decided, tasks = seen.decisions, timeline.schedule.tasks
    num_steps, numerics = (decided.num_steps, decided.numerics) if isinstance(decided, RivalDecisions) else (1, None)
    each = f"for {num_steps} iterations, {si(seen.period_s / num_steps, 's')} each" if num_steps > 1 else ""
    speed = f"{decided.num_sequences * seen.seq_len / seen.period_s:,.0f} {counted(seen.model)}/s"
    present = {task.phase for task in tasks}  # only published runs have ``loop``
    phases = {phase.value: s for phase, s in seen.phases.items() if phase in present}
    title = f"{seen.model.name} on {decided.num_devices} device(s) of {seen.cost.profile.name} by {seen.engine}"
    return Part(
        title=title,
        kind="iteration",
        sentence=f"One simulated iteration takes {si(seen.period_s, 's')}: {seen.verdict}.",
        facts=(
            Fact("iteration", si(seen.period_s, "s"), f"{each}; {speed}" if each else speed, origin="predicted"),
            *(Fact(name, si(s, "s"), percent(s / seen.period_s)) for name, s in phases.items()),
        ),
        about={
            "verdict": seen.verdict,
            "would help": seen.relief,
            **({"sharing": seen.sharing} if seen.sharing else {}),
            **({"does not fit": seen.missing} if seen.missing else {}),
            **({"numerics": f"changed: {numerics}"} if numerics else {}),
            "schedule": f"{title}: {len(tasks)} tasks, iteration {seen.simulation.steady + 1} of "
            f"{timeline.num_iterations}",
        },
        sections=(
            Section("lanes", "Lanes", "Lanes and critical path", (), (_lanes(seen), *_critical(seen))),
            memory_section(seen.peaks, {}),
            gantt_section(views),
            resources_section(views, cost),
            traffic_section(views, cost),
            memory_over_time(views, cost, None),
        ),
        warnings=tuple(seen.warnings),
    )


def _lanes(seen: Iteration) -> Table:
    rows = tuple(
        (lane.value, si(busy_s, "s"), si(max(seen.period_s - busy_s, 0.0), "s"), percent(busy_s / seen.period_s))
        for lane, busy_s in seen.busy_s.items()
    )
    return Table("lanes", ("lane", "busy", "idle", "busy share"), rows)


def _critical(seen: Iteration) -> Iterator[Table | Chart]:
    """Yield the critical path summed by kind of task, and by lane over time."""
    tasks, period_s = seen.simulation.timeline.schedule.tasks, seen.period_s
    kinds: dict[tuple[str, str, str], list[Span]] = defaultdict(list)
    for step in seen.steps:
        task = tasks[step.task]
        kinds[task.phase.value, task.lane.value, task.op.value].append(step)
    rows, rest = [], list[Span]()
    for kind, steps in kinds.items():
        if sum(step.length_s for step in steps) >= _SMALL * period_s:
            rows.append((*kind, *_summed(steps, period_s), _slowed_by(seen, steps)))
        else:
            rest += steps
    if rest:
        rows.append(("others", "", "", *_summed(rest, period_s), ""))
    columns = ("phase", "lane", "work", "tasks", "time", "share", "slowed by")
    yield Table("critical path", columns, tuple(rows))
    lanes, work = [tasks[step.task].lane for step in seen.steps], [WORK[tasks[step.task].op] for step in seen.steps]
    starts_s, ends_s = [step.start_s for step in seen.steps], [step.end_s for step in seen.steps]
    row = Trace("critical path", starts_s, ends_s, "tasks", work, texts=lanes)
    words = "; ".join(f"{lane}: {LANE_WORDS[lane]}" for lane in dict.fromkeys(lanes))
    title = "Critical path over the iteration"
    yield Chart("critical", title, words, TIME, (row,), over_time=True, period_s=period_s)


def _summed(steps: Sequence[Span], period_s: float) -> tuple[str, str, str]:
    """Return the number of some steps, their time and its share of the iteration."""
    length_s = sum(step.length_s for step in steps)
    return str(len(steps)), si(length_s, "s"), percent(length_s / period_s)


def _slowed_by(seen: Iteration, steps: Sequence[Span]) -> str:
    """Return the resource that slows some steps most, and by how much all do; empty if that is little."""
    by_resource: dict[Resource, float] = defaultdict(float)
    for seconds, resource in (seen.slowed_steps[step] for step in steps if step in seen.slowed_steps):
        by_resource[resource] += seconds
    slowed_s = sum(by_resource.values())
    if not by_resource or slowed_s < _SMALL * sum(step.length_s for step in steps):
        return ""
    return f"{max(by_resource, key=by_resource.__getitem__).name.lower()} {si(slowed_s, 's')}"
