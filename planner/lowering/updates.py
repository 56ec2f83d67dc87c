"""The pass for optimizer steps, and for copies of updated parameters back to the device."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from planner.decisions import Place
from planner.lowering.parameters import issue_ahead
from planner.lowering.program import Keys, LoweredUnit, Program
from planner.lowering.storage import Ring, spilled_bytes
from planner.schedule.tasks import Lane, Op, Phase, Task


class LoweredSubgroup(NamedTuple):
    """A subgroup whose update is lowered.

    Attributes:
        unit: its unit.
        piece: its number there.
        num_params: parameters of one rank.
        position: the unit's position in forward.
        ready: keys of the tasks after which its gradient is in its place and its update can begin.
        ring: buffers for state of subgroups with this place.
    """

    unit: LoweredUnit
    piece: int
    num_params: int
    position: int
    ready: Keys
    ring: Ring


Way = Callable[[Program, LoweredSubgroup], list[Task]]
"""Adds the tasks of one subgroup's update, and returns those that its unit waits for."""


def updates(program: Program, ways: Mapping[Place, Way] | None = None) -> None:
    """Update every subgroup in its decided place and order, and make the next use of each unit wait for it.

    With ``overlap_next_forward``, only a unit's own next forward waits for its updates. Uploads,
    fetches and all-gathers for it are issued in the next iteration, in the order of use.

    Args:
        program: the program to extend.
        ways: how subgroups with a place are updated, where that differs from :data:`WAYS`.
    """
    decisions, known = program.decisions, {**WAYS, **(ways or {})}
    # In a pipeline, units are placed by their stage.
    order = [(unit.stage if decisions.pipeline_parallel > 1 else i, unit) for i, unit in enumerate(program.units)]
    # Updates that start during backward are issued after it, so in the order of backward, whatever was decided.
    forward = decisions.update_order == "forward" and decisions.update_start == "step"
    streamed, through_nvme = Ring(decisions.num_state_slots), Ring(decisions.num_nvme_slots)
    for position, unit in order if forward else reversed(order):
        done: list[Task] = []
        for piece, (num_params, place) in enumerate(unit.amounts.pieces):
            ring = through_nvme if place is Place.NVME else streamed
            subgroup = LoweredSubgroup(unit, piece, num_params, position, ready(program, unit, place), ring)
            done += known[place](program, subgroup)
        if done and unit.amounts.fetched and (fp8 := unit.amounts.fp8):
            cast = add(program, unit, -1, Lane.CPU, Op.CAST, tuple(draft.index for draft in done))
            cast.num_bytes = fp8.cast_bytes
            done = [cast]
        if done:
            gate(program, unit, position, done)
    streamed.recycle()
    through_nvme.recycle()


def ready(program: Program, unit: LoweredUnit, place: Place) -> Keys:
    """Return the keys of tasks after which a unit's gradient is in its place and its update can begin."""
    here = unit.summed if place in unit.amounts.flushes else unit.final
    if place is Place.NVME and unit.spill:
        here = unit.spill
    assert here is not None
    if program.decisions.update_start == "backward":
        return (here.index,)
    return (here.index, (program.clip or program.spine[-1]).index)


def add(program: Program, unit: LoweredUnit, piece: int, lane: Lane, op: Op, after: Keys) -> Task:
    """Add a task of the update: at the end of the iteration, or right after the unit's backward."""
    draft = program.draft(lane, op, Phase.UPDATE, unit, after=after, piece=piece)
    tail(program, unit).append(draft)
    return draft


def tail(program: Program, unit: LoweredUnit) -> list[Task]:
    """Return the list of the tasks of a unit's update."""
    return program.tail if program.decisions.update_start == "step" else program.behind[unit.backwards[-1].index]


def add_update(program: Program, unit: LoweredUnit, piece: int, lane: Lane, num_params: int, after: Keys) -> Task:
    """Add the optimizer step of a subgroup."""
    update = add(program, unit, piece, lane, Op.UPDATE, after)
    update.num_params = num_params
    subgroup = unit.amounts.subgroups[piece]
    update.matrices, update.num_bytes = subgroup.matrices, subgroup.exchanged_bytes
    update.splits = program.decisions.splits(unit.amounts.pieces[piece][1])
    unit.updates.append(update)
    return update


def _on_device(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
    unit, piece, num_params, _, after, _ = subgroup
    updated = add_update(program, unit, piece, Lane.GPU_UPDATE, num_params, after)
    unit.changes.append(updated)
    return [updated]


def _on_host(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
    unit, piece, num_params, _, after, _ = subgroup
    updated = add_update(program, unit, piece, Lane.CPU, num_params, after)
    unit.changes.append(updated)
    return [upload(program, subgroup, updated) or updated]


def upload(program: Program, subgroup: LoweredSubgroup, updated: Task) -> Task | None:
    """Copy parameters that the host updated to the device, unless the unit is fetched into a slot anyway."""
    unit = subgroup.unit
    if unit.amounts.fetched:
        return None
    decisions = program.decisions
    draft = program.draft(Lane.H2D, Op.UPLOAD, Phase.UPDATE, unit, piece=subgroup.piece)
    draft.num_bytes = decisions.precision.weight_bytes * subgroup.num_params
    if decisions.overlap_next_forward:
        draft.after_previous = (updated.index,)
        issue_ahead(program, unit, subgroup.position, draft)
    else:
        draft.after = (updated.index,)
        tail(program, unit).append(draft)
    return draft


def _through_nvme(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
    """Read a subgroup's state into a host buffer, update it, write it back.

    See [Note: Host buffers] in :mod:`planner.lowering.storage`.
    """
    unit, piece, num_params, _, after, ring = subgroup
    swap_in = add_swap_in(program, subgroup)
    updated = add_update(program, unit, piece, Lane.CPU, num_params, (*after, swap_in.index))
    uploaded = upload(program, subgroup, updated)
    swap_out = add_swap_out(program, subgroup, updated)
    ring.free(swap_in, swap_out)
    if unit.amounts.params == "nvme":
        return [swap_out]
    # Without overlap, the step ends when all state is written.
    return [uploaded or updated] + ([] if program.decisions.overlap_next_forward else [swap_out])


def add_swap_in(program: Program, subgroup: LoweredSubgroup) -> Task:
    """Add the read of a subgroup's state from NVMe. It waits for the gradient only if it reads the gradient too."""
    unit, piece, num_params, _, after, ring = subgroup
    spilled = spilled_bytes(program.decisions)
    swap_in = add(program, unit, piece, Lane.NVME_STATE_IN, Op.SWAP_IN, after if spilled else ())
    swap_in.num_bytes = unit.amounts.state_bytes[piece] + spilled * num_params
    ring.take(swap_in)
    return swap_in


def add_swap_out(program: Program, subgroup: LoweredSubgroup, written: Task) -> Task:
    """Add the write of a subgroup's state to NVMe after a task."""
    unit, piece = subgroup.unit, subgroup.piece
    swap_out = add(program, unit, piece, Lane.NVME_STATE_OUT, Op.SWAP_OUT, (written.index,))
    weight_bytes = program.decisions.stored_weight_bytes(unit.name)
    swap_out.num_bytes = unit.amounts.state_bytes[piece] + weight_bytes * subgroup.num_params
    unit.changes.append(swap_out)
    return swap_out


def _streamed(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
    """Copy a subgroup's state to the next slot, update it there, copy it back."""
    unit, piece, num_params, _, after, ring = subgroup
    decisions = program.decisions
    weight_bytes, state_bytes = decisions.precision.weight_bytes, unit.amounts.state_bytes[piece]
    load = add(program, unit, piece, Lane.STATE_IN, Op.LOAD, after)
    load.num_bytes = state_bytes + (weight_bytes * num_params if Place.STREAM in unit.amounts.flushes else 0)
    ring.take(load)
    update = add_update(program, unit, piece, Lane.GPU_UPDATE, num_params, (load.index,))
    store = add(program, unit, piece, Lane.STATE_OUT, Op.STORE, (update.index,))
    store.num_bytes = state_bytes
    ring.free(load, store)
    unit.changes.append(store)
    if not unit.amounts.fetched:
        return [update]  # the new weights are written in place
    if not decisions.weight_in_state:
        store.num_bytes += weight_bytes * num_params
    return [store]


WAYS: Final[Mapping[Place, Way]] = {
    Place.GPU: _on_device,
    Place.CPU: _on_host,
    Place.NVME: _through_nvme,
    Place.STREAM: _streamed,
}


def gate(program: Program, unit: LoweredUnit, position: int, done: list[Task]) -> None:
    """Make the next use of a unit, or without overlap the whole next iteration, wait for its updates."""
    if unit.amounts.regathered:
        done = [_regather(program, unit, position, done)]
    if not program.decisions.overlap_next_forward:
        start = program.spine[0]
        gated = [*program.before[start.index], start]  # with the fetches and gathers before it
        if unit.first_fill:  # a read or fetch may be issued ahead of its user
            gated.append(unit.first_fill[1])
        for draft in gated:
            draft.after_previous += tuple(each.index for each in done)
        return
    # If the unit uses a slot, its first fill waits.
    user = unit.first_fill[1] if unit.first_fill else unit.forwards[0]
    for each in done:
        # Uploads and gathers are issued before their user in its iteration; updates in the iteration before.
        if each.op is Op.UPLOAD or each.op is Op.GATHER:
            user.after += (each.index,)
        else:
            user.after_previous += (each.index,)


def _regather(program: Program, unit: LoweredUnit, position: int, done: list[Task]) -> Task:
    """All-gather updated shards (ZeRO-1 and 2, where parameters are not sharded)."""
    assert not unit.amounts.gathered
    gather = program.draft(Lane.COLLECTIVE, Op.GATHER, Phase.UPDATE, unit)
    gather.num_bytes = program.decisions.precision.weight_bytes * unit.amounts.exchanged_params
    if program.decisions.overlap_next_forward:
        gather.after = tuple(each.index for each in done if each.op is Op.UPLOAD)
        gather.after_previous = tuple(each.index for each in done if each.op is not Op.UPLOAD)
        issue_ahead(program, unit, position, gather)
    else:
        gather.after = tuple(each.index for each in done)
        tail(program, unit).append(gather)
    return gather
