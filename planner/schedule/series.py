"""Quantities over time: the traffic of every link, and which processors are busy.

A timeline, simulated or measured, says when tasks start and end, not how fast they are in between. So each task counts
with its mean rate. The area under a rate is then exactly the number of bytes that were moved.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline, largest_by_key

Values = npt.NDArray[np.float64]

_Key = TypeVar("_Key", bound=Hashable)

PROCESSORS: Mapping[str, frozenset[Lane]] = {
    "gpu": frozenset({Lane.COMPUTE, Lane.GPU_UPDATE}),
    "cpu": frozenset({Lane.CPU}),
}
"""Processors and their lanes. As for tiers, ``gpu`` is the device, also where that is a CPU."""

# Lanes whose bytes cross no link: a pass over host memory stays in it.
_NO_LINK = frozenset({*PROCESSORS["gpu"], *PROCESSORS["cpu"], Lane.LAUNCH})
# Lanes that share a link with another one; every other lane is a link by itself.
_SAME_LINK = {
    Lane.STATE_IN: Lane.H2D,
    Lane.ACTIVATION_IN: Lane.H2D,
    Lane.STATE_OUT: Lane.D2H,
    Lane.ACTIVATION_OUT: Lane.D2H,
    Lane.NVME_STATE_IN: Lane.NVME_READ,
    Lane.NVME_STATE_OUT: Lane.NVME_WRITE,
}


Flow = tuple[float, float, float]
"""A constant rate for some time: start and end in seconds, and the rate."""


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """A step function over one period.

    Attributes:
        times_s: float64[n], the times at which the value changes, ascending from 0.
        values: float64[n], the value from each of those times on.
        period_s: the end of the period.
    """

    times_s: Values
    values: Values
    period_s: float

    @property
    def peak(self) -> float:
        """Highest value."""
        return float(self.values.max(initial=0.0))

    @property
    def integral(self) -> float:
        """Area under the function: bytes for a rate in bytes/s, seconds for a busy share."""
        return float(self._areas[-1])

    def means(self, num_columns: int) -> Values:
        """Divide the period into equal parts and return the mean of each, float64[num_columns]."""
        edges_s = np.linspace(0.0, self.period_s, num_columns + 1)
        area = np.interp(edges_s, self._ends_s, self._areas)
        return np.diff(area) * num_columns / self.period_s if self.period_s > 0 else np.zeros(num_columns)

    def moving_means(self, times_s: Values, window_s: float) -> Values:
        """Return the mean over a window around each of ``times_s``; the function is periodic."""

        def area(at_s: Values) -> Values:
            whole, within_s = np.divmod(at_s, self.period_s)
            return np.asarray(whole * self.integral + np.interp(within_s, self._ends_s, self._areas))

        return (area(times_s + window_s / 2) - area(times_s - window_s / 2)) / window_s

    def mean_within(self, start_s: float, end_s: float) -> float:
        """Return the mean over a part of the period; 0 if the part is empty."""
        area = np.interp([start_s, end_s], self._ends_s, self._areas)
        return float(area[1] - area[0]) / (end_s - start_s) if end_s > start_s else 0.0

    @functools.cached_property
    def _ends_s(self) -> Values:
        return np.append(self.times_s, self.period_s)

    @functools.cached_property
    def _areas(self) -> Values:
        """The area up to each of these times, float64[n + 1]."""
        return np.concatenate([[0.0], np.cumsum(self.values * np.diff(self._ends_s))])


def link_of(lane: Lane) -> Lane | None:
    """Return the lane that stands for the link (and direction) that a lane uses; ``None`` if it uses no link."""
    return None if lane in _NO_LINK else _SAME_LINK.get(lane, lane)


def traffic(timeline: Timeline, iteration: int) -> dict[Lane, Series]:
    """Return the bytes/s that one steady iteration moves over every link, as the schedule counts bytes.

    Traffic in the next iteration is folded back, as in :func:`planner.schedule.timeline.memory_use`. In a pipeline,
    each link shows the stage that moves most.
    """
    tasks = timeline.schedule.tasks
    found = _rates(timeline, iteration, [(link_of(task.lane), float(task.num_bytes)) for task in tasks])
    return {link: found[link] for link in Lane if link in found}


def amounts(timeline: Timeline, iteration: int, amounts: Sequence[float]) -> Series:
    """Return the rate at which one steady iteration uses a resource.

    Args:
        timeline: when tasks run.
        iteration: which one; use in the next iteration is folded back.
        amounts: how much each task of the schedule uses in total. In a pipeline, the stage that uses most is shown.
    """
    found = _rates(timeline, iteration, [("all", amount) for amount in amounts])
    return found.get("all") or series((), timeline.period_s(iteration))


def _rates(timeline: Timeline, iteration: int, amount_of: Sequence[tuple[_Key | None, float]]) -> dict[_Key, Series]:
    """Return rates by key. ``amount_of`` has a key and an amount for each task."""
    begin_s, period_s = timeline.begin_s(iteration), timeline.period_s(iteration)
    flows: dict[tuple[_Key, int], list[Flow]] = defaultdict(list)
    for span in timeline.of_iteration(iteration):
        (key, amount), length_s = amount_of[span.task], span.length_s
        if key is not None and amount and length_s > 0:  # a task that takes no time has no rate
            stage = timeline.schedule.tasks[span.task].stage
            flows[key, stage].append((span.start_s, span.end_s, amount / length_s))
    found = {key: series(_folded(listed, begin_s, period_s), period_s) for key, listed in flows.items()}
    return largest_by_key(found, lambda moved: moved.integral)


def busy(timeline: Timeline, iteration: int) -> dict[str, Series]:
    """Return for each of :data:`PROCESSORS` a series that is 1 while any of its lanes runs, folded as above.

    In a pipeline, each processor shows the stage that is busiest.
    """
    begin_s, period_s = timeline.begin_s(iteration), timeline.period_s(iteration)
    flows: dict[tuple[str, int], list[Flow]] = {(name, 0): [] for name in PROCESSORS}
    for span in timeline.of_iteration(iteration):
        task = timeline.schedule.tasks[span.task]
        for name, lanes in PROCESSORS.items():
            if task.lane in lanes:
                flows.setdefault((name, task.stage), []).append((span.start_s, span.end_s, 1.0))
    result = {}
    for key, listed in flows.items():
        counted = series(_folded(listed, begin_s, period_s), period_s)
        result[key] = dataclasses.replace(counted, values=np.minimum(counted.values.round(), 1.0))
    return largest_by_key(result, lambda counted: counted.integral)


def series(flows: Iterable[Flow], period_s: float) -> Series:
    """Return the sum of flows that lie within ``[0, period_s]``."""
    listed = [(start_s, end_s, rate) for start_s, end_s, rate in flows if end_s > start_s]
    starts_s, ends_s, rates = np.array(listed).reshape(-1, 3).T
    times_s, where = np.unique(np.concatenate([[0.0], starts_s, ends_s]), return_inverse=True)
    changes, active = np.zeros(len(times_s)), np.zeros(len(times_s), np.int64)
    starts, ends = where[1 : len(listed) + 1], where[len(listed) + 1 :]
    np.add.at(changes, starts, rates)
    np.subtract.at(changes, ends, rates)
    np.add.at(active, starts, 1)
    np.subtract.at(active, ends, 1)
    # Sums and differences of floats leave a tiny rest where nothing flows.
    values = np.where(np.cumsum(active) > 0, np.maximum(np.cumsum(changes), 0.0), 0.0)
    inside = (times_s < period_s) | (times_s == 0.0)
    return Series(times_s[inside], values[inside], period_s)


def _folded(flows: Iterable[Flow], begin_s: float, period_s: float) -> Iterator[Flow]:
    """Cut flows where an iteration ends, and move every part into ``[0, period_s]``."""
    for began_s, ended_s, rate in flows:
        if period_s <= 0:
            continue
        start_s, end_s = began_s - begin_s, ended_s - begin_s
        number = start_s // period_s
        while start_s < end_s:
            cut_s = min((number + 1) * period_s, end_s)
            moved_s = number * period_s
            yield max(start_s - moved_s, 0.0), min(cut_s - moved_s, period_s), rate
            start_s, number = cut_s, number + 1
