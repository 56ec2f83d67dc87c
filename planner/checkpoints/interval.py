"""How often to checkpoint: a lost iteration against the time that a checkpoint takes.

All times are in seconds. ``cost_s`` is what one checkpoint adds to the critical path (:meth:`RunTimes.cost_s`), not how
long it takes to be written: the *latency* delays what a failure can fall back to, and does not move the optimum.
"""

import dataclasses
import math


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return the training time between checkpoints that wastes least, to first order: sqrt(2 o M).

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return that time to higher order, which matters when a checkpoint costs much of the time between failures.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006,
    equation 37.
    """
    _check(cost_s=cost_s, mtbf_s=mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def waste(interval_s: float, cost_s: float, mtbf_s: float, *, latency_s: float = 0.0, restart_s: float = 0.0) -> float:
    """Return the fraction of time that is not progress: checkpoints, and what failures lose.

    ``o/(T+o) + ((T+o)/2 + L + R)/M``: a failure strikes on average in the middle of an interval, loses what was not
    written yet, and takes a restart. To first order in ``1/M``.

    Args:
        interval_s: training time between checkpoints, T.
        cost_s: that one checkpoint adds, o.
        mtbf_s: mean time between failures, M.
        latency_s: from a checkpoint's state to its being written, L.
        restart_s: from a failure to training again, R.
    """
    _check(interval_s=interval_s, mtbf_s=mtbf_s)
    period_s = interval_s + cost_s
    return cost_s / period_s + (period_s / 2 + latency_s + restart_s) / mtbf_s


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """How often to checkpoint.

    Attributes:
        every: iterations from one checkpoint to the next.
        interval_s: the training time that this is.
        bound: what decided it: the ``waste`` that is least, one ``iteration``, or the ``drain`` of what is in flight.
    """

    every: int
    interval_s: float
    bound: str


def choose(cost_s: float, latency_s: float, iteration_s: float, mtbf_s: float, *, in_flight: int = 1) -> Interval:
    """Return the least wasteful whole number of iterations that storage can keep up with.

    Args:
        cost_s: that one checkpoint adds to the critical path.
        latency_s: until one is written; of so many ``in_flight`` at once, one must end in every interval.
        iteration_s: of training without checkpoints.
        mtbf_s: mean time between failures.
        in_flight: checkpoints that may be under way.
    """
    _check(latency_s=latency_s, iteration_s=iteration_s, in_flight=in_flight)
    bounds = {"waste": daly_s(cost_s, mtbf_s), "iteration": iteration_s, "drain": latency_s / in_flight}
    bound = max(bounds, key=lambda name: bounds[name])
    exact = bounds[bound] / iteration_s
    # Waste is flat about its minimum, so the nearest number will do; of a drain there is no rounding down.
    every = max(math.ceil(exact - 1e-9) if bound == "drain" else round(exact), 1)
    if every * iteration_s < bounds["drain"]:
        every += 1
    return Interval(every, every * iteration_s, bound)


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value:g}; an interval between checkpoints needs it finite and above 0")
