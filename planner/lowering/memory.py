"""The pass that adds buffers: which bytes are held on which tier, from which task to which."""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping

from planner.decisions import Decisions, Place
from planner.decisions.precision import SPLIT_SCRATCH_BYTES
from planner.graph import Unit
from planner.lowering.activations import OffloadRooms, Segment
from planner.lowering.amounts import HeldBytes
from planner.lowering.parameters import assign_slots
from planner.lowering.program import LoweredUnit, Program
from planner.lowering.storage import spill_rooms, spilled_bytes
from planner.lowering.workspace import backward_workspace_bytes
from planner.optimizers import OPTIMIZERS, UPDATED_AT_ONCE
from planner.schedule.tasks import Lane, MemoryClass, Op, Task, Tier

Fresh = list[dict[str, dict[str, float]]]
"""By micro-batch and unit: the share of each parameter's gradient that is new in that unit's backward."""
HoldGradients = Callable[[Program, LoweredUnit, LoweredUnit, Collection[str], Fresh], None]


def memory(program: Program, hold_gradients: HoldGradients | None = None) -> None:
    """Add all buffers: parameters, slots, optimizer state, gradients, activations and workspace.

    Args:
        program: the program to extend.
        hold_gradients: holds a unit's gradients, in place of :func:`hold_leaving`.
    """
    _parameters(program)
    fresh = _gradients(program, hold_gradients or functools.partial(hold_leaving, _free_after(program)))
    _state_slots(program)
    _nvme_slots(program)
    for micro_batch in range(program.decisions.num_micro_batches):
        for segment in program.segments:
            _activations(program, segment, micro_batch)
            _around_tiles(program, segment, micro_batch)
        _kept(program, micro_batch)
    if any(unit.moved_bytes is not None for unit in program.units):
        _offload_rooms(program)
    if program.decisions.spill_gradients:
        for room, num_bytes in enumerate(spill_rooms(program.model, program.decisions)[0]):
            program.hold(Tier.HOST, MemoryClass.GRADIENTS, num_bytes, f"spilled gradients {room}")
    _workspace(program, fresh)
    _made_in_forward(program)
    _host_exchange(program)


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


def _gradients(program: Program, hold_gradients: HoldGradients) -> Fresh:
    """Hold optimizer state and gradients; return which gradients are new in which backward."""
    # The unit that uses a tied weight last in forward makes its gradient first; the owner's backward adds to it. Where
    # several units use weights of one owner, the last of them counts as the maker of all.
    sharing = [unit for unit in program.units if unit.unit.shared_units and not unit.unit.evaluates]
    trained = [unit for unit in program.units if unit.num_params] if sharing else []
    owners = {name: unit.name for unit in trained for name in unit.unit.sizes}
    used = [(name, unit) for unit in sharing for name in unit.unit.shared_parameters if name in owners]
    makers = {owners[name]: unit for name, unit in used}
    tied = {name: makers[owners[name]] for name, _ in used}
    fresh: Fresh = [{unit.name: {} for unit in program.units} for _ in range(program.decisions.num_micro_batches)]
    for unit in program.units:
        if unit.num_params:
            _hold_always(program, unit, MemoryClass.OPTIMIZER, unit.amounts.optimizer)
            _hold_always(program, unit, MemoryClass.GRADIENTS, unit.amounts.gradients)
            hold_gradients(program, unit, makers.get(unit.name, unit), tied, fresh)
    _tied_gradients(program, tied, fresh)
    return fresh


def hold_leaving(
    free_after: Mapping[int, Task],
    program: Program,
    unit: LoweredUnit,
    maker: LoweredUnit,
    tied: Collection[str],
    fresh: Fresh,
) -> None:
    """Hold a unit's gradients on the device, and note in ``fresh`` in which backward they are new.

    Args:
        free_after: see :func:`_free_after`.
        program: the program to extend.
        unit: whose gradients they are.
        maker: makes only the gradient of a ``tied`` weight; the unit's own backward makes the others.
        tied: the weights that several units use.
        fresh: what is new in which backward.
    """
    decisions, amounts = program.decisions, unit.amounts
    gradient_bytes, ranks = decisions.precision.gradient_bytes, amounts.replicas
    host, resident = amounts.flushed_params, amounts.resident_params
    made: Task | None = None  # the task since which whole gradients of this rank accumulate
    summed: Task | None = None  # the task since which the sum for the device's update is there
    for micro_batch in range(decisions.num_micro_batches):
        note_fresh(unit, maker, tied, fresh[micro_batch], (summed is not None, made is not None))
        made = made or _sum_of_tiles(program, unit, micro_batch, summed) or maker.makes(micro_batch)
        if scatter := unit.scatters.get(micro_batch):
            summed, made = _hold_reduced(program, unit, scatter, made, summed, free_after), None
            continue
        if ranks > 1:
            continue
        if host and micro_batch not in unit.flushes:  # added up until the last one
            summed = summed or made
            continue
        if host:
            last = unit.flushes[micro_batch]
            hold_from(program, unit, tied, gradient_bytes * host, unit.name, made, free_after.get(last.index, last))
        summed, made = summed or made, None
    if resident and summed:
        hold_resident(program, unit, tied, summed)


def _hold_reduced(
    program: Program, unit: LoweredUnit, scatter: Task, made: Task, summed: Task | None, free_after: Mapping[int, Task]
) -> Task:
    """Hold a gradient that ranks reduce; return the task since which the sum for the device's update is there.

    Gradients of all parameters are in one block. Ranks reduce it to a shard in memory of its own, or in place. If a
    part of the result goes to the host, the whole of it is there until then, and the sum is a copy.
    """
    amounts, gradient_bytes = unit.amounts, program.decisions.precision.gradient_bytes
    freed, reduced = free_after.get(scatter.index, scatter), made
    if program.decisions.zero_stage:
        last, num_bytes = scatter if amounts.flushed_params else freed, gradient_bytes * amounts.padded_params
        program.hold_while(MemoryClass.GRADIENTS, num_bytes, f"{unit.name} unreduced", made, last)
        reduced = scatter
    if flush := unit.flushes.get(scatter.micro_batch):
        freed = free_after.get(flush.index, flush)
    elif not summed:
        return reduced
    num_bytes = gradient_bytes * amounts.shard_params
    program.hold_while(MemoryClass.GRADIENTS, num_bytes, unit.name, reduced, freed)
    return summed or scatter


def _sum_of_tiles(program: Program, unit: LoweredUnit, micro_batch: int, summed: Task | None) -> Task | None:
    """Hold the sum of the tiles' gradients that autograd keeps until the last tile; return the task that takes it.

    ``None`` if there are no tiles, or the sum itself is the gradient from then on.
    """
    if unit.unit.num_tiles == 1:
        return None
    first, last = unit.backwards[unit.back(micro_batch)], unit.backwards[unit.back(micro_batch, 0)]
    if unit.amounts.replicas > 1:  # copied into one block
        num_params = unit.num_params
    elif summed is not None:  # added to what is there; what goes to the host is counted as that
        num_params = unit.amounts.resident_params
    else:
        return None
    num_bytes = program.decisions.precision.gradient_bytes * num_params
    program.hold_while(MemoryClass.GRADIENTS, num_bytes, f"{unit.name} of tiles", first, last)
    return last if unit.amounts.replicas > 1 else None


def note_fresh(
    unit: LoweredUnit,
    maker: LoweredUnit,
    tied: Collection[str],
    fresh: dict[str, dict[str, float]],
    there: tuple[bool, bool],
) -> None:
    """Note which share of each gradient of a unit is new in one micro-batch.

    Args:
        unit: whose gradients they are.
        maker: makes the gradients of ``tied`` weights first.
        tied: the weights that several units use.
        fresh: what is new in each unit's backward of this micro-batch.
        there: whether a sum for the device's update, and whole gradients of this rank, are there already.
    """
    amounts, ranks = unit.amounts, unit.amounts.replicas
    whole = max(unit.num_params, amounts.shard_params)  # with the padding between parameters
    new = whole if ranks > 1 else amounts.flushed_params + (0 if there[0] else amounts.resident_params)
    shares = dict.fromkeys(unit.unit.sizes, 0.0 if there[1] else new / whole)
    if maker is not unit and ranks == 1:  # with several ranks, the first gradient allocates one block for all
        fresh[maker.name] |= {name: shares.pop(name) for name in unit.unit.sizes if name in tied}
        fresh[unit.name] |= shares
    else:
        fresh[maker.name] |= shares


def hold_resident(program: Program, unit: LoweredUnit, tied: Collection[str], summed: Task) -> None:
    """Hold the sum of gradients that stay on the device, from a task to their last update.

    If it may be taken back, to the unit's next forward: then it has ended, and the norm is known.
    """
    amounts = unit.amounts
    num_bytes = program.decisions.precision.gradient_bytes * amounts.resident_params
    final = max(i for i, (_, place) in enumerate(amounts.pieces) if place not in amounts.flushes)
    freed = unit.forwards[0] if program.decisions.takes_back and unit.forwards else unit.updates[final]
    hold_from(program, unit, tied, num_bytes, f"{unit.name} resident", summed, freed)


def _free_after(program: Program) -> dict[int, Task]:
    """Return the tasks after which backward can use the memory of gradients again, by the last task that moves them.

    On a GPU, the host issues backward ahead. What autograd allocates then cannot take memory that a copy on another
    stream still reads, while memory of its own stream is freed in the order of issue. So for what is issued next, a
    gradient is there until the host waits for its copy, before it issues a later backward.
    """
    found: dict[int, Task] = {}
    for before, draft in itertools.pairwise(program.computing):
        for issue in program.before.get(draft.index, ()):
            for key in issue.after if issue.op is Op.ISSUE else ():
                if before.unit != program.drafts[key].unit:
                    found.setdefault(key, before)
    return found


def hold_from(
    program: Program, unit: LoweredUnit, tied: Collection[str], num_bytes: int, label: str, first: Task, last: Task
) -> None:
    """Hold a unit's gradients. Only those of a ``tied`` weight exist before the unit's own backward.

    Where ranks reduce them, the first one allocates one block for all.
    """
    if first.op is Op.BACKWARD and first.unit != unit.name and unit.amounts.replicas == 1:
        num_late = sum(size for name, size in unit.unit.sizes.items() if name not in tied)
        late_bytes = num_bytes * num_late // unit.num_params
        own = unit.backwards[unit.back(first.micro_batch)]
        program.hold_while(MemoryClass.GRADIENTS, late_bytes, f"{label} of its own", own, last)
        num_bytes -= late_bytes
    program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, first, last)


def _tied_gradients(program: Program, tied: Mapping[str, LoweredUnit], fresh: Fresh) -> None:
    """Hold the extra gradients of tied weights: autograd adds two out of place, so for a moment there are three.

    Only then is the sum added to that of earlier micro-batches, so the first gradient waits until then. It also waits
    beside the block for the reduction over ranks, if another gradient of the owner has allocated that.
    """
    gradient_bytes = program.decisions.precision.gradient_bytes
    for name, maker in sorted(tied.items(), key=lambda item: item[0]):
        owner = next(unit for unit in program.units if name in unit.unit.sizes)
        num_bytes = gradient_bytes * owner.unit.sizes[name]
        for micro_batch, shares in enumerate(fresh):
            if name not in shares[maker.name]:  # products have added it to a sum
                continue
            adding, made = (unit.backwards[unit.back(micro_batch)] for unit in (owner, maker))
            waiting_bytes = int(num_bytes * (1 - shares[maker.name][name]))
            is_beside = owner.amounts.replicas > 1 and len(owner.unit.sizes) > 1
            summed_bytes = 2 * num_bytes + (num_bytes - waiting_bytes if is_beside else 0)
            program.hold_while(MemoryClass.GRADIENTS, summed_bytes, f"{name} summed", adding, adding)
            program.hold_while(MemoryClass.GRADIENTS, waiting_bytes, f"{name} waiting", made, adding)
            shares[maker.name][name] = 1.0


def _workspace(program: Program, fresh: Fresh) -> None:
    """Hold the workspace of each compute task while it runs."""
    for draft in program.computing:
        unit = program.named[draft.unit]
        num_bytes = unit.unit.forward_workspace_bytes
        if draft.op is Op.BACKWARD:
            new = {} if unit.weight_gradients else fresh[draft.micro_batch][unit.name]
            num_bytes = _backward_bytes(program, unit, draft, new)
        elif draft.op is Op.WEIGHT_GRADIENT:  # one is made at a time, and copied or added to what is there
            shares, gradient_bytes = fresh[draft.micro_batch][unit.name], program.decisions.precision.gradient_bytes
            is_piled = unit.amounts.replicas > 1  # in one block, for the reduction over ranks
            added = (size * (is_piled or 1 - shares.get(name, 1.0)) for name, size in unit.unit.sizes.items())
            num_bytes = int(gradient_bytes * max(added))
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


def exchange_bytes(units: Iterable[Unit], decisions: Decisions) -> dict[int, int]:
    """Return the most that a rank writes at a time to memory that ranks share, for all units of so many parts."""
    sizes: dict[int, int] = {}
    for unit in units:
        if num_bytes := decisions.exchanged_at_once_bytes(unit):
            parts = unit.parts(decisions)
            sizes[parts] = max(sizes.get(parts, 0), num_bytes)
    return sizes


def _host_exchange(program: Program) -> None:
    """Hold two halves of what a rank writes at a time on the host, and on the device what it sums at a time."""
    sizes = exchange_bytes(program.model, program.decisions)
    for parts, num_bytes in sizes.items():
        program.hold(Tier.HOST, MemoryClass.WORKSPACE, 2 * num_bytes, f"collectives of {parts} part(s)")
    for unit in program.units if sizes else ():
        num_bytes = program.decisions.exchanged_at_once_bytes(unit.unit)
        for draft in (*unit.scatters.values(), *([unit.exchange] if unit.exchange else [])):
            program.hold_while(MemoryClass.WORKSPACE, num_bytes, f"{unit.name} sums", draft, draft)


def _backward_bytes(program: Program, unit: LoweredUnit, backward: Task, new: dict[str, float]) -> int:
    """Return the workspace of a backward; of tiles, the first one's gradients are new, and others are added to them."""
    sizes, piled = unit.unit.sizes, unit.amounts.replicas > 1
    for other in unit.unit.shared_units:
        sizes = sizes | program.named[other].unit.sizes
    if (num_tiles := unit.unit.num_tiles) > 1:
        new, piled = dict.fromkeys(new, float(backward.tile == num_tiles - 1)), False
    return backward_workspace_bytes(unit.unit, sizes, new, program.decisions.precision.gradient_bytes, piled=piled)


def _made_in_forward(program: Program) -> None:
    """Hold gradients that forward has made while other tasks run before backward takes them."""
    making = [unit for unit in program.units if any(each.differentiates for each in unit.unit.operators)]
    position = {draft.index: number for number, draft in enumerate(program.computing if making else ())}
    for unit in making:
        names = {name for each in unit.unit.operators if each.differentiates for name in each.parameter_names}
        owners = [unit, *(program.named[name] for name in unit.unit.shared_units)]
        num_params = sum(size for owner in owners for name, size in owner.unit.sizes.items() if name in names)
        num_bytes, label = program.decisions.precision.gradient_bytes * num_params, f"{unit.name} made in forward"
        for forward, backward in zip(unit.forwards, unit.backwards, strict=False) if num_bytes else ():
            between = program.computing[position[forward.index] + 1 : position[backward.index]]
            if between:
                program.hold_while(MemoryClass.GRADIENTS, num_bytes, label, between[0], between[-1])


def host_workspace_bytes(units: Iterable[Unit], decisions: Decisions) -> int:
    """Return the bytes that updates on the host need beside state and gradients; they come one after another."""
    return max(
        (
            subgroup.workspace_bytes
            for unit in units
            for subgroup, place in zip(decisions.subgroups(unit), decisions.units[unit.name].update, strict=True)
            if place.by_host
        ),
        default=0,
    )


def _state_slots(program: Program) -> None:
    """Hold the slots for streamed state, sized for the largest subgroups with and without weights or gradients."""
    decisions = program.decisions
    streaming = [unit for unit in program.units if unit.amounts.streamed]
    passing = [max(unit.amounts.streamed) for unit in streaming if decisions.weights_pass(unit.name)]
    state = [
        state_bytes
        for unit in streaming
        for (_, place), state_bytes in zip(unit.amounts.pieces, unit.amounts.state_bytes, strict=True)
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
    if first.unit.entry_bytes:
        begin, end = first.forwards[first.there(micro_batch)], first.backwards[first.back(micro_batch, 0)]
        program.hold_while(
            MemoryClass.ACTIVATIONS, first.unit.entry_bytes, f"beside {first.unit.segment} input", begin, end
        )
    if first.moved_bytes is not None:
        _offloaded(program, segment, micro_batch)
        return
    keep, tiles = first.activations == "keep", range(first.unit.num_tiles)
    if not keep:
        # From then on it is among the first unit's saved tensors, unless that unit saves a copy.
        until = first.backwards if first.unit.operators[0].copies_input else first.agains
        input_bytes, label = first.unit.activation_output_bytes * len(tiles), f"{first.unit.segment} input"
        begin, end = first.forwards[first.there(micro_batch)], until[first.back(micro_batch, 0)]
        program.hold_while(MemoryClass.ACTIVATIONS, input_bytes, label, begin, end)
    for unit, tile in itertools.product(segment, tiles):
        there, back = unit.there(micro_batch, tile), unit.back(micro_batch, tile)
        begin, end = unit.forwards[there] if keep else unit.agains[back], unit.backwards[back]
        program.hold_while(MemoryClass.ACTIVATIONS, unit.unit.saved_bytes, unit.name, begin, end)


def _kept(program: Program, micro_batch: int) -> None:
    """Hold what gradients of weights need that are made after backward, see [Note: Zero bubble]."""
    for unit in program.units:
        if unit.weight_gradients:
            begin, end = unit.backwards[micro_batch], unit.weight_gradients[micro_batch]
            label = f"{unit.name} for its weights' gradients"
            program.hold_while(MemoryClass.ACTIVATIONS, unit.unit.kept_bytes, label, begin, end)


def _around_tiles(program: Program, segment: Segment, micro_batch: int) -> None:
    """Hold what is whole around tiles: the segment's output, and the gradients of its output and of its input.

    The tensor that tiles are cut from is there until the last of them has been used, and outputs are put together when
    the last tile has passed. So is the gradient of the input.
    """
    first, last = segment[0], segment[-1]
    if (num_tiles := first.unit.num_tiles) == 1:
        return
    tile_bytes, label = first.unit.activation_output_bytes, f"{first.unit.segment} around tiles"
    rest_bytes = tile_bytes * (num_tiles - 1)
    there, back = first.there(micro_batch), first.back(micro_batch)
    ended, over = last.forwards[there + num_tiles - 1], first.backwards[back + num_tiles - 1]
    for num_bytes, begin, end in (
        (rest_bytes, last.forwards[there], ended),
        (tile_bytes * num_tiles, ended, ended),
        (2 * rest_bytes, last.backwards[back], over),
        (tile_bytes * num_tiles, over, over),
    ):
        program.hold_while(MemoryClass.ACTIVATIONS, num_bytes, label, begin, end)
    if first.moved_bytes is not None:
        program.hold_while(
            MemoryClass.ACTIVATIONS, rest_bytes, label, first.forwards[there], first.offloads[there + num_tiles - 1]
        )
    for tile in range(1, num_tiles) if first.activations == "keep" else ():  # what it saves counts its own input
        begun = first.forwards[there], first.forwards[there + tile - 1]
        program.hold_while(MemoryClass.ACTIVATIONS, tile_bytes, label, *begun)
        used = first.backwards[back + num_tiles - 1 - tile], over
        program.hold_while(MemoryClass.ACTIVATIONS, tile_bytes, label, *used)


def _offloaded(program: Program, segment: Segment, micro_batch: int) -> None:
    """Hold offloaded activations on the device before they leave and after they return, and those made again."""
    for unit, tile in itertools.product(segment, range(segment[0].unit.num_tiles)):
        there, back = unit.there(micro_batch, tile), unit.back(micro_batch, tile)
        forward, offload = unit.forwards[there], unit.offloads[there]
        reload, remake, backward = unit.reloads[back], unit.agains[back], unit.backwards[back]
        moved_bytes = unit.moved_bytes or 0
        program.hold_while(MemoryClass.ACTIVATIONS, moved_bytes, unit.name, forward, offload)
        # Outputs of products that backward does not need, such as both parts of a sum, go as soon as they were used.
        used_bytes = max(moved_bytes - unit.unit.saved_bytes, 0)
        program.hold_while(MemoryClass.ACTIVATIONS, used_bytes, f"{unit.name} used up", reload, remake)
        program.hold_while(MemoryClass.ACTIVATIONS, moved_bytes - used_bytes, unit.name, reload, backward)
        rest_bytes = max(unit.unit.saved_bytes - moved_bytes, 0)
        program.hold_while(MemoryClass.ACTIVATIONS, rest_bytes, f"{unit.name} made again", remake, backward)


def _offload_rooms(program: Program) -> None:
    """Hold the memory for offloaded activations: rooms, or a ring if they go on to NVMe."""
    rooms = OffloadRooms(program.model, program.decisions)
    for name, num_bytes in rooms.on_host.items():
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, num_bytes, name)
    for slot in range(rooms.num_slots):
        program.hold(Tier.HOST, MemoryClass.ACTIVATIONS, rooms.slot_bytes, f"activation slot {slot}")
    for name, num_bytes in rooms.on_nvme.items():
        program.hold(Tier.NVME, MemoryClass.ACTIVATIONS, num_bytes, name)
