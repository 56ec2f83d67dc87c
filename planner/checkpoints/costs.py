"""What the tasks of a checkpoint take on one machine.

As everywhere in :mod:`planner.costs.model`, one representative rank stands for all: they write at the same time, so
each has its share of what a node, and a job, can write.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from hwprofiles.profile import Host
from hwprofiles.quantity import Quantity
from planner.checkpoints.lowering import Run
from planner.checkpoints.policy import HASH_BYTES_PER_S, CheckpointPolicy
from planner.checkpoints.stores import Traffic, storage_of, store_of
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.schedule.tasks import Lane, Op, Task
from planner.terms import Level

# What is hashed and written from memory is read by a core, and by the drive.
_HASHED_PASSES = 2


def hash_bytes_per_s(host: Host) -> Quantity:
    """Return the rate at which one thread makes checksums: the profile's, or what is assumed."""
    return host.hash_bytes_per_s or HASH_BYTES_PER_S


class CheckpointCosts:
    """Prices a run with checkpoints.

    Args:
        cost: of training, and of copies; says how many ranks save.
        policy: the engine.
        store: where to: memory or disk of each node, or the file system that all share.
        above: whence, if checkpoints are brought there from a faster level.

    Raises:
        ValueError: the profile lacks the store, or a rate that the engine needs.
    """

    def __init__(self, cost: CostModel, policy: CheckpointPolicy, store: Level, above: Level | None = None) -> None:
        self._cost = cost
        self._policy = policy
        self._store = store_of(cost, store)
        self._above = store_of(cost, above) if above else None
        storage = storage_of(cost, store)
        self._create_s = storage.create_s.value if storage and storage.create_s else 0.0
        self._training = cost.capacities()

    def capacities(self) -> dict[Resource, float]:
        """Return what one rank has of every resource."""
        above = self._above.capacities() if self._above else {}
        return self._training | above | self._store.capacities()

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

    def read_again_s(self, num_bytes: int) -> float:
        """Return the seconds that it takes to read so many bytes of each rank again, if nothing else goes on."""
        return self._in_turn(num_bytes, self._store.read).duration_s

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
                price = Price(self._create_s * self._cost.num_ranks, 0.0)
            case Op.GATE:  # copying what fits into the buffer is next to nothing beside writing the rest
                price = Price(0.0, 0.0)
            case Op.TOUCH:
                price = self._on_cores(task.num_bytes, self._rate("fresh_bytes_per_s"), 1)
            case Op.WRITE:
                price = self._write(task.num_bytes)
            case Op.READ:  # by a thread that then does nothing else
                price = self._cost.price(dataclasses.replace(task, lane=Lane.NVME_STATE_IN))
            case Op.PROMOTE:
                assert self._above is not None, "who promotes says from where"
                price = self._in_turn(task.num_bytes, self._above.read, self._store.write)
            case Op.VERIFY:
                price = self._in_turn(task.num_bytes, self._store.read)
            case _:
                price = self._cost.price(task)
        return dataclasses.replace(price, weight=self._policy.weight)

    def _write(self, num_bytes: int) -> Price:
        """Price a write: the slowest of the store and of what prepares the bytes."""
        policy, writers = self._policy, self._policy.num_writers
        stored = self._store.write(num_bytes, writers)
        duration_s = stored.duration_s
        if policy.serialises:
            duration_s = max(duration_s, num_bytes / (writers * self._rate("serialise_bytes_per_s")))
        if policy.hashes:
            # Threads hash while others wait for a drive; copies into memory they make themselves.
            hashed = self._hashed(num_bytes)
            core_s = (hashed.core_s + stored.core_s) / min(writers, self._training[Resource.CORES])
            return self._shared(max(duration_s, core_s), (hashed, stored))
        price = self._on_cores(num_bytes, num_bytes / duration_s, writers)
        slower = stored.duration_s / duration_s
        uses = (*price.uses, *((resource, amount * slower) for resource, amount in stored.uses))
        if policy.holds_interpreter:
            uses = (*uses, (Resource.INTERPRETER, 1.0))
        return dataclasses.replace(price, uses=uses)

    def _in_turn(self, num_bytes: int, *ways: Callable[[int, float], Traffic]) -> Price:
        """Price what one thread of a node does for all of its ranks, chunk by chunk, which it hashes each time."""
        threads = 1 / self._cost.ranks_per_node
        parts = [way(num_bytes, threads) for way in ways]
        hashed = self._hashed(len(ways) * num_bytes)
        duration_s = sum(part.duration_s for part in parts) + hashed.core_s / threads
        return self._shared(duration_s, (hashed, *parts))

    def _hashed(self, num_bytes: int) -> Traffic:
        """Return what it takes a core to hash so many bytes."""
        rate = hash_bytes_per_s(self._cost.profile.host).value
        return Traffic(num_bytes / rate, num_bytes / rate, ((Resource.DRAM, _HASHED_PASSES * rate),))

    def _shared(self, duration_s: float, parts: Iterable[Traffic]) -> Price:
        """Price what takes so long together; no demand is more than there is."""
        totals: dict[Resource, float] = defaultdict(float)
        for part in parts:
            totals[Resource.CORES] += part.core_s
            for resource, amount in part.uses:
                totals[resource] += amount * part.duration_s
        capacities = self.capacities()
        rates = {resource: min(totals[resource] / duration_s, capacities[resource]) for resource in sorted(totals)}
        return Price(0.0, duration_s, tuple(rates.items()))

    def _on_cores(self, num_bytes: int, bytes_per_s: float, num_threads: int) -> Price:
        """Price a pass over host memory by a few threads."""
        cores = min(float(num_threads), self._training[Resource.CORES])
        dram = min(bytes_per_s, self._training[Resource.DRAM])
        return Price(0.0, num_bytes / bytes_per_s, ((Resource.CORES, cores), (Resource.DRAM, dram)))

    def _rate(self, name: Literal["fresh_bytes_per_s", "serialise_bytes_per_s"]) -> float:
        quantity: Quantity | None = getattr(self._cost.profile.host, name)
        if quantity is None:
            raise ValueError(
                f"profile {self._cost.profile.name} has no host.{name}, which the checkpoint engine "
                f"{self._policy.name} depends on; add it to the profile or choose another engine"
            )
        return quantity.value
