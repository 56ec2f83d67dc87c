"""Resources that running tasks share, and one rank's part of them."""

import dataclasses
from enum import IntEnum

from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Curve
from planner.costs.layout import Layout

_WORTH_A_WARNING_S = 1e-3


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


class RankHardware:
    """One rank's part of a machine: a device, and a share of its node's host, links and drives.

    Args:
        profile: the machine.
        layout: where the ranks are.

    Attributes:
        profile: the machine.
        ranks_per_node: of a full node.
        ranks_per_uplink: ranks behind one switch; they copy at the same time, so all their bytes cross its uplink.
        warnings: sentences about readings outside the measured range, in order of appearance.
    """

    def __init__(self, profile: HardwareProfile, layout: Layout) -> None:
        self.profile = profile
        self.ranks_per_node = layout.ranks_per_node
        self.ranks_per_uplink = layout.ranks_per_uplink(profile)
        self.warnings: dict[str, None] = {}

    def capacities(self) -> dict[Resource, float]:
        """Return one rank's capacity of every resource."""
        profile, ranks = self.profile, self.ranks_per_node
        link = profile.host_link
        capacity = {
            Resource.DEVICE: 1.0,
            Resource.CORES: profile.host.num_cores / ranks,
            Resource.DRAM: profile.host.dram_bytes_per_s.value / ranks,
            Resource.LINK_DOWN: link.down.best_rate_per_s() / self.ranks_per_uplink,
            Resource.LINK_UP: link.up.best_rate_per_s() / self.ranks_per_uplink,
            Resource.LINK: link.both_bytes_per_s.value / self.ranks_per_uplink,
            Resource.FABRIC: 1.0,
            Resource.PFS: 1.0,  # only checkpoints are written there: see planner.checkpoints.costs
            Resource.INTERPRETER: 1.0,
            **self.storage_capacities(),
        }
        for resource, amount in capacity.items():
            if amount <= 0:
                name = resource.name.lower()
                raise ValueError(f"profile {profile.name} gives {name} a capacity of {amount:g}; it must be positive")
        return capacity

    def storage_capacities(self) -> dict[Resource, float]:
        """Return a rank's share of the node's drives. Without drives no task uses them, and any number will do."""
        nvme = self.profile.nvme
        if nvme is None:
            return {Resource.NVME_READ: 1.0, Resource.NVME_WRITE: 1.0, Resource.NVME: 1.0}
        read, write = nvme.read.best_rate_per_s(), nvme.write.best_rate_per_s()
        both = nvme.both_bytes_per_s.value if nvme.both_bytes_per_s else read + write
        ranks = self.ranks_per_node
        return {Resource.NVME_READ: read / ranks, Resource.NVME_WRITE: write / ranks, Resource.NVME: both / ranks}

    def host_pass(self, num_bytes: int) -> Price:
        """Price a pass over so many bytes of host memory, by the cores that also update."""
        host, ranks = self.profile.host, self.ranks_per_node
        rate = min(host.elementwise_bytes_per_s.value, host.dram_bytes_per_s.value) / ranks
        uses = ((Resource.CORES, host.num_optimizer_cores / ranks), (Resource.DRAM, self.at_most_dram(rate)))
        return Price(0.0, num_bytes / rate, uses)

    def at_most_dram(self, rate: float) -> float:
        """Bound a task's own demand by the whole capacity, so that a task alone always runs at full speed."""
        return min(rate, self.profile.host.dram_bytes_per_s.value / self.ranks_per_node)

    def read_s(self, curve: Curve, size: float, what: str) -> float:
        """Return the time that a curve gives for a size; warn once if it was not measured near that size."""
        low, high = curve.points[0].size, curve.points[-1].size
        # Below the range, the error is at most the time of the first point. If that is small, there is no warning.
        if size > high or (0 < size < low and curve.points[0].median_s > _WORTH_A_WARNING_S):
            self.warnings.setdefault(
                f"{what} times are extrapolated: {self.profile.name} covers {low:.3g} to {high:.3g} {curve.size_unit}"
            )
        return curve.time_s(size)
