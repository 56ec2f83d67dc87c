"""The timeline: when each task started and ended, for a simulated and for a measured run alike."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from planner.schedule import Lane, MemoryClass, Op, Phase, Schedule, Tier

Seconds = npt.NDArray[np.float64]

_COMPUTE = {
    Op.FORWARD: Phase.FORWARD,
    Op.RECOMPUTE: Phase.BACKWARD,
    Op.REMAKE: Phase.BACKWARD,
    Op.BACKWARD: Phase.BACKWARD,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One execution of a task, in seconds since the timeline's zero."""

    iteration: int
    task: int
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Phases:
    """Seconds that one iteration spends in each phase; they add up to the iteration.

    Boundaries are read off the compute lane: ``forward`` and ``backward`` are the stretches in which their tasks are
    under way, and ``update`` is the rest: from the last backward to the first forward of the next iteration. Updates
    that overlap with computing cost nothing there, which is the point of overlapping them.
    """

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def iteration_s(self) -> float:
        """Seconds for the whole iteration."""
        return self.forward_s + self.backward_s + self.update_s


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Several consecutive iterations of one schedule.

    Attributes:
        schedule: whose tasks ran.
        start_s, end_s: float64[num_iterations, num_tasks], seconds; NaN where a task has not run.
    """

    schedule: Schedule
    start_s: Seconds
    end_s: Seconds

    def __post_init__(self) -> None:
        assert self.start_s.shape == self.end_s.shape == (self.num_iterations, len(self.schedule.tasks))

    @classmethod
    def from_spans(cls, schedule: Schedule, spans: Iterable[Span], num_iterations: int) -> Self:
        """Make a timeline from single spans, in any order."""
        start_s, end_s = np.full((2, num_iterations, len(schedule.tasks)), np.nan)
        for span in spans:
            start_s[span.iteration, span.task] = span.start_s
            end_s[span.iteration, span.task] = span.end_s
        return cls(schedule, start_s, end_s)

    @property
    def num_iterations(self) -> int:
        """Number of iterations that were started."""
        return len(self.start_s)

    @property
    def spans(self) -> Iterator[Span]:
        """All executions, iteration by iteration in issue order."""
        for iteration in range(self.num_iterations):
            yield from self.of_iteration(iteration)

    def of_iteration(self, iteration: int) -> Iterator[Span]:
        """Yield the executions of one iteration in issue order."""
        ran = np.flatnonzero(~np.isnan(self.start_s[iteration])).tolist()
        starts_s, ends_s = self.start_s[iteration].tolist(), self.end_s[iteration].tolist()
        return (Span(iteration, task, starts_s[task], ends_s[task]) for task in ran)

    def makespan_s(self) -> float:
        """Return the time from the first start to the last end."""
        return float(np.nanmax(self.end_s) - np.nanmin(self.start_s)) if self.start_s.size else 0.0

    def begin_s(self, iteration: int) -> float:
        """Return when an iteration begins: the start of its first forward."""
        first = self.schedule.first_forward
        return float(self.start_s[iteration, first]) if first is not None else float(np.nanmin(self.start_s[iteration]))

    def period_s(self, iteration: int) -> float:
        """Return the time until the next iteration begins, or until the end of this one if it is the last."""
        if iteration + 1 < self.num_iterations:
            return self.begin_s(iteration + 1) - self.begin_s(iteration)
        return float(np.nanmax(self.end_s[iteration])) - self.begin_s(iteration)

    def phases(self, iteration: int) -> Phases:
        """Return the phases of an iteration; all but the last are complete (see :meth:`period_s`)."""
        compute = [
            (_COMPUTE[self.schedule.tasks[s.task].op], s)
            for s in self.of_iteration(iteration)
            if self.schedule.tasks[s.task].op in _COMPUTE
        ]
        totals = {Phase.FORWARD: 0.0, Phase.BACKWARD: 0.0}
        stretches = [list(group) for _, group in itertools.groupby(compute, key=lambda item: item[0])]
        for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
            # A stretch lasts until the next one begins: the wait in between belongs to what is waited in.
            end_s = following[0][1].start_s if following else stretch[-1][1].end_s
            totals[stretch[0][0]] += end_s - stretch[0][1].start_s
        forward_s, backward_s = totals[Phase.FORWARD], totals[Phase.BACKWARD]
        return Phases(forward_s, backward_s, max(self.period_s(iteration) - forward_s - backward_s, 0.0))

    def busy_s(self, iteration: int) -> dict[Lane, float]:
        """Return the seconds each lane was occupied by tasks of one iteration."""
        busy: dict[Lane, float] = defaultdict(float)
        for span in self.of_iteration(iteration):
            busy[self.schedule.tasks[span.task].lane] += span.end_s - span.start_s
        return dict(busy)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes held on one tier over one iteration.

    Attributes:
        times_s: when the amounts change, since the beginning of the iteration.
        num_bytes: amount held from each of those times on, by class.
        peak_bytes: highest sum over all classes.
        peak_by_class: what each class holds at that moment.
    """

    times_s: tuple[float, ...]
    num_bytes: dict[MemoryClass, tuple[int, ...]]
    peak_bytes: int
    peak_by_class: dict[MemoryClass, int]


def memory_use(timeline: Timeline, iteration: int) -> dict[Tier, MemoryUse]:
    """Return what every tier holds during one (steady) iteration of a timeline.

    A buffer that outlives the iteration (see :class:`planner.schedule.Buffer`) is folded back into it: in the steady
    state the previous iteration's copy of it is held until the same moment of this one.
    """
    begin_s, period_s = timeline.begin_s(iteration), timeline.period_s(iteration)
    starts_s, ends_s = timeline.start_s[iteration].tolist(), timeline.end_s[iteration].tolist()
    events: dict[Tier, list[tuple[float, int, MemoryClass]]] = {tier: [] for tier in Tier}
    for buffer in timeline.schedule.buffers:
        changes = events[buffer.tier]
        if buffer.first is None or buffer.last is None:
            changes.append((0.0, buffer.num_bytes, buffer.memory_class))
            continue
        start_s, end_s = starts_s[buffer.first] - begin_s, ends_s[buffer.last] - begin_s
        if buffer.last < buffer.first:
            end_s += period_s
        changes.extend(_fold(start_s, max(end_s, start_s), period_s, buffer.num_bytes, buffer.memory_class))
    return {tier: _accumulate(changes) for tier, changes in events.items() if changes}


def _fold(
    start_s: float, end_s: float, period_s: float, num_bytes: int, memory_class: MemoryClass
) -> list[tuple[float, int, MemoryClass]]:
    if period_s <= 0:
        return [(start_s, num_bytes, memory_class), (end_s, -num_bytes, memory_class)]
    # Moments inside the iteration stay exactly what they are: what ends when another begins must still do so.
    first, start_s = divmod(start_s, period_s)
    last, end_s = divmod(end_s, period_s)
    changes = [(start_s, num_bytes, memory_class), (end_s, -num_bytes, memory_class)]
    if last > first:  # held when an iteration begins
        changes.append((0.0, int(last - first) * num_bytes, memory_class))
    return changes


def _accumulate(changes: Sequence[tuple[float, int, MemoryClass]]) -> MemoryUse:
    held: dict[MemoryClass, int] = defaultdict(int)
    rows: list[tuple[float, dict[MemoryClass, int]]] = []
    peak_bytes, peak_by_class = 0, dict(held)
    # At one instant, what ends is freed before what begins is taken: a slot handed over is not held twice.
    for time_s, group in itertools.groupby(sorted(changes, key=lambda c: (c[0], c[1])), key=lambda c: c[0]):
        for _, num_bytes, memory_class in group:
            held[memory_class] += num_bytes
        rows.append((time_s, dict(held)))
        if sum(held.values()) > peak_bytes:
            peak_bytes, peak_by_class = sum(held.values()), dict(held)
    classes = sorted({c for _, row in rows for c in row})
    return MemoryUse(
        times_s=tuple(time_s for time_s, _ in rows),
        num_bytes={c: tuple(row.get(c, 0) for _, row in rows) for c in classes},
        peak_bytes=peak_bytes,
        peak_by_class={c: n for c, n in peak_by_class.items() if n},
    )
