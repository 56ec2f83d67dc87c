"""Timing in the presence of noise.

[Note: Robust timing] Other programs only ever make a repetition slower, in bursts. So the sizes of one curve take turns
(a burst then hits one repetition of many sizes, not all repetitions of one), and the central value is the median of
the fastest half of the repetitions. The tenth and ninetieth percentiles are taken over all of them: they show the
noise. A curve that still falls somewhere is made monotone by isotonic regression on log time, and says so.
"""

import dataclasses
import datetime
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple, Protocol

import numpy as np
from scipy.optimize import isotonic_regression

from hwprofiles.calibrate.options import Floats
from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity, Unit

METHOD = "median of the fastest half"
_MIN_ROUNDS = 3
_MIN_SAMPLE_S = 5e-4  # shorter calls are repeated within one sample: clocks and loops must not count

Call = Callable[[], object]


class Clock(Protocol):
    """Times calls on one backend."""

    def time_s(self, call: Call, num_calls: int) -> float:
        """Return seconds per call over ``num_calls`` calls one after another, work on the device included."""
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    """One size to measure: ``call`` does ``1 / scale`` times the work of ``size``."""

    size: float
    call: Call
    scale: float = 1.0


class Summary(NamedTuple):
    """Tenth percentile, robust centre and ninetieth percentile in seconds, and the number of samples."""

    p10_s: float
    median_s: float
    p90_s: float
    num_samples: int


def summarize(samples: Floats | Sequence[float]) -> Summary:
    """Return the statistics of [Note: Robust timing]."""
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    centre = float(np.median(ordered[: (len(ordered) + 1) // 2]))
    p10, p90 = np.percentile(ordered, [10, 90])
    return Summary(min(float(p10), centre), centre, max(float(p90), centre), len(ordered))


def sample(cases: Sequence[Case], clock: Clock, budget_s: float) -> list[Summary]:
    """Time all cases in turns until the budget is spent, at least three rounds.

    Cases come smallest first. Those which warming up does not reach within a third of the budget are left out (never
    the first two), so the result may be shorter than ``cases``.
    """
    cases[0].call()  # first use compiles and allocates
    begin_s = time.perf_counter()
    repeats: list[int] = []
    for case in cases:
        if len(repeats) >= 2 and time.perf_counter() - begin_s > budget_s / 3:
            break
        case.call()
        once_s = max(clock.time_s(case.call, 1), 1e-9)
        repeats.append(min(max(math.ceil(_MIN_SAMPLE_S / once_s), 1), 200))
    samples: list[list[float]] = [[] for _ in repeats]
    begin_s = time.perf_counter()
    while len(samples[0]) < _MIN_ROUNDS or time.perf_counter() - begin_s < budget_s * 2 / 3:
        for case, num_calls, times in zip(cases, repeats, samples, strict=False):
            times.append(clock.time_s(case.call, num_calls) * case.scale)
    return [summarize(times) for times in samples]


def measured(source: str, num_samples: int) -> Provenance:
    """Return today's provenance of a measured value."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Provenance(origin="measured", source=source, date=today, num_samples=num_samples)


def quantity(value: float, unit: Unit, source: str, num_samples: int) -> Quantity:
    """Return a measured quantity."""
    return Quantity(value=value, unit=unit, provenance=measured(source, num_samples))


def build_curve(
    size_unit: Literal["bytes", "flop", "params"],
    sizes: Sequence[float],
    summaries: Sequence[Summary],
    source: str,
) -> Curve:
    """Return the monotone curve through the summaries; equal sizes count as one point, their geometric mean."""
    groups: dict[float, list[Summary]] = defaultdict(list)
    for size, summary in zip(sizes, summaries, strict=False):
        groups[size].append(summary)
    ordered = sorted(groups)
    logs = np.array([np.mean(np.log([s[:3] for s in groups[size]]), axis=0) for size in ordered])
    fixed = np.column_stack([isotonic_regression(column).x for column in logs.T])
    num_raised = int(np.sum(~np.isclose(fixed[:, 1], logs[:, 1], rtol=0, atol=1e-9)))
    if num_raised:
        source += f"; {num_raised} of {len(ordered)} points moved to keep the curve monotone (isotonic regression)"
    times_s = np.maximum.accumulate(np.exp(fixed), axis=1)  # p10 <= median <= p90 despite rounding
    points = tuple(
        CurvePoint(size=size, p10_s=float(row[0]), median_s=float(row[1]), p90_s=float(row[2]))
        for size, row in zip(ordered, times_s, strict=True)
    )
    num_samples = sum(s.num_samples for group in groups.values() for s in group)
    return Curve(size_unit=size_unit, points=points, provenance=measured(f"{source}, {METHOD}", num_samples))


def together(calls: Sequence[Call], window_s: float) -> list[list[float]]:
    """Repeat blocking calls for a while, each in its own thread, and return the seconds of each repetition.

    The first one runs in the calling thread. Repetitions that end after the window are dropped (unless they are all
    there is): by then the others may have stopped.
    """
    stop = threading.Event()
    barrier = threading.Barrier(len(calls))

    def repeat(call: Call, until_s: float) -> list[float]:
        barrier.wait()
        start_s = now_s = time.perf_counter()
        times: list[float] = []
        while not times or (now_s - start_s < until_s and not stop.is_set()):
            call()
            before_s, now_s = now_s, time.perf_counter()
            times.append(now_s - before_s)
        return times[:-1] or times

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(repeat, call, math.inf) for call in calls[1:]]
        try:
            first = repeat(calls[0], window_s)
        finally:
            stop.set()
            barrier.abort()
        return [first, *(future.result() for future in futures)]
