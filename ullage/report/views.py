"""One predicted or measured iteration for a report, from its beginning to the beginning of the next."""

import dataclasses
import functools
import statistics
from collections.abc import Iterator

import numpy as np

from planner.schedule.series import Series, amounts, busy, traffic
from planner.schedule.tasks import Lane, Tier
from planner.schedule.timeline import MemoryUse, Timeline, memory_use
from planner.simulate.machine import Simulation
from ullage.analysis.runs import RunRecord, check_measured
from ullage.output.formatting import si
from ullage.output.palette import WORK
from ullage.report.charts import Band, Row

_MIN_NAMED = 0.06  # fraction of the period; a narrower interval has no room for its name


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """One iteration. Times are seconds since it began.

    Attributes:
        timeline, iteration: the timeline, and the number of the iteration.
        measured: whether the times are measured.
    """

    timeline: Timeline
    iteration: int
    measured: bool

    @classmethod
    def predicted_by(cls, simulation: Simulation) -> "View":
        """Return the steady iteration of a simulation."""
        return cls(simulation.timeline, simulation.steady, measured=False)

    @classmethod
    def measured_in(cls, run: RunRecord) -> "View":
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
    def bands(self) -> tuple[Band, ...]:
        """The phases in order."""
        result = []
        for stretch in self.timeline.stretches(self.iteration):
            start_s, length_s = stretch.start_s - self.begin_s, stretch.end_s - stretch.start_s
            named = length_s >= _MIN_NAMED * self.period_s
            words = f"{stretch.phase} {si(length_s, 's')}" if named else ""
            if length_s > 0:
                result.append(Band(start_s, start_s + length_s, words, f"phase {stretch.phase}"))
        return tuple(result)

    @functools.cached_property
    def memory(self) -> dict[Tier, MemoryUse]:
        """Memory of every tier of one rank over time, by the schedule's count of bytes."""
        return memory_use(self.timeline, self.iteration)

    @functools.cached_property
    def traffic(self) -> dict[Lane, Series]:
        """Bytes per second over time on every link."""
        return traffic(self.timeline, self.iteration)

    @functools.cached_property
    def busy(self) -> dict[str, Series]:
        """For each processor, 1 while it works and 0 while it is idle."""
        return busy(self.timeline, self.iteration)

    def used(self, of_tasks: list[float]) -> Series:
        """Return the use of a resource per second, given the total use of each task."""
        return amounts(self.timeline, self.iteration, of_tasks)

    def rows(self, *, says_who: bool) -> Iterator[tuple[tuple[int, int], Row]]:
        """Yield a row per stage and lane with all tasks that run within this interval, of any iteration."""
        tasks = self.timeline.schedule.tasks
        start_s = self.timeline.start_s - self.begin_s
        end_s = self.timeline.end_s - self.begin_s
        inside = (np.nan_to_num(end_s, nan=-1.0) > 0) & (np.nan_to_num(start_s, nan=np.inf) < self.period_s)
        found: dict[tuple[int, int], list[tuple[float, float, int]]] = {}
        order = list(Lane)
        for iteration, index in zip(*np.nonzero(inside & (end_s > start_s)), strict=True):
            task = tasks[index]
            span = (
                max(float(start_s[iteration, index]), 0.0),
                min(float(end_s[iteration, index]), self.period_s),
                int(index),
            )
            found.setdefault((task.stage, order.index(task.lane)), []).append(span)
        several = self.timeline.schedule.num_stages > 1
        for (stage, number), spans in sorted(found.items()):
            spans.sort()
            name = f"{stage}: {order[number]}" if several else order[number].value
            yield (
                (stage, number),
                Row(
                    name=f"{name}, {self.who}" if says_who else name,
                    start_s=[span[0] for span in spans],
                    end_s=[span[1] for span in spans],
                    work=[WORK[tasks[span[2]].op] for span in spans],
                    tasks=[tasks[span[2]].name for span in spans],
                    measured=self.measured,
                ),
            )
