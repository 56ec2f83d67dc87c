"""One rank's part of a machine: what it has of every resource, and what collectives over fabrics take.

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

import math

from hwprofiles.profile import Fabric, HardwareProfile
from hwprofiles.quantity import Curve
from planner.costs.layout import Group, Layout
from planner.costs.resources import Price, Resource
from planner.decisions import MOST_EXCHANGED_BYTES

Uses = list[tuple[Resource, float]]

_WORTH_A_WARNING_S = 1e-3
_LAYER_BYTES = 100e6
# A thread that copies is woken up, and writes to the sockets of others, which are woken up: an order of magnitude.
_TELL_S = 1e-4


class RankHardware:
    """One rank's part of a machine: a device, and a share of its node's host, links, drives and fabrics.

    Args:
        profile: the machine.
        layout: where the ranks are.

    Attributes:
        profile, layout: the arguments.
        ranks_per_node: of a full node.
        ranks_per_uplink: ranks behind one switch; they copy at the same time, so all their bytes cross its uplink.
        warnings: sentences about readings outside the measured range, in order of appearance.
    """

    def __init__(self, profile: HardwareProfile, layout: Layout) -> None:
        self.profile, self.layout = profile, layout
        self.ranks_per_node = layout.ranks_per_node
        self.ranks_per_uplink = min(self.ranks_per_node, profile.devices_per_uplink())
        self.warnings: dict[str, None] = {}

    def capacities(self) -> dict[Resource, float]:
        """Return one rank's capacity of every resource."""
        profile, ranks = self.profile, self.ranks_per_node
        link = profile.host_link
        return {
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

    def copying(self, up_rate: float, down_rate: float, num_passes: int) -> Uses:
        """Return what copies over the link use at these bytes per second, with so many passes over DRAM."""
        ways = ((Resource.LINK_UP, up_rate), (Resource.LINK_DOWN, down_rate))
        rate, num_cores = up_rate + down_rate, self.profile.host_link.num_cores_per_copy.value
        uses = [*(way for way in ways if way[1]), (Resource.LINK, rate)]
        uses.append((Resource.DRAM, self.at_most_dram(rate * num_passes)))
        return [*uses, (Resource.CORES, num_cores)] if num_cores else uses

    def exchanging(self) -> Uses:
        """Return what any exchange between ranks uses. Where cores are the device, gloo's sockets take one of them."""
        uses: Uses = [(Resource.FABRIC, 1.0)]
        return [*uses, (Resource.CORES, 1.0)] if self.profile.device.kind == "host" else uses

    def crossing(self, fabric: Fabric, rate: float) -> Uses:
        """Return what bytes over a fabric use of the link to the host, if they cross it."""
        best = self.profile.host_link.down.best_rate_per_s() / self.ranks_per_uplink
        return [(Resource.LINK_DOWN, min(rate, best))] if fabric.via_host_link else []

    def collective(self, group: Group, num_bytes: float, num_rounds: int = 1, more_s: float = 0.0) -> Price:
        """Price a collective in rings, inside a node and between nodes; a group of one rank has none.

        Args:
            group: the ranks that take part.
            num_bytes: the bytes that every rank has at the end.
            num_rounds: of the ring: 2 for an all-reduce, 1 for an all-gather or a reduce-scatter.
            more_s: seconds of other work on the device.

        Raises:
            ValueError: the group needs several nodes, and the profile has no fabric between nodes.
        """
        size = group.per_node * group.nodes
        all_bytes, sent_bytes = num_rounds * num_bytes, num_rounds * num_bytes * (size - 1) / size
        latency_s = time_s = 0.0
        uses = self.exchanging()
        if group.per_node > 1:
            fabric = self._inside()
            latency_s += _latency_s(fabric, num_rounds * (group.per_node - 1))
            time_s = ring_s = sent_bytes / fabric.bytes_per_s.value
            uses += self.crossing(fabric, all_bytes / ring_s) if ring_s else []
        if group.nodes > 1:
            fabric = self._between_nodes()
            if group.nodes == 2 and num_rounds == 2:
                sent_bytes = num_bytes
            share_bytes = sent_bytes / group.per_node
            if fabric.partial_group_ratio and group.per_node < self.ranks_per_node:
                share_bytes /= fabric.partial_group_ratio.value
            latency_s += _latency_s(fabric, num_rounds * (group.nodes - 1))
            ring_s = share_bytes / fabric.bytes_per_s.value
            time_s = max(time_s, ring_s)
            uses += self.crossing(fabric, all_bytes / group.per_node / ring_s) if ring_s else []
        return Price(latency_s, time_s + more_s, tuple(sorted(uses)))

    def through_host(self, group: Group, num_bytes: float, *, sums: bool, more_s: float = 0.0) -> Price:
        """Price an all-gather or a reduce-scatter over ranks of one node through host memory.

        A rank writes its part of what is gathered, and all parts but its own of what is summed. At the same time it
        reads what others have written. It begins to read when the first round has been written; see [Note: Through the
        host] in :mod:`executor.devices.host_exchange`.

        Args:
            group: the ranks that take part.
            num_bytes: the bytes that every rank has at the end of a gather, or at the beginning of a sum. An all-reduce
                counts as a sum of twice the bytes.
            sums: whether values are summed.
            more_s: seconds of other work on the device.

        Raises:
            ValueError: the group needs several nodes.
        """
        if group.nodes > 1:
            raise ValueError(
                f"collectives go through host memory, but {group.per_node * group.nodes} ranks with the same weights "
                f"are on {group.nodes} nodes; plan with --parallel collectives=fabric"
            )
        sharing, count = self.ranks_per_uplink, group.per_node
        link, part_bytes = self.profile.host_link, num_bytes / count
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
            time_s += self.profile.device.elementwise.time_s(num_bytes + part_bytes)
        duration_s = time_s + more_s
        up, down = (count_bytes / duration_s if duration_s else 0.0 for count_bytes in (up_bytes, down_bytes))
        uses = self.copying(up, down, 2 if link.num_cores_per_copy.value else 1)
        return Price(_TELL_S * num_rounds, duration_s, tuple(sorted(uses)))

    def prefers_host(self, group: Group) -> bool:
        """Return whether ranks sum and gather the weights of a layer faster through the host than over the fabric."""
        if group.nodes > 1 or group.per_node == 1:
            return False
        paths = [self.through_host(group, _LAYER_BYTES, sums=sums) for sums in (False, True)]
        return sum(path.alone_s for path in paths) < self.collective(group, _LAYER_BYTES, num_rounds=2).alone_s

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
        return self._between_nodes() if self.layout.crosses(stage, other) else self._inside()

    def _inside(self) -> Fabric:
        assert self.profile.intra_node is not None  # a profile of several devices per node has one
        return self.profile.intra_node

    def _between_nodes(self) -> Fabric:
        if (fabric := self.profile.inter_node) is None:
            profile, ranks = self.profile, self.layout.num_ranks
            raise ValueError(
                f"profile {profile.name} has no inter_node fabric, but {ranks} devices need "
                f"{-(-ranks // profile.devices_per_node)} nodes; add inter_node to the profile or ask for at most "
                f"{profile.devices_per_node} devices"
            )
        return fabric


def _latency_s(fabric: Fabric, num_steps: int) -> float:
    step_s = fabric.hop_latency_s.value if fabric.hop_latency_s else 0.0
    return fabric.latency_s.value + step_s * num_steps
