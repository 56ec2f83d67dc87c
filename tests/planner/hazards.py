"""What a schedule must never do, checked without knowing how it was lowered.

Every task is given its meaning: which memory it reads and writes, and what the bytes then are (``Walk``). A schedule is
right under *any* timing if

1. walked in issue order, every task reads what it should (the weights of this iteration, all gradients of it, ...), and
2. every two accesses to the same memory of which one writes are ordered: by dependencies and lanes alone
   (``ordered_by_rules``), or, weaker, in one timeline (``ordered_in``).
"""

from collections.abc import Hashable

from walked import NUM_ITERATIONS, Ordered, WalkedMemory

from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import STAGE_LANES, Lane, Op, Task
from ullage.rivals.decisions import HostUpdate


def violations(schedule: Schedule, units: tuple[Unit, ...], decisions: Decisions, ordered: Ordered) -> list[str]:
    """Return what is wrong, one line each."""
    return Walk(schedule, units, decisions, ordered).run()


class Walk(WalkedMemory):
    """Walks some iterations in issue order: what each task reads and writes, and what must be there."""

    def run(self) -> list[str]:
        for iteration in range(NUM_ITERATIONS):
            for task in self.schedule.tasks:
                self.node = (iteration, task.index)
                if task.lane is Lane.COMPUTE and task.op is not Op.WEIGHT_GRADIENT:
                    self._pass_cut(task)
                getattr(self, f"_{task.op.name.lower()}")(task)
        self._once()
        self._ahead()
        return self.found

    # -- compute --------------------------------------------------------------------------------------------------

    def _weights(self, task: Task) -> None:
        """Every use finds the weights of this iteration, updated as often as iterations have passed."""
        self.expect(task.in_fp8, self.decisions.moves_fp8(self.units[task.unit]), "its weights in fp8:")
        for name in (task.unit, *self.units[task.unit].shared_units):
            if not self.units[name].num_weights or not self.units[name].forward:
                continue
            if name in self.slot_of:
                place: Hashable = ("slot", self.slot_of[name])
            else:  # where they are regathered, the own shard is a part of the whole
                self.expect(self._version(name, "device"), self.node[0], f"weights of {name} of version")
                if name not in self.regathers:
                    continue
                place = ("whole", name)
            wanted = (name, self.node[0]) if name in self.slot_of else self.node[0]
            self.expect(self.read(place, 0), wanted, f"weights of {name} as")

    def _forward(self, task: Task) -> None:
        self._weights(task)
        if self.decisions.units[task.unit].activations != "recompute" or self.decisions.inputs_on_host:
            self.write(("activations", task.unit, task.micro_batch, task.tile), self.node[0])
        self.write(("hidden", task.micro_batch), task.unit)

    def _recompute(self, task: Task) -> None:
        self._weights(task)
        self.write(("activations", task.unit, task.micro_batch, task.tile), self.node[0])

    def _offload(self, task: Task) -> None:
        """What leaves the device is gone from there."""
        place = ("activations", task.unit, task.micro_batch, task.tile)
        self.expect(self.read(place), self.node[0], "activations of iteration")
        self.write(("host activations", self._room(task)), (self.node[0], task.micro_batch))
        self.write(place, None)
        self._enter_passage(task)

    def _evict(self, task: Task) -> None:
        self._pass_on(task, "host activations", "nvme activations")
        self._leave_passage(task)

    def _recall(self, task: Task) -> None:
        self._pass_on(task, "nvme activations", "host activations")
        self._enter_passage(task)

    def _reload(self, task: Task) -> None:
        self._pass_on(task, "host activations", "products")
        self._leave_passage(task)

    def _room(self, task: Task) -> str:
        return self.room_of(task.unit, task.micro_batch, task.tile)

    def _enter_passage(self, task: Task) -> None:
        """What only passes through the host goes into its segment's slot."""
        if (room := self._room(task)) in self.passage:
            place = ("passage", self.passage[room], self.position[task.unit])
            self.write(place, (task.unit, task.micro_batch, task.tile))

    def _leave_passage(self, task: Task) -> None:
        if (room := self._room(task)) in self.passage:
            place = ("passage", self.passage[room], self.position[task.unit])
            self.expect(self.read(place), (task.unit, task.micro_batch, task.tile), "in the slot")

    def _pass_on(self, task: Task, source: str, target: str) -> None:
        place, moved = (source, self._room(task)), (self.node[0], task.micro_batch)
        self.expect(self.read(place), moved, f"{source} of iteration and micro-batch")
        self.write((target, self._room(task)), moved)
        self.write(place, None)

    def _remake(self, task: Task) -> None:
        self._weights(task)
        wanted = self.node[0], task.micro_batch
        self.expect(self.read(("products", self._room(task))), wanted, "products of iteration and micro-batch")
        self.write(("activations", task.unit, task.micro_batch, task.tile), self.node[0])

    def _backward(self, task: Task) -> None:
        self._weights(task)
        found = self.read(("activations", task.unit, task.micro_batch, task.tile))
        self.expect(found, self.node[0], "activations of iteration")
        if self.units[task.unit].weight_gradients:
            self.write(("kept", task.unit, task.micro_batch), self.node[0])
        else:
            self._gradients(task)

    def _weight_gradient(self, task: Task) -> None:
        """Gradients that backward has left are made from what it has kept, without weights."""
        self.expect(self.read(("kept", task.unit, task.micro_batch)), self.node[0], "kept in iteration")
        self._gradients(task)

    def _gradients(self, task: Task) -> None:
        for name in (task.unit, *self.units[task.unit].shared_units):
            if not self.units[name].num_params:
                continue
            place = ("gradient", name, self.node[0], task.micro_batch)
            self.write(place, self.memory.get(place, frozenset()) | {(task.unit, task.tile)})
            if self.stays(name) and name not in self.replicated:  # what updates on the device read
                self.write(("sum", name), None)
        if self.units[task.unit].num_params:
            self.flushes[self.node[0], task.unit, task.micro_batch] = []
            if self.on_device and self.host_pieces(task.unit):
                place = ("device sum", self.node[0], task.unit, task.micro_batch)
                before = self.read(place) if task.micro_batch else frozenset()
                self.write(place, (before or frozenset()) | self._new(task))

    # -- parameters -----------------------------------------------------------------------------------------------

    def _read(self, task: Task) -> None:
        self.expect(task.slot, self.slot_of[task.unit], "its slot as")
        self.write(("buffer of", task.slot), (task.unit, self._version(task.unit, "nvme weights")))

    def _fetch(self, task: Task) -> None:
        if self.on_nvme(task.unit):
            name, version = self.read(("buffer of", self.slot_of[task.unit]), ("", -1))
            self.expect(name, task.unit, "in the host buffer")
        else:
            version = self._version(task.unit, "host weights")
        if self.decisions.moves_fp8(self.units[task.unit]):
            self.expect(self.read(("fp8 copy", task.unit), 0), version, "weights in fp8 of version")
        # A shard that is about to be gathered lands in its place in the slot.
        self.write(
            ("slot", self.slot_of[task.unit]),
            (task.unit, "shard", version) if task.unit in self.gathers else (task.unit, version),
        )
        self.expect(task.slot, -1 if task.unit in self.gathers else self.slot_of[task.unit], "its slot as")

    def _cast(self, task: Task) -> None:
        """The host casts a unit's weights when all of them are updated."""
        self.expect((task.lane, task.piece), (Lane.CPU, -1), "its lane and piece as")
        self.write(("fp8 copy", task.unit), self._version(task.unit, "host weights"))

    def _gather(self, task: Task) -> None:
        if task.unit not in self.gathers:
            self.write(("whole", task.unit), self._version(task.unit, "device"))
            return
        if self.fetched(task.unit):
            name, kind, version = self.read(("slot", self.slot_of[task.unit]), ("", "", -1))
            self.expect((name, kind), (task.unit, "shard"), "in the slot")
        else:
            version = self._version(task.unit, "device")
        self.expect(task.slot, self.slot_of[task.unit], "its slot as")
        self.write(("slot", task.slot), (task.unit, version))

    def _version(self, unit: str, where: str) -> int:
        """Return how often a unit's weights have been updated; all pieces equally often, and frozen ones in step."""
        if not self.places(unit):
            return self.node[0]
        versions = {self.read((where, unit, piece), 0) for piece in range(len(self.places(unit)))}
        self.expect(len(versions), 1, f"{where} of several versions {versions}:")
        return min((version for version in versions if isinstance(version, int)), default=-1)  # none of a gradient

    def _upload(self, task: Task) -> None:
        if self.decisions.host_update is HostUpdate.SUPER_OFFLOAD:
            updated = self.read(("host weights", task.unit, task.piece), 0)
            self.expect(self.read(("returned", task.unit, task.piece), 0), updated, "weights returned of version")
        self.write(("device", task.unit, task.piece), self.read(("host weights", task.unit, task.piece), 0))

    # -- gradients ------------------------------------------------------------------------------------------------

    def _reduced(self, unit: str, micro_batch: int) -> frozenset[int]:
        """Return the micro-batches whose complete gradient, of all ranks, this micro-batch made ready on the device."""
        iteration = self.node[0]
        if unit in self.replicated:
            return self.read(("shard", unit, iteration, micro_batch), frozenset())
        if self.decisions.in_rounds:  # all of them leave together
            return frozenset().union(*(self._complete(unit, each) for each in range(micro_batch + 1)))
        return self._complete(unit, micro_batch)

    def _complete(self, unit: str, micro_batch: int) -> frozenset[int]:
        found = self.read(("gradient", unit, self.node[0], micro_batch), frozenset())
        self.expect(found, self.contributors[unit], f"the gradient of {unit} made of")
        return frozenset({micro_batch})

    def _scatter(self, task: Task) -> None:
        """Reduce what has piled up since the last reduction."""
        iteration, mine = self.node[0], frozenset[int]()
        for micro_batch in range(task.micro_batch, -1, -1):
            if ("shard", task.unit, iteration, micro_batch) in self.memory:
                break
            mine |= self._complete(task.unit, micro_batch)
        self.write(("shard", task.unit, iteration, task.micro_batch), mine)
        if self.stays(task.unit):
            self.write(("sum", task.unit), None)
        self.flushes[iteration, task.unit, task.micro_batch].append(self.node)

    def _flush(self, task: Task) -> None:
        self.flushes[self.node[0], task.unit, task.micro_batch].append(self.node)
        self._arrive(task.unit, self._new(task), adds=task.micro_batch > 0 and not self.decisions.in_rounds)

    def _overwrite(self, task: Task) -> None:
        """Copy the device's sum to a buffer on the host; after the last micro-batch also to the gradients."""
        key = (self.node[0], task.unit, task.micro_batch)
        self.flushes[key].append(self.node)
        if self.on_device:
            self.write(("buffer of the sum", task.unit), self.read(("device sum", *key)))
            return
        device, buffer = ("summed on the device", *key), ("buffer of the sum", task.unit)
        if len(self.flushes[key]) - (task.unit in self.replicated) <= 1:
            before = self.read(device) if task.micro_batch else frozenset()
            if task.micro_batch:
                self.write(device, before | self._new(task))
            self.write(buffer, before | self._new(task))
        else:
            self._arrive(task.unit, self.read(device), adds=False)

    def _new(self, task: Task) -> frozenset[tuple[int, int]]:
        return frozenset((self.node[0], micro_batch) for micro_batch in self._reduced(task.unit, task.micro_batch))

    def _arrive(self, unit: str, gradient: frozenset[tuple[int, int]], *, adds: bool) -> None:
        if unit in self.spill_room:
            self.write(("spill room", self.spill_room[unit]), unit)
        for piece in self.host_pieces(unit):
            place = self._arrival(unit, piece)
            self.write(place, gradient | (self.read(place, frozenset()) if adds else frozenset()))

    def _spill(self, task: Task) -> None:
        if task.unit in self.spill_room:
            self.expect(self.read(("spill room", self.spill_room[task.unit])), task.unit, "in the room of gradients")
        for piece, place in enumerate(self.places(task.unit)):
            if place is Place.NVME:
                self._summed(task.unit, piece, Place.CPU)
                gradient = self.read(self._arrival(task.unit, piece), frozenset())
                self.write(("nvme gradient", task.unit, piece), gradient)

    def _pass_cut(self, task: Task) -> None:
        """What is computed is there to be sent, and uses what has been received for it."""
        place = ("received", self.node[0], task.phase, task.unit, task.micro_batch)
        if place in self.memory:
            self.read(place)
        self.write(("made", self.node[0], task.phase, task.unit, task.micro_batch), task.tile)

    def _receive(self, task: Task) -> None:
        self.write(("received", self.node[0], task.phase, task.unit, task.micro_batch), None)

    def _send(self, task: Task) -> None:
        """The gradient of another stage is added to the unit's, wherever that is. What has been made is sent."""
        if task.lane in STAGE_LANES:
            self.expect(("made", self.node[0], task.phase, task.unit, task.micro_batch) in self.memory, True, "made:")
            self.read(("made", self.node[0], task.phase, task.unit, task.micro_batch))
            return
        for piece, place in enumerate(self.places(task.unit)):
            self._summed(task.unit, piece, place)
            flushes = self.decisions.flushes(task.unit, place)
            where = self._arrival(task.unit, piece) if flushes else ("sum", task.unit)
            self.write(where, self.memory.get(where))
        self.write(("exchanged", task.unit), self.node[0])

    def _clip(self, _task: Task) -> None:
        """The norm is that of the summed gradient: on the device where it stays there, else read on the host."""
        for name, unit in self.units.items():
            if unit.num_params:
                for piece, place in enumerate(self.places(name)):
                    self._summed(name, piece, place)
        self.write("clip", self.node[0])

    def _step(self, _task: Task) -> None:
        """The caller's own work: it touches nothing that lanes do."""

    def _summed(self, unit: str, piece: int, place: Place) -> None:
        micro_batches = range(self.decisions.num_micro_batches)
        if not self.decisions.flushes(unit, place):
            self.read(("sum", unit))
            found = {m for micro_batch in micro_batches for m in self._present(unit, micro_batch)}
            self.expect(found, set(micro_batches), "summed gradients of micro-batches")
        else:
            wanted = {(self.node[0], micro_batch) for micro_batch in micro_batches}
            on_device = ("device sum", self.node[0], unit, micro_batches[-1])
            place = on_device if self.on_device else self._arrival(unit, piece)
            self.expect(self.read(place, frozenset()), wanted, "gradients (iteration, batch)")

    def _arrival(self, unit: str, piece: int) -> Hashable:
        """Return where a gradient is on the host: apart, or in the place of weights, which are gone then."""
        in_place = self.decisions.arrives_in_place(unit, self.places(unit)[piece])
        return ("host weights" if in_place else "host gradient", unit, piece)

    def _present(self, unit: str, micro_batch: int) -> frozenset[int]:
        """Return what :meth:`_reduced` does, where a reduction may wait for a later micro-batch."""
        if unit in self.replicated and ("shard", unit, self.node[0], micro_batch) not in self.memory:
            return frozenset()
        return self._reduced(unit, micro_batch)

    # -- updates --------------------------------------------------------------------------------------------------

    def _clipped(self) -> None:
        if self.decisions.clip and not self.decisions.takes_back:
            self.expect(self.read("clip"), self.node[0], "the clip factor of iteration")

    def _pass(self, task: Task) -> None:
        if self.updated[self.node[0], task.unit, task.piece]:  # Super-Offload's second one
            self.expect(self.decisions.host_update, HostUpdate.SUPER_OFFLOAD, "an engine that copies results:")
            self.write(("returned", task.unit, task.piece), self.read(("host weights", task.unit, task.piece), 0))
            return
        self._clipped()
        self._gradient_of(task)
        self.write(("scaled", task.unit, task.piece), self.node[0])
        place = self._arrival(task.unit, task.piece)
        self.write(place, self.memory.get(place))

    def _loop(self, _task: Task) -> None:
        """The script's own work: it touches nothing that lanes do."""

    def _update(self, task: Task) -> None:
        self.updated[self.node[0], task.unit, task.piece] += 1
        place = self.places(task.unit)[task.piece]
        on_cpu = place in {Place.CPU, Place.NVME}
        self.expect(task.lane, Lane.CPU if on_cpu else Lane.GPU_UPDATE, "its lane as")
        if self.units[task.unit].sizes.keys() & {*self.decisions.tied_weights}:
            self.expect(self.read(("exchanged", task.unit)), self.node[0], "gradients of both stages in iteration")
        fused = self.decisions.host_update.is_pinned or not on_cpu
        if fused:
            self._clipped()
        else:
            self.expect(self.read(("scaled", task.unit, task.piece)), self.node[0], "gradients scaled in iteration")
        stays = place is Place.STREAM and (self.on_device or not self.decisions.flushes(task.unit, place))
        if place in {Place.CPU, Place.GPU} or stays:
            self._summed(task.unit, task.piece, place)
        if place is Place.STREAM:
            self._update_streamed(task)
            return
        if place is Place.NVME:
            self._update_swapped(task)
            return
        state = ("host state" if place is Place.CPU else "device state", task.unit, task.piece)
        self.expect(self.read(state, 0), self.node[0], "state of version")
        self.write(state, self.node[0] + 1)
        if place is Place.GPU:
            self.write(("device", task.unit, task.piece), self.node[0] + 1)
        else:
            self.write(("host weights", task.unit, task.piece), self.node[0] + 1)

    def _load(self, task: Task) -> None:
        if task.piece < 0:  # the sum of gradients, to which the device will add
            name = "device sum" if self.on_device else "summed on the device"
            on_device = (name, self.node[0], task.unit, task.micro_batch)
            self.write(on_device, self.read(("buffer of the sum", task.unit)))
            return
        if self.decisions.flushes(task.unit, Place.STREAM) and not self.on_device:
            self._summed(task.unit, task.piece, Place.STREAM)
        version = self.read(("host state", task.unit, task.piece), 0)
        self.expect(task.slot in range(self.decisions.num_state_slots), True, "its state slot to exist:")
        self.write(("state slot", task.slot), (task.unit, task.piece, version))
        self.memory["loaded into", task.unit, task.piece] = task.slot

    def _update_streamed(self, task: Task) -> None:
        slot = ("state slot", self.memory.get(("loaded into", task.unit, task.piece)))
        self.expect(self.read(slot), (task.unit, task.piece, self.node[0]), "in the state slot")
        self.write(slot, (task.unit, task.piece, self.node[0] + 1))
        if not self.fetched(task.unit):
            self.write(("device", task.unit, task.piece), self.node[0] + 1)

    def _from_nvme(self, task: Task) -> bool:
        return self.places(task.unit)[task.piece] is Place.NVME

    def _buffer(self, task: Task) -> Hashable:
        return ("nvme slot", self.memory.get(("swapped into", task.unit, task.piece)))

    def _gradient_of(self, task: Task) -> None:
        """The gradient that an update on the host uses: on the host, or in the buffer that it was read into."""
        if self._from_nvme(task) and self.decisions.spill_gradients:
            wanted = {(self.node[0], m) for m in range(self.decisions.num_micro_batches)}
            self.expect(self.read(self._buffer(task), (None,))[-1], wanted, "in the buffer gradients")
        else:
            self._summed(task.unit, task.piece, Place.CPU)

    def _swap_in(self, task: Task) -> None:
        self.expect(task.slot in range(self.decisions.num_nvme_slots), True, "its nvme slot to exist:")
        gradient = None
        if self.decisions.spill_gradients:
            gradient = self.read(("nvme gradient", task.unit, task.piece))
        version = self.read(("nvme state", task.unit, task.piece), 0)
        self.write(("nvme slot", task.slot), (task.unit, task.piece, version, gradient))
        self.memory["swapped into", task.unit, task.piece] = task.slot

    def _update_swapped(self, task: Task) -> None:
        self._gradient_of(task)
        place = self._buffer(task)
        held = self.read(place, (None, None, None, None))
        self.expect(held[:3], (task.unit, task.piece, self.node[0]), "in the buffer")
        self.write(place, (task.unit, task.piece, self.node[0] + 1, held[3]))
        if not self.on_nvme(task.unit):
            self.write(("host weights", task.unit, task.piece), self.node[0] + 1)

    def _swap_out(self, task: Task) -> None:
        held = self.read(self._buffer(task), (None, None, None))
        self.expect(held[:3], (task.unit, task.piece, self.node[0] + 1), "in the buffer")
        self.write(("nvme state", task.unit, task.piece), self.node[0] + 1)
        if self.on_nvme(task.unit):
            self.write(("nvme weights", task.unit, task.piece), self.node[0] + 1)

    def _store(self, task: Task) -> None:
        slot = ("state slot", self.memory.get(("loaded into", task.unit, task.piece)))
        self.expect(self.read(slot), (task.unit, task.piece, self.node[0] + 1), "in the state slot")
        self.write(("host state", task.unit, task.piece), self.node[0] + 1)
        if self.fetched(task.unit):
            self.write(("host weights", task.unit, task.piece), self.node[0] + 1)

    def _issue(self, task: Task) -> None:
        """The host's time touches nothing."""

    # -- the whole ------------------------------------------------------------------------------------------------

    def _once(self) -> None:
        for iteration in range(NUM_ITERATIONS):
            for name in self.units:
                for piece in range(len(self.places(name))):
                    if (times := self.updated[iteration, name, piece]) != 1:
                        self.found.append(f"update {name}#{piece}: {times} times in iteration {iteration}")

    def _ahead(self) -> None:
        """Backward runs a bounded number of units ahead of the gradients leaving the device.

        While tiles pass a segment, the gradients of all its units are there, and none of them can leave.
        Those that wait in a bucket for others of their micro-batch are bounded by its size.
        """
        last, path = self.decisions.num_micro_batches - 1, self.decisions.gradient_path
        in_bucket = {m for m in range(last + 1) if self.decisions.fills_buckets and path.blocks(m, last)}
        leaving = [(key, nodes[-1]) for key, nodes in self.flushes.items() if nodes and key[2] not in in_bucket]
        backward: dict[tuple[str, int], int] = {}
        for task in self.schedule.tasks:
            if task.op is Op.WEIGHT_GRADIENT or (task.op is Op.BACKWARD and not self.units[task.unit].weight_gradients):
                backward.setdefault((task.unit, task.micro_batch), task.index)
        for i, ((iteration, unit, micro_batch), _) in enumerate(leaving):
            new = 0 if self.decisions.in_rounds else micro_batch  # later ones are added to these
            start = (iteration, backward[unit, new])
            earlier = (node for key, node in leaving[:i] if not self._together(key, (iteration, unit, micro_batch)))
            waiting = [node for node in earlier if not self.ordered(node, start)]
            if len(waiting) >= self.decisions.num_gradient_slots:
                names = ", ".join(self._name(node) for node in waiting)
                self.found.append(f"ahead: {self._name(start)} may start while gradients wait for {names}")

    def _together(self, one: tuple[int, str, int], other: tuple[int, str, int]) -> bool:
        """Return whether two gradients are made while tiles pass one segment, or micro-batches one round."""
        (iteration, unit, micro_batch), tiled = one, self.units[other[1]]
        if self.decisions.in_rounds and iteration == other[0] and self.turn_of[unit] == self.turn_of[other[1]]:
            return True
        same = (iteration, micro_batch) == (other[0], other[2]) and self.units[unit].segment == tiled.segment
        return same and tiled.num_tiles > 1
