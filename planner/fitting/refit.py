"""A profile fitted to the lanes of one run of a plan, so that the next plan is for the machine as it is now.

[Note: Lanes] What was measured of a run is the time of every task. Tasks of one class (computing, copies one way,
updates on the host and so on) share the quantities that price them, and one factor for each class makes the simulated
schedule take as long in these tasks as the measured one did. Tasks slow each other down, in the run and in the
simulation, so the factors are not the ratios of the first comparison: the schedule is simulated again with each new
profile, until they stay. (Fitting to whole runs, :mod:`planner.fitting.from_runs`, has no tasks to look at, and needs
several.)
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

from hwprofiles.paths import number, quantities, replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance, Quantity
from planner.costs.model import CostModel
from planner.decisions import Decisions
from planner.graph import Unit
from planner.schedule.tasks import Lane
from planner.schedule.timeline import Timeline
from planner.simulate.machine import Simulation, run_until_steady

RANGE: Final = 8.0
"""No quantity is believed to be further off than this factor."""
_MOST_ROUNDS: Final = 12
_CLOSE: Final = 0.01  # classes whose times are this near to the measured ones are left alone

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
# Both directions together are bound by what the better of the two is now.
_BOTH: Final[Mapping[str, tuple[str, str]]] = {
    "host_link.both_bytes_per_s": ("copies to the device", "copies from the device"),
    "nvme.both_bytes_per_s": ("reads from NVMe", "writes to NVMe"),
}


@dataclasses.dataclass(frozen=True)
class Refit:
    """What came of it.

    Attributes:
        profile: with the fitted quantities.
        slower: by class of tasks, how many times longer than before they take alone.
        predicted_s: what an iteration of the measured schedule takes on the profile.
        measured_s: what it took, at the median.
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
    """Fit a profile to a run of these decisions; see [Note: Lanes].

    Args:
        profile: what the run was predicted with.
        units: the model's.
        decisions: what was executed.
        measured: what came of it.
        iterations: which iterations of it to read: complete ones, with their successors.
        run: what the fitted quantities call it.

    Raises:
        ValueError: ``iterations`` is empty.
    """
    if not iterations:
        raise ValueError("no steady iteration was measured; run more iterations")
    wanted_s = {name: statistics.median(_busy_s(measured, i)[name] for i in iterations) for name in CLASSES}
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
        fitted = _slowed(profile, decisions.precision.weights, slower, source)
        simulation = _simulated(fitted, units, decisions, measured)
    predicted_s = simulation.timeline.period_s(simulation.steady)
    return Refit(fitted, slower, predicted_s, statistics.median(measured.period_s(i) for i in iterations))


def _simulated(
    profile: HardwareProfile, units: tuple[Unit, ...], decisions: Decisions, measured: Timeline
) -> Simulation:
    return run_until_steady(measured.schedule, CostModel.of(profile, units, decisions))


def _busy_s(timeline: Timeline, iteration: int) -> dict[str, float]:
    """Return the seconds of all tasks of an iteration by class."""
    by_lane = timeline.busy_s(iteration)
    return {name: sum(by_lane.get(lane, 0.0) for lane in lanes) for name, lanes in CLASSES.items()}


def _slowed(profile: HardwareProfile, dtype: str, slower: Mapping[str, float], source: str) -> HardwareProfile:
    """Return a profile on which the tasks of each class take so many times longer."""
    elementwise = ("device.elementwise", "device.elementwise_fp32")
    computing: tuple[str, ...] = (f"device.gemm.{dtype}", f"device.attention.{dtype}", *elementwise)
    issues = "launching" if profile.device.kind == "gpu" else "computing"  # who waits while kernels are issued
    paths = {**_PRICED_BY, "computing": computing}
    paths[issues] = (*paths[issues], "device.issue_s")
    factors = {path: factor for name, factor in slower.items() for path in paths[name]}
    for both, (one, other) in _BOTH.items():
        factors[both] = min(slower.get(one, 1.0), slower.get(other, 1.0))
    known = quantities(profile)
    numbers = {}
    for path, factor in factors.items():
        if (item := known.get(path)) is not None and factor != 1 and number(item):
            is_time = isinstance(item, Quantity) and item.unit == "s"
            numbers[path] = number(item) * factor if is_time else number(item) / factor
    return replace(profile, numbers, Provenance(origin="fitted", source=source))
