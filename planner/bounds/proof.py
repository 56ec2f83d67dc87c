"""The data of a certificate, as it stands in a plan; :mod:`.certificate` makes and checks it."""

import itertools
from typing import Annotated

from pydantic import Field

from hwprofiles.quantity import Frozen
from planner.decisions import Choice


class Proof(Frozen):
    """Multipliers, and what they prove about all schedules of one choice and ZeRO stage.

    Attributes:
        choice: degrees and batch sizes.
        zero_stage: the stage.
        bound_s: a lower bound on the iteration time; ``None`` if no schedule fits in memory.
        overrun: if none fits, a lower bound on the fraction by which the memory of a tier is exceeded.
        multipliers: by the name of the condition.
    """

    choice: Choice
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    bound_s: float | None = None
    overrun: float | None = None
    multipliers: dict[str, float]


class Certificate(Frozen):
    """Lower bounds on the iteration time, and their proofs.

    Attributes:
        bound_s: no schedule for this request and machine is faster.
        placement_bound_s: no schedule with the plan's placement is faster.
        order_bound_s: the plan's own schedule is not faster, however its tasks share; at least ``placement_bound_s``.
        proofs: the proofs of ``bound_s``, one for every choice and stage.
        placement: multipliers that prove ``placement_bound_s``.
    """

    bound_s: float
    placement_bound_s: float
    order_bound_s: float
    proofs: tuple[Proof, ...]
    placement: dict[str, float]

    @property
    def num_multipliers(self) -> int:
        """Number of multipliers in all proofs."""
        return sum(len(proof.multipliers) for proof in self.proofs) + len(self.placement)

    def gap(self, iteration_s: float) -> float:
        """Return the fraction by which an iteration is slower than the bound."""
        return iteration_s / self.bound_s - 1

    def gap_parts(self, iteration_s: float) -> dict[str, float]:
        """Return the parts of the gap: the differences between bounds that hold for fewer and fewer schedules.

        ``rounding`` is the difference between the best mixture and the plan's placement, both under the necessary
        conditions. ``relaxation`` is the difference to what the schedule's tasks and their order require. ``schedule``
        is the rest: what simulated sharing of resources adds.
        """
        steps_s = (self.bound_s, self.placement_bound_s, self.order_bound_s, iteration_s)
        parts = ((after_s - before_s) / self.bound_s for before_s, after_s in itertools.pairwise(steps_s))
        return dict(zip(("rounding", "relaxation", "schedule"), parts, strict=True))
