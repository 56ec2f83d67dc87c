"""How often to checkpoint: the expected loss of work against the cost of checkpoints.

All times are in seconds. ``cost_s`` is what one checkpoint adds to the critical path, not how long it takes to be
written: the *latency* delays what a failure can fall back to, and does not move the optimum.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

Values = float | npt.NDArray[np.float64]

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
        cost_s: time that one checkpoint at this level adds to training.
        latency_s: time until a checkpoint is safe at this level.
        restart_s: time from a failure until training goes on from this level.
        failures_per_s: rate of the failures that this level survives and no faster level in use does.
        is_of_several: whether these are losses of several nodes at once, which limits on one failure leave out.
        least_s: shortest training time between two checkpoints, so that one is written before the next, and drives
            endure.
    """

    cost_s: float
    latency_s: float
    restart_s: float
    failures_per_s: float
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
