"""Where a rank is among all: the groups that it shares layers, experts or data with."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planner.graph import Degrees

Groups = tuple[tuple[int, ...], ...]
"""All groups of one kind; every rank is in one of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a plan without pipeline stages, numbered as [Note: Layout] in :mod:`planner.costs.layout` says.

    Attributes:
        degrees: how many ranks share what.
        rank: this one.
    """

    degrees: Degrees
    rank: int

    @property
    def tensor(self) -> int:
        """Which share of every layer this rank has."""
        return self.rank % self.degrees.tensor_parallel

    @property
    def data(self) -> int:
        """Which part of every batch this rank works on, with all that have the other shares of the layers."""
        return self.rank // self.degrees.tensor_parallel

    @property
    def expert(self) -> int:
        """Which experts of every layer this rank has."""
        return self.data % self.degrees.expert_parallel

    def tensor_groups(self) -> Groups:
        """Return who shares layers."""
        return _groups(self._ranks.reshape(-1, self.degrees.tensor_parallel))

    def expert_groups(self) -> Groups:
        """Return who shares experts."""
        return _groups(self._ranks.transpose(0, 2, 1).reshape(-1, self.degrees.expert_parallel))

    def replicas(self, parts: int) -> Groups:
        """Return who has the same of so many parts that data-parallel ranks hold."""
        tensor = self.degrees.tensor_parallel
        ranks = np.arange(self.degrees.num_devices).reshape(-1, parts, tensor)
        return _groups(ranks.transpose(1, 2, 0).reshape(parts * tensor, -1))

    @property
    def _ranks(self) -> npt.NDArray[np.int64]:
        """All ranks: ``[blocks of data-parallel ranks, expert_parallel, tensor_parallel]``."""
        degrees = self.degrees
        return np.arange(degrees.num_devices).reshape(-1, degrees.expert_parallel, degrees.tensor_parallel)


def _groups(rows: npt.NDArray[np.int64]) -> Groups:
    found: Sequence[Sequence[int]] = rows.tolist()
    return tuple(tuple(row) for row in found)
