"""The layout of ranks: their groups, and their nodes.

[Note: Layout] Ranks are numbered with tensor parallelism innermost, then data, then pipeline (DeepSpeed's
``PipeModelDataParallelTopology``), and fill one node after the other. So the ranks of a tensor group are neighbours,
those of a data group are ``tensor`` apart, and a stage is a block of ``tensor * data`` ranks.
"""

import dataclasses
from collections import Counter
from typing import Self

from hwprofiles.profile import HardwareProfile
from planner.decisions import Choice


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Ranks that run collectives together: so many per node, on so many nodes."""

    per_node: int
    nodes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism on nodes of equal size; see [Note: Layout].

    Attributes:
        data, tensor, pipeline: ranks that share the batch, every layer, the layers.
        devices_per_node: ranks that a node takes.
    """

    data: int
    tensor: int
    pipeline: int
    devices_per_node: int

    @classmethod
    def of(cls, choice: Choice, profile: HardwareProfile) -> Self:
        """Return the layout of a choice's ranks on a machine."""
        return cls(choice.data_parallel, choice.tensor_parallel, choice.pipeline_parallel, profile.devices_per_node)

    @property
    def num_ranks(self) -> int:
        """All ranks, each with one device."""
        return self.data * self.tensor * self.pipeline

    @property
    def ranks_per_node(self) -> int:
        """Ranks on a full node."""
        return min(self.num_ranks, self.devices_per_node)

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank // (self.data * self.tensor)

    def nodes(self) -> list[range]:
        """Return the ranks of every node."""
        starts = range(0, self.num_ranks, self.devices_per_node)
        return [range(first, min(first + self.devices_per_node, self.num_ranks)) for first in starts]

    def stages_on_nodes(self) -> set[tuple[int, ...]]:
        """Return how many ranks of each pipeline stage a node has, for every kind of node."""
        if self.pipeline == 1:
            return {(self.ranks_per_node,)}
        counts = (Counter(map(self.stage, ranks)) for ranks in self.nodes())
        return {tuple(each[stage] for stage in range(self.pipeline)) for each in counts}

    @property
    def tensor_group(self) -> Group:
        """The ranks that share the layers of one stage."""
        return self._group(self.tensor, self.devices_per_node)

    def replicas(self, parts: int) -> Group:
        """Return the data-parallel ranks that hold the same one of ``parts`` parts: every ``parts``-th rank."""
        return self._group(self.data // parts, max(self.devices_per_node // (self.tensor * parts), 1))

    def parts(self, parts: int, *, over_tensor: bool = False) -> Group:
        """Return the ranks that hold different ones of ``parts`` parts: neighbours.

        They are data-parallel ranks, or, ``over_tensor``, those that share layers too.
        """
        return self._group(parts, max(self.devices_per_node // (1 if over_tensor else self.tensor), 1))

    def crosses(self, stage: int, other: int) -> bool:
        """Return whether some rank of a stage and its counterpart in another stage are on different nodes."""
        block = self.data * self.tensor
        return any(
            (stage * block + rank) // self.devices_per_node != (other * block + rank) // self.devices_per_node
            for rank in range(min(block, self.devices_per_node))
        )

    @staticmethod
    def _group(size: int, most_per_node: int) -> Group:
        per_node = min(size, most_per_node)
        return Group(per_node, -(-size // per_node))
