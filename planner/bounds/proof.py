"""What a plan says of how far from the best it can be: data only, which :mod:`.certificate` makes and checks."""

import itertools
from typing import Annotated

from pydantic import Field

from planner.choices.choice import Choice
from planner.decisions import Frozen


class Proof(Frozen):
    """What multipliers prove of all schedules of one choice and ZeRO stage.

    Attributes:
        choice: degrees and batch sizes.
        zero_stage: the stage.
        bound_s: no iteration of it is faster; ``None`` if none fits in memory.
        overrun: if none fits, the fraction of a tier by which memory is exceeded at least.
        multipliers: of conditions, by name.
    """

    choice: Choice
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    bound_s: float | None = None
    overrun: float | None = None
    multipliers: dict[str, float]


class Certificate(Frozen):
    """How fast any schedule could be at best.

    Attributes:
        bound_s: no schedule that does what was asked for on this machine is faster.
        placement_bound_s: nor is any that places everything as the plan does.
        order_bound_s: nor is the plan's own, in whatever way its tasks come to share (at least ``placement_bound_s``).
        proofs: of ``bound_s``, one for every choice and stage.
        placement: multipliers that prove ``placement_bound_s``.
    """

    bound_s: float
    placement_bound_s: float
    order_bound_s: float
    proofs: tuple[Proof, ...]
    placement: dict[str, float]

    def gap(self, iteration_s: float) -> float:
        """Return by what fraction an iteration is slower than the bound."""
        return iteration_s / self.bound_s - 1

    def gap_parts(self, iteration_s: float) -> dict[str, float]:
        """Return the parts of the gap, none negative: what lies between bounds that hold for fewer and fewer schedules.

        ``rounding`` lies between the best mixture and the plan's own placement, both under the necessary conditions;
        ``relaxation`` between what those ask of this placement and what this schedule's tasks and their order do;
        ``schedule`` between that and what the schedule is simulated to take, where tasks share.
        """
        steps_s = (self.bound_s, self.placement_bound_s, self.order_bound_s, iteration_s)
        parts = ((after_s - before_s) / self.bound_s for before_s, after_s in itertools.pairwise(steps_s))
        return dict(zip(("rounding", "relaxation", "schedule"), parts, strict=True))
