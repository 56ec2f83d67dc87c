"""Find the intervals of several levels that waste least, each a multiple of the next faster one."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from planner.checkpoints.interval import Protection, Values, daly_s, expected_waste, most_lost_s, overhead

Counts = npt.NDArray[np.int64]

# The first numbers to try for each level: all small ones, then some at equal ratios. Waste is flat near its minimum,
# and the best is then improved step by step.
_FIRST_TRIED, _MULTIPLES_TRIED = 160, 48
_FAR: Final = 4  # times the optimum of one level: longer intervals gain nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """Intervals, and the waste that follows from them.

    Attributes:
        every: iterations between two checkpoints of each level, fastest first; each a multiple of the one before.
        waste, overhead, most_lost_s: see :mod:`planner.checkpoints.interval`.
    """

    every: tuple[int, ...]
    waste: float
    overhead: float
    most_lost_s: float


class CheckpointsError(ValueError):
    """Checkpoints cannot be made within the limits: names the limit that binds, and a remedy.

    Attributes:
        least_overhead: if no interval keeps both limits, the least within that of lost work; ``None`` if there is none.
        least_lost_s: likewise, the least work that is lost within the limit of overhead.
    """

    def __init__(self, message: str, least_overhead: float | None = None, least_lost_s: float | None = None) -> None:
        super().__init__(message)
        self.least_overhead = least_overhead
        self.least_lost_s = least_lost_s


def nest(
    levels: Sequence[Protection], iteration_s: float, max_overhead: float | None = None, max_lost_s: float | None = None
) -> Nested:
    """Return the intervals that waste least.

    Args:
        levels: fastest first; some failures need the last one.
        iteration_s: of training without checkpoints.
        max_overhead: limit of :func:`planner.checkpoints.interval.overhead`; ``None``: none.
        max_lost_s: limit of :func:`planner.checkpoints.interval.most_lost_s`; ``None``: none.

    Raises:
        CheckpointsError: no intervals are within the limits.
    """
    search = _Search(levels, iteration_s, max_overhead, max_lost_s)
    found = search.best(search.grid())
    while (better := search.best(search.around(found.every))).every != found.every:
        found = better
    return found


def check(
    levels: Sequence[Protection],
    every: tuple[int, ...],
    iteration_s: float,
    max_overhead: float | None = None,
    max_lost_s: float | None = None,
) -> Nested:
    """Return the waste that follows from given intervals; see :func:`nest`.

    Raises:
        CheckpointsError: they are not within the limits.
    """
    return _Search(levels, iteration_s, max_overhead, max_lost_s).best(tuple(np.array([n]) for n in every))


class _Search:
    def __init__(
        self, levels: Sequence[Protection], iteration_s: float, max_overhead: float | None, max_lost_s: float | None
    ) -> None:
        assert levels[-1].failures_per_s > 0, "a level that no failure needs is of no use"
        self._levels = levels
        self._iteration_s = iteration_s
        self._max_overhead, self._max_lost_s = max_overhead, max_lost_s
        self._least = tuple(max(math.ceil(level.least_s / iteration_s - 1e-9), 1) for level in levels)

    def grid(self) -> tuple[Counts, ...]:
        """Return the first intervals to try: those of the fastest level, times multiples for each slower one."""
        first = np.union1d(_thinned(self._least[0], self._most, _FIRST_TRIED), self._at_limits())
        multiples = _thinned(1, -(-self._most // self._least[0]), _MULTIPLES_TRIED)
        return _cumulated(np.meshgrid(first, *[multiples] * (len(self._levels) - 1), indexing="ij"))

    def _at_limits(self) -> Counts:
        """Return the numbers of iterations near which one level alone reaches a limit."""
        found = [self._least[0]]
        for level in self._levels:
            if self._max_lost_s is not None:
                found.append(math.floor((self._max_lost_s - level.latency_s - level.cost_s) / self._iteration_s))
            if self._max_overhead:
                found.append(math.ceil(level.cost_s / self._max_overhead / self._iteration_s))
        return np.array([n for n in found if n >= self._least[0]])

    def around(self, every: tuple[int, ...]) -> tuple[Counts, ...]:
        """Return neighbours of intervals: each number changed by one, or by a few percent, or by another ratio."""
        multiples = [every[0], *(b // a for a, b in itertools.pairwise(every))]
        tried = []
        for n in multiples:
            near = {n, n - 1, n + 1, n - n // 16, n + n // 16, n // 2, n * 2}
            tried.append(np.array(sorted(i for i in near if i >= 1)))
        return _cumulated(np.meshgrid(*tried, indexing="ij"))

    def best(self, tried: tuple[Counts, ...]) -> Nested:
        """Return the intervals that waste least, and what follows from them."""
        work_s: list[Values] = [counts * np.float64(self._iteration_s) for counts in tried]
        allowed = np.logical_and.reduce([n >= least for n, least in zip(tried, self._least, strict=True)])
        added, lost_s = (np.broadcast_to(of(self._levels, work_s), tried[0].shape) for of in (overhead, most_lost_s))
        few = allowed & self._within(added, self._max_overhead)
        little = allowed & self._within(lost_s, self._max_lost_s)
        if not (few & little).any():
            message = "no interval between checkpoints keeps both its limit of overhead and that of lost work"
            raise CheckpointsError(message, _least(added, little), _least(lost_s, few))
        wasted = np.where(few & little, expected_waste(self._levels, work_s), np.inf)
        found = int(np.argmin(wasted))
        every = tuple(int(counts[found]) for counts in tried)
        return Nested(every, float(wasted[found]), float(added[found]), float(lost_s[found]))

    @property
    def _most(self) -> int:
        """The longest interval to try, in iterations: far beyond the optimum, and long enough for a low overhead."""
        cost_s = sum(level.cost_s for level in self._levels)
        most_s = [least * self._iteration_s for least in self._least]
        if cost_s > 0:
            most_s += [_FAR * daly_s(cost_s, 1 / each.failures_per_s) for each in self._levels if each.failures_per_s]
            if self._max_overhead:
                most_s.append(_FAR * cost_s / self._max_overhead)
        return math.ceil(max(most_s) / self._iteration_s)

    @staticmethod
    def _within(values: npt.NDArray[np.float64], limit: float | None) -> npt.NDArray[np.bool_]:
        return values <= (math.inf if limit is None else limit * (1 + 1e-9))


def _thinned(least: int, most: int, count: int) -> Counts:
    """Return at most about ``count`` whole numbers from ``least`` to ``most``; all of them if there are no more."""
    if most - least < count:
        return np.arange(least, most + 1)
    return np.unique(np.round(np.geomspace(least, most, count)).astype(np.int64))


def _cumulated(multiples: Sequence[Counts]) -> tuple[Counts, ...]:
    """Return flat arrays of the intervals of all levels, from the first level's interval and the multiples."""
    return tuple(np.multiply.accumulate([counts.ravel() for counts in multiples]))


def _least(values: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_]) -> float | None:
    return float(values[mask].min()) if mask.any() else None
