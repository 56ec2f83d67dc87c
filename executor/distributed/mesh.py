"""A rank's position among all ranks: its tensor-, expert- and data-parallel groups."""

import dataclasses

import numpy as np
import numpy.typing as npt

from planner.decisions import Choice

Groups = tuple[tuple[int, ...], ...]
"""All groups of one kind. Every rank is in exactly one of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a plan without pipeline stages.

    For their numbers, see [Note: Layout] in :mod:`planner.costs.layout`.

    Attributes:
        degrees: degrees of parallelism.
        rank: this rank.
    """

    degrees: Choice
    rank: int

    @property
    def tensor(self) -> int:
        """Tensor-parallel rank."""
        return self.rank % self.degrees.tensor_parallel

    @property
    def data(self) -> int:
        """Data-parallel rank. It is the same for all ranks of a tensor-parallel group."""
        return self.rank // self.degrees.tensor_parallel

    @property
    def expert(self) -> int:
        """Expert-parallel rank."""
        return self.data % self.degrees.expert_parallel

    @property
    def reader(self) -> int:
        """The number of the group of ranks that share sequences, and so read the same ones."""
        return self.data // self.degrees.context_parallel

    def context_groups(self) -> Groups:
        """Return all groups of ranks that share sequences."""
        return self._neighbours(self.degrees.context_parallel)

    def tensor_groups(self) -> Groups:
        """Return all tensor-parallel groups."""
        return _groups(np.arange(self.degrees.num_devices).reshape(-1, self.degrees.tensor_parallel))

    def expert_groups(self) -> Groups:
        """Return all expert-parallel groups."""
        return self._neighbours(self.degrees.expert_parallel)

    def replicas(self, parts: int) -> Groups:
        """Return the groups of ranks that hold the same part, if data-parallel ranks divide a unit into ``parts``."""
        tensor = self.degrees.tensor_parallel
        ranks = np.arange(self.degrees.num_devices).reshape(-1, parts, tensor)
        return _groups(ranks.transpose(1, 2, 0).reshape(parts * tensor, -1))

    def _neighbours(self, size: int) -> Groups:
        """Return all groups of ``size`` data-parallel ranks, one after another, with the same tensor-parallel rank."""
        ranks = np.arange(self.degrees.num_devices).reshape(-1, size, self.degrees.tensor_parallel)
        return _groups(ranks.transpose(0, 2, 1).reshape(-1, size))


def _groups(rows: npt.NDArray[np.int64]) -> Groups:
    return tuple(map(tuple, rows.tolist()))
