"""The variables of a linear program: where everything is, and what follows for each unit alone."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.bounds.loads import Load, Loads
from planner.bounds.program import NEVER_S, ROOM, TIME, LinearProgram, Sum
from planner.costs.model import CostModel
from planner.costs.resources import Resource
from planner.decisions import Place
from planner.graph import Unit, segments
from planner.schedule.tasks import Lane, Op, Phase, Task
from planner.setup import Setup

# Ways not to keep activations, and the task that makes them again.
AGAIN = (("recompute", Op.RECOMPUTE), ("offload", Op.REMAKE), ("evict", Op.REMAKE))


class Placement:
    """The variables of a program, and expressions that its rows share.

    Args:
        setup: the decisions that are compared.
        cost: prices of tasks, and the machine.
        few: whether only the conditions are wanted that a search starts from; see :func:`.pipelines.pipelined`.

    Attributes:
        repeats: how often all weights are used, forward and backward, and gradients leave: once for each micro-batch,
            or with rounds once for all.
        passages: of a pipeline's chunks, the seconds forward and backward, by the name of their first segment.
        program: the program, with the rows on decisions; other classes add theirs.
        loads: prices of tasks as loads.
        position: the position of every unit, by name.
    """

    def __init__(self, setup: Setup, cost: CostModel, *, few: bool = False) -> None:
        self.units, self.given, self.storage = setup.units, setup.given, setup.storage
        self.cost, self.few = cost, few
        self.segments = segments(setup.units)
        self.position = {unit.name: i for i, unit in enumerate(setup.units)}
        self.weight_bytes = self.given.precision.weight_bytes
        self.repeats = 1 if self.given.pipeline_rounds > 1 else self.given.num_micro_batches
        self.loads = Loads(cost, self.given)
        self._coming: dict[str, Load] = {}
        self.passages: dict[str, tuple[Sum, Sum]] = {}
        self.program = LinearProgram(TIME)
        self.program.variable(TIME, 0.0, NEVER_S)
        for room in ROOM.values():
            self.program.variable(room, 1.0, 1.0)
        for unit in self.units:
            if unit.num_weights:
                self._place(unit)
        for segment in self.segments:
            if segment[0].can_swap:
                self._activations(segment)

    def _place(self, unit: Unit) -> None:
        if unit.num_params:
            self._fills(unit, self._trained(unit))
            return
        away = self._may_be_away(unit)
        self.program.at_least(f"{unit.name}: in one place", Sum(("", 1.0)), away)
        self._fills(unit, away)

    def _trained(self, unit: Unit) -> Sum:
        """Add the variables of a unit that is trained; return the share of its parameters that is not on the device."""
        program, name = self.program, unit.name
        places = [place for place in Place if self.stores(place is Place.NVME)]
        shares = Sum(*((program.variable(f"{name}:{place}"), 1.0) for place in places))
        program.at_least(f"{name}: updated somewhere", shares, Sum(("", 1.0)), equal=True)
        # Gradients that accumulate stay on the host meanwhile.
        if Place.NVME in places and self.given.num_micro_batches == 1:
            spill = Sum((program.variable(f"{name}:spill"), 1.0))
            program.at_least(f"{name}: spilled for NVMe", Sum((f"{name}:{Place.NVME}", 1.0)), spill)
        away = Sum() if self.given.regathers(unit) else self._may_be_away(unit)
        if not self.given.regathers(unit):
            # Gradients of updates on the device, resident or streamed, stay there.
            program.at_least(f"{name}: resident where updated", Sum(("", 1.0)), Sum((f"{name}:gpu", 1.0)).plus(away))
            if f"{name}:onnvme" in away:
                program.at_least(f"{name}: state on NVMe too", Sum((f"{name}:nvme", 1.0)), Sum((f"{name}:onnvme", 1.0)))
        # Uploads of weights that the host updates and the device keeps.
        upload = Sum((program.variable(f"{name}:upload"), 1.0))
        program.at_least(f"{name}: uploaded unless fetched", upload, self.on_host(unit).plus(away, -1.0))
        # The gradient of a streamed subgroup stays on the device, or leaves and comes back with its state. New weights
        # of streamed subgroups go to the host, unless they are resident.
        streamed = Sum((f"{name}:{Place.STREAM}", 1.0))
        program.at_least(f"{name}: gradient stays", streamed, Sum((program.variable(f"{name}:stays"), 1.0)))
        if away and not self.given.weight_in_state:
            back = Sum((program.variable(f"{name}:back"), 1.0))
            program.at_least(f"{name}: new weights go back", back, Sum(("", -1.0)).plus(streamed).plus(away))
        return away

    def _may_be_away(self, unit: Unit) -> Sum:
        """Add the variables of the share of a unit's parameters that is not on the device; return it."""
        for where in ("host", "onnvme"):
            if self.stores(where == "onnvme") and not unit.stays:
                self.program.variable(f"{unit.name}:{where}")
        return self.away(unit)

    def own_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's weights that one rank keeps, if ranks share updates or weights."""
        return self.weight_bytes * self.given.shard_params(unit) + self.given.frozen_shard_bytes(unit)

    def _fills(self, unit: Unit, away: Sum) -> None:
        """Count how often parameters that are not resident are copied in: before every use, unless they were kept."""
        program, name = self.program, unit.name
        need = Sum(("", 1.0)) if self.given.gathers(unit) else away
        if not need or not unit.forward:  # an expert that no token visits
            return
        uses = (2.0 if unit.backward or unit.num_params else 1.0) * self.repeats
        reused = Sum()
        for gap, count in self.gaps():
            reused[program.variable(f"{name}:kept {gap}")] = count
            program.at_least(f"{name}: kept {gap}", need, Sum((f"{name}:kept {gap}", 1.0)))
        fills = Sum((program.variable(f"{name}:fills", 0.0, uses), 1.0))
        program.at_least(f"{name}: comes for every use", fills, Sum().plus(need, uses).plus(reused, -1.0))
        program.at_least(f"{name}: comes once at least", fills, need)
        if (there := f"{name}:onnvme") in away:
            reads = Sum((program.variable(f"{name}:reads", 0.0, uses), 1.0))
            program.at_least(f"{name}: read for every use", reads, Sum((there, uses)).plus(reused, -1.0))
            program.at_least(f"{name}: read once at least", reads, Sum((there, 1.0)))
        if self.given.gathers(unit) and self.given.fp8_if_moved(unit):
            wide = Sum((program.variable(f"{name}:wide", 0.0, uses), 1.0))
            program.at_least(
                f"{name}: gathered in its own type", wide, Sum().plus(fills).plus(self.moved_in_fp8(unit), -uses)
            )
        if self.given.gathers(unit) and away:
            fetches = Sum((program.variable(f"{name}:fetches", 0.0, uses), 1.0))
            program.at_least(f"{name}: fetched for every use", fetches, Sum().plus(away, uses).plus(reused, -1.0))
            program.at_least(f"{name}: fetched once at least", fetches, away)

    def gaps(self) -> list[tuple[str, float]]:
        """Return the gaps between uses in which parameters may be kept, and how often each occurs per micro-batch."""
        earlier = self.repeats - 1.0
        return [("at last", 1.0), *([("before", earlier), ("between", earlier)] if earlier else [])]

    def _activations(self, segment: Sequence[Unit]) -> None:
        name = segment[0].segment
        ways = [way for way, _ in AGAIN if way == "recompute" or self.storage != "never"]
        ways = [way for way in ways if way != "evict" or self.stores(nvme=True)]
        chosen = Sum(*((self.program.variable(f"{name}:{way}"), 1.0) for way in ways))
        if len(ways) > 1:
            self.program.at_least(f"{name}: activations one way", Sum(("", 1.0)), chosen)

    def passes(self, unit: Unit) -> float:
        """Return how often a unit computes in an iteration: its kernels and activations are those of one tile."""
        return float(self.given.num_micro_batches * unit.num_tiles)

    def stores(self, nvme: bool) -> bool:
        """Return whether the setup allows this storage: NVMe, or the host."""
        return not nvme or (self.storage == "nvme" and self.cost.profile.nvme is not None)

    def share(self, unit: Unit, *places: str) -> Sum:
        """Return the sum of a unit's variables of these names, as far as the program has them."""
        names = (f"{unit.name}:{place}" for place in places)
        return Sum(*((name, 1.0) for name in names if name in self.program.boxes))

    def away(self, unit: Unit) -> Sum:
        """Return the share of a unit's parameters that is not on the device."""
        return self.share(unit, "host", "onnvme")

    def fetched(self, unit: Unit) -> Sum:
        """Return the share of a unit's parameters that is on the host."""
        return self.share(unit, "host")

    def moved_in_fp8(self, unit: Unit) -> Sum:
        """Return the share of a unit's parameters that come in fp8, if any do: fetched, or gathered from devices."""
        if not self.given.gathers(unit):
            return self.fetched(unit)
        return Sum(("", 1.0)).plus(self.share(unit, "onnvme"), -1.0)

    def comes(self, load: Load, unit: Unit) -> None:
        """Add one copy of a unit's parameters to the device from where they are, perhaps in fp8."""
        away, own_bytes = self.away(unit), self.own_bytes(unit)
        if fp8 := self.given.fp8_if_moved(unit):
            host = self.fetched(unit)
            num_bytes = fp8.fetched_bytes + self.given.frozen_shard_bytes(unit)
            self.loads.copy(load, Resource.LINK_DOWN, num_bytes, host)
            away.plus(host, -1.0)
        self.loads.copy(load, Resource.LINK_DOWN, own_bytes, away)

    def coming(self, unit: Unit) -> Load:
        """Return the load of bringing a unit's parameters to the device for one use."""
        if (known := self._coming.get(unit.name)) is not None:
            return known
        load = self._coming[unit.name] = defaultdict(Sum)
        if f"{unit.name}:fills" in self.program.boxes:
            if self.given.gathers(unit):
                self.gathered(load, unit)
            self.comes(load, unit)
        return load

    def gathered(self, load: Load, unit: Unit) -> None:
        """Add one all-gather of a unit's parameters, perhaps in fp8."""
        every, narrow = Sum(("", 1.0)), self.moved_in_fp8(unit)
        if fp8 := self.given.fp8_if_moved(unit):
            self.loads.gather(load, unit, narrow, fp8)
            every.plus(narrow, -1.0)
        self.loads.gather(load, unit, every)

    def on_host(self, unit: Unit) -> Sum:
        """Return the share of a unit that the host updates."""
        return self.share(unit, Place.CPU, Place.NVME)

    def leaves(self, unit: Unit) -> Sum:
        """Return the share of a unit's gradient that is copied to the host."""
        return self.on_host(unit).plus(Sum((f"{unit.name}:{Place.STREAM}", 1.0), (f"{unit.name}:stays", -1.0)))

    def state_out(self, unit: Unit) -> Sum:
        """Return the bytes of streamed state and new weights that are copied back to the host."""
        shard = self.given.placed_params(unit)
        stored = Sum((f"{unit.name}:{Place.STREAM}", float(self.given.placed_state_bytes_per_param(unit) * shard)))
        return stored.plus(self.share(unit, "back"), float(self.weight_bytes * shard))

    def updates(self, load: Load, unit: Unit) -> None:
        """Add the update itself, the copy of streamed state to the device, and the cast of weights on the host."""
        self.loads.update(load, unit, Lane.CPU, self.on_host(unit))
        streamed = Sum((f"{unit.name}:{Place.STREAM}", 1.0))
        self.loads.update(load, unit, Lane.GPU_UPDATE, Sum((f"{unit.name}:{Place.GPU}", 1.0)).plus(streamed))
        shard = self.given.placed_params(unit)
        self.loads.copy(load, Resource.LINK_DOWN, self.given.placed_state_bytes_per_param(unit) * shard, streamed)
        gradient = Sum((f"{unit.name}:{Place.STREAM}", 1.0), (f"{unit.name}:stays", -1.0))
        self.loads.copy(load, Resource.LINK_DOWN, self.weight_bytes * shard, gradient)
        if fp8 := self.given.fp8_if_moved(unit):
            cast = Task(0, Lane.CPU, Op.CAST, Phase.UPDATE, num_bytes=fp8.cast_bytes)
            self.loads.charge(load, cast, self.fetched(unit))

    def chain(self, what: str, amounts: Iterable[Sum], numbers: Sequence[int] = ()) -> list[str]:
        """Return variables for the running sums of ``amounts``, with ``numbers`` (0, 1, ...) in their names."""
        chain: list[str] = []
        high = 0.0
        for i, amount in zip(numbers, amounts, strict=True) if numbers else enumerate(amounts):
            high += self.program.highest(amount)
            variable = self.program.variable(f"{what}, 0 to {i}", 0.0, high)
            so_far = Sum().plus(amount).plus({chain[-1]: 1.0} if chain else {})
            self.program.at_least(f"{what}, 0 to {i}", Sum((variable, 1.0)), so_far, equal=True)
            chain.append(variable)
        return chain
