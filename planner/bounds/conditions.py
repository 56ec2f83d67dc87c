"""What every schedule of a model on a machine must satisfy, as linear conditions on what is decided.

[Note: Necessary conditions] Nothing here describes a good schedule. Each row is a consequence of the rules that the
simulator walks by, so that the least iteration time under all rows is a lower bound for every schedule:

- *work*: a lane does one task after another, and a resource gives no more than it has, so an iteration lasts at least
  as long as either needs for its work;
- *windows*: with clipping no update starts before all gradients are where they are updated, and a unit's forward waits
  for its update. So between the last backward of unit j and the next forward of unit i there must be time for the
  gradients of units 0..j to leave, and then for the updates of units 0..i to be made and brought back, while between
  the forward of i and the backward of j the device computes all that lies there. This holds in whatever order updates
  are made: of units 0..i one is last, and from its forward on the device still has to compute at least as much.
  Without clipping the window of units 0..i begins when the backward of i ends;
  State that is streamed in is stored again meanwhile, but for what the device has room for: at the end of the window,
  and at each backward that follows. State on NVMe comes and goes meanwhile, but for what host buffers hold
  [Note: State ahead];
- *memory*: at the backward of each unit the device holds at least what stays there, the activations of all segments
  before it, and the unit's own activations, workspace and gradient. Parameters that come are in slots
  [Note: Static slots], of which there is one for each size of units at least, and one more for each unit that is kept
  between two uses while another of its size is used;
- *rates* are the best that a curve reaches; what a subgroup takes is what the cheapest of its unit takes per parameter.

A decision that is yes or no becomes a fraction, so the bound is also one for mixtures that nobody can run.
Variables (``U`` a unit, ``S`` a segment): ``U:gpu|stream|cpu|nvme`` shares of its updates, ``U:host``, ``U:onnvme``
where its parameters are, ``U:fills`` how often they come and ``U:reads`` from NVMe, ``U:spill`` the share of gradients
that wait there, ``S:recompute|offload|evict`` what happens to activations.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from planner.bounds.loads import Key, Load, Loads
from planner.bounds.pipelines import pipelined
from planner.bounds.program import LinearProgram, Sum
from planner.bounds.space import OVERRUN, RING, ROOM, TIME, Space
from planner.bounds.storage import STATE_BUFFERS, offloaded
from planner.costs import CostModel, Resource
from planner.decisions import SPILLED_BYTES_PER_PARAM, STATE_BYTES_PER_PARAM, Decisions, Place
from planner.graph import Unit, segments
from planner.lowering.workspace import least_workspace_bytes
from planner.prediction import capacities
from planner.schedule import Lane, Op, Phase, Task, Tier

_STATE_SLOT = "state slot"
# Windows end at so many units, and begin at so many, evenly spaced: each is a row.
_NUM_ENDS, _NUM_BEGINNINGS = 24, 8
_AGAIN = (("recompute", Op.RECOMPUTE), ("offload", Op.REMAKE), ("evict", Op.REMAKE))


def conditions(space: Space, cost: CostModel, limit_s: float, *, soft: bool = False) -> LinearProgram:
    """Return the conditions of an iteration that takes at most ``limit_s``.

    Args:
        space: what is compared.
        cost: prices of tasks, and the machine.
        limit_s: schedules that take longer are of no interest.
        soft: minimise by what fraction memory is overrun, rather than time; see :data:`OVERRUN`.
    """
    if space.given.pipeline_parallel > 1:
        return pipelined(space, cost, limit_s, soft=soft)
    return _Conditions(space, cost, limit_s, soft=soft).program


class _Conditions:
    """Builds the program, a group of rows at a time."""

    def __init__(self, space: Space, cost: CostModel, limit_s: float, *, soft: bool) -> None:
        self.units, self.given, self.storage = space.units, space.given, space.storage
        self.cost, self.limit_s = cost, limit_s
        self.segments = segments(space.units)
        self.position = {unit.name: i for i, unit in enumerate(space.units)}
        self.weight_bytes = self.given.precision.weight_bytes
        self.repeats = self.given.num_micro_batches
        self.loads = Loads(cost, self.given)
        self.program = LinearProgram(OVERRUN if soft else TIME)
        self.program.variable(TIME, 0.0, limit_s)
        self.rings: dict[str, tuple[float, list[Unit]]] = {}  # size of one slot, and who may be in it
        self.held: list[Sum] = []  # what the device holds at the first backward of every unit
        self.overrun = Sum((self.program.variable(OVERRUN, 0.0, 1e6), 1.0)) if soft else Sum()
        for room in ROOM.values():
            self.program.variable(room, 1.0, 1.0)
        self.total: Load = defaultdict(Sum)
        for unit in self.units:
            if unit.num_params:
                self._place(unit)
        for segment in self.segments:
            if segment[0].recompute:
                self._activations(segment)
        self._work()
        self._memory()
        self._windows()

    # -- what is decided ------------------------------------------------------------------------------------------

    def _place(self, unit: Unit) -> None:
        program, name = self.program, unit.name
        places = [place for place in Place if self._stores(place is Place.NVME)]
        shares = Sum(*((program.variable(f"{name}:{place}"), 1.0) for place in places))
        program.at_least(f"{name}: updated somewhere", shares, Sum(("", 1.0)), equal=True)
        if Place.NVME in places and self.repeats == 1:  # what is added up later is on the host until then
            spill = Sum((program.variable(f"{name}:spill"), 1.0))
            program.at_least(f"{name}: spilled for NVMe", Sum((f"{name}:{Place.NVME}", 1.0)), spill)
        away = self._away(unit)
        if not self.given.regathers(unit):
            for where in ("host", "onnvme"):
                if self._stores(where == "onnvme"):
                    away[program.variable(f"{name}:{where}")] = 1.0
            # What is updated on the device, or comes from the host, stays there.
            program.at_least(f"{name}: resident where updated", Sum(("", 1.0)), Sum((f"{name}:gpu", 1.0)).plus(away))
            if self._stores(nvme=True):
                program.at_least(f"{name}: state on NVMe too", Sum((f"{name}:nvme", 1.0)), Sum((f"{name}:onnvme", 1.0)))
        # Uploads, of what the host updates and the device keeps.
        upload = Sum((program.variable(f"{name}:upload"), 1.0))
        program.at_least(f"{name}: uploaded unless fetched", upload, self._on_host(unit).plus(away, -1.0))
        # The gradient of what is streamed stays on the device, or leaves and comes back with its state; new weights of
        # what is streamed and not resident go to the host.
        streamed = Sum((f"{name}:{Place.STREAM}", 1.0))
        program.at_least(f"{name}: gradient stays", streamed, Sum((program.variable(f"{name}:stays"), 1.0)))
        if away and not self.given.precision.master_is_weight:
            back = Sum((program.variable(f"{name}:back"), 1.0))
            program.at_least(f"{name}: new weights go back", back, Sum(("", -1.0)).plus(streamed).plus(away))
        self._fills(unit, away)

    def _fills(self, unit: Unit, away: Sum) -> None:
        """Count how often parameters that are not resident come: before every use that they were not kept for."""
        program, name = self.program, unit.name
        need = Sum(("", 1.0)) if self.given.gathers(unit) else away
        if not need or not unit.forward:  # an expert that no token visits
            return
        uses = 2.0 * self.repeats
        kept = Sum()
        for gap, count in self._gaps():
            kept[program.variable(f"{name}:kept {gap}")] = count
            program.at_least(f"{name}: kept {gap}", need, Sum((f"{name}:kept {gap}", 1.0)))
        fills = Sum((program.variable(f"{name}:fills", 0.0, uses), 1.0))
        program.at_least(f"{name}: comes for every use", fills, Sum().plus(need, uses).plus(kept, -1.0))
        program.at_least(f"{name}: comes once at least", fills, need)
        if (there := f"{name}:onnvme") in away:
            reads = Sum((program.variable(f"{name}:reads", 0.0, uses), 1.0))
            program.at_least(f"{name}: read for every use", reads, Sum((there, uses)).plus(kept, -1.0))
            program.at_least(f"{name}: read once at least", reads, Sum((there, 1.0)))
        if self.given.gathers(unit) and away:
            fetches = Sum((program.variable(f"{name}:fetches", 0.0, uses), 1.0))
            program.at_least(f"{name}: fetched for every use", fetches, Sum().plus(away, uses).plus(kept, -1.0))
            program.at_least(f"{name}: fetched once at least", fetches, away)

    def _gaps(self) -> list[tuple[str, float]]:
        """Return between which uses parameters may be kept, and how often that is: means over micro-batches."""
        earlier = self.repeats - 1.0
        return [("at last", 1.0), *([("before", earlier), ("between", earlier)] if earlier else [])]

    def _activations(self, segment: Sequence[Unit]) -> None:
        name = segment[0].segment
        ways = [way for way, _ in _AGAIN if way == "recompute" or self.storage != "never"]
        ways = [way for way in ways if way != "evict" or self._stores(nvme=True)]
        chosen = Sum(*((self.program.variable(f"{name}:{way}"), 1.0) for way in ways))
        if len(ways) > 1:
            self.program.at_least(f"{name}: activations one way", Sum(("", 1.0)), chosen)

    def _stores(self, nvme: bool) -> bool:
        return not nvme or (self.storage == "nvme" and self.cost.profile.nvme is not None)

    def _away(self, unit: Unit) -> Sum:
        names = [f"{unit.name}:{where}" for where in ("host", "onnvme")]
        return Sum(*((name, 1.0) for name in names if name in self.program.boxes))

    def _on_host(self, unit: Unit) -> Sum:
        """Return the share of a unit's updates that the host makes."""
        names = [f"{unit.name}:{place}" for place in (Place.CPU, Place.NVME)]
        return Sum(*((name, 1.0) for name in names if name in self.program.boxes))

    def _leaves(self, unit: Unit) -> Sum:
        """Return the share of a unit's gradient that leaves the device."""
        return self._on_host(unit).plus(Sum((f"{unit.name}:{Place.STREAM}", 1.0), (f"{unit.name}:stays", -1.0)))

    def _state_out(self, unit: Unit) -> Sum:
        """Return the bytes of streamed state and new weights that are stored again."""
        shard = self.given.shard_params(unit)
        stored = Sum((f"{unit.name}:{Place.STREAM}", float(STATE_BYTES_PER_PARAM * shard)))
        back = f"{unit.name}:back"
        return stored.plus({back: float(self.weight_bytes * shard)} if back in self.program.boxes else {})

    # -- rows -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """An iteration lasts as long as each lane and resource needs for its work."""
        total, every = self.total, Sum(("", float(self.repeats)))
        for unit in self.units:
            self._pass(unit, Op.FORWARD, every)
            self._pass(unit, Op.BACKWARD, every)
            if unit.num_params:
                self._work_of(unit)
        for segment in self.segments:
            for way, op in _AGAIN:
                if (name := f"{segment[0].segment}:{way}") not in self.program.boxes:
                    continue
                by = Sum((name, float(self.repeats)))
                for unit in segment:
                    self._pass(unit, op, by)
                    if way != "recompute":
                        self.loads.copy(total, Resource.LINK_UP, unit.swap_bytes, by)
                        self.loads.copy(total, Resource.LINK_DOWN, unit.swap_bytes, by)
                    if way == "evict":
                        self.loads.storage(total, Resource.NVME_WRITE, unit.swap_bytes, by)
                        self.loads.storage(total, Resource.NVME_READ, unit.swap_bytes, by)
        num_tensors = sum(len(unit.parameters) for unit in self.units)
        step = Task(0, Lane.LAUNCH, Op.STEP, Phase.UPDATE, num_tensors=num_tensors)
        self.loads.charge(total, step, Sum(("", 1.0)))
        for key, load in total.items():
            terms = Sum().plus(load, 1.0 / self.loads.capacity[key])
            self.program.at_least(f"work: {_word(key)}", Sum((TIME, 1.0)), terms)

    def _pass(self, unit: Unit, op: Op, by: Sum) -> None:
        for key, amount in self.loads.computing(unit, op).items():
            self.total[key].plus(by, amount[""])

    def _work_of(self, unit: Unit) -> None:
        """Add what a unit's parameters, gradients and updates take in an iteration."""
        total, name = self.total, unit.name
        shard = self.given.shard_params(unit)
        self._updates(total, unit)
        self.loads.copy(total, Resource.LINK_DOWN, self.weight_bytes * shard, Sum((f"{name}:upload", 1.0)))
        by = Sum().plus(self._leaves(unit), float(self.repeats))
        self.loads.copy(total, Resource.LINK_UP, self.weight_bytes * shard, by)
        self.loads.copy(total, Resource.LINK_UP, 1.0, self._state_out(unit))
        if self.given.replicas(unit) > 1:
            # Where whole gradients pile up on the device, they are added up once.
            resident = Sum((f"{name}:{Place.GPU}", 1.0), (f"{name}:{Place.STREAM}", 1.0))
            rest = self.repeats - 1.0
            often = Sum(("", float(self.repeats))).plus(resident if self.given.zero_stage < 2 else {}, -rest)
            self.loads.scatter(total, unit, often)
        if self.given.regathers(unit):
            self.loads.gather(total, unit, Sum(("", 1.0)))
        if self.given.gathers(unit) and unit.forward:
            self.loads.gather(total, unit, Sum((f"{name}:fills", 1.0)))
        fetched = next((v for v in (f"{name}:fetches", f"{name}:fills") if v in self.program.boxes), None)
        if fetched and self._away(unit):
            fetch = Task(0, Lane.H2D, Op.FETCH, Phase.FORWARD, num_bytes=self.weight_bytes * shard)
            self.loads.charge(total, fetch, Sum((fetched, 1.0)))
        if self._stores(nvme=True):
            self._storage_work(unit)

    def _storage_work(self, unit: Unit) -> None:
        """Add what a unit's parameters, gradients and state on NVMe are read and written in an iteration."""
        name, shard = unit.name, self.given.shard_params(unit)
        read, written = Resource.NVME_READ, Resource.NVME_WRITE
        weights_written = 0 if self.given.precision.master_is_weight else self.weight_bytes
        for what, num_bytes, directions in (
            (Place.NVME, STATE_BYTES_PER_PARAM, (read, written)),
            ("spill", SPILLED_BYTES_PER_PARAM, (read, written)),
            ("onnvme", weights_written, (written,)),
            ("reads", self.weight_bytes, (read,)),
        ):
            for direction in directions if f"{name}:{what}" in self.program.boxes else ():
                self.loads.storage(self.total, direction, num_bytes * shard, Sum((f"{name}:{what}", 1.0)))

    def _updates(self, load: Load, unit: Unit) -> None:
        """Add the update itself, and the state that is streamed in for it."""
        self.loads.update(load, unit, Lane.CPU, self._on_host(unit))
        streamed = Sum((f"{unit.name}:{Place.STREAM}", 1.0))
        self.loads.update(load, unit, Lane.GPU_UPDATE, Sum((f"{unit.name}:{Place.GPU}", 1.0)).plus(streamed))
        shard = self.given.shard_params(unit)
        self.loads.copy(load, Resource.LINK_DOWN, STATE_BYTES_PER_PARAM * shard, streamed)
        gradient = Sum((f"{unit.name}:{Place.STREAM}", 1.0), (f"{unit.name}:stays", -1.0))
        self.loads.copy(load, Resource.LINK_DOWN, self.weight_bytes * shard, gradient)

    def _windows(self) -> None:
        """Updates and what surrounds them fit between the last backward and the next forward."""
        leaving = [self._leaving(unit) for unit in self.units]
        returning = [self._returning(unit) for unit in self.units]
        forward_s, backward_s, again = [], [], []
        for unit in self.units:
            forward_s.append(self.loads.computing(unit, Op.FORWARD)[Lane.COMPUTE][""])
            backward_s.append(self.loads.computing(unit, Op.BACKWARD)[Lane.COMPUTE][""])
            ways = [
                (f"{unit.segment}:{way}", op) for way, op in _AGAIN if f"{unit.segment}:{way}" in self.program.boxes
            ]
            again.append(Sum(*((name, self.loads.computing(unit, op)[Lane.COMPUTE][""]) for name, op in ways)))
        everything = Sum(("", self.repeats * (sum(forward_s) + sum(backward_s))))
        again_s = self._chain("again", again)
        if again_s:
            everything[again_s[-1]] += float(self.repeats)

        def between(end: int, begin: int) -> Sum:
            """Return what is computed from the first forward of ``end`` to the last backward of ``begin``."""
            rest = Sum().plus(everything).plus({"": sum(forward_s[:end]) + sum(backward_s[:begin])}, -1.0)
            return rest.plus({again_s[begin - 1]: 1.0}, -1.0) if begin and again_s else rest

        if not self.given.clip:
            both = [_added(out, back) for out, back in zip(leaving, returning, strict=True)]
            spans = self._longest("update", both)
            self._through_nvme(spans)
            for i in _spread(len(self.units), _NUM_ENDS):
                needs = between(i, i).plus({spans[i]: 1.0})
                self.program.at_least(f"window: updates of units 0 to {i}", Sum((TIME, 1.0)), needs)
            return
        coming = [self._coming(unit) for unit in self.units]  # for backward, while gradients leave
        after, before = self._longest("update", returning), self._longest("leave", leaving, coming)
        self._through_nvme(after)
        for i in _spread(len(self.units), _NUM_ENDS):
            for j in _spread(len(self.units), _NUM_BEGINNINGS):
                needs = between(i, j).plus(Sum((after[i], 1.0), (before[j], 1.0)))
                name = f"window: updates of units 0 to {i} once gradients of 0 to {j} have left"
                self.program.at_least(name, Sum((TIME, 1.0)), needs)
        starts = {segment[0].segment: self.position[segment[0].name] for segment in self.segments}
        for i in _spread(len(self.units), _NUM_BEGINNINGS):
            stored = self._stored_before(i)
            start = starts[self.units[i].segment]
            earlier = Sum(("", sum(forward_s) + sum(backward_s[i + 1 :])), *(((again_s[-1], 1.0),) if again_s else ()))
            earlier.plus({again_s[start - 1]: 1.0} if start and again_s else {}, -1.0)
            for j in (j for j in _spread(len(self.units), _NUM_BEGINNINGS) if j <= i):
                needs = between(0, j).plus(earlier, -1.0).plus(Sum((stored, 1.0), (before[j], 1.0)))
                name = f"window: all updates before the backward of {i}, once gradients of 0 to {j} have left"
                self.program.at_least(name, Sum((TIME, 1.0)), needs)

    def _stored_before(self, position: int) -> str:
        """Return a variable: what all updates take, and storing what the device has no room for at a backward."""
        span = self.program.variable(f"updated and stored before the backward of {position}", 0.0, self.limit_s)
        memory = float(capacities(self.cost)[Tier.GPU])
        last = len(self.units) - 1
        stored = Sum((f"streamed, 0 to {last}", memory), (_STATE_SLOT, -memory), ("", -memory))
        stored.plus(self.held[position], memory)
        for key in (Resource.LINK_UP, Resource.LINK, Resource.DRAM):
            updates = f"update by {_word(key)}, 0 to {last}"
            needs = Sum((updates, 1.0)) if updates in self.program.boxes else Sum()
            needs.plus(stored, self.loads.per_byte(Resource.LINK_UP, key))
            name = f"updated and stored before the backward of {position} by {_word(key)}"
            self.program.at_least(name, Sum((span, 1.0)), needs)
        return span

    def _leaving(self, unit: Unit) -> Load:
        """Return what gradients of one micro-batch take to where they are updated."""
        load: Load = defaultdict(Sum)
        if unit.num_params:
            num_bytes = self.weight_bytes * self.given.shard_params(unit)
            self.loads.copy(load, Resource.LINK_UP, num_bytes, self._leaves(unit))
            if self.given.replicas(unit) > 1:
                self.loads.scatter(load, unit, Sum(("", 1.0)))
        return load

    def _returning(self, unit: Unit) -> Load:
        """Return what the update takes, and what it changed takes to where it is used next."""
        load: Load = defaultdict(Sum)
        if unit.num_params:
            self._updates(load, unit)
            num_bytes = self.weight_bytes * self.given.shard_params(unit)
            comes = Sum((f"{unit.name}:upload", 1.0)).plus(self._away(unit) if unit.forward else {})
            self.loads.copy(load, Resource.LINK_DOWN, num_bytes, comes)
            if (self.given.gathers(unit) and unit.forward) or self.given.regathers(unit):
                self.loads.gather(load, unit, Sum(("", 1.0)))
        return load

    def _longest(self, what: str, loads: Sequence[Load], behind: Sequence[Load] = ()) -> list[str]:
        """Return, for units 0 to each, a variable that is at least the time any lane or resource needs for them.

        Args:
            what: names it.
            loads: of each unit.
            behind: what the units before it need meanwhile, if anything, but for what slots hold.
        """
        found = [self.program.variable(f"{what} of 0 to {i}", 0.0, self.limit_s) for i in range(len(loads))]
        keys = sorted({key for load in (*loads, *behind) for key in load}, key=_word)
        for key in keys:
            if key is Resource.DEVICE:  # computes meanwhile
                continue
            scaled = [Sum().plus(load.get(key, {}), 1.0 / self.loads.capacity[key]) for load in loads]
            others = [Sum().plus(load.get(key, {}), 1.0 / self.loads.capacity[key]) for load in behind]
            coming = self._chain(f"{what} beside, by {_word(key)}", others) if any(others) else []
            in_slots = self._in_slots(behind, key) if coming else Sum()
            for i, variable in enumerate(self._chain(f"{what} by {_word(key)}", scaled)):
                name = f"{what} of 0 to {i} by {_word(key)}"
                self.program.at_least(name, Sum((found[i], 1.0)), Sum((variable, 1.0)))
                if i and coming:
                    needs = Sum((variable, 1.0), (coming[i - 1], 1.0)).plus(in_slots, -1.0)
                    self.program.at_least(f"{name}, with what comes", Sum((found[i], 1.0)), needs)
                if what == "update" and key in {Resource.LINK_UP, Resource.LINK, Resource.DRAM}:
                    needs = Sum((variable, 1.0)).plus(self._stored(i), self.loads.per_byte(Resource.LINK_UP, key))
                    name = f"update of 0 to {i} by {_word(key)}, with what is stored"
                    self.program.at_least(name, Sum((found[i], 1.0)), needs)
        return found

    def _in_slots(self, coming: Sequence[Load], key: Key) -> Sum:
        """Return the seconds of what comes that was for parameters which slots can hold."""
        held = Sum()
        for ring, (size, units) in self.rings.items():
            most = max(self.program.highest(coming[self.position[unit.name]].get(key, {})) for unit in units)
            held[ring] += most / self.loads.capacity[key] / size
        return held

    def _coming(self, unit: Unit) -> Load:
        """Return what it takes to bring a unit's parameters for one use."""
        load: Load = defaultdict(Sum)
        if f"{unit.name}:fills" in self.program.boxes:
            if self.given.gathers(unit):
                self.loads.gather(load, unit, Sum(("", 1.0)))
            self.loads.copy(
                load, Resource.LINK_DOWN, self.weight_bytes * self.given.shard_params(unit), self._away(unit)
            )
        return load

    def _through_nvme(self, spans: Sequence[str]) -> None:
        """State on NVMe is read and written within the spans of updates, but for what host buffers hold."""
        if not self._stores(nvme=True):
            return
        device_bytes = float(capacities(self.cost)[Tier.GPU])
        scale = STATE_BYTES_PER_PARAM / device_bytes
        shares = (
            Sum((f"{unit.name}:{Place.NVME}", self.given.shard_params(unit) * scale)) if unit.num_params else Sum()
            for unit in self.units
        )
        state = self._chain("state through NVMe", shares)
        each: Load = defaultdict(Sum)
        for direction in (Resource.NVME_READ, Resource.NVME_WRITE):
            self.loads.storage(each, direction, device_bytes, Sum(("", 1.0)))
        for key in (Resource.NVME_READ, Resource.NVME_WRITE, Resource.NVME):
            needs_s = each[key][""] / self.loads.capacity[key]
            for i, span in enumerate(spans):
                needs = Sum((state[i], needs_s), (STATE_BUFFERS, -needs_s))
                self.program.at_least(f"state of 0 to {i} by {_word(key)}", Sum((span, 1.0)), needs)

    def _stored(self, last: int) -> Sum:
        """Return the bytes of streamed state of units 0 to ``last`` that no longer fit on the device."""
        memory = float(capacities(self.cost)[Tier.GPU])
        held = Sum((f"streamed, 0 to {last}", memory), ("always held", memory), (_STATE_SLOT, -memory))
        return held.plus({"": -memory})

    def _chain(self, what: str, amounts: Iterable[Sum]) -> list[str]:
        """Return variables for the running sums of some expressions."""
        chain: list[str] = []
        high = 0.0
        for i, amount in enumerate(amounts):
            high += self.program.highest(amount)
            variable = self.program.variable(f"{what}, 0 to {i}", 0.0, high)
            so_far = Sum().plus(amount).plus({chain[-1]: 1.0} if chain else {})
            self.program.at_least(f"{what}, 0 to {i}", Sum((variable, 1.0)), so_far, equal=True)
            chain.append(variable)
        return chain

    # -- memory ---------------------------------------------------------------------------------------------------

    def _memory(self) -> None:
        capacity = capacities(self.cost)
        device_bytes = float(capacity[Tier.GPU])
        activations = offloaded(self.program, self.segments, device_bytes)
        self._device_memory(device_bytes, Sum(*((activations[tier], 1.0) for tier in activations if tier is Tier.GPU)))
        host, nvme = (
            Sum(*((activations[tier], device_bytes) for tier in activations if tier is where))
            for where in (Tier.HOST, Tier.NVME)
        )
        if self._stores(nvme=True):
            host.plus(Sum((self._state_buffers(device_bytes), device_bytes)))
        for unit in (unit for unit in self.units if unit.num_params):
            shard = self.given.shard_params(unit)
            name = unit.name
            for place in (Place.CPU, Place.STREAM):
                host[f"{name}:{place}"] += STATE_BYTES_PER_PARAM * shard
            host[self._weights_or_gradients(unit)] += float(self.weight_bytes * shard)
            on_nvme = Sum((f"{name}:{Place.NVME}", 1.0)) if self._stores(nvme=True) else Sum()
            nvme.plus(on_nvme, float(STATE_BYTES_PER_PARAM * shard))
            if (weights_there := f"{name}:onnvme") in self.program.boxes and not self.given.precision.master_is_weight:
                nvme[weights_there] += float(self.weight_bytes * shard)
        ranks = self.cost.ranks_per_node
        for tier, held in ((Tier.HOST, host), (Tier.NVME, nvme)):
            if capacity[tier] and held:
                room = Sum((ROOM[tier], 1.0)).plus(self.overrun)
                self.program.at_least(f"memory: {tier}", room, Sum().plus(held, ranks / capacity[tier]))

    def _weights_or_gradients(self, unit: Unit) -> str:
        """Return the share of a unit's parameters that has a weight or a gradient on the host [Note: In place]."""
        program, name = self.program, unit.name
        served = {f"{name}:host": 1.0} if f"{name}:host" in program.boxes else {}
        gradients = self._leaves(unit)
        if f"{name}:spill" in program.boxes:
            gradients[f"{name}:spill"] -= 1.0
        there = program.variable(f"{name}:there", 0.0, 2.0)
        if not self.given.precision.master_is_weight:
            if self.repeats > 1:
                gradients.plus(served)
            weights = Sum((f"{name}:upload", 1.0)).plus(served)
            program.at_least(f"{name}: weights on the host", Sum((there, 1.0)), weights)
        program.at_least(f"{name}: gradients on the host", Sum((there, 1.0)), gradients)
        return there

    def _state_buffers(self, unit_bytes: float) -> str:
        """Return what host buffers hold of state on NVMe, in multiples of ``unit_bytes``: one subgroup at least."""
        shards = {unit.name: self.given.shard_params(unit) for unit in self.units if unit.num_params}
        everything = STATE_BYTES_PER_PARAM * sum(shards.values()) / unit_bytes
        buffers = self.program.variable(STATE_BUFFERS, 0.0, everything)
        for unit in (unit for unit in self.units if unit.num_params):
            mean = STATE_BYTES_PER_PARAM * shards[unit.name] / len(self.given.piece_params(unit)) / unit_bytes
            one = Sum((f"{unit.name}:{Place.NVME}", mean))
            self.program.at_least(f"{unit.name}: fits the host buffers", Sum((buffers, 1.0)), one)
        return buffers

    def _device_memory(self, capacity: float, offloaded_there: Sum) -> None:
        """At the backward of every unit the device holds all of this; at the last one's what is offloaded too."""
        program, scale, room = self.program, 1.0 / capacity, ROOM[Tier.GPU]
        held_always = self._always(scale)
        always = program.variable("always held", 0.0, program.highest(held_always))
        program.at_least("always held", Sum((always, 1.0)), held_always, equal=True)
        before = [Sum().plus(self._kept(segment), scale) for segment in self.segments]
        kept = self._chain("activations", before)
        resident = self._chain("resident gradients", (self._resident_gradient(unit, scale) for unit in self.units))
        state = (Sum().plus(self._state_out(unit), scale) if unit.num_params else Sum() for unit in self.units)
        self._chain("streamed", state)
        position = 0
        for number, segment in enumerate(self.segments):
            inside = 0.0
            for unit in segment:
                inside += unit.saved_bytes
                held = Sum((always, 1.0)).plus({kept[number - 1]: 1.0} if number else {})
                workspace_bytes = least_workspace_bytes(unit, self.weight_bytes)
                held[""] += (inside + workspace_bytes + self.weight_bytes * unit.num_params) * scale
                if f"{segment[0].segment}:recompute" in program.boxes and segment[0].operators[0].copies_input:
                    held[f"{segment[0].segment}:recompute"] += segment[0].activation_output_bytes * scale
                name = f"memory: device at the backward of {unit.name}"
                held.plus(offloaded_there if unit is self.units[-1] else {})
                if self.given.clip:  # gradients of units behind it; of all others, if there were micro-batches before
                    held.plus(Sum((resident[-1], 1.0), (resident[position], -1.0)))
                self.held.append(Sum().plus(held))
                if self.given.clip and self.repeats > 1 and position:
                    held[resident[position - 1]] += 1.0
                program.at_least(name, Sum((room, 1.0)).plus(self.overrun), held)
                position += 1

    def _rings(self, scale: float) -> Sum:
        """Return the share of memory of slots for parameters: see [Note: Static slots].

        There is a ring for each size of units, with room for one that computes and those that are kept meanwhile.
        """
        rings: dict[int, list[Unit]] = defaultdict(list)
        for unit in self.units:
            if f"{unit.name}:fills" in self.program.boxes:
                rings[unit.num_params].append(unit)
        held = Sum()
        for num_params, units in rings.items():
            size = self.weight_bytes * num_params * scale
            ring = self.program.variable(f"{RING}{num_params}", 0.0, size * len(units))
            held[ring] = 1.0
            self.rings[ring] = (size, units)
            kept = {
                gap: self._chain(f"{ring} kept {gap}", (Sum((f"{unit.name}:kept {gap}", size)) for unit in units))
                for gap, _ in self._gaps()
            }
            for i, unit in enumerate(units):
                needed = Sum(("", size)) if self.given.gathers(unit) else Sum().plus(self._away(unit), size)
                at_last = Sum().plus(needed).plus({kept["at last"][i - 1]: 1.0} if i else {})
                self.program.at_least(f"{ring} at the backward of {unit.name}", Sum((ring, 1.0)), at_last)
                if self.repeats > 1:
                    earlier = needed.plus({kept["before"][i - 1]: 1.0} if i else {})
                    earlier.plus(Sum((kept["between"][-1], 1.0), (kept["between"][i], -1.0)))
                    self.program.at_least(f"{ring} at an earlier backward of {unit.name}", Sum((ring, 1.0)), earlier)
        return held

    def _resident_gradient(self, unit: Unit, scale: float) -> Sum:
        if not unit.num_params:
            return Sum()
        num_bytes = self.weight_bytes * self.given.shard_params(unit) * scale
        return Sum((f"{unit.name}:{Place.GPU}", num_bytes), (f"{unit.name}:stays", num_bytes))

    def _always(self, scale: float) -> Sum:
        """Return the share of memory of parameters, state and slots that never leave the device."""
        held = self._rings(scale)
        state_bytes = STATE_BYTES_PER_PARAM - (4 if self.given.precision.master_is_weight else 0)
        largest = max(self.given.shard_params(unit) for unit in self.units)
        slot = self.program.variable(_STATE_SLOT, 0.0, STATE_BYTES_PER_PARAM * largest * scale)
        held[slot] += 1.0
        for unit in (unit for unit in self.units if unit.num_params):
            shard = self.given.shard_params(unit)
            resident = self.weight_bytes * (shard if self.given.gathers(unit) else unit.num_params)
            held.plus(Sum(("", 1.0)).plus(self._away(unit), -1.0), resident * scale)
            held[f"{unit.name}:{Place.GPU}"] += state_bytes * shard * scale
            # The largest of the subgroups that are streamed is no smaller than their mean.
            mean = shard / len(self.given.piece_params(unit))
            streamed = Sum((f"{unit.name}:{Place.STREAM}", STATE_BYTES_PER_PARAM * mean * scale))
            self.program.at_least(f"{unit.name}: fits the state slot", Sum((slot, 1.0)), streamed)
        return held

    def _kept(self, segment: Sequence[Unit]) -> Sum:
        """Return the bytes of a segment's activations while a later one computes backward."""
        saved, name = float(sum(unit.saved_bytes for unit in segment)), segment[0].segment
        held = Sum(("", saved))
        for way, _ in _AGAIN:
            if (variable := f"{name}:{way}") in self.program.boxes:
                rest = float(segment[0].activation_output_bytes) if way == "recompute" else 0.0
                held[variable] = rest - saved
        return held


def _added(one: Load, other: Load) -> Load:
    total: Load = defaultdict(Sum)
    for load in (one, other):
        for key, amount in load.items():
            total[key].plus(amount)
    return total


def _spread(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers below ``count``, evenly spaced, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def _word(key: Key) -> str:
    return key.value if isinstance(key, Lane) else f"resource {key.name.lower()}"


def decided(program: LinearProgram, units: Sequence[Unit], decisions: Decisions) -> LinearProgram:
    """Return the conditions on schedules that place everything as some decisions do."""
    fixed: dict[str, float] = {}
    for unit in units:
        choice = decisions.units[unit.name]
        pieces = decisions.placed_pieces(unit)
        for place in Place:
            share = sum(size for size, where in pieces if where is place) / max(sum(size for size, _ in pieces), 1)
            fixed[f"{unit.name}:{place}"] = share
        stays = not decisions.flushes(unit.name, Place.STREAM)
        fixed[f"{unit.name}:stays"] = fixed[f"{unit.name}:{Place.STREAM}"] if stays else 0.0
        fixed[f"{unit.name}:spill"] = fixed[f"{unit.name}:{Place.NVME}"] if decisions.spill_gradients else 0.0
        fixed[f"{unit.name}:host"] = float(choice.params == "host")
        fixed[f"{unit.name}:onnvme"] = float(choice.params == "nvme")
        way = {"offload-nvme": "evict"}.get(choice.activations, choice.activations)
        fixed |= {f"{unit.segment}:{other}": float(other == way) for other, _ in _AGAIN}
    return program.within({name: (value, value) for name, value in fixed.items() if name in program.boxes})
