"""Fabrics between ranks: which one a collective or transfer uses, and how many bytes each rank sends.

One ring goes through all ranks of a group. Each rank sends and receives all bytes but its own share. The
ring enters each node once, over the NICs of its devices in the group, and the slower level sets the pace (bus bandwidth
of NCCL's rings, see ``doc/PERFORMANCE.md`` of https://github.com/NVIDIA/nccl-tests).

An all-reduce over two nodes is a tree in NCCL: each node sends the tensor once, where a ring of many
ranks sends it almost twice. So it runs at almost twice the bandwidth of the NICs
(https://github.com/NVIDIA/nccl-tests/issues/196).

NCCL lets a ring enter a node through the NIC nearest to a GPU, pass all GPUs of the group, and
leave by that NIC; it lays as many such rings as there are NICs (https://github.com/NVIDIA/nccl/issues/412). A group
with only some of a node's devices, such as the data-parallel group of every second rank, has fewer NICs nearby. It
shares them with its neighbours' groups, which run the same collective at the same time: rings meet on a NIC
(https://github.com/NVIDIA/nccl/issues/1494). In published runs on two machines such groups reach 0.53 and 0.63 of their
share (``partial_group_ratio``). Profiles of machines with a NIC for every device leave the ratio out.
"""

import dataclasses
import math

from hwprofiles.profile import Fabric, HardwareProfile
from planner.costs.layout import Group, Layout
from planner.decisions import MOST_EXCHANGED_BYTES

_LAYER_BYTES = 100e6
# A thread that copies is woken up, and writes to the sockets of others, which are woken up: an order of magnitude.
_TELL_S = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """One level of a collective.

    Attributes:
        fabric: the fabric of this level.
        num_bytes: the bytes of the collective as each rank sees them on this level.
        time_s: at full speed, without latency.
        latency_s: the start-up time.
    """

    fabric: Fabric
    num_bytes: float
    time_s: float
    latency_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class HostPath:
    """A collective through host memory that ranks share, as one of them sees it.

    Attributes:
        up_bytes, down_bytes: what it copies from its device and to it.
        time_s: at full speed, without latency.
        latency_s: the time in which ranks tell each other that they have written.
    """

    up_bytes: float
    down_bytes: float
    time_s: float
    latency_s: float


class Fabrics:
    """The fabrics of a machine for ranks laid out on its nodes.

    See the module.

    Args:
        profile: the machine.
        layout: where the ranks are.
    """

    def __init__(self, profile: HardwareProfile, layout: Layout) -> None:
        self._profile = profile
        self._layout = layout

    def rings(self, group: Group, num_bytes: float, num_rounds: int = 1) -> list[Ring]:
        """Return the levels of a collective, inside a node and between nodes; none for a group of one rank.

        Args:
            group: the ranks that take part.
            num_bytes: the bytes that every rank has at the end.
            num_rounds: of the ring: 2 for an all-reduce, 1 for an all-gather or a reduce-scatter.

        Raises:
            ValueError: the group needs several nodes, and the profile has no fabric between nodes.
        """
        size = group.per_node * group.nodes
        sent_bytes = num_rounds * num_bytes * (size - 1) / size
        rings = []
        if group.per_node > 1:
            rings.append(_ring(self._inside(), num_rounds * num_bytes, sent_bytes, num_rounds * (group.per_node - 1)))
        if group.nodes > 1:
            fabric = self._between_nodes()
            if group.nodes == 2 and num_rounds == 2:
                sent_bytes = num_bytes
            share_bytes = sent_bytes / group.per_node
            if fabric.partial_group_ratio and group.per_node < self._layout.ranks_per_node:
                share_bytes /= fabric.partial_group_ratio.value
            num_steps = num_rounds * (group.nodes - 1)
            rings.append(_ring(fabric, num_rounds * num_bytes / group.per_node, share_bytes, num_steps))
        return rings

    def through_host(self, group: Group, num_bytes: float, *, sums: bool) -> HostPath:
        """Return an all-gather or a reduce-scatter over ranks of one node through host memory.

        A rank writes its part of what is gathered, and all parts but its own of what is summed. At the same time it
        reads what others have written. It begins to read when the first round has been written; see [Note: Through the
        host] in :mod:`executor.devices.host_exchange`.

        Args:
            group: the ranks that take part.
            num_bytes: the bytes that every rank has at the end of a gather, or at the beginning of a sum. An all-reduce
                counts as a sum of twice the bytes.
            sums: whether values are summed.

        Raises:
            ValueError: the group needs several nodes.
        """
        if group.nodes > 1:
            raise ValueError(
                f"collectives go through host memory, but {group.per_node * group.nodes} ranks with the same weights "
                f"are on {group.nodes} nodes; plan with --parallel collectives=fabric"
            )
        profile, sharing, count = self._profile, self._layout.ranks_per_uplink(self._profile), group.per_node
        link, part_bytes = profile.host_link, num_bytes / count
        up_bytes, down_bytes = part_bytes * (count - 1 if sums else 1), part_bytes * (count - 1)
        up_s, down_s = (
            curve.time_s(total * sharing) for curve, total in ((link.up, up_bytes), (link.down, down_bytes))
        )
        num_rounds = math.ceil((num_bytes if sums else part_bytes) / MOST_EXCHANGED_BYTES)
        if link.num_cores_per_copy.value:  # a core copies one way after the other
            time_s = up_s + down_s
        else:
            both_s = (up_bytes + down_bytes) * sharing / link.both_bytes_per_s.value
            time_s = max(up_s, down_s, both_s) + up_s / max(num_rounds, 1)
        if sums:  # the device reads all ranks' values of its part, and writes their sums
            time_s += profile.device.elementwise.time_s(num_bytes + part_bytes)
        return HostPath(up_bytes, down_bytes, time_s, _TELL_S * num_rounds)

    def prefers_host(self, group: Group) -> bool:
        """Return whether ranks sum and gather the weights of a layer faster through the host than over the fabric."""
        if group.nodes > 1 or group.per_node == 1:
            return False
        paths = [self.through_host(group, _LAYER_BYTES, sums=sums) for sums in (False, True)]
        (ring,) = self.rings(group, _LAYER_BYTES, num_rounds=2)
        return sum(path.time_s + path.latency_s for path in paths) < ring.time_s + ring.latency_s

    def all_to_all_s(self, group: Group, num_bytes: float) -> float:
        """Return the time of an all-to-all of ``num_bytes`` per rank."""
        size = group.per_node * group.nodes
        inside, across = num_bytes * (group.per_node - 1) / size, num_bytes * (size - group.per_node) / size
        levels = [(self._inside(), inside)] if inside else []
        levels += [(self._between_nodes(), across)] if across else []
        slowest_s = max((sent / fabric.bytes_per_s.value for fabric, sent in levels), default=0.0)
        return slowest_s + sum(_latency_s(fabric, size - 1) for fabric, _ in levels)

    def pass_s(self, group: Group, num_bytes: float) -> float:
        """Return the time in which every rank sends ``num_bytes`` to the next one, and the last one to the first."""
        fabrics = [self._inside()] if group.per_node > 1 else []
        fabrics += [self._between_nodes()] if group.nodes > 1 else []
        return max((num_bytes / each.bytes_per_s.value + _latency_s(each, 1) for each in fabrics), default=0.0)

    def exchanges_s(self, group: Group, num_bytes: int) -> float:
        """Return the time in which ranks send parts of matrices and take results back, ``num_bytes`` per rank in all.

        See [Note: Shared matrices] in :mod:`planner.subgroups`.
        """
        return 2 * self.all_to_all_s(group, num_bytes / 2) if num_bytes else 0.0

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


def _ring(fabric: Fabric, num_bytes: float, sent_bytes: float, num_steps: int) -> Ring:
    return Ring(fabric, num_bytes, sent_bytes / fabric.bytes_per_s.value, _latency_s(fabric, num_steps))


def _latency_s(fabric: Fabric, num_steps: int) -> float:
    step_s = fabric.hop_latency_s.value if fabric.hop_latency_s else 0.0
    return fabric.latency_s.value + step_s * num_steps
