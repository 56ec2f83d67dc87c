"""The pass that states who holds how many bytes of which tier, and when."""

from collections import defaultdict
from collections.abc import Collection

from planner.decisions import GradientPath, Place
from planner.graph import Unit
from planner.lowering.activations import OffloadRooms
from planner.lowering.compute import AGAIN, compute_drafts
from planner.lowering.parameters import assign_slots
from planner.lowering.program import Program
from planner.lowering.storage import SpillRooms, spilled_bytes
from planner.lowering.workspace import backward_workspace_bytes
from planner.schedule import MemoryClass, Op, Tier


def memory(program: Program) -> None:
    """Add all buffers: parameters, slots, optimizer state, gradients, activations and workspace."""
    _parameters(program)
    program.hold(Tier.GPU, MemoryClass.WORKSPACE, program.decisions.device_buffer_bytes, "engine's buffers")
    # Backward makes a tied weight's gradient where the weight is used last in forward, and adds to it until its own.
    makers = {name: unit.name for unit in program.units for name in (unit.name, *unit.shared_units)}
    tied = {name for unit in program.units for operator in unit.operators for name in operator.shared_parameters}
    fresh: Fresh = defaultdict(dict)
    for unit in program.units:
        if unit.num_params:
            _optimizer(program, unit)
            _gradients(program, unit, makers[unit.name], tied, fresh)
    _tied_gradients(program, fresh)
    _state_slots(program)
    _nvme_slots(program)
    for micro_batch in range(program.decisions.num_micro_batches):
        for segment in program.segments:
            _activations(program, segment, micro_batch)
    _offload_rooms(program)
    for room, num_bytes in enumerate(SpillRooms(program.units, program.decisions).sizes_bytes):
        program.hold(Tier.HOST, MemoryClass.GRADIENTS, num_bytes, f"spilled gradients {room}")
    _workspace(program, fresh)


def _parameters(program: Program) -> None:
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    slots = assign_slots(program)
    for slot, num_params in enumerate(slots.num_params):
        program.hold(Tier.GPU, MemoryClass.PARAMETERS, weight_bytes * num_params, f"slot {slot}")
        read = [
            u for u in program.units if decisions.units[u.name].params == "nvme" and slots.of_unit.get(u.name) == slot
        ]
        if read:
            num_bytes = weight_bytes * max(program.shard_params[unit.name] for unit in read)
            program.hold(Tier.HOST, MemoryClass.PARAMETERS, num_bytes, f"buffer of slot {slot}")
    for unit in program.units:
        resident = (
            program.shard_params[unit.name] if unit.name in program.gathered else program.padded_params[unit.name]
        )
        if decisions.units[unit.name].params == "gpu":
            program.hold(Tier.GPU, MemoryClass.PARAMETERS, weight_bytes * resident, unit.name)
        shard = program.shard_params[unit.name]
        if decisions.units[unit.name].params == "nvme":
            num_bytes = decisions.num_state_versions * decisions.stored_weight_bytes(unit.name) * shard
            program.hold(Tier.NVME, MemoryClass.PARAMETERS, num_bytes, unit.name)
        else:
            served = sum(n for place, n in program.placed[unit.name].items() if decisions.serves(unit.name, place))
            program.hold(Tier.HOST, MemoryClass.PARAMETERS, weight_bytes * served, unit.name)


def _optimizer(program: Program, unit: Unit) -> None:
    shard = program.shard_params[unit.name]
    host = program.placed_params(unit, Place.CPU, Place.STREAM, Place.NVME)
    decisions = program.decisions
    resident_bytes, state_bytes = decisions.resident_state_bytes_per_param, decisions.state_bytes_per_param
    nvme = program.placed_params(unit, Place.NVME)
    program.hold(Tier.HOST, MemoryClass.OPTIMIZER, state_bytes * (host - nvme), unit.name)
    on_nvme_bytes = decisions.num_state_versions * state_bytes * nvme
    program.hold(Tier.NVME, MemoryClass.OPTIMIZER, on_nvme_bytes, unit.name)
    program.hold(Tier.GPU, MemoryClass.OPTIMIZER, resident_bytes * (shard - host), unit.name)


Fresh = defaultdict[tuple[str, int], dict[str, float]]
"""By maker and micro-batch: which share of each parameter's gradient is held from that backward on."""


def _gradients(program: Program, unit: Unit, maker: str, tied: Collection[str], fresh: Fresh) -> None:
    """Hold a unit's gradients, and note from which backward on in ``fresh``.

    Of a unit with a ``tied`` weight, only that one's is made by the ``maker``; others' are by the unit's own backward.
    """
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    host = program.flushed_params[unit.name]
    resident = program.shard_params[unit.name] - host
    if decisions.gradient_path is not GradientPath.ONCE:
        # DeepSpeed's flat buffer for what the device updates is allocated once, before training.
        fixed = program.placed_params(unit, Place.GPU)
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, weight_bytes * fixed, f"{unit.name} buffer")
        resident -= fixed
    made: str | None = None  # since when whole gradients of this rank pile up
    host_bytes = weight_bytes if decisions.gradient_path is GradientPath.ONCE else 4
    _host_gradients(program, unit, host_bytes)
    summed: str | None = None  # since when the sum that the device updates with is there
    for micro_batch in range(decisions.num_micro_batches):
        new = unit.num_params if program.replicas[unit.name] > 1 else host + (0 if summed else resident)
        share = 0.0 if made else new / unit.num_params
        for name in unit.sizes:
            early = name in tied or program.replicas[unit.name] > 1  # one block for all is taken with the first
            fresh[maker if early else unit.name, micro_batch][name] = share
        made = made or f"{Op.BACKWARD}:{maker}:{micro_batch}"
        scatter = f"scatter:{unit.name}:{micro_batch}"
        if scatter in program.drafts:  # the unreduced gradient of all parameters, then the rank's shard of it
            label = f"{unit.name} unreduced"
            num_bytes = weight_bytes * program.padded_params[unit.name]
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, label, made, scatter)
            made = scatter
        elif program.replicas[unit.name] > 1:
            continue
        if host:
            end = f"flush:{unit.name}:{micro_batch}"
            _hold_from(program, unit, tied, (weight_bytes * host, unit.name, made, end))
        summed, made = summed or made, None
    if resident:
        assert summed is not None
        places = enumerate(decisions.units[unit.name].update)
        final = max(piece for piece, place in places if not decisions.flushes(unit.name, place))
        end = f"{Op.UPDATE}:{unit.name}:{final}"
        _hold_from(program, unit, tied, (weight_bytes * resident, f"{unit.name} resident", summed, end))


def _hold_from(program: Program, unit: Unit, tied: Collection[str], held: tuple[int, str, str, str]) -> None:
    """Hold gradients, of which only a tied weight's are there before its unit's own backward.

    Args:
        program: where to.
        unit: whose they are.
        tied: names of weights that others use too.
        held: bytes, label, and the first and the last task.
    """
    num_bytes, label, first, last = held
    draft = program.drafts[first]
    if draft.op is Op.BACKWARD and draft.unit != unit.name:
        num_late = sum(spec.num_params for spec in unit.parameters if spec.name not in tied)
        late_bytes = num_bytes * num_late // unit.num_params
        own = f"{Op.BACKWARD}:{unit.name}:{draft.micro_batch}"
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, late_bytes, f"{label} of its own", own, last)
        num_bytes -= late_bytes
    program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, label, first, last)


def _host_gradients(program: Program, unit: Unit, bytes_per_param: int) -> None:
    """Hold the host's gradients, but for the rooms that spilled ones pass through (:class:`SpillRooms`).

    Those that take the place of weights need no room: see [Note: In place] in :mod:`planner.decisions`.
    """
    decisions = program.decisions
    host, spilled = (
        program.flushed_params[unit.name],
        program.placed_params(unit, Place.NVME) if decisions.spill_gradients else 0,
    )
    program.hold(Tier.NVME, MemoryClass.GRADIENTS, decisions.spilled_bytes_per_param * spilled, unit.name)
    in_place = (n for place, n in program.placed[unit.name].items() if decisions.arrives_in_place(unit.name, place))
    apart = host - spilled - sum(in_place)
    program.hold(Tier.HOST, MemoryClass.GRADIENTS, bytes_per_param * apart, unit.name)
    if spilled and decisions.gradient_path is not GradientPath.ONCE:  # others take memory as it comes
        once = decisions.num_micro_batches == 1
        ends = (f"flush-bf16:{unit.name}:0", f"{Op.SPILL}:{unit.name}") if once else ()
        program.hold(Tier.HOST, MemoryClass.GRADIENTS, bytes_per_param * spilled, f"{unit.name} spilled", *ends)


def _tied_gradients(program: Program, fresh: Fresh) -> None:
    """Autograd adds up a tied weight's two gradients out of place: at that moment there are three.

    Only then is their sum added to what earlier micro-batches have left, if anything: the first waits until then.
    """
    sizes = {name: size for unit in program.units for name, size in unit.sizes.items()}
    owner = {name: unit.name for unit in program.units for name in unit.sizes}
    weight_bytes = program.decisions.precision.weight_bytes
    tied = {name: unit.name for unit in program.units for op in unit.operators for name in op.shared_parameters}
    for name, maker in sorted(tied.items()):
        for micro_batch in range(program.decisions.num_micro_batches):
            adding = f"{Op.BACKWARD}:{owner[name]}:{micro_batch}"
            label = f"{name} summed"
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, 2 * weight_bytes * sizes[name], label, adding, adding)
            waiting_bytes = int(weight_bytes * sizes[name] * (1 - fresh[maker, micro_batch].pop(name)))
            made = f"{Op.BACKWARD}:{maker}:{micro_batch}"
            program.hold(Tier.GPU, MemoryClass.GRADIENTS, waiting_bytes, f"{name} waiting", made, adding)
            fresh[maker, micro_batch][name] = 1.0


def _workspace(program: Program, fresh: Fresh) -> None:
    """Hold what lives only inside a unit's own computing: one unit's at a time."""
    num_params = {name: size for unit in program.units for name, size in unit.sizes.items()}
    units = {unit.name: unit for unit in program.units}
    for draft in compute_drafts(program):
        unit = units[draft.unit]
        num_bytes = unit.forward_workspace_bytes
        if draft.op is Op.BACKWARD:
            new = fresh[unit.name, draft.micro_batch]
            weight_bytes, piled = program.decisions.precision.weight_bytes, program.replicas[unit.name] > 1
            num_bytes = backward_workspace_bytes(unit, num_params, new, weight_bytes, piled=piled)
        program.hold(Tier.GPU, MemoryClass.WORKSPACE, num_bytes, f"{unit.name} workspace", draft.key, draft.key)


def _state_slots(program: Program) -> None:
    """Hold the slots of the largest subgroups: of those that are streamed, and of those with weights or gradients."""
    decisions = program.decisions
    sizes = {
        unit.name: [n for n, place in program.pieces[unit.name] if place is Place.STREAM] for unit in program.units
    }
    streamed = [n for name in sizes for n in sizes[name]]
    weights = max((n for name in sizes for n in sizes[name] if decisions.weights_pass(name)), default=0)
    for slot in range(min(decisions.num_state_slots, len(streamed))):
        num_bytes = decisions.state_bytes_per_param * max(streamed) + decisions.precision.weight_bytes * weights
        program.hold(Tier.GPU, MemoryClass.OPTIMIZER, num_bytes, f"state slot {slot}")


def _nvme_slots(program: Program) -> None:
    """Hold the ring of host buffers: state, spilled gradient and weights to be written of the largest subgroup."""
    decisions = program.decisions
    sizes = [
        n * (decisions.state_bytes_per_param + spilled_bytes(program) + decisions.stored_weight_bytes(unit.name))
        for unit in program.units
        for n, place in program.pieces[unit.name]
        if place is Place.NVME
    ]
    for slot in range(min(decisions.num_nvme_slots, len(sizes))):
        program.hold(Tier.HOST, MemoryClass.OPTIMIZER, max(sizes), f"nvme slot {slot}")


def _activations(program: Program, segment: list[Unit], micro_batch: int) -> None:
    decided = program.decisions.units[segment[0].name].activations
    first = segment[0]
    if decided in {"offload", "offload-nvme"}:
        _offloaded(program, segment, micro_batch)
        return
    keep = decided == "keep"
    if not keep:
        program.hold(
            Tier.GPU,
            MemoryClass.ACTIVATIONS,
            first.activation_output_bytes,
            f"{first.segment} input",
            f"{Op.FORWARD}:{first.name}:{micro_batch}",
            # From then on it is among what the first unit saves, unless that is a copy.
            f"{Op.BACKWARD if first.operators[0].copies_input else Op.RECOMPUTE}:{first.name}:{micro_batch}",
        )
    for unit in segment:
        begin = f"{Op.FORWARD if keep else Op.RECOMPUTE}:{unit.name}:{micro_batch}"
        end = f"{Op.BACKWARD}:{unit.name}:{micro_batch}"
        program.hold(Tier.GPU, MemoryClass.ACTIVATIONS, unit.saved_bytes, unit.name, begin, end)


def _offloaded(program: Program, segment: list[Unit], micro_batch: int) -> None:
    """Hold what is moved on the device until it has left and from when it comes back, and what is made again."""
    again = AGAIN[program.decisions.units[segment[0].name].activations]
    for unit in segment:
        forward, offload, reload, remake, backward = (
            f"{op}:{unit.name}:{micro_batch}" for op in (Op.FORWARD, Op.OFFLOAD, Op.RELOAD, again, Op.BACKWARD)
        )
        moved, label = unit.swap_bytes, unit.name
        program.hold(Tier.GPU, MemoryClass.ACTIVATIONS, moved, label, forward, offload)
        program.hold(Tier.GPU, MemoryClass.ACTIVATIONS, moved, label, reload, backward)
        rest = max(unit.saved_bytes - moved, 0)
        program.hold(Tier.GPU, MemoryClass.ACTIVATIONS, rest, f"{label} made again", remake, backward)


def _offload_rooms(program: Program) -> None:
    """Hold the rooms that offloaded activations leave to: a place for each unit, or in a ring if they go on to NVMe.

    They are taken once, and serve one micro-batch after another: forward of the next begins when all are free.
    """
    rooms = OffloadRooms(program.units, program.decisions)
    for name, num_bytes in rooms.on_host.items():
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, num_bytes, name)
    for slot in range(rooms.num_slots):
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, rooms.slot_bytes, f"activation slot {slot}")
    for name, num_bytes in rooms.on_nvme.items():
        program.hold(Tier.NVME, MemoryClass.ACTIVATIONS, num_bytes, name)
