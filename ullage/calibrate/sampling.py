"""Timing in the presence of noise.

[Note: Robust timing] Other programs must not affect the profile. They slow repetitions down, in bursts. Therefore:
- time in which the calling thread was ready but waited for a core (Linux counts it) is subtracted;
- the sizes of one curve take turns: a burst hits one repetition of many sizes, not all repetitions of one;
- the central value is the median of the fastest quarter of the repetitions. The tenth and ninetieth percentiles are
  taken over all of them: they show the noise that is left.
If a curve still falls somewhere, isotonic regression on log time makes it monotone, and its source says so.

A GPU has no other programs, but a power limit: its first products are faster than those of a
training that runs for hours. The fastest repetitions are then the wrong ones. So every sample on a GPU follows
milliseconds of large products, as in training, and the central value is the median of all samples. The SM clock and the
power during the samples stand in the source. Meanwhile the host issues the sample's kernels, so that their time is the
device's and not that of Python. What a library does at the first call of a shape (it may build a plan for half a
second) is done before the clock starts.

A server with several GPUs lends each some cores and a share of its memory's bandwidth. Neighbours come and go, while
calibrating and while training. So the central value of updates on the host of a GPU is the median of all samples, too:
on such a machine with an H200 updates ran as slowly as the slowest fifth of the samples, and the fastest quarter was
20 % faster (``benchmarks/results/gpu_agreement.json``).
"""

import contextlib
import dataclasses
import datetime as dt
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity, Unit
from ullage.calibrate.options import Floats

FASTEST = 0.25
_MIN_ROUNDS = 3
NUM_WINDOWS = 16
_MIN_WINDOW_S = 0.01
_UNDISTURBED = 0.02  # a window counts as undisturbed if calls waited for a core for at most this fraction

Call = Callable[[], object]


#: ``clock(call, num_calls)``: seconds per call over ``num_calls`` calls in a row, including work on the device.
Clock = Callable[[Call, int], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """One size to measure: ``call`` does ``1 / scale`` times the work of ``size``."""

    size: float
    call: Call
    scale: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How calls are sampled.

    Attributes:
        fastest: fraction of the repetitions, the fastest ones, whose median is the central value.
        shortest_s: shorter calls are repeated within one sample, so that overhead of the clock and the loop vanishes.
        most_calls: at most so many times.
        lead_s: time that passes before each sample.
    """

    fastest: float
    shortest_s: float
    most_calls: int
    lead_s: float = 0.0

    def __str__(self) -> str:
        """Return the central value in words."""
        if self.fastest < 1:
            return "median of the fastest quarter"
        return "median, each after large products" if self.lead_s else "median"


ROBUST = Manner(fastest=FASTEST, shortest_s=5e-4, most_calls=200)
"""See [Note: Robust timing]."""
SHARED = dataclasses.replace(ROBUST, fastest=1.0)
"""For updates on the host of a GPU, whose neighbours come and go."""
SUSTAINED = Manner(fastest=1.0, shortest_s=0.01, most_calls=40, lead_s=0.005)
"""See [Note: Robust timing]. So few calls of a few kernels are issued while the products run."""


class Summary(NamedTuple):
    """Tenth percentile, robust centre and ninetieth percentile in seconds, the number of samples, and their manner.

    On a GPU whose sensors can be read, ``mhz`` and ``watts`` are the medians of SM clock and power.
    """

    p10_s: float
    median_s: float
    p90_s: float
    num_samples: int
    manner: Manner = ROBUST
    mhz: float | None = None
    watts: float | None = None


def summarize(samples: Floats | Sequence[float], manner: Manner = ROBUST) -> Summary:
    """Return the statistics of the manner's note: the samples' percentiles, and the median of the fastest."""
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    centre = float(np.median(ordered[: math.ceil(len(ordered) * manner.fastest)]))
    p10, p90 = np.percentile(ordered, [10, 90])
    return Summary(min(float(p10), centre), centre, max(float(p90), centre), len(ordered), manner)


def conditions(summaries: Sequence[Summary]) -> str:
    """Return the range of SM clock and power in words, to follow a source; empty if nobody could read them."""

    def spread(values: Sequence[float], unit: str) -> str:
        low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"

    known = [(s.mhz, s.watts) for s in summaries if s.mhz is not None and s.watts is not None]
    if not known:
        return ""
    mhz, watts = zip(*known, strict=True)
    return f", at {spread(mhz, 'MHz')} and {spread(watts, 'W')}"


def wall_clock(call: Call, num_calls: int) -> float:
    """Return wall seconds per call minus the time spent waiting for a core; see :data:`Clock`."""
    with _queue_clock() as queued_s:
        begin_s = time.perf_counter()
        before_s = queued_s()  # read inside the timed span, so that only waits within the span are subtracted
        for _ in range(num_calls):
            call()
        waited_s = queued_s() - before_s
        return max(time.perf_counter() - begin_s - waited_s, 1e-9) / num_calls


def team_clock(call: Call, num_calls: int) -> float:
    """Return wall seconds per call, for work that other threads do; see :data:`Clock`.

    Waiting for a core is not subtracted: the caller may wait for its own team of threads.
    """
    begin_s = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - begin_s) / num_calls


def clock_of(num_threads: int) -> Clock:
    """Return the clock for work that ``num_threads`` threads share."""
    return wall_clock if num_threads == 1 else team_clock


@contextlib.contextmanager
def _queue_clock() -> Iterator[Callable[[], float]]:
    """Yield a clock of the seconds in which this thread was ready but had no core. It always reads 0 outside Linux."""
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        descriptor = -1
    try:
        yield lambda: int(os.pread(descriptor, 64, 0).split()[1]) / 1e9 if descriptor >= 0 else 0.0
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def sample(cases: Sequence[Case], clock: Clock, budget_s: float, manner: Manner = ROBUST) -> list[Summary]:
    """Time all cases in turns until the budget is spent, at least three rounds.

    Cases are ordered by size, the smallest first. The largest cases are left out if the warm-up does not reach them
    within a third of the budget, or if three rounds with them would exceed the remaining budget. The first two cases
    always stay. So the result may be shorter than ``cases``.
    """
    cases[0].call()  # the first call compiles and allocates
    begin_s = time.perf_counter()
    repeats: list[int] = []
    round_s = 0.0
    for case in cases:
        if len(repeats) >= 2 and time.perf_counter() - begin_s > budget_s / 3:
            break
        case.call()
        once_s = max(clock(case.call, 1), 1e-9)
        num_calls = min(max(math.ceil(manner.shortest_s / once_s), 1), manner.most_calls)
        round_s += num_calls * once_s + manner.lead_s
        if len(repeats) >= 2 and _MIN_ROUNDS * round_s > budget_s * 2 / 3:
            break
        repeats.append(num_calls)
    samples: list[list[float]] = [[] for _ in repeats]
    begin_s = time.perf_counter()
    while len(samples[0]) < _MIN_ROUNDS or time.perf_counter() - begin_s < budget_s * 2 / 3:
        for case, num_calls, times in zip(cases, repeats, samples, strict=False):
            times.append(clock(case.call, num_calls) * case.scale)
    return [summarize(times, manner) for times in samples]


def measured(source: str, num_samples: int) -> Provenance:
    """Return the provenance of a value that was measured today."""
    today = dt.datetime.now(dt.UTC).date().isoformat()
    return Provenance(origin="measured", source=source, date=today, num_samples=num_samples)


def quantity(
    value: float, unit: Unit, source: str, num_samples: int, spread: Floats | Sequence[float] = ()
) -> Quantity:
    """Return a measured quantity with the percentiles of its repetitions, ``spread``."""
    provenance = measured(source, num_samples)
    if not len(spread):
        return Quantity(value=value, unit=unit, provenance=provenance)
    p10, p90 = np.percentile(spread, [10, 90]).tolist()
    return _between(value, p10, p90, unit, provenance)


def rate(size: float, time: Summary, unit: Unit, source: str) -> Quantity:
    """Return the rate of repetitions that each process ``size``."""
    per_s = (size / time.median_s, size / time.p90_s, size / time.p10_s)
    return _between(*per_s, unit, measured(source + conditions([time]), time.num_samples))


def seconds(time: Summary, source: str, less_s: float = 0.0) -> Quantity:
    """Return the seconds of a repetition, minus ``less_s``."""
    value, p10, p90 = (max(x - less_s, 0.0) for x in (time.median_s, time.p10_s, time.p90_s))
    return _between(value, p10, p90, "s", measured(source, time.num_samples))


def _between(value: float, p10: float, p90: float, unit: Unit, provenance: Provenance) -> Quantity:
    return Quantity(value=value, unit=unit, provenance=provenance, p10=min(p10, value), p90=max(p90, value))


def build_curve(
    size_unit: Literal["bytes", "flop", "params"], sizes: Sequence[float], summaries: Sequence[Summary], source: str
) -> Curve:
    """Return the monotone curve through the summaries. The geometric mean of equal sizes makes one point."""
    groups: dict[float, list[Summary]] = defaultdict(list)
    for size, summary in zip(sizes, summaries, strict=False):
        groups[size].append(summary)
    ordered = sorted(groups)
    if num_left_out := len(sizes) - len(summaries):
        source += f"; the {num_left_out} largest sizes left out for lack of time"
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
    source += f", {summaries[0].manner}{conditions(summaries)}"
    return Curve(size_unit=size_unit, points=points, provenance=measured(source, num_samples))


def concurrently(calls: Sequence[Call], window_s: float) -> list[tuple[float, float]]:
    """Repeat blocking calls for ``window_s``, each in its own thread; the first one runs in the calling thread.

    Repetitions that end after the window are dropped, because other calls may have stopped by then. If a call completed
    only one repetition, that one stays.

    Returns:
        For each call the seconds per repetition, and the fraction of the window in which it waited for a core.
    """
    stop = threading.Event()
    barrier = threading.Barrier(len(calls))

    def repeat(call: Call, until_s: float) -> tuple[float, float]:
        with _queue_clock() as queued_s:
            barrier.wait()
            start_s, before_s = time.perf_counter(), queued_s()
            ends: list[tuple[float, float]] = []
            while not ends or (ends[-1][0] < until_s and not stop.is_set()):
                call()
                waited_s = queued_s() - before_s
                ends.append((time.perf_counter() - start_s, waited_s))
        complete = ends[:-1] or ends
        elapsed_s, waited_s = complete[-1]
        return max(elapsed_s - waited_s, 1e-9) / len(complete), waited_s / elapsed_s

    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(repeat, call, math.inf) for call in calls[1:]]
        try:
            first = repeat(calls[0], window_s)
        except BaseException:
            barrier.abort()  # release threads that still wait for this one
            raise
        finally:
            stop.set()
        return [first, *(future.result() for future in futures)]


def sample_groups(groups: Sequence[Sequence[Call]], budget_s: float) -> list[Floats]:
    """Run the calls of each group together, in short windows that alternate between groups.

    Windows count in which no call waited for a core, or the quarter with the least waiting.

    Returns:
        For each group the seconds per repetition of each call in each window that counts, float64[windows, calls].
    """
    window_s = max(budget_s / NUM_WINDOWS / len(groups), _MIN_WINDOW_S)
    windows: list[list[list[tuple[float, float]]]] = [[] for _ in groups]
    for _ in range(NUM_WINDOWS):
        for group, found in zip(groups, windows, strict=True):
            found.append(concurrently(group, window_s))
    results = []
    for found in windows:
        shares = np.array(found)  # window, call, (time, waited)
        waited = shares[:, :, 1].max(axis=1)
        allowed = max(_UNDISTURBED, float(np.quantile(waited, FASTEST)))
        results.append(shares[waited <= allowed, :, 0])
    return results


def median_s(windows_s: Floats) -> Floats:
    """Return the median time of each call of a group, float64[calls].

    The fastest repetitions are those in which other calls of the group stood still, so they do not count for more.
    """
    return np.asarray(np.exp(np.median(np.log(windows_s), axis=0)))
