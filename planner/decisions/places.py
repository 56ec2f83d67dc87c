"""Where a unit's parameters, gradients, activations and optimizer state live, and how they move."""

from enum import StrEnum
from typing import Literal

from hwprofiles.quantity import Frozen

Activations = Literal["keep", "recompute", "offload", "offload-nvme"]


class Place(StrEnum):
    """Where a subgroup's optimizer state lives, and who updates it."""

    GPU = "gpu"  # resident on the device, updated there
    STREAM = "stream"  # lives on the host, streamed in, updated on the device, streamed back
    CPU = "cpu"  # lives on the host, updated by the host
    NVME = "nvme"  # lives on NVMe, read into host buffers, updated by the host, written back

    @property
    def by_host(self) -> bool:
        """Whether the host updates it."""
        return self in {Place.CPU, Place.NVME}


class UnitDecision(Frozen):
    """Where one unit's parameters, activations and optimizer state live.

    Attributes:
        params: ``gpu`` keeps them (or the rank's shard) on the device; ``host`` fetches them into a slot for every use;
            ``nvme`` reads them into a host buffer before that.
        activations: ``keep`` saved activations, ``recompute`` them, or ``offload`` outputs of products to the host
            (``offload-nvme``: on to NVMe) and recompute the rest. Equal for all units of one segment.
        update: one place per subgroup of the unit's (sharded) parameters, in order.
        streamed_gradients: where gradients of streamed subgroups wait for their update: on the ``gpu``, or on the
            ``host``, from where they come back with their state.
    """

    params: Literal["gpu", "host", "nvme"]
    activations: Activations
    update: tuple[Place, ...]
    streamed_gradients: Literal["gpu", "host"] = "host"

    @property
    def fetched(self) -> bool:
        """Whether the parameters are copied from the host for every use."""
        return self.params != "gpu"

    @property
    def offloads(self) -> bool:
        """Whether activations leave the device between forward and backward."""
        return self.activations in {"offload", "offload-nvme"}
