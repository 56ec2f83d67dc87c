"""Fit a profile to the lanes of one run of a plan, so that the next plan is for the machine as it is now.

A run yields the measured time of every task. Tasks of one class (computing, copies one way, updates on the host and so
on) are priced with the same quantities. One factor for each class makes the simulated time of these tasks equal to the
measured one. Tasks slow each other down, in the run and in the simulation. So the factors are not simply the ratios of
the first comparison: the schedule is simulated again with each new profile, until the factors converge. (Fitting to
whole runs, :mod:`benchmarks.published.fitting`, knows no tasks and needs several runs.)

A factor is believed as far as it stands out from how much iterations differ among themselves: where neighbours on a
server share its memory, one run says little of the next. Of its logarithm remains the share ``1 - (d / log factor)^2``,
and nothing below zero (the positive part of James and Stein's estimate, 1961); ``d`` is the median deviation of the
logarithm of the class's time over iterations.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import ATTENTION_TYPES, HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from planner.costs.model import CostModel
from planner.decisions import Decisions, Precision
from planner.graph import Unit
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation, run_until_steady

RANGE: Final = 8.0
"""The largest factor by which a quantity may change."""
_MOST_ROUNDS: Final = 12
_CLOSE: Final = 0.01  # classes whose times are this close to the measured ones are not changed

CLASSES: Final[Mapping[str, frozenset[Lane]]] = {
    "computing": frozenset({Lane.COMPUTE}),
    "launching": frozenset({Lane.LAUNCH}),
    "device updates": frozenset({Lane.GPU_UPDATE}),
    "host updates": frozenset({Lane.CPU}),
    "copies to the device": frozenset({Lane.H2D, Lane.STATE_IN, Lane.ACTIVATION_IN}),
    "copies from the device": frozenset({Lane.D2H, Lane.STATE_OUT, Lane.ACTIVATION_OUT}),
    "collectives": frozenset({Lane.COLLECTIVE}),
    "reads from NVMe": frozenset({Lane.NVME_READ, Lane.NVME_STATE_IN}),
    "writes to NVMe": frozenset({Lane.NVME_WRITE, Lane.NVME_STATE_OUT}),
}
"""Tasks that are fitted together, by the lanes that they are on."""
_PRICED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "launching": ("device.step_s", "device.hook_s"),
    "device updates": ("device.optimizer",),
    "host updates": ("host.optimizer", "host.optimizer_process_params_per_s"),
    "copies to the device": ("host_link.down",),
    "copies from the device": ("host_link.up",),
    "collectives": ("intra_node.bytes_per_s", "intra_node.latency_s", "inter_node.bytes_per_s", "inter_node.latency_s"),
    "reads from NVMe": ("nvme.read",),
    "writes to NVMe": ("nvme.write",),
}
# The limit of both directions together is scaled with the faster direction.
_BOTH: Final[Mapping[str, tuple[str, str]]] = {
    "host_link.both_bytes_per_s": ("copies to the device", "copies from the device"),
    "nvme.both_bytes_per_s": ("reads from NVMe", "writes to NVMe"),
}


@dataclasses.dataclass(frozen=True)
class Refit:
    """The result.

    Attributes:
        profile: with the fitted quantities.
        slower: by class of tasks, the factor on their time when they run alone.
        predicted_s: iteration time of the measured schedule on the new profile.
        measured_s: median iteration time of the run.
    """

    profile: HardwareProfile
    slower: dict[str, float]
    predicted_s: float
    measured_s: float


def refit(
    profile: HardwareProfile,
    units: tuple[Unit, ...],
    decisions: Decisions,
    measured: Timeline,
    iterations: Sequence[int],
    run: str = "a run",
) -> Refit:
    """Fit a profile to a run of these decisions.

    Args:
        profile: the profile of the run's prediction.
        units: of the model.
        decisions: the executed decisions.
        measured: the run's timeline.
        iterations: iterations of the run to read; each and its successor must be complete.
        run: name of the run, for the provenance.

    Raises:
        ValueError: ``iterations`` is empty.
    """
    if not iterations:
        raise ValueError("no steady iteration was measured; run more iterations")
    busy_s = [_busy_s(measured, i) for i in iterations]
    wanted_s = {name: statistics.median(each[name] for each in busy_s) for name in CLASSES}
    deviations = {name: _deviation([each[name] for each in busy_s]) for name in CLASSES}
    source = f"tasks of {len(iterations)} iterations of {run}"
    slower: dict[str, float] = {}
    fitted, simulation = profile, _simulated(profile, units, decisions, measured)
    for _ in range(_MOST_ROUNDS):
        found_s = _busy_s(simulation.timeline, simulation.steady)
        nearer = {
            name: min(max(slower.get(name, 1.0) * wanted_s[name] / found_s[name], 1 / RANGE), RANGE)
            for name in CLASSES
            if wanted_s[name] > 0 and found_s[name] > 0
        }
        if all(abs(math.log(factor / slower.get(name, 1.0))) < _CLOSE for name, factor in nearer.items()):
            break
        slower = nearer
        fitted = _slowed(profile, decisions.precision, slower, source)
        simulation = _simulated(fitted, units, decisions, measured)
    believed = {name: _believed(factor, deviations[name]) for name, factor in slower.items()}
    if believed != slower:
        slower, fitted = believed, _slowed(profile, decisions.precision, believed, source)
        simulation = _simulated(fitted, units, decisions, measured)
    predicted_s = simulation.timeline.period_s(simulation.steady)
    return Refit(fitted, slower, predicted_s, statistics.median(measured.period_s(i) for i in iterations))


def _deviation(times_s: Sequence[float]) -> float:
    """Return the median deviation of the logarithms of times from their median."""
    logarithms = [math.log(time_s) for time_s in times_s if time_s > 0]
    if not logarithms:
        return 0.0
    middle = statistics.median(logarithms)
    return statistics.median(abs(each - middle) for each in logarithms)


def _believed(factor: float, deviation: float) -> float:
    """Return what of a factor is believed if iterations differ so much."""
    logarithm = math.log(factor)
    if abs(logarithm) <= deviation:
        return 1.0
    return factor if not deviation else math.exp(logarithm - deviation**2 / logarithm)


def _simulated(
    profile: HardwareProfile, units: tuple[Unit, ...], decisions: Decisions, measured: Timeline
) -> Simulation:
    return run_until_steady(measured.schedule, CostModel.of(profile, units, decisions))


def _busy_s(timeline: Timeline, iteration: int) -> dict[str, float]:
    by_lane = timeline.busy_s(iteration)
    return {name: sum(by_lane.get(lane, 0.0) for lane in lanes) for name, lanes in CLASSES.items()}


def _slowed(
    profile: HardwareProfile, precision: Precision, slower: Mapping[str, float], source: str
) -> HardwareProfile:
    """Return a profile on which the tasks of each class take longer by the factors in ``slower``."""
    dtype, products = precision.weights, precision.products
    elementwise = ("device.elementwise", "device.elementwise_fp32")
    kinds = [kind for kind in ATTENTION_TYPES if kind.startswith(dtype)]
    attention = (f"device.{name}.{kind}" for name in ("attention", "attention_backward") for kind in kinds)
    computing: tuple[str, ...] = (f"device.gemm.{dtype}", *attention, *elementwise)
    if products:
        computing = (f"device.gemm.{products}", *computing)
    issues = "launching" if profile.device.kind == "gpu" else "computing"  # the class that includes launch times
    paths = {**_PRICED_BY, "computing": computing}
    paths[issues] = (*paths[issues], "device.issue_s")
    factors = {path: factor for name, factor in slower.items() for path in paths[name]}
    for both, (one, other) in _BOTH.items():
        factors[both] = min(slower.get(one, 1.0), slower.get(other, 1.0))
    known = quantities(profile)
    numbers = {}
    for path, factor in factors.items():
        is_changed = not math.isclose(factor, 1.0, rel_tol=1e-9)
        if (item := known.get(path)) is not None and is_changed and number(item):
            is_time = isinstance(item, Quantity) and item.unit == "s"
            numbers[path] = number(item) * factor if is_time else number(item) / factor
    return replace(profile, numbers, Provenance(origin="fitted", source=source))
