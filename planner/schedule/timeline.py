"""The timeline: when each task started and ended, in a simulated or a measured run."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from planner.schedule.schedule import Schedule
from planner.schedule.tasks import LANES, MEMORY_CLASSES, TIERS, Ints, Lane, MemoryClass, Op, Phase, Task, Tier

Seconds = npt.NDArray[np.float64]

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

_COMPUTE = {
    Op.FORWARD: Phase.FORWARD,
    Op.RECOMPUTE: Phase.BACKWARD,
    Op.REMAKE: Phase.BACKWARD,
    Op.BACKWARD: Phase.BACKWARD,
    Op.WEIGHT_GRADIENT: Phase.BACKWARD,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One execution of a task, in seconds since the timeline's zero."""

    iteration: int
    task: int
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it took, in seconds."""
        return self.end_s - self.start_s


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """An uninterrupted part of an iteration in one phase, in seconds since the timeline's zero."""

    phase: Phase
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Several consecutive iterations of one schedule.

    Attributes:
        schedule: the schedule that was run.
        start_s, end_s: float64[num_iterations, num_tasks], seconds; NaN where a task has not run.
    """

    schedule: Schedule
    start_s: Seconds
    end_s: Seconds

    def __post_init__(self) -> None:
        assert self.start_s.shape == self.end_s.shape == (self.num_iterations, self.schedule.num_tasks)

    @classmethod
    def from_spans(cls, schedule: Schedule, spans: Iterable[Span], num_iterations: int) -> Self:
        """Make a timeline from single spans, in any order."""
        start_s, end_s = np.full((2, num_iterations, schedule.num_tasks), np.nan)
        for span in spans:
            start_s[span.iteration, span.task] = span.start_s
            end_s[span.iteration, span.task] = span.end_s
        return cls(schedule, start_s, end_s)

    def without(self, iterations: Collection[int]) -> "Timeline":
        """Return the timeline without some iterations; the time until the next iteration begins goes with each."""
        if not iterations:
            return self
        start_s, end_s = self.start_s.copy(), self.end_s.copy()
        for iteration in iterations:
            if iteration + 1 < self.num_iterations:
                cut_s = self.begin_s(iteration + 1) - self.begin_s(iteration)
                start_s[iteration + 1 :] -= cut_s
                end_s[iteration + 1 :] -= cut_s
        remaining = [i for i in range(self.num_iterations) if i not in iterations]
        zero_s = np.nanmin(start_s[remaining], initial=np.inf)
        return dataclasses.replace(self, start_s=start_s[remaining] - zero_s, end_s=end_s[remaining] - zero_s)

    def only(self, has: Callable[[Task], bool]) -> "Timeline":
        """Return the timeline as if only some tasks had run."""
        others = [task.index for task in self.schedule.tasks if not has(task)]
        start_s, end_s = self.start_s.copy(), self.end_s.copy()
        start_s[:, others] = end_s[:, others] = np.nan
        return dataclasses.replace(self, start_s=start_s, end_s=end_s)

    def with_waiting(self) -> "Timeline":
        """Return a simulated timeline in which what stages exchange lasts as long as in a run.

        Simulated, a stage sends to memory, and what it receives is there at once. In a run it receives from when it
        can compute no more without that, and another one sends until then.
        """
        tasks, start_s, end_s = self.schedule.tasks, self.start_s.copy(), self.end_s.copy()
        latest: dict[tuple[Lane, int], Seconds] = {}  # of each link, the end of what was sent last
        for receive in (task for task in tasks if task.lane is Lane.RECEIVE):
            own = [i for i in receive.after if tasks[i].stage == receive.stage]
            ready_s = end_s[:, own[0]] if own else start_s[:, receive.index]
            start_s[:, receive.index] = np.minimum(ready_s, end_s[:, receive.index])
            for i in (i for i in receive.after if i not in own):
                link = tasks[i].lane, tasks[i].stage
                start_s[:, i] = np.maximum(start_s[:, i], latest.get(link, start_s[:, i]))
                latest[link] = end_s[:, i] = np.maximum(np.maximum(start_s[:, i], end_s[:, i]), ready_s)
        return dataclasses.replace(self, start_s=start_s, end_s=end_s)

    @property
    def num_iterations(self) -> int:
        """Number of iterations that began."""
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
        """Return the time until the next iteration begins, or until the end of this one if none has begun."""
        following_s = self.begin_s(iteration + 1) if iteration + 1 < self.num_iterations else math.nan
        end_s = float(np.nanmax(self.end_s[iteration])) if math.isnan(following_s) else following_s
        return end_s - self.begin_s(iteration)

    def stretches(self, iteration: int) -> tuple[Stretch, ...]:
        """Return the phases of an iteration in order, without gaps.

        With several micro-batches, forward and backward alternate. A stretch lasts until the next one begins, so it
        includes the wait at its end.
        """
        tasks = self.schedule.tasks
        spans = [s for s in self.of_iteration(iteration) if not tasks[s.task].stage]
        compute = [(_COMPUTE[op], s) for s in spans if (op := tasks[s.task].op) in _COMPUTE]
        loop_s = sum(s.length_s for s in spans if tasks[s.task].phase is Phase.LOOP)
        groups = [(phase, list(group)) for phase, group in itertools.groupby(compute, key=lambda item: item[0])]
        result: list[Stretch] = []
        for (phase, group), following in itertools.zip_longest(groups, groups[1:]):
            end_s = following[1][0][1].start_s if following else group[-1][1].end_s
            result.append(Stretch(phase, group[0][1].start_s, end_s))
        begin_s = result[-1].end_s if result else self.begin_s(iteration)
        end_s = max(self.begin_s(iteration) + self.period_s(iteration), begin_s)
        update = Stretch(Phase.UPDATE, begin_s, max(end_s - loop_s, begin_s))
        return (*result, update, *([Stretch(Phase.LOOP, update.end_s, end_s)] if loop_s else []))

    def phases(self, iteration: int) -> dict[Phase, float]:
        """Return the seconds that an iteration spends in each phase, in the order of phases; they add up to it.

        The compute lane (of a pipeline's first stage) sets the boundaries. Forward and backward last while their tasks
        run. Update is the rest, from the last backward to the first forward of the next iteration; updates that overlap
        with computing do not add to it. Loop is the script's own work between iterations, if it is a task. All
        iterations but the last are complete (see :meth:`period_s`).
        """
        totals = dict.fromkeys(Phase, 0.0)
        for stretch in self.stretches(iteration):
            totals[stretch.phase] += stretch.end_s - stretch.start_s
        return totals

    def busy_s(self, iteration: int) -> dict[Lane, float]:
        """Return the seconds that tasks of one iteration occupied each lane; in a pipeline, of the busiest stage."""
        lengths_s = self.end_s[iteration] - self.start_s[iteration]
        ran = ~np.isnan(lengths_s)
        lanes = self.schedule.arrays.lane[ran]
        totals_s = np.bincount(lanes, lengths_s[ran]).tolist()
        busy = {
            (LANES[lane % len(LANES)], lane // len(LANES)): totals_s[lane] for lane in dict.fromkeys(lanes.tolist())
        }
        return largest_by_key(busy, lambda seconds: seconds)


def largest_by_key(values: Mapping[tuple[_Key, int], _Value], size: Callable[[_Value], float]) -> dict[_Key, _Value]:
    """Return for each key the largest of its values over pipeline stages.

    Args:
        values: the values, by key and stage.
        size: by what to compare; of equal values the first is taken.
    """
    found: dict[_Key, _Value] = {}
    for (key, _), value in values.items():
        if key not in found or size(value) > size(found[key]):
            found[key] = value
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes held on one tier over one iteration.

    Attributes:
        times_s: 0, then the times at which the amounts change, since the iteration began.
        num_bytes: bytes held from each of those times on, by class.
        peak_bytes: highest sum over all classes.
        peak_by_class: bytes of each class at the time of the peak.
    """

    times_s: tuple[float, ...]
    num_bytes: dict[MemoryClass, tuple[int, ...]]
    peak_bytes: int
    peak_by_class: dict[MemoryClass, int]


def memory_use(timeline: Timeline, iteration: int) -> dict[Tier, MemoryUse]:
    """Return the memory use of every tier by one rank in an iteration; in a pipeline, of the fullest stage."""
    uses = memory_uses(timeline, iteration)
    return {tier: max(of_stages.values(), key=lambda use: use.peak_bytes) for tier, of_stages in uses.items()}


def memory_uses(timeline: Timeline, iteration: int) -> dict[Tier, dict[int, MemoryUse]]:
    """Return the memory use of every tier by one rank of each stage during one (steady) iteration.

    A buffer that outlives the iteration (see :class:`planner.schedule.tasks.Buffer`) is folded back: in the steady
    state, the previous iteration's copy is held until the same moment of this iteration.
    """
    arrays, period_s = timeline.schedule.arrays, timeline.period_s(iteration)
    kind = arrays.stage * len(TIERS) + arrays.tier
    buffer, times_s, num_bytes = _changes(timeline, iteration, period_s)
    kinds = kind[buffer]
    uses: dict[Tier, dict[int, MemoryUse]] = {}
    for number in np.unique(kind).tolist():
        here = kinds == number
        stage, tier = divmod(number, len(TIERS))
        used = _accumulated(times_s[here], num_bytes[here], arrays.memory_class[buffer[here]])
        uses.setdefault(TIERS[tier], {})[stage] = used
    return {tier: uses[tier] for tier in Tier if tier in uses}


def peak_bytes(timeline: Timeline, iteration: int) -> dict[Tier, dict[int, int]]:
    """Return only the peaks of :func:`memory_uses`, much faster."""
    arrays = timeline.schedule.arrays
    buffer, times_s, num_bytes = _changes(timeline, iteration, timeline.period_s(iteration))
    kinds = (arrays.stage * len(TIERS) + arrays.tier)[buffer]
    order = np.lexsort((times_s, kinds))
    kinds, times_s, held = kinds[order], times_s[order], num_bytes[order].cumsum()
    ends = np.flatnonzero(np.diff(kinds, append=-1))  # of each kind, the last change
    last = np.append(times_s[1:] != times_s[:-1], True)  # what changes at one instant changes together
    last[ends] = True
    peaks: dict[Tier, dict[int, int]] = {}
    before = 0
    for begin, end in itertools.pairwise([0, *(ends + 1).tolist()]):
        stage, tier = divmod(int(kinds[begin]), len(TIERS))
        peaks.setdefault(TIERS[tier], {})[stage] = int(held[begin:end][last[begin:end]].max()) - before
        before = int(held[end - 1])
    return peaks


def _changes(timeline: Timeline, iteration: int, period_s: float) -> tuple[Ints, Seconds, Ints]:
    """Return all allocations and releases: the buffer, the time since the iteration began, and the change in bytes."""
    arrays = timeline.schedule.arrays
    everything = np.arange(len(arrays.tier))
    always, held = everything[arrays.first < 0], everything[arrays.first >= 0]
    first, last = arrays.first[held], arrays.last[held]
    begin_s = timeline.begin_s(iteration)
    starts_s = timeline.start_s[iteration, first] - begin_s
    ends_s = timeline.end_s[iteration, last] - begin_s + np.where(last < first, period_s, 0.0)
    ends_s = np.where(starts_s > ends_s, starts_s, ends_s)
    num_held = np.zeros(len(held), np.int64)
    if period_s > 0:
        # Times inside the iteration stay exact: a buffer that ends when another begins must still do so.
        begun, starts_s = np.divmod(starts_s, period_s)
        ended, ends_s = np.divmod(ends_s, period_s)
        num_held = np.maximum(ended - begun, 0).astype(np.int64)  # held when an iteration begins
    num_bytes = arrays.num_bytes
    return (
        np.concatenate([always, held, held, held]),
        np.concatenate([np.zeros(len(always)), starts_s, ends_s, np.zeros(len(held))]),
        np.concatenate([num_bytes[always], num_bytes[held], -num_bytes[held], num_held * num_bytes[held]]),
    )


def _accumulated(times_s: Seconds, num_bytes: Ints, memory_class: Ints) -> MemoryUse:
    """Add up changes. Changes at one instant count as one, so a slot that is handed over is not held twice."""
    # The first entry is for the beginning, even if nothing is held then.
    moments_s, moment = np.unique(np.concatenate([[0.0], times_s]), return_inverse=True)
    held = np.zeros((len(MEMORY_CLASSES), len(moments_s)), np.int64)
    np.add.at(held, (memory_class, moment[1:]), num_bytes)
    held = held.cumsum(axis=1)
    total = held.sum(axis=0)
    peak = int(total.argmax())
    return MemoryUse(
        times_s=tuple(moments_s.tolist()),
        num_bytes={
            MEMORY_CLASSES[c]: tuple(held[c].tolist())
            for c in sorted(set(memory_class.tolist()), key=MEMORY_CLASSES.__getitem__)
        },
        peak_bytes=max(int(total[peak]), 0),
        peak_by_class={c: n for c, n in zip(MEMORY_CLASSES, held[:, peak].tolist(), strict=True) if n}
        if total[peak] > 0
        else {},
    )
