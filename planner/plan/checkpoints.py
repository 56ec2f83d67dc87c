"""Checkpoints as a plan has them: what was asked, which levels at which intervals, and what is expected of them."""

import math
from typing import Annotated, Literal

from pydantic import Field

from planner.decisions import Frozen
from planner.terms import DEFAULT_RESTART_S, LEAST_KEPT, Level

Amount = Annotated[float, Field(gt=0)]
Bound = Literal["waste", "iteration", "drain", "endurance", "overhead", "lost work"]

_DAY_S = 86400.0


class CheckpointsAsked(Frozen):
    """What checkpoints are for, and what they may take.

    Attributes:
        mtbf_s: by level, mean seconds between failures of the whole job that this level survives and faster ones do
            not: of a process (memory), of a node's power (nvme), of a node or its drives (pfs).
        restart_s: from a failure until state can be read again; assumed.
        keep: checkpoints that stay at each level. There is room for two more, the newest and the next.
        buffer_bytes: of each rank, for what is copied and not yet written; ``None``: as much as pays.
        max_overhead: the most that checkpoints may add to training, as a fraction; ``None``: any.
        max_lost_s: the most that one failure may lose; ``None``: any.
        drive_writes_per_day: how often a node's drives may be written over in a day, for years; ``None``: as
            the profile says, if it does.
        num_iterations: of the whole run; ``None``: a day's.
    """

    mtbf_s: Annotated[dict[Level, Amount], Field(min_length=1)]
    restart_s: Annotated[float, Field(ge=0)] = DEFAULT_RESTART_S
    keep: Annotated[int, Field(ge=LEAST_KEPT)] = LEAST_KEPT
    buffer_bytes: Annotated[int, Field(ge=1)] | None = None
    max_overhead: Amount | None = None
    max_lost_s: Amount | None = None
    drive_writes_per_day: Amount | None = None
    num_iterations: Annotated[int, Field(ge=1)] | None = None

    @property
    def failures_per_s(self) -> float:
        """Failures of all kinds."""
        return sum(1 / mtbf_s for mtbf_s in self.mtbf_s.values())


class CheckpointLevel(Frozen):
    """Checkpoints at one level.

    Attributes:
        level: where they are.
        every: iterations from one to the next.
        bound: what decided that: the ``waste`` that is least, one ``iteration``, the ``drain`` of one before the next,
            the ``endurance`` of drives, or the limit of ``overhead`` or ``lost work``.
        cost_s: that one adds to training, at these intervals.
        latency_s: from its state to its being safe.
        restart_s: from a failure to training again from here.
        mtbf_s: between failures that this level is there for; ``None``: it only serves the slower ones.
        stored_bytes: in all checkpoints that stay, and one more; of one node, or of all (pfs).
        written_bytes_per_day: by checkpoints, of the same.
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
    """What another checkpoint engine would do at its own best interval.

    Attributes:
        name: of its policy.
        level: that it writes to.
        every: iterations from one checkpoint to the next.
        cost_s, latency_s, waste: see :class:`CheckpointLevel` and :class:`CheckpointPlan`.
        why_not: why there is none of all that.
    """

    name: str
    level: Level | None = None
    every: int | None = None
    cost_s: float | None = None
    latency_s: float | None = None
    waste: float | None = None
    why_not: str | None = None


class CheckpointPlan(Frozen):
    """When to make checkpoints, and at which levels.

    Attributes:
        asked: what for.
        iteration_s: of training without checkpoints.
        size_bytes: of one checkpoint, of all ranks.
        buffer_bytes: host memory of each rank for what is copied and not yet written.
        node_buffer_bytes: of one node.
        levels: fastest first. Each is a multiple of the one before, and filled from it.
        left_out: why other levels are not used.
        waste: expected fraction of time that is not progress: checkpoints, and what failures lose.
        overhead: what checkpoints add to training, as a fraction of it.
        most_lost_s: by one failure.
        engines: what others would do.
        assumptions: that no measurement stands behind.
    """

    asked: CheckpointsAsked
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
        return _DAY_S if self.asked.num_iterations is None else self.asked.num_iterations * self.iteration_s

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
        rate = self.asked.failures_per_s
        try:
            return (1 / rate + self.asked.restart_s) * math.expm1(rate * self.work_s)
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
