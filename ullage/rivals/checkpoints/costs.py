"""The prices of what other checkpoint engines do."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from hwprofiles.quantity import Quantity
from planner.checkpoints.costs import CheckpointCosts
from planner.checkpoints.lowering import Run
from planner.costs.model import CostModel
from planner.costs.resources import Price, Resource
from planner.schedule.tasks import Lane, Op, Task
from planner.terms import Level
from ullage.rivals.checkpoints.policy import CheckpointPolicy


class EngineCosts(CheckpointCosts):
    """Prices a run with checkpoints of another engine; see :class:`planner.checkpoints.costs.CheckpointCosts`.

    Raises:
        ValueError: the profile lacks the store, or a rate that the engine needs.
    """

    def __init__(self, policy: CheckpointPolicy, cost: CostModel, store: Level, num_files: int | None = None) -> None:
        super().__init__(cost, store, num_files=num_files)
        self._policy = policy

    def prices(self, run: Run, training: Sequence[Price]) -> list[Price]:
        """Return the price of every task of a run; see :meth:`planner.checkpoints.costs.CheckpointCosts.prices`."""
        return [
            self.saving(task) if origin < 0 else self._interrupted(task, training[origin])
            for task, origin in zip(run.schedule.tasks, run.origin, strict=True)
        ]

    def saving(self, task: Task) -> Price:
        """Return the price of one task of a checkpoint if nothing competes with it."""
        match task.op:
            case Op.TOUCH:
                return self._on_cores(task.num_bytes, self._rate("fresh_bytes_per_s"), 1)
            case Op.WRITE:
                return self._written(task.num_bytes)
            case _:
                return super().saving(task)

    def _written(self, num_bytes: int) -> Price:
        """Price a write: the slower of the store and of what prepares the bytes."""
        policy, writers = self._policy, self._policy.num_writers
        stored = self.write(num_bytes, writers)
        duration_s = stored.duration_s
        if policy.serialises:
            duration_s = max(duration_s, num_bytes / (writers * self._rate("serialise_bytes_per_s")))
        price = self._on_cores(num_bytes, num_bytes / duration_s, writers)
        slower = stored.duration_s / duration_s
        own = ((resource, amount * slower) for resource, amount in stored.uses if resource is not Resource.CORES)
        uses = (*price.uses, *own)
        if policy.holds_interpreter:
            uses = (*uses, (Resource.INTERPRETER, 1.0))
        return dataclasses.replace(price, uses=uses)

    def _interrupted(self, task: Task, price: Price) -> Price:
        """Return the price of a training task beside writers that may hold the interpreter lock.

        A device computes what the interpreter has launched, and nothing is launched while a writer holds the lock. So
        computing and writing share the interpreter, and each runs at half its speed. (A launch loop fell from 204,000
        to 7,700 operations a second beside a thread in ``torch.save``.)
        """
        if not self._policy.holds_interpreter or task.lane not in {Lane.COMPUTE, Lane.GPU_UPDATE}:
            return price
        return dataclasses.replace(price, uses=(*price.uses, (Resource.INTERPRETER, 1.0)))

    def _on_cores(self, num_bytes: int, bytes_per_s: float, num_threads: int) -> Price:
        """Price a pass over host memory by a few threads."""
        capacity = self.cost.capacities()
        cores, dram = min(float(num_threads), capacity[Resource.CORES]), min(bytes_per_s, capacity[Resource.DRAM])
        return Price(0.0, num_bytes / bytes_per_s, ((Resource.CORES, cores), (Resource.DRAM, dram)))

    def _rate(self, name: Literal["fresh_bytes_per_s", "serialise_bytes_per_s"]) -> float:
        profile = self.cost.profile
        quantity: Quantity | None = getattr(profile.host, name)
        if quantity is None:
            raise ValueError(
                f"profile {profile.name} has no host.{name}, which the checkpoint engine {self._policy.name} depends "
                "on; add it to the profile or choose another engine"
            )
        return quantity.value
