"""Predictions for a schedule: time by phase, memory by tier, and the critical path."""

from collections import Counter
from collections.abc import Mapping

from hwprofiles.quantity import Frozen
from planner.costs.model import CostModel, total_flop
from planner.decisions import Decisions
from planner.graph import Unit
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import TIERS, MemoryClass, Tier
from planner.schedule.timeline import Timeline, memory_uses, peak_bytes
from planner.simulate.critical_path import critical_path
from planner.simulate.machine import Simulation


class TierMemory(Frozen):
    """Peak memory of one tier: of one device, or of one node's host.

    Attributes:
        peak_bytes: most bytes held at any moment of the iteration.
        capacity_bytes: the capacity of the tier.
        by_class: bytes of each class at that moment.
    """

    peak_bytes: int
    capacity_bytes: int
    by_class: dict[MemoryClass, int]

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the peak exceeds the capacity; 0 if it fits."""
        return max(self.peak_bytes - self.capacity_bytes, 0)


class Prediction(Frozen):
    """One steady iteration, as the simulator sees it.

    Attributes:
        forward_s, backward_s, update_s, loop_s, iteration_s: seconds in each phase, and in all of them; see
            :meth:`planner.schedule.timeline.Timeline.phases`.
        tokens_per_s: over all devices.
        model_flop_per_s: per device, without recomputation.
        memory: peaks by tier.
        busy_s: seconds that each lane is occupied.
        critical_s: each lane's share of the critical path, in seconds.
        converged: whether the simulated iterations repeated exactly.
        warnings: what the user should know about the numbers.
        interval_s: within which the iteration's time is in 8 of 10 cases, see [Note: Error bars] in
            :mod:`planner.simulate.uncertainty`; ``None``: not known.
    """

    forward_s: float
    backward_s: float
    update_s: float
    loop_s: float
    iteration_s: float
    tokens_per_s: float
    model_flop_per_s: float
    memory: dict[Tier, TierMemory]
    busy_s: dict[str, float]
    critical_s: dict[str, float]
    converged: bool
    warnings: tuple[str, ...] = ()
    interval_s: tuple[float, float] | None = None

    @property
    def fits(self) -> bool:
        """Whether every tier holds its peak."""
        return not self.missing_bytes

    @property
    def missing_bytes(self) -> dict[Tier, int]:
        """Missing bytes of the tiers that are too small."""
        return {tier: use.missing_bytes for tier, use in self.memory.items() if use.missing_bytes}


def predict(
    units: tuple[Unit, ...], seq_len: int, decisions: Decisions, cost: CostModel, simulation: Simulation
) -> Prediction:
    """Summarise a simulation as a prediction.

    Args:
        units: for one micro-batch.
        seq_len: tokens per sequence.
        decisions: what was simulated.
        cost: with these prices.
        simulation: with this result.
    """
    timeline, steady = simulation.timeline, simulation.steady
    iteration_s = simulation.iteration_s
    return Prediction(
        **{f"{phase}_s": seconds for phase, seconds in simulation.phases.items()},
        iteration_s=iteration_s,
        tokens_per_s=decisions.num_sequences * seq_len / iteration_s,
        model_flop_per_s=total_flop(units, decisions) / iteration_s,
        memory=memory_peaks(timeline, steady, cost),
        busy_s={lane.value: seconds for lane, seconds in sorted(timeline.busy_s(steady).items())},
        critical_s=critical_path(timeline, steady),
        converged=simulation.converged,
        warnings=tuple(cost.warnings),
    )


def memory_peaks(timeline: Timeline, iteration: int, cost: CostModel) -> dict[Tier, TierMemory]:
    """Return peaks and capacities: of one device, and of a node's host and drives with all its ranks."""
    capacity, found = capacities(cost), {}
    for tier, uses in memory_uses(timeline, iteration).items():
        count_of = _sharing(tier, {stage: use.peak_bytes for stage, use in uses.items()}, cost)
        by_class = Counter[MemoryClass]()
        for stage, count in count_of.items():
            by_class.update({c: count * num_bytes for c, num_bytes in uses[stage].peak_by_class.items()})
        found[tier] = TierMemory(
            peak_bytes=sum(count * uses[stage].peak_bytes for stage, count in count_of.items()),
            capacity_bytes=capacity[tier],
            by_class=dict(sorted(by_class.items())),
        )
    return found


def capacities(cost: CostModel) -> dict[Tier, int]:
    """Return the bytes of one device, of one node's host memory and of its NVMe."""
    profile = cost.profile
    return {
        Tier.GPU: int(profile.device.memory_bytes.value),
        Tier.HOST: int(profile.host.memory_bytes.value),
        Tier.NVME: int(profile.nvme.capacity_bytes.value) if profile.nvme else 0,
    }


def needs_bytes(timeline: Timeline, iteration: int, cost: CostModel) -> dict[Tier, int]:
    """Return only the peaks of :func:`memory_peaks`. A search needs them hundreds of times."""
    return {tier: _of_all(tier, peaks, cost) for tier, peaks in peak_bytes(timeline, iteration).items()}


def _sharing(tier: Tier, peaks: Mapping[int, int], cost: CostModel) -> dict[int, int]:
    """Return the numbers of ranks, by stage, that share the fullest memory of a tier, given the peaks of a rank's.

    A node's are added up, although those of different stages come at different times.
    """
    if tier is Tier.GPU:
        return {max(peaks, key=lambda stage: peaks[stage]): 1}
    nodes = [{stage: n for stage, n in enumerate(counts) if n and stage in peaks} for counts in cost.stages_on_nodes]
    return max(nodes, key=lambda count_of: sum(n * peaks[stage] for stage, n in count_of.items()))


def _of_all(tier: Tier, peaks: Mapping[int, int], cost: CostModel) -> int:
    return sum(count * peaks[stage] for stage, count in _sharing(tier, peaks, cost).items())


def always_held(schedule: Schedule, cost: CostModel) -> dict[Tier, int]:
    """Return the bytes that are always held on each tier: a lower bound of the peak without a simulation."""
    held = zip(TIERS, schedule.arrays.always_held.tolist(), strict=True)
    return {tier: _of_all(tier, dict(enumerate(by_stage)) or {0: 0}, cost) for tier, by_stage in held}
