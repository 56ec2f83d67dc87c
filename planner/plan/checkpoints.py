"""The checkpoints of a plan: the user's limits, levels and intervals, and the expected waste."""

import math
from typing import Annotated, Literal

from pydantic import Field

from hwprofiles.quantity import Frozen
from planner.terms import DAY_S, DEFAULT_RESTART_S, MIN_CHECKPOINTS, Level

Amount = Annotated[float, Field(gt=0)]
Bound = Literal["waste", "iteration", "drain", "endurance", "overhead", "lost work"]


class CheckpointRequest(Frozen):
    """The failures from which checkpoints must recover, and the limits on checkpoints.

    Attributes:
        mtbf_s: by level, mean seconds between failures of the whole job that this level survives and faster levels do
            not: of a process (memory), of a node's power (nvme), of a node or its drives (pfs).
        restart_s: assumed time from a failure until state can be read again.
        keep: checkpoints to keep at each level. There is room for two more, the newest and the next.
        buffer_bytes: host memory of each rank for copies that are not written yet; ``None``: as much as pays.
        max_overhead: largest time that checkpoints may add to training, as a fraction; ``None``: no limit.
        max_lost_s: longest time that one failure may lose; ``None``: no limit.
        drive_writes_per_day: times that a node's drives may be overwritten in a day, for years; ``None``: the
            profile's value, if it has one.
        num_iterations: of the whole run; ``None``: those of one day.
    """

    mtbf_s: Annotated[dict[Level, Amount], Field(min_length=1)]
    restart_s: Annotated[float, Field(ge=0)] = DEFAULT_RESTART_S
    keep: Annotated[int, Field(ge=MIN_CHECKPOINTS)] = MIN_CHECKPOINTS
    buffer_bytes: Annotated[int, Field(ge=1)] | None = None
    max_overhead: Amount | None = None
    max_lost_s: Amount | None = None
    drive_writes_per_day: Amount | None = None
    num_iterations: Annotated[int, Field(ge=1)] | None = None

    @property
    def failures_per_s(self) -> float:
        """Rate of failures of all kinds."""
        return sum(1 / mtbf_s for mtbf_s in self.mtbf_s.values())


class CheckpointLevel(Frozen):
    """Checkpoints at one level.

    Attributes:
        level: where they are stored.
        every: iterations between checkpoints.
        bound: what decided the interval: the least ``waste``, one ``iteration``, the ``drain`` of one checkpoint before
            the next, the ``endurance`` of drives, or the limit of ``overhead`` or ``lost work``.
        cost_s: time that one adds to training, at these intervals.
        latency_s: time until one is safe at this level.
        restart_s: time from a failure until training goes on from this level.
        mtbf_s: time between failures from which this level recovers; ``None``: it only feeds slower levels.
        stored_bytes: in all kept checkpoints and one more, on one node, or on all (pfs).
        written_bytes_per_day: by checkpoints, on one node, or on all (pfs).
    """

    level: Level
    every: int
    bound: Bound
    cost_s: float
    latency_s: float
    restart_s: float
    mtbf_s: float | None = None
    stored_bytes: int
    written_bytes_per_day: float


class EngineCheckpoints(Frozen):
    """Another checkpoint engine at its own best interval.

    Attributes:
        name: of its policy.
        level: to which it writes.
        every: iterations between checkpoints.
        cost_s, latency_s, waste: see :class:`CheckpointLevel` and :class:`CheckpointPlan`.
        why_not: why it cannot be used; the other fields are then ``None``.
    """

    name: str
    level: Level | None = None
    every: int | None = None
    cost_s: float | None = None
    latency_s: float | None = None
    waste: float | None = None
    why_not: str | None = None


class CheckpointPlan(Frozen):
    """Levels and intervals of checkpoints, and the expected waste.

    Attributes:
        request: failures and limits.
        iteration_s: of training without checkpoints.
        size_bytes: of one checkpoint, of all ranks.
        buffer_bytes: host memory of each rank for copies that are not written yet.
        node_buffer_bytes: of one node.
        levels: fastest first. Each interval is a multiple of the one before, and each level is filled from the one
            before.
        left_out: why other levels are not used.
        waste: expected fraction of time that is not progress: checkpoints, and work lost in failures.
        overhead: time that checkpoints add to training, as a fraction of it.
        most_lost_s: longest time that one failure can lose.
        engines: other engines at their best intervals.
        assumptions: values that were not measured, in words.
    """

    request: CheckpointRequest
    iteration_s: float
    size_bytes: int
    buffer_bytes: int
    node_buffer_bytes: int
    levels: Annotated[tuple[CheckpointLevel, ...], Field(min_length=1)]
    left_out: dict[Level, str]
    waste: float
    overhead: float
    most_lost_s: float
    engines: tuple[EngineCheckpoints, ...]
    assumptions: tuple[str, ...]

    @property
    def work_s(self) -> float:
        """Seconds of training that the run has, or a day's."""
        return DAY_S if self.request.num_iterations is None else self.request.num_iterations * self.iteration_s

    @property
    def expected_s(self) -> float:
        """Seconds that it is expected to take, with failures."""
        return self.work_s / (1 - self.waste) if self.waste < 1 else math.inf

    @property
    def without_s(self) -> float:
        """Seconds that it is expected to take without checkpoints: a failure then loses all of it.

        Of failures at exponential times, so many per second, and a restart after each:
        ``(1 / rate + restart) * (exp(rate * work) - 1)``.
        """
        rate = self.request.failures_per_s
        try:
            return (1 / rate + self.request.restart_s) * math.expm1(rate * self.work_s)
        except OverflowError:
            return math.inf

    def every(self, level: Level) -> int:
        """Return how many iterations lie between two checkpoints at a level.

        Raises:
            ValueError: the plan has none there.
        """
        found = {each.level: each.every for each in self.levels}
        if level not in found:
            raise ValueError(
                f"the plan makes no checkpoints at level {level}, but at {', '.join(found)}; give the interval, or "
                "plan again with other failures"
            )
        return found[level]
