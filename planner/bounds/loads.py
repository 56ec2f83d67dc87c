"""The load of tasks on lanes and resources, as linear expressions in how often the tasks are done."""

from collections import defaultdict

from planner.bounds.program import Sum
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Fp8Weights, Sharding
from planner.graph import Unit
from planner.lowering.gradients import ADDING_PASSES
from planner.models.kernels import num_kernels
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.subgroups import Subgroup

_COMPUTE = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.WEIGHT_GRADIENT: "weight_gradients",
    Op.RECOMPUTE: "recompute",
    Op.REMAKE: "remake",
}

Key = Lane | Resource
Load = dict[Key, Sum]


class Loads:
    """Prices of tasks, by lane (seconds) and resource (amounts).

    Args:
        cost: the prices.
        given: the global decisions.

    Attributes:
        capacity: of every lane, 1 second per second; of every resource, its amount per second.
    """

    def __init__(self, cost: CostModel, given: Sharding) -> None:
        self.cost, self.given = cost, given
        self.weight_bytes = given.precision.weight_bytes
        self.capacity: dict[Key, float] = dict.fromkeys(Lane, 1.0)
        self.capacity |= dict(cost.capacities().items())
        self._passes: dict[tuple[str, Op, bool, int], Load] = {}
        self._updates: dict[tuple[Lane, Subgroup], dict[Key, float]] = {}

    def charge(self, load: Load, task: Task, by: Sum) -> None:
        """Add a task to the load of its lane and resources, ``by`` times."""
        price = self.cost.price(task)
        load[task.lane].plus(by, price.latency_s + price.duration_s)
        for resource, rate in price.uses:
            load[resource].plus(by, rate * price.duration_s)

    def update(self, load: Load, unit: Unit, lane: Lane, by: Sum) -> None:
        """Add the update of a unit, at the price per parameter of its cheapest subgroup."""
        placed = self.given.placed_params(unit)
        for key, cheapest in self._cheapest(unit, lane).items():
            load[key].plus(by, cheapest * placed)

    def _cheapest(self, unit: Unit, lane: Lane) -> dict[Key, float]:
        found: dict[Key, float] = {}
        for subgroup in self.given.placed_subgroups(unit):
            for key, amount in self._per_param(subgroup, lane).items():
                found[key] = min(found.get(key, float("inf")), amount)
        return found

    def _per_param(self, subgroup: Subgroup, lane: Lane) -> dict[Key, float]:
        if (lane, subgroup) not in self._updates:
            load: Load = defaultdict(Sum)
            # On a GPU, an update of what is resident there is cheaper.
            off_device = lane is Lane.CPU or self.cost.profile.device.kind == "host"
            task = Task(
                0,
                lane,
                Op.UPDATE,
                Phase.UPDATE,
                num_bytes=subgroup.exchanged_bytes,
                num_params=subgroup.num_params,
                matrices=subgroup.matrices,
                splits=off_device and self.given.split_masters is not None,
            )
            self.charge(load, task, Sum(("", 1.0)))
            self._updates[lane, subgroup] = {key: amount[""] / subgroup.num_params for key, amount in load.items()}
        return self._updates[lane, subgroup]

    def copy(self, load: Load, direction: Resource, num_bytes: float, by: Sum) -> None:
        """Add bytes that cross the host link, in copies of any size."""
        link = self.cost.profile.host_link
        best = self.capacity[direction]
        load[direction].plus(by, num_bytes)
        load[Resource.LINK].plus(by, num_bytes)
        load[Resource.DRAM].plus(by, num_bytes * min(1.0, self.capacity[Resource.DRAM] / best))
        load[Resource.CORES].plus(by, num_bytes / best * link.num_cores_per_copy.value)

    def storage(self, load: Load, direction: Resource, num_bytes: float, by: Sum) -> None:
        """Add bytes that are read from or written to NVMe, in pieces of any size."""
        best = self.capacity[direction]
        load[direction].plus(by, num_bytes)
        for resource in (Resource.NVME, Resource.DRAM):
            load[resource].plus(by, num_bytes * min(1.0, self.capacity[resource] / best))

    def computing(self, unit: Unit, op: Op) -> Load:
        """Return the load of one pass through a unit, including the host's time to issue it: the least it can be."""
        return self._pass(unit, op, in_fp8=self.given.fp8_if_moved(unit) is not None)

    def casting(self, unit: Unit, op: Op) -> Load:
        """Return what comes on top where a unit's weights do not come in fp8; nothing where they never do."""
        load: Load = defaultdict(Sum)
        if self.given.fp8_if_moved(unit) is not None:
            for key, amount in self._pass(unit, op, in_fp8=False).items():
                load[key].plus(amount).plus(self.computing(unit, op)[key], -1.0)
        return load

    def adding(self, unit: Unit, op: Op) -> Load:
        """Return what comes on top where a pass adds the gradients that it makes to those of earlier micro-batches."""
        load: Load = defaultdict(Sum)
        if unit.num_params and op is (Op.WEIGHT_GRADIENT if unit.weight_gradients else Op.BACKWARD):
            num_bytes = ADDING_PASSES * self.given.precision.gradient_bytes * unit.num_params
            in_fp8 = self.given.fp8_if_moved(unit) is not None
            for key, amount in self._pass(unit, op, in_fp8=in_fp8, num_bytes=num_bytes).items():
                load[key].plus(amount).plus(self.computing(unit, op)[key], -1.0)
        return load

    def _pass(self, unit: Unit, op: Op, *, in_fp8: bool, num_bytes: int = 0) -> Load:
        if (known := self._passes.get((unit.name, op, in_fp8, num_bytes))) is not None:
            return known
        load = self._passes[unit.name, op, in_fp8, num_bytes] = defaultdict(Sum)
        task = Task(0, Lane.COMPUTE, op, Phase.BACKWARD, unit.name, in_fp8=in_fp8, num_bytes=num_bytes)
        self.charge(load, task, Sum(("", 1.0)))
        if self.cost.asynchronous:
            kernels = getattr((unit.fp8_twin if in_fp8 else None) or unit, _COMPUTE[op])
            issue = Task(0, Lane.LAUNCH, Op.ISSUE, Phase.BACKWARD, num_kernels=num_kernels(kernels))
            self.charge(load, issue, Sum(("", 1.0)))
        return load

    def gather(self, load: Load, unit: Unit, by: Sum, fp8: Fp8Weights | None = None) -> None:
        """Add a collective that gathers a unit's parameters: after an update alone, those that are trained."""
        gathers = self.given.gathers(unit)
        num_bytes = fp8.gathered_bytes if fp8 else self.weight_bytes * self.given.exchanged_params(unit)
        num_bytes += unit.frozen_bytes(self.weight_bytes) if gathers else 0
        self._collective(load, Op.GATHER, unit, num_bytes, by)

    def scatter(self, load: Load, unit: Unit, by: Sum) -> None:
        """Add the collective for a unit's gradient: a reduce-scatter, or an all-reduce in ZeRO stage 0."""
        num_bytes = self.weight_bytes * self.given.exchanged_params(unit) * (2 if self.given.zero_stage == 0 else 1)
        self._collective(load, Op.SCATTER, unit, num_bytes, by)

    def _collective(self, load: Load, op: Op, unit: Unit, num_bytes: int, by: Sum) -> None:
        through_host = self.given.collectives is not None
        phase = Phase.FORWARD if op is Op.GATHER else Phase.BACKWARD
        task = Task(0, Lane.COLLECTIVE, op, phase, unit.name, num_bytes=num_bytes, through_host=through_host)
        self.charge(load, task, by)

    def per_byte(self, direction: Resource, key: Key) -> float:
        """Return the seconds of a resource for one byte across the host link."""
        load: Load = defaultdict(Sum)
        self.copy(load, direction, 1.0, Sum(("", 1.0)))
        return load[key][""] / self.capacity[key]


def label(key: Key) -> str:
    """Return the name of a lane or resource as it stands in names of rows."""
    return key.value if isinstance(key, Lane) else f"resource {key.name.lower()}"
