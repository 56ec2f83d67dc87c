"""Resources that running tasks share, and prices."""

import dataclasses
from enum import IntEnum


class Resource(IntEnum):
    """A resource that running tasks share."""

    DEVICE = 0  # the device's compute: capacity 1
    CORES = 1  # CPU cores
    DRAM = 2  # bytes/s
    LINK_DOWN = 3  # bytes/s towards the device
    LINK_UP = 4
    LINK = 5  # both directions together
    FABRIC = 6
    NVME_READ = 7  # bytes/s
    NVME_WRITE = 8
    NVME = 9  # both directions together
    PFS = 10  # bytes/s to the file system that all nodes share
    INTERPRETER = 11  # the Python interpreter of the training process: capacity 1


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """The duration of one task when it runs alone, and the resources that it uses.

    Attributes:
        latency_s: paid first, without any resource.
        duration_s: at full speed.
        uses: (resource, amount per second at full speed), resources ascending.
        weight: the weight of its speed when it competes with others; see [Note: Fluid sharing].
    """

    latency_s: float
    duration_s: float
    uses: tuple[tuple[Resource, float], ...] = ()
    weight: float = 1.0

    @property
    def alone_s(self) -> float:
        """The time from its start to its end when it runs alone."""
        return self.duration_s + self.latency_s
