"""The set of schedules that are compared with one another, and names of variables in conditions on it."""

import dataclasses
from typing import Self

from planner.decisions import Decisions
from planner.graph import Unit
from planner.schedule.tasks import Tier
from planner.terms import Storage

TIME = "iteration_s"
OVERRUN = "overrun"
# A variable for the usable fraction of a tier's memory. It is 1; a search may set it lower.
ROOM = {Tier.GPU: "room on the device", Tier.HOST: "room on the host", Tier.NVME: "room on NVMe"}
# A variable for each ring of slots: the fraction of device memory that the ring takes.
RING = "slots for units of "
# Longer than any iteration.
NEVER_S = 1e9


@dataclasses.dataclass(frozen=True)
class Space:
    """The decisions that all compared schedules share.

    Attributes:
        units: the model's units for one micro-batch, in forward order.
        given: all decisions that are not about single units: batch, precision, degrees, ZeRO stage, clipping,
            subgroups.
        storage: whether activations may leave the device, and whether anything may be on NVMe.
    """

    units: tuple[Unit, ...]
    given: Decisions
    storage: Storage = "never"

    @classmethod
    def of(cls, units: tuple[Unit, ...], decisions: Decisions, *, storage: Storage = "never") -> Self:
        """Return the space of a plan's decisions: those that are not about single units are given."""
        return cls(units, decisions.model_copy(update={"units": {}}), storage)

    def stages(self) -> tuple[Self, ...]:
        """Return the spaces of all ZeRO stages that make sense for its degrees."""
        if self.given.data_parallel == 1:
            stages: tuple[int, ...] = (0,)
        else:
            stages = (0, 1) if self.given.pipeline_parallel > 1 else (0, 1, 2, 3)
            stages = stages[:3] if any(unit.stays for unit in self.units) else stages
        options = ({"zero_stage": stage} for stage in stages)
        return tuple(dataclasses.replace(self, given=self.given.model_copy(update=option)) for option in options)

    def without_order(self) -> Self:
        """Return the space without what conditions ignore: the policy and the order of updates."""
        return dataclasses.replace(self, given=self.given.model_copy(update=_ORDER))


_ORDER = {
    name: Decisions.model_fields[name].default
    for name in (
        "num_param_slots",
        "num_state_slots",
        "num_nvme_slots",
        "num_gradient_slots",
        "num_activation_slots",
        "spill_gradients",
        "update_order",
        "update_start",
        "overlap_next_forward",
    )
} | {"policy": "any"}
