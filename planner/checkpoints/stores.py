"""Storage for checkpoints, as one rank sees it while all ranks write or read at the same time."""

from typing import final

from hwprofiles.profile import Storage
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.terms import Level

# Passes over memory of a copy: it reads and writes, through caches.
_COPY_PASSES = 2


@final
class Store:
    """Storage of one level.

    Into and out of memory, a thread copies as fast as a core passes over memory. Writing also takes the time to get
    fresh memory, if the profile has that rate. Drives are those of the node, which optimizer state and activations use
    too, or a file system that all nodes share.

    Raises:
        ValueError: the profile has no such storage.
    """

    def __init__(self, cost: CostModel, level: Level) -> None:
        self._storage = storage_of(cost, level)
        if level != "memory" and self._storage is None:
            raise ValueError(f"profile {cost.profile.name} has no {level}; add it to the profile or write elsewhere")
        self._is_shared = level == "pfs"
        self._cost = cost
        self._capacity = cost.capacities()

    def write(self, num_bytes: int, num_threads: float) -> Price:
        """Price writing ``num_bytes`` of one rank with ``num_threads`` threads, while all ranks do the same.

        Drives take the longer of the time of the node's disk or network, and of the job's share.
        """
        if self._storage is None:
            fresh = self._cost.profile.host.fresh_bytes_per_s
            return self._copy(num_bytes, num_threads, 1 / fresh.value if fresh else 0.0)
        share_s = num_bytes / self._share_bytes_per_s(self._storage)
        duration_s = max(self._storage.write.time_s(num_bytes * self._cost.ranks_per_node), share_s)
        return self._move(self._storage, num_bytes, duration_s, Resource.NVME_WRITE)

    def read(self, num_bytes: int, num_threads: float) -> Price:
        """Price reading ``num_bytes`` of one rank with ``num_threads`` threads, while all ranks do the same."""
        if self._storage is None:
            return self._copy(num_bytes, num_threads, 0.0)
        duration_s = self._storage.read.time_s(num_bytes * self._cost.ranks_per_node)
        return self._move(self._storage, num_bytes, duration_s, Resource.NVME_READ)

    def capacities(self) -> dict[Resource, float]:
        """Return one rank's capacities of resources that only checkpoints use."""
        if self._storage is None or not self._is_shared:
            return {}
        return {Resource.PFS: self._share_bytes_per_s(self._storage)}

    def _copy(self, num_bytes: int, num_threads: float, more_s_per_byte: float) -> Price:
        host = self._cost.profile.host
        thread_bytes_per_s = host.elementwise_bytes_per_s.value / host.num_optimizer_cores / _COPY_PASSES
        threads = min(num_threads, self._capacity[Resource.CORES])
        least_s = _COPY_PASSES * num_bytes / self._capacity[Resource.DRAM]
        duration_s = max(num_bytes / (threads * thread_bytes_per_s) + num_bytes * more_s_per_byte, least_s)
        dram = min(_COPY_PASSES * num_bytes / duration_s, self._capacity[Resource.DRAM])
        return Price(0.0, duration_s, ((Resource.CORES, threads), (Resource.DRAM, dram)))

    def _move(self, storage: Storage, num_bytes: int, duration_s: float, direction: Resource) -> Price:
        rate = num_bytes / duration_s if duration_s else 0.0
        if self._is_shared:
            return Price(0.0, duration_s, ((Resource.PFS, min(rate, self._share_bytes_per_s(storage))),))
        both = min(rate, self._capacity[Resource.NVME])
        return Price(0.0, duration_s, ((direction, rate), (Resource.NVME, both)))

    def _share_bytes_per_s(self, storage: Storage) -> float:
        """Return one rank's write rate while all ranks write."""
        share = storage.write.best_rate_per_s() / self._cost.ranks_per_node
        job = storage.job_write_bytes_per_s
        return share if job is None else min(share, job.value / self._cost.num_ranks)


def storage_of(cost: CostModel, level: Level) -> Storage | None:
    """Return a level's storage in the profile; ``None`` for memory."""
    return {"memory": None, "nvme": cost.profile.nvme, "pfs": cost.profile.pfs}[level]
