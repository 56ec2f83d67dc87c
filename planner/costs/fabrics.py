"""What joins the ranks: which fabric a collective or a transfer takes, and what each rank sends there.

[Note: Rings] One ring goes through all ranks of a group: each sends and receives all but its own share of the bytes. It
enters each node once, over the NICs of its devices together, and the slower of both levels sets the pace (bus
bandwidth of NCCL's rings, see ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests).
"""

import dataclasses

from hwprofiles.profile import Fabric, HardwareProfile
from planner.costs.layout import Group, Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """One level of a collective.

    Attributes:
        fabric: that it crosses.
        num_bytes: the bytes of the collective as each rank sees them on this level.
        time_s: at full speed, latency apart.
    """

    fabric: Fabric
    num_bytes: float
    time_s: float


class Fabrics:
    """The fabrics of a machine for ranks laid out on its nodes; see [Note: Rings].

    Args:
        profile: the machine.
        layout: where the ranks are.
    """

    def __init__(self, profile: HardwareProfile, layout: Layout) -> None:
        self._profile = profile
        self._layout = layout

    def rings(self, group: Group, num_bytes: float) -> list[Ring]:
        """Return the levels of a collective, inside a node and between nodes; none for a group of one rank.

        Args:
            group: whose ranks take part.
            num_bytes: that every rank has in the end, times how often the ring carries it round.

        Raises:
            ValueError: the group needs several nodes, and nothing joins them.
        """
        size = group.per_node * group.nodes
        rings = []
        if group.per_node > 1:
            rings.append(_ring(self._inside(), num_bytes, size))
        if group.nodes > 1:
            rings.append(_ring(self._between_nodes(), num_bytes / group.per_node, size))
        return rings

    def all_to_all_s(self, group: Group, num_bytes: float) -> float:
        """Return the time in which every rank of a group sends each other rank its part of so many bytes."""
        size = group.per_node * group.nodes
        inside, across = num_bytes * (group.per_node - 1) / size, num_bytes * (size - group.per_node) / size
        levels = [(self._inside(), inside)] if inside else []
        levels += [(self._between_nodes(), across)] if across else []
        slowest_s = max((sent / fabric.bytes_per_s.value for fabric, sent in levels), default=0.0)
        return slowest_s + sum(fabric.latency_s.value for fabric, _ in levels)

    def between(self, stage: int, other: int) -> Fabric:
        """Return what a rank's transfer to its counterpart in another pipeline stage crosses.

        Raises:
            ValueError: that is on another node, and nothing joins them.
        """
        return self._between_nodes() if self._layout.crosses(stage, other) else self._inside()

    def _inside(self) -> Fabric:
        assert self._profile.intra_node is not None  # a profile of several devices per node has one
        return self._profile.intra_node

    def _between_nodes(self) -> Fabric:
        if (fabric := self._profile.inter_node) is None:
            profile, ranks = self._profile, self._layout.num_ranks
            raise ValueError(
                f"profile {profile.name} has no inter_node fabric, but {ranks} devices need "
                f"{-(-ranks // profile.devices_per_node)} nodes; add inter_node to the profile or ask for at most "
                f"{profile.devices_per_node} devices"
            )
        return fabric


def _ring(fabric: Fabric, num_bytes: float, size: int) -> Ring:
    return Ring(fabric, num_bytes, num_bytes * (size - 1) / size / fabric.bytes_per_s.value)
