"""The pass for optimizer steps, wherever they run, and for bringing what they changed back to the device."""

from planner.decisions import STATE_BYTES_PER_PARAM, HostUpdate, Place
from planner.graph import Unit
from planner.lowering.gradients import gradient_ready
from planner.lowering.parameters import first_forward, issue_ahead
from planner.lowering.program import Draft, Program
from planner.lowering.storage import StateRing
from planner.schedule import Lane, Op, Phase

# A separate pass of DeepSpeed: scaling fp32 gradients in place.
_SCALE_BYTES_PER_PARAM = 8


def updates(program: Program) -> None:
    """Update every subgroup where it was decided, in the decided order, and gate the next use of each unit.

    [Note: Deadlines] With ``overlap_next_forward`` the updates of a unit gate only that unit's next forward. What it
    needs on the device by then (an upload, a fetch, a gather) is issued in the next iteration, in the order of use.
    """
    decisions = program.decisions
    order = list(enumerate(program.units))
    # What starts during backward is issued behind it, so in its order whatever else was decided.
    forward = decisions.update_order == "forward" and decisions.update_start == "step"
    stream_slots: list[str] = []
    ring = StateRing(program)
    blocker: str | None = None
    for position, unit in order if forward else reversed(order):
        done: list[str] = []
        for piece, (num_params, place) in enumerate(program.pieces[unit.name]):
            ready = _ready(program, unit, place)
            if place is Place.CPU:
                updated = _on_cpu(program, unit, piece, num_params, ready + ([blocker] if blocker else []))
                uploaded = _upload(program, unit, piece, num_params, position, updated)
                if uploaded and decisions.host_update is not HostUpdate.FUSED:
                    blocker = uploaded  # the thread that updates waits for the copy
                done.append(uploaded or updated)
            elif place is Place.NVME:
                done += _through_nvme(program, ring, unit, piece, num_params, position, ready)
            elif place is Place.GPU:
                done.append(_place(program, unit, piece, Lane.GPU_UPDATE, Op.UPDATE, ready, num_params=num_params).key)
            else:
                done.append(_streamed(program, unit, piece, num_params, ready, stream_slots))
        if done:
            _gate(program, unit, position, done)
    if stream_slots:
        _recycle(program, stream_slots)
    ring.recycle()
    if program.loop:
        program.loop.after += [draft.key for draft in program.ordered() if draft.phase is Phase.UPDATE]


def _ready(program: Program, unit: Unit, place: Place) -> list[str]:
    """Return the keys after which a unit's gradient is where it is updated, and its clip factor known."""
    last = program.decisions.num_micro_batches - 1
    here = f"flush:{unit.name}:{last}" if program.decisions.flushes(unit.name, place) else gradient_ready(program, unit)
    if place is Place.NVME and program.decisions.spill_gradients:
        here = f"{Op.SPILL}:{unit.name}"
    if program.decisions.clip:
        return [here, "clip"]
    return [here] if program.decisions.update_start == "backward" else [here, program.spine[-1].key]


def _place(
    program: Program, unit: Unit, piece: int, lane: Lane, op: Op, after: list[str], *, num_params: int = 0
) -> Draft:
    """Add a task of the update, at the end of the iteration or right behind the unit's backward."""
    draft = Draft(f"{op}:{unit.name}:{piece}", lane, op, Phase.UPDATE, unit.name, piece=piece, num_params=num_params)
    draft.after = list(after)
    while draft.key in program.drafts:  # several passes over the same piece
        draft.key += "'"
    _tail(program, unit).append(program.add(draft))
    return draft


def _tail(program: Program, unit: Unit) -> list[Draft]:
    if program.decisions.update_start == "step":
        return program.tail
    return program.behind[f"{Op.BACKWARD}:{unit.name}:{program.decisions.num_micro_batches - 1}"]


def _on_cpu(program: Program, unit: Unit, piece: int, num_params: int, ready: list[str]) -> str:
    if program.decisions.host_update is HostUpdate.DEEPSPEED:
        scale = _place(program, unit, piece, Lane.CPU, Op.PASS, ready)
        scale.num_bytes = _SCALE_BYTES_PER_PARAM * num_params
        ready = [scale.key]
    return _place(program, unit, piece, Lane.CPU, Op.UPDATE, ready, num_params=num_params).key


def _upload(program: Program, unit: Unit, piece: int, num_params: int, position: int, updated: str) -> str | None:
    """Bring what the host updated to the device, unless the unit is fetched into a slot anyway."""
    decisions = program.decisions
    if decisions.units[unit.name].fetched:
        return None
    draft = Draft(f"upload:{unit.name}:{piece}", Lane.H2D, Op.UPLOAD, Phase.UPDATE, unit.name, piece=piece)
    fp32 = decisions.host_update is HostUpdate.DEVICE_CAST
    draft.num_bytes = (4 if fp32 else decisions.precision.weight_bytes) * num_params
    draft.pinned = decisions.host_update is not HostUpdate.DEEPSPEED
    if decisions.overlap_next_forward:
        draft.after_previous.append(updated)
        issue_ahead(program, unit, position, draft)
    else:
        draft.after.append(updated)
        _tail(program, unit).append(program.add(draft))
    return draft.key


def _through_nvme(
    program: Program,
    ring: StateRing,
    unit: Unit,
    piece: int,
    num_params: int,
    position: int,
    ready: list[str],
) -> list[str]:
    """Read a subgroup's state into a host buffer, update it, write it back; return the keys that gate its unit."""
    decisions = program.decisions
    where = _tail(program, unit)
    swap_in = ring.swap_in(where, unit, piece, num_params, ready)
    updated = _on_cpu(program, unit, piece, num_params, [*ready, swap_in.key])
    uploaded = _upload(program, unit, piece, num_params, position, updated)
    # The thread that would write waits for the copy, unless that is made in the next iteration.
    waits = decisions.host_update is not HostUpdate.FUSED and not decisions.overlap_next_forward
    swap_out = ring.swap_out(where, swap_in, unit, num_params, uploaded if uploaded and waits else updated)
    if decisions.units[unit.name].params == "nvme":
        return [swap_out.key]
    # An engine that overlaps nothing ends its step when all is written.
    return [uploaded or updated] + ([] if decisions.overlap_next_forward else [swap_out.key])


def _streamed(
    program: Program, unit: Unit, piece: int, num_params: int, ready: list[str], stream_slots: list[str]
) -> str:
    """Load a subgroup's state and gradient into the next slot of the ring, update it there, store it back."""
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    load = _place(program, unit, piece, Lane.STATE_IN, Op.LOAD, ready)
    gradient_bytes = weight_bytes if decisions.flushes(unit.name, Place.STREAM) else 0
    load.num_bytes = (STATE_BYTES_PER_PARAM + gradient_bytes) * num_params
    load.slot = len(stream_slots) % decisions.num_state_slots
    if len(stream_slots) >= decisions.num_state_slots:
        load.after.append(stream_slots[-decisions.num_state_slots])
    update = _place(program, unit, piece, Lane.GPU_UPDATE, Op.UPDATE, [load.key], num_params=num_params)
    store = _place(program, unit, piece, Lane.STATE_OUT, Op.STORE, [update.key])
    store.num_bytes = STATE_BYTES_PER_PARAM * num_params
    load.after_previous.append(store.key)  # not before last iteration's state is back
    stream_slots.append(store.key)
    if decisions.units[unit.name].params == "gpu":
        return update.key  # the new weights are written in place
    if not decisions.precision.master_is_weight:
        store.num_bytes += weight_bytes * num_params
    return store.key


def _recycle(program: Program, stream_slots: list[str]) -> None:
    """Let the first loads of an iteration wait for the slots that the previous one used last."""
    count = program.decisions.num_state_slots
    for i, store in enumerate(stream_slots[:count]):
        load = program.drafts[store.replace(f"{Op.STORE}:", f"{Op.LOAD}:", 1)]
        last_in_slot = [s for j, s in enumerate(stream_slots) if j % count == i][-1]
        load.after_previous.append(last_in_slot)


def _gate(program: Program, unit: Unit, position: int, done: list[str]) -> None:
    """Make the next use of a unit wait for its updates, or the whole next iteration if nothing overlaps."""
    decisions = program.decisions
    user = first_forward(program, unit.name)
    if decisions.regathers(unit):
        done = [_regather(program, unit, position, done)]
    if not decisions.overlap_next_forward:
        start = program.spine[0]
        gated = [*program.before[start.key], start]  # what is fetched or gathered before it included
        if unit.name in program.first_use:  # what is read, or fetched for a gather, may be ahead of its user
            gated.append(program.drafts[program.first_use[unit.name][1]])
        for draft in gated:
            draft.after_previous += done
        return
    if unit.name in program.first_use:  # fetched or gathered into a slot: the first of those waits
        user = program.drafts[program.first_use[unit.name][1]]
    for key in done:
        # An upload or gather of the next iteration is issued before its user, an update in the iteration before.
        early = program.drafts[key].op in {Op.UPLOAD, Op.GATHER}
        (user.after if early else user.after_previous).append(key)


def _regather(program: Program, unit: Unit, position: int, done: list[str]) -> str:
    """Give every rank the others' updated shards (ZeRO-1 and 2, where parameters themselves are not sharded)."""
    assert unit.name not in program.gathered
    num_bytes = program.decisions.precision.weight_bytes * unit.num_params
    key = f"gather:{unit.name}"
    gather = Draft(key, Lane.COLLECTIVE, Op.GATHER, Phase.UPDATE, unit.name, num_bytes=num_bytes)
    if program.decisions.overlap_next_forward:
        for dependency in done:
            early = program.drafts[dependency].op is Op.UPLOAD
            (gather.after if early else gather.after_previous).append(dependency)
        issue_ahead(program, unit, position, gather)
    else:
        gather.after = done
        _tail(program, unit).append(program.add(gather))
    return key
