"""Predicted against measured: time by phase, lane and kind of task, memory by tier, and which assumption was wrong."""

import dataclasses
import functools
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from hwprofiles.paths import number, quantities
from planner.costs.layout import Layout
from planner.costs.model import CostModel
from planner.fitting.attribution import Attribution, Cause, TaskKind, attribute, lane_and_op, middle
from planner.fitting.refit import Refit, refit
from planner.models.kernels import flop
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Phase, Task, Tier
from planner.schedule.timeline import Timeline, peak_bytes
from planner.simulate.critical_path import critical_path
from planner.simulate.machine import Simulation
from ullage.analysis.provenance import unit_and_value
from ullage.analysis.runs import RunRecord, check_measured
from ullage.analysis.simulation import simulate
from ullage.output.formatting import LANE_WORDS, si, signed_percent

CLOSE = 0.01
"""A prediction counts as right if it is off by less than this fraction of the measured iteration."""
_NOTHING = "(idle)"
"""Name on the critical path of time in which no task of the schedule runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One quantity, predicted and measured.

    Attributes:
        name: the phase, lane or tier.
        predicted, measured: in ``unit``; ``None`` if there is no such number.
        unit: the SI unit.
    """

    name: str
    predicted: float | None
    measured: float | None
    unit: Literal["s", "B", "B/s", "FLOP/s", "tokens"]

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``: positive if too much was predicted; ``None`` if either is missing or 0."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a table: name, predicted, measured, error."""
        values = ("-" if value is None else si(value, self.unit) for value in (self.predicted, self.measured))
        return (self.name, *values, "-" if self.error is None else signed_percent(self.error))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Predicted against measured.

    Attributes:
        phases: seconds of each phase of the schedule, and of the iteration.
        lanes: seconds that each lane is busy in one iteration; of a pipeline, on the stage that was measured. Lanes
            between stages wait for the other stage, too.
        memory: peak bytes of each tier.
        num_iterations: number of measured iterations.
        num_read: number of iterations of middle length that the means are taken over.
    """

    phases: tuple[Row, ...]
    lanes: tuple[Row, ...]
    memory: tuple[Row, ...]
    num_iterations: int
    num_read: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, seconds and bytes, with the signed relative error of each row."""
        tables = {"phases": self.phases, "lanes": self.lanes, "memory": self.memory}
        return {
            "num_iterations": self.num_iterations,
            "num_read": self.num_read,
            **{name: _plain(rows) for name, rows in tables.items()},
        }


def _plain(rows: Sequence[Row]) -> dict[str, Any]:
    return {row.name: {"predicted": row.predicted, "measured": row.measured, "error": row.error} for row in rows}


def compare(
    predicted: Simulation,
    measured: Timeline,
    iterations: Sequence[int],
    predicted_memory: Mapping[Tier, int],
    measured_memory: Mapping[Tier, int],
) -> Comparison:
    """Compare a simulated iteration with measured ones.

    Args:
        predicted: the simulated schedule. If a cycle has several iterations, their mean is compared.
        measured: the measured timeline of the same schedule.
        iterations: measured iterations to read. Each quantity is the mean over those of middle length.
        predicted_memory: predicted peak bytes by tier.
        measured_memory: measured peak bytes by tier.

    If ``iterations`` is empty, only memory has measured values.

    Raises:
        ValueError: ``iterations`` names an iteration that was not measured.
    """
    chosen = middle(measured, iterations) if iterations else ()
    expected, seen = predicted.timeline, [(measured, i) for i in chosen]
    simulated = [(expected, i) for i in predicted.iterations]

    def row(name: str, read: Callable[[Timeline, int], float]) -> Row:
        predicted_s, measured_s = (
            statistics.fmean(read(*one) for one in ones) if ones else None for ones in (simulated, seen)
        )
        return Row(name, predicted_s, measured_s, "s")

    present = {task.phase for task in expected.schedule.tasks}
    phases = [row(phase.value, functools.partial(_phase_s, phase)) for phase in Phase if phase in present]
    waiting = expected.with_waiting()
    if measured.schedule.num_stages > 1:  # one stage measures itself
        ran = {measured.schedule.tasks[span.task].stage for i in chosen[:1] for span in measured.of_iteration(i)}
        waiting = waiting.only(lambda task: task.stage in (ran or {0}))
    busy = {(expected, i): waiting.busy_s(i) for i in predicted.iterations}
    busy |= {(timeline, i): timeline.busy_s(i) for timeline, i in seen}
    lanes = dict.fromkeys(itertools.chain.from_iterable(busy.values()))

    def busy_row(lane: Lane) -> Row:
        return row(lane.value, lambda timeline, i: busy[timeline, i].get(lane, 0.0))

    return Comparison(
        phases=(*phases, row("iteration", Timeline.period_s)),
        lanes=tuple(map(busy_row, lanes)),
        memory=tuple(
            Row(tier.value, predicted_memory.get(tier), measured_memory.get(tier), "B")
            for tier in Tier
            if tier in predicted_memory or tier in measured_memory
        ),
        num_iterations=len(iterations),
        num_read=len(chosen),
    )


def _phase_s(phase: Phase, timeline: Timeline, iteration: int) -> float:
    return timeline.phases(iteration)[phase]


def compare_record(record: RunRecord, predicted: Simulation | None = None) -> Comparison:
    """Compare the prediction of an executed plan (simulated again, or given) with the measurements of its run."""
    plan, simulation = record.plan, predicted or simulate(record.plan)
    memory = {tier: use.peak_bytes for tier, use in plan.prediction.memory.items()}
    if plan.decisions.pipeline_parallel > 1:  # the run is of the first stage, times the ranks of a node
        num_ranks = Layout.of(plan.decisions, plan.hardware).ranks_per_node
        peaks = peak_bytes(simulation.timeline, simulation.steady)
        memory = {tier: of[0] * (1 if tier is Tier.GPU else num_ranks) for tier, of in peaks.items() if 0 in of}
    if record.checkpoint_bytes:  # checkpoints are not part of the prediction
        memory[Tier.HOST] = memory.get(Tier.HOST, 0) + record.checkpoint_bytes
    return compare(simulation, record.timeline, record.steady_iterations, memory, record.memory)


@dataclasses.dataclass(frozen=True)
class Explained:
    """A comparison with the reasons for its differences.

    Attributes:
        comparison: the comparison by phase, lane and tier.
        attribution: the part of the difference that each assumption explains.
        work: of each kind of task, its work in an iteration, in ``B``, ``FLOP``, ``param`` or ``""`` (not counted).
        critical: seconds of each lane on the critical path.
        p10_s, p90_s: percentiles over all measured iterations.
        refitted: the profile fitted to the tasks of the run, and its prediction.
        changes: quantities of the profile that the fit changed, each with its value (of a curve the best rate) before
            and after, and its unit.
        before: the same for the first plan, if the plan was changed during training.
    """

    comparison: Comparison
    attribution: Attribution
    work: dict[TaskKind, tuple[float, str]]
    critical: tuple[Row, ...]
    p10_s: float
    p90_s: float
    refitted: Refit
    changes: tuple[tuple[str, float, float, str], ...]
    before: "Explained | None" = None

    @property
    def error_s(self) -> float:
        """``measured - predicted`` seconds of an iteration."""
        return self.attribution.measured_s - self.attribution.predicted_s

    @property
    def main(self) -> Cause | None:
        """The cause that explains most of the difference; ``None`` if the prediction was right (see :data:`CLOSE`)."""
        if abs(self.error_s) < CLOSE * self.attribution.measured_s:
            return None
        return max(self.attribution.causes, key=lambda cause: cause.seconds * self.error_s, default=None)

    @property
    def answer(self) -> str:
        """The result in one line."""
        found = self.attribution
        times = f"predicted {si(found.predicted_s, 's')}, measured {si(found.measured_s, 's')}"
        cause = self.main
        if cause is None:
            return f"{times}: within {100 * CLOSE:.0f} %"
        return (
            f"{times}: {self.reason(cause)}, which explains {si(abs(cause.seconds), 's')} of the "
            f"{si(abs(self.error_s), 's')}"
        )

    def reason(self, cause: Cause) -> str:
        """Return a cause in words."""
        found = self.attribution
        match cause.kind:
            case "rate":
                if cause.of is None:
                    return "other tasks took more or less time"
                tasks = next(tasks for tasks in found.tasks if (tasks.lane, tasks.op) == cause.of)
                if not tasks.predicted_s:
                    return f"{kind_words(cause.of)} took {si(tasks.measured_s, 's')}, and nothing was predicted"
                return f"{kind_words(cause.of)} ran at {tasks.predicted_s / tasks.measured_s:.2f} of the predicted rate"
            case "count":
                missing = sum(max(tasks.num_planned - tasks.num_ran, 0) for tasks in found.tasks)
                more = sum(max(tasks.num_ran - tasks.num_planned, 0) for tasks in found.tasks)
                counts = [f"{missing} planned tasks did not run"] if missing else []
                return " and ".join(counts + ([f"{more} tasks ran that were not planned"] if more else []))
            case "order":
                lanes = ", ".join(f"{count} of {LANE_WORDS[lane]}" for lane, count in found.swapped.items())
                broken = f"{found.num_broken} dependencies were not kept" if found.num_broken else ""
                return "; ".join(filter(None, [f"tasks ran in another order ({lanes})" if lanes else "", broken]))
            case "stall":
                where = next(iter(found.stalls_s), None)
                latest = f", most of all {kind_words(where)}" if where else ""
                return f"tasks began later than what they wait for{latest}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data: seconds, bytes and other SI units."""
        found, cause = self.attribution, self.main
        result = {
            **self.comparison.to_json(),
            "answer": self.answer,
            "predicted_s": found.predicted_s,
            "measured_s": found.measured_s,
            "measured_p10_s": self.p10_s,
            "measured_p90_s": self.p90_s,
            "verdict": cause.kind if cause else None,
            "causes": [
                {"kind": c.kind, **_kind_json(c.of), "what": self.reason(c), "seconds": c.seconds} for c in found.causes
            ],
            "critical": _plain(self.critical),
            "tasks": [
                {
                    **dataclasses.asdict(tasks),
                    **dict(zip(("amount", "unit"), self.work[tasks.lane, tasks.op], strict=True)),
                }
                for tasks in found.tasks
            ],
            "stalls": [{**_kind_json(kind), "seconds": seconds} for kind, seconds in found.stalls_s.items()],
            "order": {"swapped": found.swapped, "broken": found.num_broken},
            "refit": {
                "predicted_s": self.refitted.predicted_s,
                "measured_s": self.refitted.measured_s,
                "quantities": [
                    dict(zip(("path", "before", "after", "unit"), each, strict=True)) for each in self.changes
                ],
            },
        }
        return result | ({"before": self.before.to_json()} if self.before else {})


def _kind_json(kind: TaskKind | None) -> dict[str, str | None]:
    return dict(zip(("lane", "op"), kind or (None, None), strict=True))


def kind_words(kind: TaskKind) -> str:
    """Return a kind of task in words, such as ``optimizer steps on the CPU (update)``."""
    lane, op = kind
    return f"{LANE_WORDS[lane]} ({op})"


def explain_run(
    record: RunRecord, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> tuple[Explained, Simulation]:
    """Compare a run with its prediction, and find the reasons for the difference; see [Note: Attribution].

    Args:
        record: the run.
        progress: called with the steps done and the number of steps.

    Returns:
        The comparison with its reasons, and the simulated prediction.
    """
    simulation, measured, steady = simulate(record.plan), record.timeline, record.steady_iterations
    check_measured(record)
    chosen = middle(measured, steady)
    plan = record.plan
    run = f"{plan.model.name} on {record.machine}"
    alone = measured.only(lambda task: task.lane not in STAGE_LANES)  # else waiting would count as slow transfers
    refitted = refit(plan.hardware, plan.units(), plan.decisions, alone, steady, run)
    periods_s = [measured.period_s(i) for i in steady]
    return Explained(
        comparison=compare_record(record, simulation),
        attribution=attribute(simulation, alone, chosen, progress),
        work=_work(record),
        critical=_critical(simulation, measured, chosen),
        p10_s=float(np.percentile(periods_s, 10)),
        p90_s=float(np.percentile(periods_s, 90)),
        refitted=refitted,
        changes=_changes(record, refitted),
        before=explain_run(record.before)[0] if record.before else None,
    ), simulation


def _work(record: RunRecord) -> dict[TaskKind, tuple[float, str]]:
    plan = record.plan
    cost = CostModel.of(plan.hardware, plan.units(), plan.decisions)
    result: dict[TaskKind, tuple[float, str]] = {}
    for schedule in (record.timeline.schedule, plan.schedule()):  # the planned schedule overwrites the executed one
        found: dict[TaskKind, tuple[float, str]] = {}
        for task in schedule.tasks:
            amount, unit = _amount(task, cost)
            so_far, unit_of_all = found.get(lane_and_op(task), (0.0, ""))
            found[lane_and_op(task)] = so_far + amount, unit_of_all or unit
        result |= found
    return result


def _amount(task: Task, cost: CostModel) -> tuple[float, str]:
    if task.lane is Lane.COMPUTE:
        return flop(cost.kernels_of(task)), "FLOP"
    if task.op is Op.UPDATE:
        return task.num_params, "param"
    return task.num_bytes, "B" if task.num_bytes else ""


def _critical(predicted: Simulation, measured: Timeline, iterations: Sequence[int]) -> tuple[Row, ...]:
    """Return the time of each lane on the critical path, predicted and measured; largest first."""
    expected_s = _mean_critical_s(predicted.timeline, predicted.iterations)
    seen_s = _mean_critical_s(measured, iterations)
    names = dict.fromkeys([*expected_s, *seen_s])
    rows = [Row(name, expected_s.get(name, 0.0), seen_s.get(name, 0.0), "s") for name in names]
    return tuple(sorted(rows, key=lambda row: -max(row.predicted or 0.0, row.measured or 0.0)))


def _mean_critical_s(timeline: Timeline, iterations: Sequence[int]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for iteration in iterations:
        shares_s = critical_path(timeline, iteration)
        rest_s = timeline.period_s(iteration) - sum(shares_s.values())
        for name, seconds in [*shares_s.items(), *([(_NOTHING, rest_s)] if rest_s > 1e-9 else [])]:
            found[name] += seconds / len(iterations)
    return found


def _changes(record: RunRecord, refitted: Refit) -> tuple[tuple[str, float, float, str], ...]:
    before, after = quantities(record.plan.hardware), quantities(refitted.profile)
    result = [
        (path, number(item), number(after[path]), unit_and_value(item)[0])
        for path, item in before.items()
        if after[path] != item
    ]
    return tuple(sorted(result, key=lambda change: -abs(np.log(change[2] / change[1]))))
