"""The prices of checkpoint tasks on one machine.

As in :mod:`planner.costs.model`, one representative rank stands for all. All ranks write at the same time, so each has
its share of the write bandwidth of its node and of the job.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from hwprofiles.profile import Host, Storage
from hwprofiles.quantity import Quantity
from planner.checkpoints.lowering import Run
from planner.checkpoints.policy import COPY_WEIGHT, HASH_BYTES_PER_S, NUM_THREADS
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.schedule.tasks import Lane, Op, Task
from planner.terms import Level

# Passes over memory: of a copy, which reads and writes through caches, and of hashing with the write behind it.
_COPY_PASSES = _HASHED_PASSES = 2


def storage_of(cost: CostModel, level: Level) -> Storage | None:
    """Return a level's storage in the profile; ``None`` for memory."""
    return {"memory": None, "nvme": cost.profile.nvme, "pfs": cost.profile.pfs}[level]


def hash_bytes_per_s(host: Host) -> Quantity:
    """Return the rate at which one thread computes checksums: the profile's, or an assumed one."""
    return host.hash_bytes_per_s or HASH_BYTES_PER_S


class CheckpointCosts:
    """Prices a run with checkpoints.

    Into and out of memory, a thread copies as fast as a core passes over memory. Writing also takes the time to get
    fresh memory, if the profile has that rate. Drives are those of the node, which optimizer state and activations use
    too, or a file system that all nodes share.

    Args:
        cost: of training, and of copies; says how many ranks save.
        store: the target: memory or drives of each node, or the shared file system.
        above: the level from which checkpoints are copied to the target, if any: a faster one; or the same one, of the
            node before.
        num_files: files of one checkpoint of the whole job; by default one for each rank.

    Raises:
        ValueError: the profile lacks the storage of a level.
    """

    def __init__(self, cost: CostModel, store: Level, above: Level | None = None, num_files: int | None = None) -> None:
        self.cost = cost
        self._num_files = cost.num_ranks if num_files is None else num_files
        self._above = CheckpointCosts(cost, above) if above else None
        self._crosses, self._is_shared = above == store, store == "pfs"
        self._storage = storage = storage_of(cost, store)
        if store != "memory" and storage is None:
            raise ValueError(f"profile {cost.profile.name} has no {store}; add it to the profile or write elsewhere")
        self._create_s = storage.create_s.value if storage and storage.create_s else 0.0
        self._training = cost.capacities()

    def capacities(self) -> dict[Resource, float]:
        """Return what one rank has of every resource."""
        above = self._above.capacities() if self._above else {}
        own = {Resource.PFS: self._share_bytes_per_s(self._storage)} if self._storage and self._is_shared else {}
        return self._training | above | own

    def write(self, num_bytes: int, num_threads: float) -> Price:
        """Price writing ``num_bytes`` of one rank with ``num_threads`` threads, while all ranks do the same.

        Drives take the longer of the time of the node's disk or network, and of the job's share.
        """
        if self._storage is None:
            fresh = self.cost.profile.host.fresh_bytes_per_s
            return self._copy(num_bytes, num_threads, 1 / fresh.value if fresh else 0.0)
        share_s = num_bytes / self._share_bytes_per_s(self._storage)
        duration_s = max(self._storage.write.time_s(num_bytes * self.cost.ranks_per_node), share_s)
        return self._move(self._storage, num_bytes, duration_s, Resource.NVME_WRITE)

    def read(self, num_bytes: int, num_threads: float) -> Price:
        """Price reading ``num_bytes`` of one rank with ``num_threads`` threads, while all ranks do the same."""
        if self._storage is None:
            return self._copy(num_bytes, num_threads, 0.0)
        duration_s = self._storage.read.time_s(num_bytes * self.cost.ranks_per_node)
        return self._move(self._storage, num_bytes, duration_s, Resource.NVME_READ)

    def prices(self, run: Run, training: Sequence[Price]) -> list[Price]:
        """Return the price of every task of a run.

        Args:
            run: the run.
            training: prices of the tasks of one iteration.
        """
        return [
            dataclasses.replace(self.saving(task), weight=COPY_WEIGHT) if origin < 0 else training[origin]
            for task, origin in zip(run.schedule.tasks, run.origin, strict=True)
        ]

    def read_again_s(self, num_bytes: int) -> float:
        """Return the seconds to read ``num_bytes`` of each rank again on an idle machine."""
        return self._in_turn(num_bytes, self.read).duration_s

    def saving(self, task: Task) -> Price:
        """Return the price of one task of a checkpoint if nothing competes with it."""
        match task.op:
            case Op.CREATE:
                price = Price(self._create_s * self._num_files, 0.0)
            case Op.GATE:  # copying into the buffer takes almost no time compared with writing the rest
                price = Price(0.0, 0.0)
            case Op.WRITE:
                price = self._saved(task.num_bytes)
            case Op.READ:  # by a thread that does nothing else meanwhile
                price = self.cost.price(dataclasses.replace(task, lane=Lane.NVME_STATE_IN))
            case Op.PROMOTE:
                assert self._above is not None, "who promotes says from where"
                sent = (self._sent(task.num_bytes),) if self._crosses else ()
                price = self._in_turn(task.num_bytes, self._above.read, self.write, also=sent)
            case Op.VERIFY:
                price = self._in_turn(task.num_bytes, self.read)
            case _:
                price = self.cost.price(task)
        return price

    def _copy(self, num_bytes: int, num_threads: float, more_s_per_byte: float) -> Price:
        host = self.cost.profile.host
        thread_bytes_per_s = host.elementwise_bytes_per_s.value / host.num_optimizer_cores / _COPY_PASSES
        threads = min(num_threads, self._training[Resource.CORES])
        least_s = _COPY_PASSES * num_bytes / self._training[Resource.DRAM]
        duration_s = max(num_bytes / (threads * thread_bytes_per_s) + num_bytes * more_s_per_byte, least_s)
        dram = min(_COPY_PASSES * num_bytes / duration_s, self._training[Resource.DRAM])
        return Price(0.0, duration_s, ((Resource.CORES, threads), (Resource.DRAM, dram)))

    def _move(self, storage: Storage, num_bytes: int, duration_s: float, direction: Resource) -> Price:
        rate = num_bytes / duration_s if duration_s else 0.0
        if self._is_shared:
            return Price(0.0, duration_s, ((Resource.PFS, min(rate, self._share_bytes_per_s(storage))),))
        both = min(rate, self._training[Resource.NVME])
        return Price(0.0, duration_s, ((direction, rate), (Resource.NVME, both)))

    def _share_bytes_per_s(self, storage: Storage) -> float:
        """Return one rank's write rate while all ranks write."""
        share = storage.write.best_rate_per_s() / self.cost.ranks_per_node
        job = storage.job_write_bytes_per_s
        return share if job is None else min(share, job.value / self.cost.num_ranks)

    def _saved(self, num_bytes: int) -> Price:
        """Price a write: threads hash while others wait for a drive. Into memory they copy by themselves."""
        stored, hashed = self.write(num_bytes, NUM_THREADS), self._hashed(num_bytes)
        core_s = (_core_s(hashed) + _core_s(stored)) / min(NUM_THREADS, self._training[Resource.CORES])
        return self._shared(max(stored.duration_s, core_s), (hashed, stored))

    def _sent(self, num_bytes: int) -> Price:
        """Price the sending of all bytes of a node to the next, over one connection."""
        fabric, ranks = self.cost.profile.inter_node, self.cost.ranks_per_node
        assert fabric is not None, "a profile for several nodes has one"
        return Price(0.0, num_bytes * ranks / fabric.bytes_per_s.value, ((Resource.FABRIC, 1 / ranks),))

    def _in_turn(self, num_bytes: int, *ways: Callable[[int, float], Price], also: Sequence[Price] = ()) -> Price:
        """Price the work of one thread for all ranks of a node: it takes chunks in turn and hashes each one."""
        threads = 1 / self.cost.ranks_per_node
        parts = [*(way(num_bytes, threads) for way in ways), *also]
        hashed = self._hashed(len(ways) * num_bytes)
        duration_s = sum(part.duration_s for part in parts) + _core_s(hashed) / threads
        return self._shared(duration_s, (hashed, *parts))

    def _hashed(self, num_bytes: int) -> Price:
        """Price one core that hashes ``num_bytes``."""
        rate = hash_bytes_per_s(self.cost.profile.host).value
        return Price(0.0, num_bytes / rate, ((Resource.CORES, 1.0), (Resource.DRAM, _HASHED_PASSES * rate)))

    def _shared(self, duration_s: float, parts: Iterable[Price]) -> Price:
        """Price parts that take ``duration_s`` together; no demand exceeds its capacity."""
        totals: dict[Resource, float] = defaultdict(float)
        for part in parts:
            for resource, amount in part.uses:
                totals[resource] += amount * part.duration_s
        capacities = self.capacities()
        rates = {resource: min(totals[resource] / duration_s, capacities[resource]) for resource in sorted(totals)}
        return Price(0.0, duration_s, tuple(rates.items()))


def _core_s(price: Price) -> float:
    """Return the time of cores in a price."""
    return dict(price.uses).get(Resource.CORES, 0.0) * price.duration_s
