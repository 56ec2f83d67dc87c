"""What a plan says of how far from the best it can be: data only, which :mod:`.certificate` makes and checks."""

from typing import Annotated

from pydantic import Field

from planner.decisions import Frozen


class Proof(Frozen):
    """What multipliers prove of all schedules of one ZeRO stage.

    Attributes:
        zero_stage: the stage.
        bound_s: no iteration of it is faster; ``None`` if none fits in memory.
        overrun: if none fits, the fraction of a tier by which memory is exceeded at least.
        multipliers: of conditions, by name.
    """

    zero_stage: Annotated[int, Field(ge=0, le=3)]
    bound_s: float | None = None
    overrun: float | None = None
    multipliers: dict[str, float]


class Certificate(Frozen):
    """How fast any schedule could be at best.

    Attributes:
        bound_s: no schedule of this model, batch and number of devices on this machine is faster.
        placement_bound_s: nor is any that places everything as the plan does.
        proofs: of ``bound_s``, one for every stage.
        placement: multipliers that prove ``placement_bound_s``.
    """

    bound_s: float
    placement_bound_s: float
    proofs: tuple[Proof, ...]
    placement: dict[str, float]

    def gap(self, iteration_s: float) -> float:
        """Return by what fraction an iteration is slower than the bound."""
        return iteration_s / self.bound_s - 1

    @property
    def placement_gap(self) -> float:
        """Return the part of the gap that lies in where everything is placed; the rest is how the schedule runs."""
        return self.placement_bound_s / self.bound_s - 1
