"""What the tasks of a checkpoint take on one machine.

As everywhere in :mod:`planner.costs`, one representative rank stands for all: they write at the same time, so each has
its share of what a node, and a job, can write.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hwprofiles.profile import Storage
from hwprofiles.quantity import Quantity
from planner.checkpoints.lowering import Run
from planner.checkpoints.policy import HASH_BYTES_PER_S, CheckpointPolicy
from planner.costs import CostModel, Price, Resource
from planner.schedule import Lane, Op, Task

StoreName = Literal["nvme", "pfs"]


class CheckpointCosts:
    """Prices a run with checkpoints.

    Args:
        cost: of training, and of copies; says how many ranks save.
        policy: the engine.
        store: where to: the disk of each node, or the file system that all share.

    Raises:
        ValueError: the profile lacks the store, or a rate that the engine needs.
    """

    def __init__(self, cost: CostModel, policy: CheckpointPolicy, store: StoreName) -> None:
        self._cost = cost
        self._policy = policy
        self._store = self._storage(store)
        self._is_shared = store == "pfs"
        self._training = cost.capacities()

    def capacities(self) -> dict[Resource, float]:
        """Return what one rank has of every resource."""
        return self._training | ({Resource.PFS: self._share_bytes_per_s()} if self._is_shared else {})

    def prices(self, run: Run, training: Sequence[Price]) -> list[Price]:
        """Return the price of every task of a run.

        Args:
            run: the run.
            training: prices of the tasks of one iteration.
        """
        return [
            self._checkpoint(task) if origin < 0 else self._interrupted(task, training[origin])
            for task, origin in zip(run.schedule.tasks, run.origin, strict=True)
        ]

    def _interrupted(self, task: Task, price: Price) -> Price:
        """Return the price of a training task beside writers that may hold the interpreter.

        A device computes what the interpreter has issued, and nothing is issued while a writer holds the lock: so
        computing and writing share it, and each goes on at half its speed. (A launch loop fell from 204,000 to 7,700
        operations a second beside a thread in ``torch.save``.)
        """
        if not self._policy.holds_interpreter or task.lane not in {Lane.COMPUTE, Lane.GPU_UPDATE}:
            return price
        return dataclasses.replace(price, uses=(*price.uses, (Resource.INTERPRETER, 1.0)))

    def _checkpoint(self, task: Task) -> Price:
        match task.op:
            case Op.CREATE:
                create = self._store.create_s
                price = Price(create.value * self._cost.num_ranks if create else 0.0, 0.0)
            case Op.TOUCH:
                price = self._on_cores(task.num_bytes, self._rate("fresh_bytes_per_s"), 1)
            case Op.WRITE:
                price = self._write(task.num_bytes)
            case _:
                price = self._cost.price(task)
        return dataclasses.replace(price, weight=self._policy.weight)

    def _write(self, num_bytes: int) -> Price:
        """Price a write: the slowest of the node's disk or network, the job's share, and what prepares the bytes.

        Drives of the node are those that optimizer state and activations use too.
        """
        policy, writers = self._policy, self._policy.num_writers
        duration_s = max(
            self._store.write.time_s(num_bytes * self._cost.ranks_per_node), num_bytes / self._share_bytes_per_s()
        )
        if policy.serialises:
            duration_s = max(duration_s, num_bytes / (writers * self._rate("serialise_bytes_per_s")))
        if policy.hashes:
            duration_s = max(duration_s, num_bytes / (writers * HASH_BYTES_PER_S))
        price = self._on_cores(num_bytes, num_bytes / duration_s, writers)
        rate = num_bytes / duration_s
        if self._is_shared:
            uses = (*price.uses, (Resource.PFS, rate))
        else:
            both = min(rate, self._training[Resource.NVME])
            uses = (*price.uses, (Resource.NVME_WRITE, rate), (Resource.NVME, both))
        if policy.holds_interpreter:
            uses = (*uses, (Resource.INTERPRETER, 1.0))
        return dataclasses.replace(price, uses=uses)

    def _on_cores(self, num_bytes: int, bytes_per_s: float, num_threads: int) -> Price:
        """Price a pass over host memory by a few threads."""
        cores = min(float(num_threads), self._training[Resource.CORES])
        dram = min(bytes_per_s, self._training[Resource.DRAM])
        return Price(0.0, num_bytes / bytes_per_s, ((Resource.CORES, cores), (Resource.DRAM, dram)))

    def _share_bytes_per_s(self) -> float:
        """Return what one rank writes while all do."""
        share = self._store.write.best_rate_per_s() / self._cost.ranks_per_node
        job = self._store.job_write_bytes_per_s
        return share if job is None else min(share, job.value / self._cost.num_ranks)

    def _storage(self, name: StoreName) -> Storage:
        storage = self._cost.profile.nvme if name == "nvme" else self._cost.profile.pfs
        if storage is None:
            raise ValueError(
                f"profile {self._cost.profile.name} has no {name}; add it to the profile or write elsewhere"
            )
        return storage

    def _rate(self, name: Literal["fresh_bytes_per_s", "serialise_bytes_per_s"]) -> float:
        quantity: Quantity | None = getattr(self._cost.profile.host, name)
        if quantity is None:
            raise ValueError(
                f"profile {self._cost.profile.name} has no host.{name}, which the checkpoint engine "
                f"{self._policy.name} depends on; add it to the profile or choose another engine"
            )
        return quantity.value
