"""Storage for checkpoints, as one rank sees it while all ranks write or read at the same time."""

import abc
import dataclasses
from typing import final

from hwprofiles.profile import Storage
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.terms import Level

Uses = tuple[tuple[Resource, float], ...]

# Passes over memory of a copy: it reads and writes, through caches.
_COPY_PASSES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """The time and resources to read or write some bytes of one rank while all ranks do the same.

    Attributes:
        duration_s: time, if nothing else runs.
        core_s: time of cores in it.
        uses: amounts per second of other shared resources.
    """

    duration_s: float
    core_s: float
    uses: Uses


class Store(abc.ABC):
    """Storage of one level."""

    @abc.abstractmethod
    def write(self, num_bytes: int, num_threads: float) -> Traffic:
        """Return the traffic to write ``num_bytes`` of one rank with ``num_threads`` threads."""

    @abc.abstractmethod
    def read(self, num_bytes: int, num_threads: float) -> Traffic:
        """Return the traffic to read ``num_bytes`` of one rank with ``num_threads`` threads."""

    @abc.abstractmethod
    def capacities(self) -> dict[Resource, float]:
        """Return one rank's capacities of resources that only checkpoints use."""


@final
class MemoryStore(Store):
    """Files in the node's memory.

    A thread copies as fast as a core passes over memory. Writing also takes the time to get fresh memory, if the
    profile has that rate.
    """

    def __init__(self, cost: CostModel) -> None:
        host = cost.profile.host
        self._capacity = cost.capacities()
        self._thread_bytes_per_s = host.elementwise_bytes_per_s.value / host.num_optimizer_cores / _COPY_PASSES
        self._fresh_s_per_byte = 1 / host.fresh_bytes_per_s.value if host.fresh_bytes_per_s else 0.0

    def write(self, num_bytes: int, num_threads: float) -> Traffic:
        """See :class:`Store`."""
        return self._copy(num_bytes, num_threads, self._fresh_s_per_byte)

    def read(self, num_bytes: int, num_threads: float) -> Traffic:
        """See :class:`Store`."""
        return self._copy(num_bytes, num_threads, 0.0)

    def capacities(self) -> dict[Resource, float]:
        """See :class:`Store`."""
        return {}

    def _copy(self, num_bytes: int, num_threads: float, more_s_per_byte: float) -> Traffic:
        threads = min(num_threads, self._capacity[Resource.CORES])
        least_s = _COPY_PASSES * num_bytes / self._capacity[Resource.DRAM]
        duration_s = max(num_bytes / (threads * self._thread_bytes_per_s) + num_bytes * more_s_per_byte, least_s)
        dram = min(_COPY_PASSES * num_bytes / duration_s, self._capacity[Resource.DRAM])
        return Traffic(duration_s, threads * duration_s, ((Resource.DRAM, dram),))


@final
class DriveStore(Store):
    """Drives of the node, or a file system that all nodes share.

    Optimizer state and activations use the same drives of the node.
    """

    def __init__(self, cost: CostModel, storage: Storage, *, is_shared: bool) -> None:
        self._storage = storage
        self._is_shared = is_shared
        self._num_ranks = cost.num_ranks
        self._ranks_per_node = cost.ranks_per_node
        self._capacity = cost.capacities()

    def write(self, num_bytes: int, num_threads: float) -> Traffic:  # noqa: ARG002 - drives bound it, not threads
        """See :class:`Store`: the slower of the node's disk or network, and the job's share."""
        share_s = num_bytes / self._share_bytes_per_s()
        duration_s = max(self._storage.write.time_s(num_bytes * self._ranks_per_node), share_s)
        return self._traffic(num_bytes, duration_s, Resource.NVME_WRITE)

    def read(self, num_bytes: int, num_threads: float) -> Traffic:  # noqa: ARG002 - drives bound it, not threads
        """See :class:`Store`."""
        duration_s = self._storage.read.time_s(num_bytes * self._ranks_per_node)
        return self._traffic(num_bytes, duration_s, Resource.NVME_READ)

    def capacities(self) -> dict[Resource, float]:
        """See :class:`Store`."""
        return {Resource.PFS: self._share_bytes_per_s()} if self._is_shared else {}

    def _traffic(self, num_bytes: int, duration_s: float, direction: Resource) -> Traffic:
        rate = num_bytes / duration_s if duration_s else 0.0
        if self._is_shared:
            return Traffic(duration_s, 0.0, ((Resource.PFS, min(rate, self._share_bytes_per_s())),))
        both = min(rate, self._capacity[Resource.NVME])
        return Traffic(duration_s, 0.0, ((direction, rate), (Resource.NVME, both)))

    def _share_bytes_per_s(self) -> float:
        """Return one rank's write rate while all ranks write."""
        share = self._storage.write.best_rate_per_s() / self._ranks_per_node
        job = self._storage.job_write_bytes_per_s
        return share if job is None else min(share, job.value / self._num_ranks)


def storage_of(cost: CostModel, level: Level) -> Storage | None:
    """Return a level's storage in the profile; ``None`` for memory."""
    return {"memory": None, "nvme": cost.profile.nvme, "pfs": cost.profile.pfs}[level]


def store_of(cost: CostModel, level: Level) -> Store:
    """Return the storage of a level.

    Raises:
        ValueError: the profile has no such storage.
    """
    if level == "memory":
        return MemoryStore(cost)
    if (storage := storage_of(cost, level)) is None:
        raise ValueError(f"profile {cost.profile.name} has no {level}; add it to the profile or write elsewhere")
    return DriveStore(cost, storage, is_shared=level == "pfs")
