"""How often to checkpoint: the expected loss of work against the cost of checkpoints.

Intervals of several levels are those that waste least, each a multiple of the next faster one.

All times are in seconds. ``cost_s`` is what one checkpoint adds to the critical path, not how long it takes to be
written: the *latency* delays what a failure can fall back to, and does not move the optimum.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Values = float | npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

# The first numbers to try for each level: all small ones, then some at equal ratios. Waste is flat near its minimum,
# and the best is then improved step by step.
_FIRST_TRIED, _MULTIPLES_TRIED = 160, 48
_FAR: Final = 4  # times the optimum of one level: longer intervals gain nothing
_NEXT_TO_NOTHING: Final = 1e-300  # instead of zero progress, so that formulas of slower levels stay finite


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the training time between checkpoints that wastes least, to higher order.

    It differs from the first order, sqrt(2 o M), if a checkpoint costs a large part of the time between failures.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006,
    equation 37.
    """
    for name, value in (("cost_s", cost_s), ("mtbf_s", mtbf_s)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value:g}; an interval between checkpoints needs it finite and above 0")
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclasses.dataclass(frozen=True, slots=True)
class Protection:
    """The cost of one level of checkpoints, and the failures from which it recovers.

    Attributes:
        cost_s: time that one checkpoint at this level adds to training, interference included.
        latency_s: time until a checkpoint is safe at this level.
        restart_s: time from a failure until training goes on from this level.
        failures_per_s: rate of the failures that this level survives and no faster level in use does.
        is_of_several: whether these are losses of several nodes at once, which limits on one failure leave out.
        least_s: shortest training time between two checkpoints, so that one is written before the next, and drives
            endure.
    """

    cost_s: float
    latency_s: float
    restart_s: float = 0.0
    failures_per_s: float = 0.0
    is_of_several: bool = False
    least_s: float = 0.0


def expected_waste(levels: Sequence[Protection], work_s: Sequence[Values]) -> Values:
    """Return the fraction of time that is not progress, under failures at exponential times.

    With one level it is exact. A life of mean length ``M`` lasts from one failure to the next and begins with a
    restart. Each period ``P = T + o`` that ends and is safe within a life keeps ``T`` of training. On average a life
    keeps::

        sum over n >= 1 of T * Pr(life >= R + L + n P)  =  T exp(-(R + L) / M) / (exp(P / M) - 1)

    For a slower level, training progresses at the rate that faster levels leave, so the formulas nest. A failure of a
    faster kind within the ``L`` seconds of a promotion loses that promotion, so the slower level waits for the next
    checkpoint. To first order the result is the sum of every level's
    ``o / P + (P / 2 + L + R) / M``: on average a failure strikes in the middle of a period.

    Args:
        levels: fastest first.
        work_s: training time between two checkpoints of each, every one a multiple of the one before; numbers or
            arrays that broadcast.

    Returns:
        Between 0 and 1; 1 if no work is ever kept.
    """
    progress: Values = 1.0  # per second
    others_per_s = 0.0  # failures of faster kinds
    with np.errstate(over="ignore"):
        for level, between_s in zip(levels, work_s, strict=True):
            period_s = np.float64(between_s / progress + level.cost_s)
            rate = level.failures_per_s
            latency_s = level.latency_s - np.expm1(-others_per_s * level.latency_s) * period_s
            if rate:
                saved_share = np.exp(-rate * (latency_s + level.restart_s)) / np.expm1(rate * period_s)
                progress = np.maximum(rate * between_s * saved_share, _NEXT_TO_NOTHING)
            else:
                progress = between_s / period_s
            others_per_s += rate
    return 1 - progress


def overhead(levels: Sequence[Protection], work_s: Sequence[Values]) -> Values:
    """Return the time that checkpoints add to training, as a fraction of it; see :func:`expected_waste`."""
    return sum((level.cost_s / between_s for level, between_s in zip(levels, work_s, strict=True)), start=0.0)


def most_lost_s(levels: Sequence[Protection], work_s: Sequence[Values]) -> Values:
    """Return the most time that one failure can lose: a period and the latency; see :func:`expected_waste`."""
    longest: Values = 0.0
    for number, (level, between_s) in enumerate(zip(levels, work_s, strict=True)):
        if level.failures_per_s and not level.is_of_several:
            added = overhead(levels[: number + 1], work_s[: number + 1])
            longest = np.maximum(longest, between_s * (1 + added) + level.latency_s)
    return longest


@dataclasses.dataclass(frozen=True, slots=True)
class Nested:
    """Intervals, and the waste that follows from them.

    Attributes:
        every: iterations between two checkpoints of each level, fastest first; each a multiple of the one before.
        waste, overhead, most_lost_s: see :func:`expected_waste`, :func:`overhead` and :func:`most_lost_s`.
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
        max_overhead: limit of :func:`overhead`; ``None``: none.
        max_lost_s: limit of :func:`most_lost_s`; ``None``: none.

    Raises:
        CheckpointsError: no intervals are within the limits.
    """
    limits = max_overhead, max_lost_s
    found = _best(levels, _first_tried(levels, iteration_s, *limits), iteration_s, *limits)
    while (better := _best(levels, _around(found.every), iteration_s, *limits)).every != found.every:
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
    return _best(levels, tuple(np.array([n]) for n in every), iteration_s, max_overhead, max_lost_s)


def _best(
    levels: Sequence[Protection],
    tried: tuple[Counts, ...],
    iteration_s: float,
    max_overhead: float | None,
    max_lost_s: float | None,
) -> Nested:
    """Return the intervals that waste least of those that are tried, and what follows from them."""
    assert levels[-1].failures_per_s > 0, "a level that no failure needs is of no use"
    work_s: list[Values] = [counts * np.float64(iteration_s) for counts in tried]
    least = _least_counts(levels, iteration_s)
    allowed = np.logical_and.reduce([counts >= fewest for counts, fewest in zip(tried, least, strict=True)])
    added, lost_s = (np.broadcast_to(of(levels, work_s), tried[0].shape) for of in (overhead, most_lost_s))
    few = allowed & _within(added, max_overhead)
    little = allowed & _within(lost_s, max_lost_s)
    if not (few & little).any():
        message = "no interval between checkpoints keeps both its limit of overhead and that of lost work"
        raise CheckpointsError(message, _least(added, little), _least(lost_s, few))
    wasted = np.where(few & little, expected_waste(levels, work_s), np.inf)
    found = int(np.argmin(wasted))
    every = tuple(int(counts[found]) for counts in tried)
    return Nested(every, float(wasted[found]), float(added[found]), float(lost_s[found]))


def _least_counts(levels: Sequence[Protection], iteration_s: float) -> list[int]:
    """Return the fewest iterations between two checkpoints of each level."""
    return [max(math.ceil(level.least_s / iteration_s - 1e-9), 1) for level in levels]


def _first_tried(
    levels: Sequence[Protection], iteration_s: float, max_overhead: float | None, max_lost_s: float | None
) -> tuple[Counts, ...]:
    """Return the first intervals to try: those of the fastest level, times multiples for each slower one."""
    least = _least_counts(levels, iteration_s)
    cost_s = sum(level.cost_s for level in levels)
    most_s = [count * iteration_s for count in least]  # far beyond the optimum, and long enough for a low overhead
    if cost_s > 0:
        most_s += [_FAR * daly_s(cost_s, 1 / each.failures_per_s) for each in levels if each.failures_per_s]
        if max_overhead:
            most_s.append(_FAR * cost_s / max_overhead)
    most = math.ceil(max(most_s) / iteration_s)
    at_limits = [least[0]]  # near which one level alone reaches a limit
    for level in levels:
        if max_lost_s is not None:
            at_limits.append(math.floor((max_lost_s - level.latency_s - level.cost_s) / iteration_s))
        if max_overhead:
            at_limits.append(math.ceil(level.cost_s / max_overhead / iteration_s))
    first = np.union1d(_thinned(least[0], most, _FIRST_TRIED), [n for n in at_limits if n >= least[0]])
    multiples = _thinned(1, -(-most // least[0]), _MULTIPLES_TRIED)
    return _cumulated(np.meshgrid(first, *[multiples] * (len(levels) - 1), indexing="ij"))


def _around(every: tuple[int, ...]) -> tuple[Counts, ...]:
    """Return neighbours of intervals: each number changed by one, or by a few percent, or by another ratio."""
    tried = []
    for n in (every[0], *(b // a for a, b in itertools.pairwise(every))):
        near = {n, n - 1, n + 1, n - n // 16, n + n // 16, n // 2, n * 2}
        tried.append(np.array(sorted(i for i in near if i >= 1)))
    return _cumulated(np.meshgrid(*tried, indexing="ij"))


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
