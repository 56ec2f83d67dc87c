"""Conditions on work: an iteration lasts at least as long as each lane and resource needs for its work."""

from collections import defaultdict

from planner.bounds.loads import Load, label
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import TIME, Sum
from planner.costs.resources import Resource
from planner.decisions import Place
from planner.graph import Unit
from planner.schedule.tasks import Lane, Op, Phase, Task


class Work:
    """Adds the conditions on work to a placement's program."""

    def __init__(self, on: Placement) -> None:
        self.on = on
        self.total: Load = defaultdict(Sum)
        self._work()

    def _work(self) -> None:
        total, every = self.total, Sum(("", float(self.on.repeats)))
        for unit in self.on.units:
            self._pass(unit, Op.FORWARD, every)
            self._pass(unit, Op.BACKWARD, every)
            self._casts(unit)
            self._work_of(unit)
        for segment in self.on.segments:
            for way, op in AGAIN:
                if (name := f"{segment[0].segment}:{way}") not in self.on.program.boxes:
                    continue
                by = Sum((name, float(self.on.repeats)))
                for unit in segment:
                    self._pass(unit, op, by)
                    if way != "recompute":
                        self.on.loads.copy(total, Resource.LINK_UP, unit.swap_bytes, by)
                        self.on.loads.copy(total, Resource.LINK_DOWN, unit.swap_bytes, by)
                    if way == "evict":
                        self.on.loads.storage(total, Resource.NVME_WRITE, unit.swap_bytes, by)
                        self.on.loads.storage(total, Resource.NVME_READ, unit.swap_bytes, by)
        num_tensors = sum(len(unit.parameters) for unit in self.on.units)
        step = Task(0, Lane.LAUNCH, Op.STEP, Phase.UPDATE, num_tensors=num_tensors)
        self.on.loads.charge(total, step, Sum(("", 1.0)))
        for key, load in total.items():
            terms = Sum().plus(load, 1.0 / self.on.loads.capacity[key])
            self.on.program.at_least(f"work: {label(key)}", Sum((TIME, 1.0)), terms)

    def _pass(self, unit: Unit, op: Op, by: Sum) -> None:
        for key, amount in self.on.loads.computing(unit, op).items():
            self.total[key].plus(by, amount[""])

    def _casts(self, unit: Unit) -> None:
        """Add the casts of weights in forward and backward where weights do not come in fp8."""
        repeats = float(self.on.repeats)
        for op in (Op.FORWARD, Op.BACKWARD):
            for key, amount in self.on.loads.casting(unit, op).items():
                self.total[key].plus(Sum(("", repeats)).plus(self.on.moved_in_fp8(unit), -repeats), amount[""])

    def _work_of(self, unit: Unit) -> None:
        """Add the load of a unit's weights, gradients and updates in an iteration."""
        if unit.num_params:
            self._train(unit)
        if unit.num_weights:
            self._bring(unit)

    def _train(self, unit: Unit) -> None:
        """Add the load of a unit's gradients and updates."""
        total, name = self.total, unit.name
        shard = self.on.given.placed_params(unit)
        self.on.updates(total, unit)
        self.on.loads.copy(total, Resource.LINK_DOWN, self.on.weight_bytes * shard, Sum((f"{name}:upload", 1.0)))
        by = Sum().plus(self.on.leaves(unit), float(self.on.repeats))
        self.on.loads.copy(total, Resource.LINK_UP, self.on.weight_bytes * shard, by)
        self.on.loads.copy(total, Resource.LINK_UP, 1.0, self.on.state_out(unit))
        if self.on.given.replicas(unit) > 1:
            # Whole gradients that accumulate on the device are reduced once.
            resident = Sum((f"{name}:{Place.GPU}", 1.0), (f"{name}:{Place.STREAM}", 1.0))
            rest = self.on.repeats - 1.0
            often = Sum(("", float(self.on.repeats))).plus(resident if self.on.given.zero_stage < 2 else {}, -rest)
            self.on.loads.scatter(total, unit, often)
        if self.on.given.regathers(unit):
            self.on.loads.gather(total, unit, Sum(("", 1.0)))

    def _bring(self, unit: Unit) -> None:
        """Add the load of bringing a unit's weights to the device, and of its storage."""
        total, name = self.total, unit.name
        fp8, boxes = self.on.given.fp8_if_moved(unit), self.on.program.boxes
        if self.on.given.gathers(unit) and unit.forward:
            fills, wide = Sum((f"{name}:fills", 1.0)), Sum((f"{name}:wide", 1.0)) if fp8 else Sum()
            self.on.loads.gather(total, unit, fills.plus(wide, -1.0), fp8)
            self.on.loads.gather(total, unit, wide)
        fetched = next((v for v in (f"{name}:fetches", f"{name}:fills") if v in boxes), None)
        if fetched and self.on.away(unit):
            reads = Sum((f"{name}:reads", 1.0)) if fp8 and f"{name}:reads" in boxes else Sum()
            frozen_bytes, own_bytes = self.on.given.frozen_shard_bytes(unit), self.on.own_bytes(unit)
            for num_bytes, by in (
                (fp8.fetched_bytes + frozen_bytes if fp8 else own_bytes, Sum((fetched, 1.0)).plus(reads, -1.0)),
                (own_bytes, reads),
            ):
                fetch = Task(0, Lane.H2D, Op.FETCH, Phase.FORWARD, num_bytes=num_bytes)
                self.on.loads.charge(total, fetch, by)
        if self.on.stores(nvme=True):
            self._storage_work(unit)

    def _storage_work(self, unit: Unit) -> None:
        """Add the reads and writes of a unit's parameters, gradients and state on NVMe in an iteration."""
        name, shard = unit.name, self.on.given.placed_params(unit)
        read, written = Resource.NVME_READ, Resource.NVME_WRITE
        weights_written = 0 if self.on.given.precision.weight_in_state else self.on.weight_bytes
        for what, num_bytes, directions in (
            (Place.NVME, self.on.given.placed_state_bytes_per_param(unit) * shard, (read, written)),
            ("spill", self.on.given.spilled_bytes_per_param * shard, (read, written)),
            ("onnvme", weights_written * shard, (written,)),
            ("reads", self.on.own_bytes(unit), (read,)),
        ):
            for direction in directions if f"{name}:{what}" in self.on.program.boxes else ():
                self.on.loads.storage(self.total, direction, num_bytes, Sum((f"{name}:{what}", 1.0)))
