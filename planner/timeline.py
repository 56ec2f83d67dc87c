"""The timeline: when each task started and ended, for a simulated and for a measured run alike."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence

from planner.schedule import Lane, MemoryClass, Op, Schedule, Task, Tier

_COMPUTE = {Op.FORWARD: "forward", Op.RECOMPUTE: "backward", Op.BACKWARD: "backward"}


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


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Spans of several consecutive iterations of one schedule."""

    schedule: Schedule
    spans: tuple[Span, ...]

    @property
    def num_iterations(self) -> int:
        """Number of iterations that were started."""
        return 1 + max((span.iteration for span in self.spans), default=-1)

    def of_iteration(self, iteration: int) -> tuple[Span, ...]:
        """Return the spans of one iteration, in issue order."""
        return tuple(sorted((s for s in self.spans if s.iteration == iteration), key=lambda s: s.task))

    def makespan_s(self) -> float:
        """Return the time from the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(s.end_s for s in self.spans) - min(s.start_s for s in self.spans)

    def begin_s(self, iteration: int) -> float:
        """Return when an iteration begins: the start of its first compute task."""
        spans = self.of_iteration(iteration)
        starts = [s.start_s for s in spans if self.schedule.tasks[s.task].op is Op.FORWARD]
        return min(starts or [s.start_s for s in spans])

    def period_s(self, iteration: int) -> float:
        """Return the time from the beginning of an iteration to that of the next (or to its end, if it is the last)."""
        begin_s = self.begin_s(iteration)
        if iteration + 1 < self.num_iterations:
            return self.begin_s(iteration + 1) - begin_s
        return max(s.end_s for s in self.of_iteration(iteration)) - begin_s

    def phases(self, iteration: int) -> Phases:
        """Return the phases of an iteration. All iterations but the last are complete (see :meth:`period_s`)."""
        compute = [
            (_COMPUTE[self.schedule.tasks[s.task].op], s)
            for s in self.of_iteration(iteration)
            if self.schedule.tasks[s.task].op in _COMPUTE
        ]
        totals = {"forward": 0.0, "backward": 0.0}
        stretches = [list(group) for _, group in itertools.groupby(compute, key=lambda item: item[0])]
        for stretch, following in itertools.zip_longest(stretches, stretches[1:]):
            # A stretch lasts until the next one begins: the wait in between belongs to what is waited in.
            end_s = following[0][1].start_s if following else stretch[-1][1].end_s
            totals[stretch[0][0]] += end_s - stretch[0][1].start_s
        update_s = max(self.period_s(iteration) - totals["forward"] - totals["backward"], 0.0)
        return Phases(totals["forward"], totals["backward"], update_s)

    def busy_s(self, iteration: int) -> dict[Lane, float]:
        """Return the seconds each lane was occupied by tasks of one iteration."""
        busy: dict[Lane, float] = defaultdict(float)
        for span in self.of_iteration(iteration):
            busy[self.schedule.tasks[span.task].lane] += span.end_s - span.start_s
        return dict(busy)

    def span(self, iteration: int, task: Task) -> Span | None:
        """Return the span of one task, or ``None`` if it has not run."""
        return self._index().get((iteration, task.index))

    def _index(self) -> dict[tuple[int, int], Span]:
        cached: dict[tuple[int, int], Span] | None = self.__dict__.get("_by_task")
        if cached is None:
            cached = {(s.iteration, s.task): s for s in self.spans}
            self.__dict__["_by_task"] = cached
        return cached


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
    spans = {s.task: s for s in timeline.of_iteration(iteration)}
    events: dict[Tier, list[tuple[float, int, MemoryClass]]] = {tier: [] for tier in Tier}
    for buffer in timeline.schedule.buffers:
        changes = events[buffer.tier]
        if buffer.first is None or buffer.last is None:
            changes.append((0.0, buffer.num_bytes, buffer.memory_class))
            continue
        start_s, end_s = spans[buffer.first].start_s - begin_s, spans[buffer.last].end_s - begin_s
        if buffer.last < buffer.first:
            end_s += period_s
        changes.extend(_fold(start_s, end_s, period_s, buffer.num_bytes, buffer.memory_class))
    return {tier: _accumulate(changes) for tier, changes in events.items() if changes}


def _fold(
    start_s: float, end_s: float, period_s: float, num_bytes: int, memory_class: MemoryClass
) -> list[tuple[float, int, MemoryClass]]:
    whole, rest_s = divmod(max(end_s - start_s, 0.0), period_s) if period_s > 0 else (0.0, end_s - start_s)
    changes = [(0.0, int(whole) * num_bytes, memory_class)] if whole else []
    begin_s = start_s % period_s if period_s > 0 else start_s
    changes += [(begin_s, num_bytes, memory_class), (begin_s + rest_s, -num_bytes, memory_class)]
    if period_s > 0 and begin_s + rest_s > period_s:  # wraps around: also held from the beginning
        changes[-1] = (begin_s + rest_s - period_s, -num_bytes, memory_class)
        changes.append((0.0, num_bytes, memory_class))
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
