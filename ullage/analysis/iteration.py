"""One simulated iteration as data for tables, JSON and figures."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from planner.schedule.series import Series, busy, traffic
from planner.schedule.tasks import Lane, Phase, Tier
from planner.schedule.timeline import MemoryUse, Phases, Stretch, memory_use
from planner.simulate.critical_path import Part, Step, critical_path, critical_steps, parts, slowed
from planner.simulate.machine import Simulation
from planner.simulate.prediction import TierMemory, memory_peaks
from ullage.analysis.simulation import Subject
from ullage.output.formatting import LANE_WORDS, percent, si

# Relief is computed for lanes with at least this share of the critical path. It is shown if it shortens the iteration
# by at least this fraction.
_WORTH_ASKING = 0.05
_WORTH_TELLING = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Iteration:
    """One steady iteration. Times are seconds since it began, bytes are those of one rank unless said otherwise.

    Attributes:
        subject, simulation: the simulated plan or engine, and its simulation.
        phases, stretches: seconds by phase, and the interval of each phase.
        busy_s: seconds that each lane runs tasks.
        busy: use over time of each of :data:`planner.schedule.series.PROCESSORS`.
        traffic: bytes/s over time on each link.
        memory: bytes over time in each tier.
        peaks: peaks and capacities of one device, and of all ranks on one node together.
        steps, parts: the critical path, in full and summed by kind.
        half_work_s: for important lanes, the iteration time with half the work on that lane.
    """

    subject: Subject
    simulation: Simulation
    phases: Phases
    stretches: tuple[Stretch, ...]
    busy_s: dict[Lane, float]
    busy: dict[str, Series]
    traffic: dict[Lane, Series]
    memory: dict[Tier, MemoryUse]
    peaks: dict[Tier, TierMemory]
    steps: tuple[Step, ...]
    parts: tuple[Part, ...]
    half_work_s: dict[Lane, float]

    @classmethod
    def of(cls, subject: Subject, simulation: Simulation) -> Self:
        """Return the steady iteration of a simulation."""
        timeline, steady, cost = simulation.timeline, simulation.steady, subject.cost
        schedule = timeline.schedule
        begin_s, period_s = timeline.begin_s(steady), timeline.period_s(steady)
        steps = critical_steps(timeline, steady)
        steps = slowed(timeline, steady, steps, cost.prices(schedule), cost.capacities())
        matter = [Lane(lane) for lane, s in critical_path(timeline, steady).items() if s >= _WORTH_ASKING * period_s]
        return cls(
            subject=subject,
            simulation=simulation,
            phases=timeline.phases(steady),
            stretches=tuple(
                Stretch(s.phase, s.start_s - begin_s, s.end_s - begin_s) for s in timeline.stretches(steady)
            ),
            busy_s=timeline.busy_s(steady),
            busy=busy(timeline, steady),
            traffic=traffic(timeline, steady),
            memory=memory_use(timeline, steady),
            peaks=memory_peaks(timeline, steady, cost),
            steps=steps,
            parts=parts(schedule, steps),
            half_work_s={lane: subject.iteration_with_half_the_work_s(schedule, lane) for lane in matter},
        )

    @property
    def period_s(self) -> float:
        """Seconds of the iteration."""
        return self.phases.iteration_s

    @property
    def critical_s(self) -> dict[str, float]:
        """Seconds of the critical path by lane, largest first."""
        return critical_path(self.simulation.timeline, self.simulation.steady)

    @property
    def slowed_s(self) -> dict[str, float]:
        """Seconds by which sharing a resource stretches the critical path, by resource, largest first."""
        totals: dict[str, float] = defaultdict(float)
        for step in self.steps:
            if step.shared is not None:
                totals[step.shared.name.lower()] += step.slowed_s
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
        warnings = list(self.subject.cost.warnings)
        if not self.simulation.converged:
            warnings.append("the simulated iteration may not repeat exactly; times are of one iteration out of several")
        if self.simulation.cycle > 1:
            warnings.append(
                f"iterations differ and repeat every {self.simulation.cycle}; this is one of them; their mean is "
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

    def critical_columns(self, num_columns: int) -> list[Lane]:
        """Divide the period into equal parts and return the critical lane at the middle of each."""
        tasks = self.simulation.timeline.schedule.tasks
        return [tasks[self.steps[i].task].lane for i in self._at_middles(self.steps, num_columns)]

    def phase_columns(self, num_columns: int) -> list[Phase]:
        """Divide the period into equal parts and return the phase at the middle of each."""
        return [self.stretches[i].phase for i in self._at_middles(self.stretches, num_columns)]

    def _at_middles(self, items: Sequence[Step] | Sequence[Stretch], num_columns: int) -> list[int]:
        """Return the index of the latest item that has started by the middle of each column."""
        middles_s = (np.arange(num_columns) + 0.5) * self.period_s / num_columns
        found = np.searchsorted([item.start_s for item in items], middles_s, side="right") - 1
        return np.maximum(found, 0).tolist() if items else []

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain data; seconds and bytes."""
        timeline, period_s = self.simulation.timeline, self.period_s
        tasks = timeline.schedule.tasks
        return {
            "engine": self.subject.engine,
            "model": self.subject.model.name,
            "hardware": self.subject.hardware.name,
            "fits": not self.missing,
            "verdict": {"binds": self.verdict, "helps": self.relief, "sharing": self.sharing, "misses": self.missing},
            "phases_s": {**{phase.value: s for phase, s in self.phases.by_phase.items()}, "iteration": period_s},
            "stretches": [{"phase": s.phase, "start_s": s.start_s, "end_s": s.end_s} for s in self.stretches],
            "busy_s": {lane.value: seconds for lane, seconds in self.busy_s.items()},
            "busy_over_time": {
                name: {"times_s": s.times_s.tolist(), "busy": s.values.tolist()} for name, s in self.busy.items()
            },
            "traffic": {
                link.value: {
                    "num_bytes": s.integral,
                    "peak_bytes_per_s": s.peak,
                    "times_s": s.times_s.tolist(),
                    "bytes_per_s": s.values.tolist(),
                }
                for link, s in self.traffic.items()
            },
            "memory": {tier.value: use.model_dump(mode="json") for tier, use in self.peaks.items()},
            "memory_over_time": {
                tier.value: {"times_s": use.times_s, "num_bytes": {c.value: n for c, n in use.num_bytes.items()}}
                for tier, use in self.memory.items()
            },
            "critical_s": self.critical_s,
            "slowed_by_sharing_s": self.slowed_s,
            "critical_path": [
                {
                    "task": tasks[step.task].name,
                    "lane": tasks[step.task].lane,
                    "op": tasks[step.task].op,
                    "phase": tasks[step.task].phase,
                    "start_s": step.start_s,
                    "end_s": step.end_s,
                    "slowed_s": step.slowed_s,
                    "short_of": None if step.shared is None else step.shared.name.lower(),
                }
                for step in self.steps
            ],
            "half_work_iteration_s": {lane.value: seconds for lane, seconds in self.half_work_s.items()},
            "warnings": self.warnings,
            "converged": self.simulation.converged,
            "num_iterations": timeline.num_iterations,
            "num_tasks": len(tasks),
        }


def most_held(use: MemoryUse, values: Sequence[int], period_s: float, num_columns: int) -> npt.NDArray[np.int64]:
    """Divide a period into equal parts and return the most bytes held in each, int64[num_columns].

    Args:
        use: gives the times at which the amounts change.
        values: the amounts from those times on.
        period_s: length of the period.
        num_columns: number of parts.
    """
    result = np.zeros(num_columns, np.int64)
    scale = num_columns / period_s if period_s > 0 else 0.0
    ends_s = (*use.times_s[1:], period_s)
    for start_s, end_s, value in zip(use.times_s, ends_s, values, strict=True):
        first = min(int(start_s * scale), num_columns - 1)
        last = max(min(int(end_s * scale), num_columns - 1), first)
        result[first : last + 1] = np.maximum(result[first : last + 1], value)
    return result
