"""What is compared with what, and the names that conditions on it share."""

import dataclasses
from typing import Self

from planner.decisions import Decisions
from planner.graph import Unit
from planner.schedule.tasks import Tier
from planner.terms import Storage

TIME = "iteration_s"
OVERRUN = "overrun"
# The share of a tier's memory that may be used: a variable, always 1, so that a search can ask for less.
ROOM = {Tier.GPU: "room on the device", Tier.HOST: "room on the host", Tier.NVME: "room on NVMe"}
# A variable for each size of units that may come into slots: the share of device memory that these slots take.
RING = "slots for units of "
# A limit that no iteration reaches.
NEVER_S = 1e9


@dataclasses.dataclass(frozen=True)
class Space:
    """What is decided already, the same for all schedules that are compared.

    Attributes:
        units: the model's units for one micro-batch, in forward order.
        given: all global decisions, without units: batch, precision, degrees, ZeRO stage, clipping, subgroups.
        storage: whether activations may leave the device, and whether anything may be on NVMe.
    """

    units: tuple[Unit, ...]
    given: Decisions
    storage: Storage = "never"

    @classmethod
    def of(cls, units: tuple[Unit, ...], decisions: Decisions, *, storage: Storage = "never") -> Self:
        """Return the space in which some decisions place everything: all that they decide for no unit is given."""
        return cls(units, decisions.model_copy(update={"units": {}}), storage)

    def stages(self) -> tuple[Self, ...]:
        """Return the spaces of all ZeRO stages that make sense for its degrees."""
        if self.given.data_parallel == 1:
            stages: tuple[int, ...] = (0,)
        else:
            stages = (0, 1) if self.given.pipeline_parallel > 1 else (0, 1, 2, 3)
        options = ({"zero_stage": stage} for stage in stages)
        return tuple(dataclasses.replace(self, given=self.given.model_copy(update=option)) for option in options)

    def without_order(self) -> Self:
        """Return the space in which nothing is given that conditions do not ask: who drives it, in which order."""
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
        "reduce_start",
        "update_start",
        "overlap_next_forward",
        "max_prefetch_params",
        "max_reuse_params",
        "module_hooks",
        "loop",
        "device_buffer_bytes",
    )
} | {"policy": "any"}
