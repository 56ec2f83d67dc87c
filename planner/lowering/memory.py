"""The pass that adds buffers: which bytes are held on which tier, from which task to which."""

import itertools
from collections.abc import Collection, Iterable, Mapping

from planner.decisions import Decisions, GradientPath, Place
from planner.decisions.precision import SPLIT_SCRATCH_BYTES
from planner.graph import Unit
from planner.lowering.activations import OFFLOADS, OffloadRooms, Segment, offloaded_bytes
from planner.lowering.amounts import HeldBytes
from planner.lowering.parameters import assign_slots
from planner.lowering.program import Draft, LoweredUnit, Program
from planner.lowering.storage import SpillRooms, spilled_bytes
from planner.lowering.workspace import backward_workspace_bytes
from planner.optimizers import OPTIMIZERS, UPDATED_AT_ONCE
from planner.schedule.tasks import Lane, MemoryClass, Op, Tier

# DeepSpeed keeps the optimizer's gradients of device updates in fp32 (``stage3.py::initialize_optimizer_states``).
_BUFFER_BYTES_PER_PARAM = 4


def memory(program: Program) -> None:
    """Add all buffers: parameters, slots, optimizer state, gradients, activations and workspace."""
    _parameters(program)
    program.hold(Tier.GPU, MemoryClass.WORKSPACE, program.decisions.device_buffer_bytes, "engine's buffers")
    fresh = _gradients(program)
    _state_slots(program)
    _nvme_slots(program)
    for micro_batch in range(program.decisions.num_micro_batches):
        for segment in program.segments:
            _activations(program, segment, micro_batch)
    if any(unit.activations in OFFLOADS for unit in program.units):
        _offload_rooms(program)
    if program.decisions.spill_gradients:
        for room, num_bytes in enumerate(SpillRooms(program.model, program.decisions).sizes_bytes):
            program.hold(Tier.HOST, MemoryClass.GRADIENTS, num_bytes, f"spilled gradients {room}")
    _workspace(program, fresh)


def _parameters(program: Program) -> None:
    weight_bytes = program.decisions.precision.weight_bytes
    slots = assign_slots(program)
    read = [0] * len(slots.num_params)  # by slot, the most bytes that are read into it from NVMe
    for unit in program.units if slots.of_unit else ():
        if unit.amounts.params == "nvme" and unit.name in slots.of_unit:
            slot = slots.of_unit[unit.name]
            read[slot] = max(read[slot], weight_bytes * unit.amounts.shard_params + unit.amounts.frozen_bytes)
    for slot, num_bytes in enumerate(slots.sizes(weight_bytes)):
        program.hold(Tier.GPU, MemoryClass.PARAMETERS, num_bytes, f"slot {slot}")
        program.hold(Tier.HOST, MemoryClass.PARAMETERS, read[slot], f"buffer of slot {slot}")
    for unit in program.units:
        _hold_always(program, unit, MemoryClass.PARAMETERS, unit.amounts.parameters)


def _hold_always(program: Program, unit: LoweredUnit, memory_class: MemoryClass, held: HeldBytes) -> None:
    for tier, num_bytes in held:
        program.hold(tier, memory_class, num_bytes, unit.name, unit.stage)


Fresh = list[dict[str, dict[str, float]]]
"""By micro-batch and unit: the share of each parameter's gradient that is new in that unit's backward."""


def _gradients(program: Program) -> Fresh:
    """Hold optimizer state and gradients; return which gradients are new in which backward."""
    # The unit that uses a tied weight last in forward makes its gradient first; the owner's backward adds to it.
    sharing = [unit for unit in program.units if unit.unit.shared_units and not unit.unit.evaluates]
    trained = [unit for unit in program.units if unit.num_params] if sharing else []
    owners = {name: unit.name for unit in trained for name in unit.unit.sizes}
    tied = {name: unit for unit in sharing for name in unit.unit.shared_parameters if name in owners}
    makers = {owners[name]: unit for name, unit in tied.items()}
    fresh: Fresh = [{unit.name: {} for unit in program.units} for _ in range(program.decisions.num_micro_batches)]
    free_after = _free_after(program)
    for unit in program.units:
        if unit.num_params:
            _hold_always(program, unit, MemoryClass.OPTIMIZER, unit.amounts.optimizer)
            _gradients_of(program, unit, makers.get(unit.name, unit), tied, fresh, free_after)
    _tied_gradients(program, tied, fresh)
    return fresh


def _gradients_of(
    program: Program,
    unit: LoweredUnit,
    maker: LoweredUnit,
    tied: Collection[str],
    fresh: Fresh,
    free_after: Mapping[int, Draft],
) -> None:
    """Hold a unit's gradients, and note in ``fresh`` in which backward they are new.

    The ``maker`` makes only the gradient of a ``tied`` weight; the unit's own backward makes the others.
    """
    decisions, amounts = program.decisions, unit.amounts
    gradient_bytes, ranks = decisions.precision.gradient_bytes, amounts.replicas
    host, resident = amounts.flushed_params, amounts.resident_params
    if amounts.buffer_params:
        num_bytes = _BUFFER_BYTES_PER_PARAM * amounts.buffer_params
        program.hold(Tier.GPU, MemoryClass.GRADIENTS, num_bytes, f"{unit.name} buffer", unit.stage)
    _hold_always(program, unit, MemoryClass.GRADIENTS, amounts.gradients)
    if unit.spill and decisions.gradient_path is not GradientPath.ONCE:  # other engines allocate on demand
        num_bytes = decisions.spilled_bytes_per_param * sum(amounts.from_nvme)
        label, begin = f"{unit.name} spilled", unit.flushes[0][0]
        if decisions.num_micro_batches == 1:
            program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, begin, unit.spill, Tier.HOST)
        else:
            program.hold(Tier.HOST, MemoryClass.GRADIENTS, num_bytes, label)
    made: Draft | None = None  # the task since which whole gradients of this rank accumulate
    summed: Draft | None = None  # the task since which the sum for the device's update is there
    for micro_batch in range(decisions.num_micro_batches):
        whole = max(unit.num_params, amounts.shard_params)  # with the padding between parameters
        new = whole if ranks > 1 else host + (0 if summed else resident)
        shares = dict.fromkeys(unit.unit.sizes, 0.0 if made else new / whole)
        if maker is not unit and ranks == 1:  # with several ranks, the first gradient allocates one block for all
            early = {name: shares.pop(name) for name in unit.unit.sizes if name in tied}
            fresh[micro_batch][maker.name] |= early
            fresh[micro_batch][unit.name] |= shares
        else:
            fresh[micro_batch][maker.name] |= shares
        brought = decisions.gradient_path is GradientPath.ON_DEVICE and micro_batch and unit.flushes.get(micro_batch)
        made = made or (brought[0] if brought else maker.backwards[micro_batch])
        if scatter := unit.scatters.get(micro_batch):
            # First the unreduced gradient of all parameters, then the rank's shard.
            num_bytes, label = gradient_bytes * amounts.padded_params, f"{unit.name} unreduced"
            last = scatter if host else free_after.get(scatter.key, scatter)
            program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, made, last)
            made = scatter
        elif ranks > 1 or (decisions.layer_by_layer and micro_batch not in unit.flushes):
            continue
        if host:
            stays = decisions.gradient_path is GradientPath.ON_DEVICE and micro_batch + 1 == decisions.num_micro_batches
            last = unit.updates[-1] if stays else unit.flushes[micro_batch][-1]
            last = free_after.get(last.key, last)
            _hold_from(program, unit, tied, gradient_bytes * host, unit.name, made, last)
        summed, made = summed or made, None
    if resident:
        assert summed is not None
        final = max(i for i, (_, place) in enumerate(amounts.pieces) if place not in amounts.flushes)
        last = unit.updates[final]
        _hold_from(program, unit, tied, gradient_bytes * resident, f"{unit.name} resident", summed, last)


def _free_after(program: Program) -> dict[int, Draft]:
    """Return the tasks after which backward can use the memory of gradients again, by the last task that moves them.

    On a GPU, the host issues backward ahead. What autograd allocates then cannot take memory that a copy on another
    stream still reads, while memory of its own stream is freed in the order of issue. So for what is issued next, a
    gradient is there until the host waits for its copy, before it issues a later backward.
    """
    found: dict[int, Draft] = {}
    if program.decisions.gradient_path is not GradientPath.ONCE or program.decisions.habits is not None:
        return found
    for before, draft in itertools.pairwise(program.computing):
        for issue in program.before.get(draft.key, ()):
            for key in issue.after if issue.op is Op.ISSUE else ():
                if before.unit != program.drafts[key].unit:
                    found.setdefault(key, before)
    return found


def _hold_from(
    program: Program, unit: LoweredUnit, tied: Collection[str], num_bytes: int, label: str, first: Draft, last: Draft
) -> None:
    """Hold a unit's gradients. Only those of a ``tied`` weight exist before the unit's own backward."""
    if first.op is Op.BACKWARD and first.unit != unit.name:
        num_late = sum(size for name, size in unit.unit.sizes.items() if name not in tied)
        late_bytes = num_bytes * num_late // unit.num_params
        own = unit.backwards[first.micro_batch]
        program.hold_while(MemoryClass.GRADIENTS, late_bytes, f"{label} of its own", own, last)
        num_bytes -= late_bytes
    program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, first, last)


def _tied_gradients(program: Program, tied: Mapping[str, LoweredUnit], fresh: Fresh) -> None:
    """Hold the extra gradients of tied weights: autograd adds two out of place, so for a moment there are three.

    Only then is the sum added to that of earlier micro-batches, so the first gradient waits until then.
    """
    gradient_bytes = program.decisions.precision.gradient_bytes
    for name, maker in sorted(tied.items(), key=lambda item: item[0]):
        owner = next(unit for unit in program.units if name in unit.unit.sizes)
        num_bytes = gradient_bytes * owner.unit.sizes[name]
        for micro_batch, shares in enumerate(fresh):
            adding, made = owner.backwards[micro_batch], maker.backwards[micro_batch]
            program.hold_while(MemoryClass.GRADIENTS, 2 * num_bytes, f"{name} summed", adding, adding)
            waiting_bytes = int(num_bytes * (1 - shares[maker.name][name]))
            program.hold_while(MemoryClass.GRADIENTS, waiting_bytes, f"{name} waiting", made, adding)
            shares[maker.name][name] = 1.0


def _workspace(program: Program, fresh: Fresh) -> None:
    """Hold the workspace of each compute task while it runs."""
    gradient_bytes = program.decisions.precision.gradient_bytes
    for draft in program.computing:
        unit = program.named[draft.unit]
        num_bytes = unit.unit.forward_workspace_bytes
        if draft.op is Op.BACKWARD:
            sizes = unit.unit.sizes
            for other in unit.unit.shared_units:
                sizes = sizes | program.named[other].unit.sizes
            new, piled = fresh[draft.micro_batch][unit.name], unit.amounts.replicas > 1
            num_bytes = backward_workspace_bytes(unit.unit, sizes, new, gradient_bytes, piled=piled)
        num_bytes = _held_share(program, unit, num_bytes)
        program.hold_while(MemoryClass.WORKSPACE, num_bytes, f"{unit.name} workspace", draft, draft)
    on_gpu = any(draft.op is Op.ISSUE for draft in program.drafts)
    for unit in program.units:
        for update in unit.updates:
            if update.lane is not Lane.CPU:
                subgroup = unit.amounts.subgroups[update.piece]
                num_bytes = subgroup.workspace_bytes + OPTIMIZERS[subgroup.kind].scratch_bytes(subgroup.num_params)
                if update.splits and on_gpu:  # a host as the device updates in one pass
                    num_bytes += SPLIT_SCRATCH_BYTES * min(subgroup.num_params, UPDATED_AT_ONCE)
                program.hold_while(MemoryClass.WORKSPACE, num_bytes, f"{unit.name} update", update, update)
    for draft in program.drafts:
        if draft.op is Op.GATHER and (fp8 := program.named[draft.unit].amounts.fp8) and draft.num_params:
            label = f"{draft.unit} cast"
            program.hold_while(MemoryClass.WORKSPACE, fp8.device_cast_workspace_bytes, label, draft, draft)
    program.hold(
        Tier.HOST, MemoryClass.WORKSPACE, host_workspace_bytes(program.model, program.decisions), "update workspace"
    )


def host_workspace_bytes(units: Iterable[Unit], decisions: Decisions) -> int:
    """Return the bytes that updates on the host need beside state and gradients; they come one after another."""
    return max(
        (
            subgroup.workspace_bytes
            for unit in units
            for subgroup, place in zip(decisions.subgroups(unit), decisions.units[unit.name].update, strict=True)
            if place in {Place.CPU, Place.NVME}
        ),
        default=0,
    )


def _state_slots(program: Program) -> None:
    """Hold the slots for streamed state, sized for the largest subgroups with and without weights or gradients."""
    decisions = program.decisions
    streaming = [unit for unit in program.units if unit.amounts.streamed]
    passing = [max(unit.amounts.streamed) for unit in streaming if decisions.weights_pass(unit.name)]
    state = [
        state_bytes - decisions.unstreamed_weight_bytes_per_param * num_params
        for unit in streaming
        for (num_params, place), state_bytes in zip(unit.amounts.pieces, unit.amounts.state_bytes, strict=True)
        if place is Place.STREAM
    ]
    num_bytes = max(state, default=0) + decisions.precision.weight_bytes * max(passing, default=0)
    for slot in range(min(decisions.num_state_slots, sum(len(unit.amounts.streamed) for unit in streaming))):
        program.hold(Tier.GPU, MemoryClass.OPTIMIZER, num_bytes, f"state slot {slot}")


def _nvme_slots(program: Program) -> None:
    """Hold the ring of host buffers, sized for state, spilled gradient and new weights of the largest subgroup."""
    decisions = program.decisions
    sizes = [
        state_bytes + n * (spilled_bytes(decisions) + decisions.stored_weight_bytes(unit.name))
        for unit in program.units
        for (n, place), state_bytes in zip(unit.amounts.pieces, unit.amounts.state_bytes, strict=True)
        if place is Place.NVME
    ]
    for slot in range(min(decisions.num_nvme_slots, len(sizes))):
        program.hold(Tier.HOST, MemoryClass.OPTIMIZER, max(sizes), f"nvme slot {slot}")


def _activations(program: Program, segment: Segment, micro_batch: int) -> None:
    first = segment[0]
    if first.activations in OFFLOADS:
        _offloaded(program, segment, micro_batch)
        return
    keep = first.activations == "keep"
    if not keep:
        # From then on it is among the first unit's saved tensors, unless that unit saves a copy.
        until = first.backwards if first.unit.operators[0].copies_input else first.agains
        input_bytes, label = first.unit.activation_output_bytes, f"{first.unit.segment} input"
        begin, end = _input_made(program, first, micro_batch), until[micro_batch]
        program.hold_while(MemoryClass.ACTIVATIONS, input_bytes, label, begin, end)
    for unit in segment:
        begin, end = (unit.forwards if keep else unit.agains)[micro_batch], unit.backwards[micro_batch]
        saved_bytes = _held_share(program, unit, unit.unit.saved_bytes)
        program.hold_while(MemoryClass.ACTIVATIONS, saved_bytes, unit.name, begin, end)


def _held_share(program: Program, unit: LoweredUnit, num_bytes: int) -> int:
    """Return the bytes that an engine with a head of its own holds, of what the model's head holds."""
    habits = program.decisions.habits
    if habits is None or unit.unit.segment != program.units[-1].unit.segment:
        return num_bytes
    return num_bytes * habits.head_percent // 100


def _input_made(program: Program, first: LoweredUnit, micro_batch: int) -> Draft:
    """Return the task since which a segment's input is there for its backward.

    In a block that is recomputed together, only the first segment's input is kept since forward.
    """
    if (habits := program.decisions.habits) is None or not first.first_passes:
        return first.forwards[micro_batch]
    firsts = [segment[0] for segment in program.segments if segment[0].first_passes]
    starts_block = firsts.index(first) % habits.recompute_block == 0
    return (first.forwards if starts_block else first.first_passes)[micro_batch]


def _offloaded(program: Program, segment: Segment, micro_batch: int) -> None:
    """Hold offloaded activations on the device before they leave and after they return, and those made again."""
    for unit in segment:
        forward, offload, reload, remake, backward = (
            tasks[micro_batch] for tasks in (unit.forwards, unit.offloads, unit.reloads, unit.agains, unit.backwards)
        )
        moved_bytes = offloaded_bytes(unit.unit, unit.activations)
        program.hold_while(MemoryClass.ACTIVATIONS, moved_bytes, unit.name, forward, offload)
        # Outputs of products that backward does not need, such as both parts of a sum, go as soon as they were used.
        used_bytes = max(moved_bytes - unit.unit.saved_bytes, 0)
        program.hold_while(MemoryClass.ACTIVATIONS, used_bytes, f"{unit.name} used up", reload, remake)
        program.hold_while(MemoryClass.ACTIVATIONS, moved_bytes - used_bytes, unit.name, reload, backward)
        rest_bytes = max(unit.unit.saved_bytes - moved_bytes, 0)
        program.hold_while(MemoryClass.ACTIVATIONS, rest_bytes, f"{unit.name} made again", remake, backward)


def _offload_rooms(program: Program) -> None:
    """Hold the memory for offloaded activations: one buffer per unit, or a ring if they go on to NVMe.

    The buffers serve all micro-batches: forward of the next one begins when all are free.
    """
    rooms = OffloadRooms(program.model, program.decisions)
    # Layer by layer, those of all micro-batches are there at once.
    count = program.decisions.num_micro_batches if program.decisions.layer_by_layer else 1
    for name, num_bytes in rooms.on_host.items():
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, count * num_bytes, name)
    for slot in range(rooms.num_slots):
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, rooms.slot_bytes, f"activation slot {slot}")
    for name, num_bytes in rooms.on_nvme.items():
        program.hold(Tier.NVME, MemoryClass.ACTIVATIONS, num_bytes, name)
