"""Fabrics between ranks: which one a collective or transfer uses, and how many bytes each rank sends.

[Note: Rings] One ring goes through all ranks of a group. Each rank sends and receives all bytes but its own share. The
ring enters each node once, over the NICs of its devices in the group, and the slower level sets the pace (bus bandwidth
of NCCL's rings, see ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests).
"""

import dataclasses

from hwprofiles.profile import Fabric, HardwareProfile
from planner.costs.layout import Group, Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """One level of a collective.

    Attributes:
        fabric: the fabric of this level.
        num_bytes: the bytes of the collective as each rank sees them on this level.
        time_s: at full speed, without latency.
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
            group: the ranks that take part.
            num_bytes: the bytes that every rank has at the end, times the number of rounds of the ring.

        Raises:
            ValueError: the group needs several nodes, and the profile has no fabric between nodes.
        """
        size = group.per_node * group.nodes
        rings = []
        if group.per_node > 1:
            rings.append(_ring(self._inside(), num_bytes, size))
        if group.nodes > 1:
            rings.append(_ring(self._between_nodes(), num_bytes / group.per_node, size))
        return rings

    def all_to_all_s(self, group: Group, num_bytes: float) -> float:
        """Return the time of an all-to-all of ``num_bytes`` per rank."""
        size = group.per_node * group.nodes
        inside, across = num_bytes * (group.per_node - 1) / size, num_bytes * (size - group.per_node) / size
        levels = [(self._inside(), inside)] if inside else []
        levels += [(self._between_nodes(), across)] if across else []
        slowest_s = max((sent / fabric.bytes_per_s.value for fabric, sent in levels), default=0.0)
        return slowest_s + sum(fabric.latency_s.value for fabric, _ in levels)

    def between(self, stage: int, other: int) -> Fabric:
        """Return the fabric of a rank's transfer to its counterpart in another pipeline stage.

        Raises:
            ValueError: the counterpart is on another node, and the profile has no fabric between nodes.
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
