"""The pass for optimizer steps, and for copies of updated parameters back to the device."""

from planner.decisions import Decisions, GradientPath, HostUpdate, Place
from planner.habits import Habits
from planner.lowering.gradients import gradient_ready, summed
from planner.lowering.parameters import issue_ahead
from planner.lowering.program import Draft, Keys, LoweredUnit, Program
from planner.lowering.storage import Ring, spilled_bytes
from planner.schedule.tasks import Lane, Op, Phase

# Separate passes of DeepSpeed over fp32 values, each of which is read and written: before the update, scaling gradients
# in place, or in Super-Offload copying them to the worker; and there, before the upload, both copying the worker's
# result and scaling.
_PASS_BYTES_PER_PARAM = 8
_PASSES_BEFORE_UPLOAD = 2
# Passes of PyTorch over gradients on the host: the norm, and scaling in place.
_CLIP_PASSES = 3


def updates(program: Program) -> None:
    """Update every subgroup in its decided place and order, and make the next use of each unit wait for it.

    [Note: Deadlines] With ``overlap_next_forward``, only a unit's own next forward waits for its updates. Uploads,
    fetches and all-gathers for it are issued in the next iteration, in the order of use.
    """
    decisions, habits = program.decisions, program.decisions.habits
    if habits is not None and habits.publishes_late:
        _update_late(program, habits)
        return
    # In a pipeline, units are placed by their stage.
    order = [(unit.stage if decisions.pipeline_parallel > 1 else i, unit) for i, unit in enumerate(program.units)]
    # Updates that start during backward are issued after it, so in the order of backward, whatever was decided.
    forward = decisions.update_order == "forward" and decisions.update_start == "step"
    streamed, through_nvme = Ring(decisions.num_state_slots), Ring(decisions.num_nvme_slots)
    blocker: Keys = ()
    for position, unit in order if forward else reversed(order):
        done: list[Draft] = []
        for piece, (num_params, place) in enumerate(unit.amounts.pieces):
            ready = _ready(program, unit, place)
            if place is Place.CPU:
                made, blocker = _by_host(program, unit, piece, num_params, position, ready, blocker)
                done += made
            elif place is Place.NVME:
                done += _through_nvme(program, through_nvme, unit, piece, num_params, position, ready)
            elif place is Place.GPU:
                updated = _update(program, unit, piece, Lane.GPU_UPDATE, num_params, ready)
                unit.changes.append(updated)
                done.append(updated)
            else:
                done.append(_streamed(program, streamed, unit, piece, num_params, ready))
        if done and unit.amounts.fetched and (fp8 := unit.amounts.fp8):
            cast = _place(program, unit, -1, Lane.CPU, Op.CAST, tuple(draft.key for draft in done))
            cast.num_bytes = fp8.cast_bytes
            done = [cast]
        if done:
            _gate(program, unit, position, done)
    _bound_gradients(program)
    streamed.recycle()
    through_nvme.recycle()
    if program.loop:
        program.loop.after += tuple(draft.key for draft in program.drafts if draft.phase is Phase.UPDATE)


def _update_late(program: Program, habits: Habits) -> None:
    """Publish what the updates of the iteration before made, and start this iteration's updates.

    [Note: Late] ZenFlow's caller waits for the worker, uploads its weights one subgroup after the other, scales the
    gradients and starts the worker again (``zenflow/engine_stage3.py::step``). RoundPipe's optimizer thread copies its
    weights to those that are fetched, then gradients to its own, and updates; only a layer's next use waits for the
    copy of its weights (``roundpipe.py::RoundPipe.step``).
    """
    decisions, end = program.decisions, program.spine[-1].key
    pieces = [
        (position, unit, piece, num_params)
        for position, unit in enumerate(program.units)
        for piece, (num_params, _) in enumerate(unit.amounts.pieces)
    ]
    published: list[Draft] = []
    done: dict[str, list[Draft]] = {unit.name: [] for unit in program.units}
    for _, unit, piece, num_params in pieces:
        if unit.amounts.fetched:
            draft = _pass(program, unit, piece, habits.publish_bytes * num_params, (end,))
        else:
            draft = _place(program, unit, piece, Lane.H2D, Op.UPLOAD, (end, *(d.key for d in published[-1:])))
            draft.num_bytes = decisions.precision.weight_bytes * num_params
            draft.pinned = decisions.host_update.is_pinned
        published.append(draft)
        done[unit.name].append(draft)
    # The lane keeps their order, so updates begin when everything is published and prepared.
    prepared = [
        _pass(
            program,
            unit,
            piece,
            habits.prepare_bytes * num_params,
            (*_ready(program, unit, Place.CPU), published[-1].key),
        )
        for _, unit, piece, num_params in pieces
    ]
    for (position, unit, piece, num_params), new, ready in zip(pieces, published, prepared, strict=True):
        updated = _update(program, unit, piece, Lane.CPU, num_params, (ready.key,))
        unit.changes.append(updated)
        new.after_previous += (updated.key,)
        if not decisions.overlap_next_forward:
            done[unit.name].append(ready)
        if piece == len(unit.amounts.pieces) - 1:
            _gate(program, unit, position, done[unit.name])


def _goes_on(decisions: Decisions) -> bool:
    """Return whether a worker goes on to the next update while updated parameters wait for the end of backward."""
    return decisions.host_update is HostUpdate.SUPER_OFFLOAD and decisions.update_start == "backward"


def _bound_gradients(program: Program) -> None:
    """Let the last backward run a few units ahead of updates if gradients wait for them on the device."""
    decisions = program.decisions
    if decisions.gradient_path is not GradientPath.ON_DEVICE or decisions.update_start == "step":
        return
    updated: list[Draft] = []
    for unit in reversed(program.units):
        if unit.amounts.flushed_params:
            if len(updated) >= decisions.num_gradient_slots:
                unit.backwards[-1].after += (updated[-decisions.num_gradient_slots].key,)
            updated.append(unit.updates[-1])


def _ready(program: Program, unit: LoweredUnit, place: Place) -> Keys:
    """Return the keys of tasks after which a unit's gradient is in its place and the clip factor is known."""
    if place is Place.NVME and unit.spill:
        here = unit.spill
    elif place in unit.amounts.flushes:
        here = summed(program, unit)
    else:
        here = gradient_ready(program, unit)
    if program.clip:
        return (here.key, program.clip.key)
    return (here.key,) if program.decisions.update_start == "backward" else (here.key, program.spine[-1].key)


def _place(program: Program, unit: LoweredUnit, piece: int, lane: Lane, op: Op, after: Keys) -> Draft:
    """Add a task of the update: at the end of the iteration, or right after the unit's backward."""
    draft = program.draft(lane, op, Phase.UPDATE, unit, after=after, piece=piece)
    _tail(program, unit).append(draft)
    return draft


def _update(program: Program, unit: LoweredUnit, piece: int, lane: Lane, num_params: int, after: Keys) -> Draft:
    update = _place(program, unit, piece, lane, Op.UPDATE, after)
    update.num_params = num_params
    subgroup = unit.amounts.subgroups[piece]
    update.matrices, update.num_bytes = subgroup.matrices, subgroup.exchanged_bytes
    update.splits = program.decisions.splits(unit.amounts.pieces[piece][1])
    unit.updates.append(update)
    return update


def _tail(program: Program, unit: LoweredUnit) -> list[Draft]:
    return program.tail if program.decisions.update_start == "step" else program.behind[unit.backwards[-1].key]


def _pass(program: Program, unit: LoweredUnit, piece: int, num_bytes: int, after: Keys) -> Draft:
    passed = _place(program, unit, piece, Lane.CPU, Op.PASS, after)
    passed.num_bytes = num_bytes
    return passed


def _by_host(
    program: Program, unit: LoweredUnit, piece: int, num_params: int, position: int, ready: Keys, blocker: Keys
) -> tuple[list[Draft], Keys]:
    """Update a subgroup whose state is on the host.

    Returns:
        The tasks its unit waits for; and the key of the copy that the next update waits for, if any.
    """
    decisions, habits = program.decisions, program.decisions.habits
    updated = _on_cpu(program, unit, piece, num_params, ready + (() if _goes_on(decisions) else blocker))
    unit.changes.append(updated)
    uploaded = _upload(program, unit, piece, num_params, position, updated, blocker)
    if uploaded and decisions.host_update is not HostUpdate.FUSED:
        blocker = (uploaded.key,)  # the update thread waits for the copy
    done = [uploaded or updated]
    if habits is not None and habits.publish_bytes:
        done.append(_pass(program, unit, piece, habits.publish_bytes * num_params, (updated.key,)))
    return done, blocker


def _on_cpu(program: Program, unit: LoweredUnit, piece: int, num_params: int, ready: Keys) -> Draft:
    decisions, passed_bytes = program.decisions, 0
    if decisions.habits is not None:
        passed_bytes = decisions.habits.prepare_bytes
    elif not decisions.host_update.is_pinned:
        passed_bytes = _PASS_BYTES_PER_PARAM
    elif decisions.clip and decisions.gradient_path is GradientPath.FSDP2:
        passed_bytes = _CLIP_PASSES * decisions.precision.master_bytes
    if passed_bytes:
        ready = (_pass(program, unit, piece, passed_bytes * num_params, ready).key,)
    return _update(program, unit, piece, Lane.CPU, num_params, ready)


def _upload(
    program: Program,
    unit: LoweredUnit,
    piece: int,
    num_params: int,
    position: int,
    updated: Draft,
    blocker: Keys = (),
) -> Draft | None:
    """Copy parameters that the host updated to the device, unless the unit is fetched into a slot anyway."""
    if unit.amounts.fetched:
        return None
    decisions, tail = program.decisions, _tail(program, unit)
    if decisions.host_update is HostUpdate.SUPER_OFFLOAD:
        tail = program.tail
        after = (updated.key, program.spine[-1].key, *blocker)
        updated = program.draft(Lane.CPU, Op.PASS, Phase.UPDATE, unit, after=after, piece=piece)
        updated.num_bytes = _PASSES_BEFORE_UPLOAD * _PASS_BYTES_PER_PARAM * num_params
        tail.append(updated)
    draft = program.draft(Lane.H2D, Op.UPLOAD, Phase.UPDATE, unit, piece=piece)
    fp32 = decisions.host_update is HostUpdate.DEVICE_CAST
    draft.num_bytes = (4 if fp32 else decisions.precision.weight_bytes) * num_params
    draft.pinned = decisions.host_update.is_pinned
    if decisions.overlap_next_forward:
        draft.after_previous = (updated.key,)
        issue_ahead(program, unit, position, draft)
    else:
        draft.after = (updated.key,)
        tail.append(draft)
    return draft


def _through_nvme(
    program: Program, ring: Ring, unit: LoweredUnit, piece: int, num_params: int, position: int, ready: Keys
) -> list[Draft]:
    """Read a subgroup's state into a host buffer, update it, write it back; return the tasks its unit waits for.

    See [Note: Host buffers] in :mod:`planner.lowering.storage`.
    """
    decisions = program.decisions
    spilled = spilled_bytes(decisions)
    # The task that reads state waits for the gradient only if it reads the gradient too.
    swap_in = _place(program, unit, piece, Lane.NVME_STATE_IN, Op.SWAP_IN, ready if spilled else ())
    swap_in.num_bytes = unit.amounts.state_bytes[piece] + spilled * num_params
    ring.take(swap_in)
    updated = _on_cpu(program, unit, piece, num_params, (*ready, swap_in.key))
    uploaded = _upload(program, unit, piece, num_params, position, updated)
    # The writing thread waits for the upload, unless that happens in the next iteration or after backward.
    waits = decisions.host_update is not HostUpdate.FUSED and not decisions.overlap_next_forward
    waits = waits and not _goes_on(decisions)
    written = uploaded if uploaded and waits else updated
    swap_out = _place(program, unit, piece, Lane.NVME_STATE_OUT, Op.SWAP_OUT, (written.key,))
    swap_out.num_bytes = unit.amounts.state_bytes[piece] + decisions.stored_weight_bytes(unit.name) * num_params
    ring.free(swap_in, swap_out)
    unit.changes.append(swap_out)
    if unit.amounts.params == "nvme":
        return [swap_out]
    # In an engine without overlap, the step ends when all state is written.
    return [uploaded or updated] + ([] if decisions.overlap_next_forward else [swap_out])


def _streamed(program: Program, ring: Ring, unit: LoweredUnit, piece: int, num_params: int, ready: Keys) -> Draft:
    """Copy a subgroup's state to the next slot, update it there, copy it back; return the task its unit waits for."""
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    state_bytes = unit.amounts.state_bytes[piece] - decisions.unstreamed_weight_bytes_per_param * num_params
    on_device = decisions.gradient_path is GradientPath.ON_DEVICE  # then only the update waits for the gradient
    load = _place(program, unit, piece, Lane.STATE_IN, Op.LOAD, () if on_device else ready)
    load.num_bytes = state_bytes
    if Place.STREAM in unit.amounts.flushes and not on_device:
        load.num_bytes += weight_bytes * num_params
    ring.take(load)
    update = _update(program, unit, piece, Lane.GPU_UPDATE, num_params, (load.key, *(ready if on_device else ())))
    store = _place(program, unit, piece, Lane.STATE_OUT, Op.STORE, (update.key,))
    store.num_bytes = state_bytes
    ring.free(load, store)
    unit.changes.append(store)
    if not unit.amounts.fetched:
        return update  # the new weights are written in place
    if on_device or not decisions.precision.weight_in_state:
        store.num_bytes += weight_bytes * num_params
    return store


def _gate(program: Program, unit: LoweredUnit, position: int, done: list[Draft]) -> None:
    """Make the next use of a unit, or without overlap the whole next iteration, wait for its updates."""
    if unit.amounts.regathered:
        done = [_regather(program, unit, position, done)]
    if not program.decisions.overlap_next_forward:
        start = program.spine[0]
        gated = [*program.before[start.key], start]  # with the fetches and gathers before it
        if unit.first_fill:  # a read or fetch may be issued ahead of its user
            gated.append(unit.first_fill[1])
        for draft in gated:
            draft.after_previous += tuple(each.key for each in done)
        return
    # If the unit uses a slot, its first fill waits.
    user = unit.first_fill[1] if unit.first_fill else unit.forwards[0]
    for each in done:
        # Uploads and gathers are issued before their user in its iteration; updates in the iteration before.
        if each.op is Op.UPLOAD or each.op is Op.GATHER:
            user.after += (each.key,)
        else:
            user.after_previous += (each.key,)


def _regather(program: Program, unit: LoweredUnit, position: int, done: list[Draft]) -> Draft:
    """All-gather updated shards (ZeRO-1 and 2, where parameters are not sharded)."""
    assert not unit.amounts.gathered
    gather = program.draft(Lane.COLLECTIVE, Op.GATHER, Phase.UPDATE, unit)
    gather.num_bytes = program.decisions.precision.weight_bytes * unit.amounts.exchanged_params
    if program.decisions.overlap_next_forward:
        gather.after = tuple(each.key for each in done if each.op is Op.UPLOAD)
        gather.after_previous = tuple(each.key for each in done if each.op is not Op.UPLOAD)
        issue_ahead(program, unit, position, gather)
    else:
        gather.after = tuple(each.key for each in done)
        late = program.decisions.host_update is HostUpdate.SUPER_OFFLOAD  # its uploads come after the last backward
        (program.tail if late else _tail(program, unit)).append(gather)
    return gather
