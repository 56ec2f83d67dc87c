"""One simulated iteration as data for tables, JSON and figures."""

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Self

from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.graph import Unit
from planner.models.captured import Model
from planner.schedule.schedule import Schedule
from planner.schedule.series import Series, amounts, busy, traffic
from planner.schedule.tasks import Lane, Phase, Task, Tier
from planner.schedule.timeline import MemoryUse, Span, Stretch, Timeline, memory_use
from planner.simulate.critical_path import Slowed, critical_path, critical_steps, slowed
from planner.simulate.machine import Simulation, run, run_until_steady
from planner.simulate.prediction import TierMemory, memory_peaks
from ullage.analysis.runs import RunRecord, check_measured
from ullage.output.formatting import LANE_WORDS, percent, si
from ullage.rivals.lowering import lower

# Relief is computed for lanes with at least this share of the critical path. It is shown if it shortens the iteration
# by at least this fraction.
_WORTH_ASKING = 0.05
_WORTH_TELLING = 0.01
# Enough iterations for a change of one lane to reach a steady state.
_ITERATIONS_OF_A_CHANGE = 6


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """One predicted or measured iteration, from its beginning to the beginning of the next, of one rank.

    Attributes:
        timeline, iteration: the timeline, and the number of the iteration.
        measured: whether the times are measured.
    """

    timeline: Timeline
    iteration: int
    measured: bool

    @classmethod
    def measured_in(cls, run: RunRecord) -> Self:
        """Return the steady iteration of a run whose length is nearest to the median.

        Raises:
            ValueError: the run has no steady iteration.
        """
        check_measured(run)
        timeline = run.timeline
        lengths_s = {i: timeline.period_s(i) for i in run.steady_iterations}
        median_s = statistics.median(lengths_s.values())
        return cls(timeline, min(lengths_s, key=lambda i: abs(lengths_s[i] - median_s)), measured=True)

    @property
    def who(self) -> str:
        """``predicted`` or ``measured``."""
        return "measured" if self.measured else "predicted"

    @functools.cached_property
    def begin_s(self) -> float:
        """Start of the iteration on the clock of the timeline."""
        return self.timeline.begin_s(self.iteration)

    @functools.cached_property
    def period_s(self) -> float:
        """Length of the iteration."""
        return self.timeline.period_s(self.iteration)

    @functools.cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """The interval of each phase, since the iteration began."""
        found = self.timeline.stretches(self.iteration)
        return tuple(Stretch(s.phase, s.start_s - self.begin_s, s.end_s - self.begin_s) for s in found)

    @functools.cached_property
    def memory(self) -> dict[Tier, MemoryUse]:
        """Memory of every tier over time, by the schedule's count of bytes."""
        return memory_use(self.timeline, self.iteration)

    @functools.cached_property
    def traffic(self) -> dict[Lane, Series]:
        """Bytes per second over time on every link."""
        return traffic(self.timeline, self.iteration)

    @functools.cached_property
    def busy(self) -> dict[str, Series]:
        """For each of :data:`planner.schedule.series.PROCESSORS`, 1 while it works and 0 while it is idle."""
        return busy(self.timeline, self.iteration)

    def tasks(self) -> Iterator[tuple[Task, float]]:
        """Yield the tasks that ran in the iteration, each with its seconds."""
        for span in self.timeline.of_iteration(self.iteration):
            yield self.timeline.schedule.tasks[span.task], span.length_s

    def used(self, of_tasks: list[float]) -> Series:
        """Return the use of a resource per second, given the total use of each task."""
        return amounts(self.timeline, self.iteration, of_tasks)


@dataclasses.dataclass(frozen=True, eq=False)
class Iteration:
    """One steady iteration of decisions, simulated when its times are asked for. Times are seconds since it began.

    Attributes:
        engine: the engine that decides, with its setting if it has one, such as ``twin-flow 0.4``.
        model: the model.
        units, seq_len: the model's units, and the tokens per sequence.
        decisions: decisions of the engine.
        cost: cost model of the tasks on the machine.
        num_iterations: iterations to simulate, of which this is the last complete one; ``None``: until they repeat.
    """

    engine: str
    model: Model
    units: tuple[Unit, ...]
    seq_len: int
    decisions: Decisions
    cost: CostModel
    num_iterations: int | None = None

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The schedule of one iteration."""
        return lower(self.units, self.decisions, asynchronous=self.cost.asynchronous)

    @functools.cached_property
    def simulation(self) -> Simulation:
        """The simulated schedule."""
        if self.num_iterations is None:
            return run_until_steady(self.schedule, self.cost)
        prices, capacities = self.cost.prices(self.schedule), self.cost.capacities()
        timeline = run(self.schedule, prices, capacities, self.num_iterations)
        last = max(self.num_iterations - 2, 0)
        return Simulation(timeline, range(last, last + 1), converged=False)

    @functools.cached_property
    def view(self) -> View:
        """Phases, memory, traffic and busy processors over time."""
        return View(self.simulation.timeline, self.simulation.steady, measured=False)

    @functools.cached_property
    def phases(self) -> dict[Phase, float]:
        """Seconds by phase."""
        return self.simulation.timeline.phases(self.simulation.steady)

    @property
    def period_s(self) -> float:
        """Seconds of the iteration."""
        return sum(self.phases.values())

    @functools.cached_property
    def busy_s(self) -> dict[Lane, float]:
        """Seconds that each lane runs tasks."""
        return self.simulation.timeline.busy_s(self.simulation.steady)

    @functools.cached_property
    def peaks(self) -> dict[Tier, TierMemory]:
        """Peaks and capacities of one device, and of all ranks on one node together."""
        return memory_peaks(self.simulation.timeline, self.simulation.steady, self.cost)

    @functools.cached_property
    def steps(self) -> tuple[Span, ...]:
        """The critical path."""
        return critical_steps(self.simulation.timeline, self.simulation.steady)

    @functools.cached_property
    def slowed_steps(self) -> Slowed:
        """The steps of the critical path that sharing slows."""
        timeline, steady, cost = self.simulation.timeline, self.simulation.steady, self.cost
        return slowed(timeline, steady, self.steps, cost.prices(timeline.schedule), cost.capacities())

    @functools.cached_property
    def half_work_s(self) -> dict[Lane, float]:
        """For important lanes, the iteration time with half the work on that lane."""
        matter = (Lane(lane) for lane, s in self.critical_s.items() if s >= _WORTH_ASKING * self.period_s)
        return {lane: self._with_half_the_work_s(lane) for lane in matter}

    def _with_half_the_work_s(self, lane: Lane) -> float:
        """Return the iteration time if every task of one lane had half the work.

        The lane's share of the critical path is an upper limit of the saving, because other paths become critical.
        """
        prices = [
            dataclasses.replace(price, latency_s=price.latency_s / 2, duration_s=price.duration_s / 2)
            if task.lane is lane
            else price
            for task, price in zip(self.schedule.tasks, self.cost.prices(self.schedule), strict=True)
        ]
        timeline = run(self.schedule, prices, self.cost.capacities(), _ITERATIONS_OF_A_CHANGE)
        return timeline.period_s(_ITERATIONS_OF_A_CHANGE - 2)

    @functools.cached_property
    def critical_s(self) -> dict[str, float]:
        """Seconds of the critical path by lane, largest first."""
        return critical_path(self.simulation.timeline, self.simulation.steady)

    @property
    def slowed_s(self) -> dict[str, float]:
        """Seconds by which sharing a resource stretches the critical path, by resource, largest first."""
        totals: dict[str, float] = defaultdict(float)
        for seconds, resource in self.slowed_steps.values():
            totals[resource.name.lower()] += seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def missing(self) -> str:
        """The missing memory in words; empty if everything fits."""
        where = {Tier.GPU: "one device", Tier.HOST: "one host"}
        return " and ".join(
            f"{tier} memory lacks {si(use.missing_bytes, 'B')} beyond the {si(use.capacity_bytes, 'B')} of "
            f"{where.get(tier, 'one node')}"
            for tier, use in self.peaks.items()
            if use.missing_bytes
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings about the numbers."""
        warnings = list(self.cost.warnings)
        if not self.simulation.converged:
            warnings.append("the simulated iteration may not repeat exactly; times are of one iteration out of several")
        if (length := len(self.simulation.iterations)) > 1:
            warnings.append(
                f"iterations differ and repeat every {length}; this is one of them; their mean is "
                f"{si(self.simulation.period_s, 's')}"
            )
        return warnings

    @property
    def verdict(self) -> str:
        """The lane that bounds the iteration, in one line."""
        shares = [(lane, s / self.period_s) for lane, s in self.critical_s.items() if s >= 0.01 * self.period_s]
        if not shares:
            return "bound by nothing that the schedule knows of"
        (first, share), *others = shares
        following = ", ".join(f"{lane} {percent(share)}" for lane, share in others[:3])
        bound = f"bound by {first} ({LANE_WORDS[Lane(first)]}): {percent(share)} of the iteration"
        return f"{bound}; next {following}" if following else bound

    @property
    def relief(self) -> str:
        """The lanes on which less work would shorten the iteration, in one line, largest effect first."""
        saved = sorted(((1 - s / self.period_s, lane) for lane, s in self.half_work_s.items()), reverse=True)
        lanes = [f"{lane} -{percent(share)}" for share, lane in saved if share >= _WORTH_TELLING]
        return f"half the work on a lane: {', '.join(lanes)}" if lanes else "less work on no single lane"

    @property
    def sharing(self) -> str:
        """The cost of sharing resources, in one line; empty if it is negligible."""
        resources = [f"{name} {si(s, 's')}" for name, s in self.slowed_s.items() if s >= 1e-3 * self.period_s]
        total_s = sum(self.slowed_s.values())
        if not resources:
            return ""
        total = f"{si(total_s, 's')} ({percent(total_s / self.period_s)})"
        return f"stretches the critical path by {total}: {', '.join(resources)}"

    def to_json(self) -> dict[str, Any]:
        """Return all of it for :func:`ullage.output.console.write_json`; seconds and bytes."""
        tasks, view = self.simulation.timeline.schedule.tasks, self.view
        return {
            "engine": self.engine,
            "model": self.model.name,
            "hardware": self.cost.profile.name,
            "fits": not self.missing,
            "verdict": {"binds": self.verdict, "helps": self.relief, "sharing": self.sharing, "misses": self.missing},
            "phases_s": {**self.phases, "iteration": self.period_s},
            "stretches": view.stretches,
            "busy_s": self.busy_s,
            "busy_over_time": {name: {"times_s": s.times_s, "busy": s.values} for name, s in view.busy.items()},
            "traffic": {
                link: {
                    "num_bytes": s.integral,
                    "peak_bytes_per_s": s.peak,
                    "times_s": s.times_s,
                    "bytes_per_s": s.values,
                }
                for link, s in view.traffic.items()
            },
            "memory": self.peaks,
            "memory_over_time": view.memory,
            "critical_s": self.critical_s,
            "slowed_by_sharing_s": self.slowed_s,
            "critical_path": [
                {
                    **{name: getattr(tasks[step.task], name) for name in ("lane", "op", "phase")},
                    "task": tasks[step.task].name,
                    "start_s": step.start_s,
                    "end_s": step.end_s,
                    "slowed_s": slowed_s,
                    "short_of": None if resource is None else resource.name.lower(),
                }
                for step in self.steps
                for slowed_s, resource in [self.slowed_steps.get(step, (0.0, None))]
            ],
            "half_work_iteration_s": self.half_work_s,
            "warnings": self.warnings,
            "converged": self.simulation.converged,
            "num_iterations": self.simulation.timeline.num_iterations,
            "num_tasks": len(tasks),
        }
