"""How other engines update: extra passes over host memory, copies that the update thread waits for, late updates."""

import functools
import itertools
from collections.abc import Mapping

from planner.decisions import Place
from planner.lowering.program import Keys, LoweredUnit, Program
from planner.lowering.updates import (
    LoweredSubgroup,
    Way,
    add,
    add_swap_in,
    add_swap_out,
    add_update,
    gate,
    ready,
    tail,
    upload,
)
from planner.lowering.updates import updates as core_updates
from planner.schedule.tasks import Lane, Op, Phase, Task
from ullage.rivals.decisions import GradientPath, HostUpdate, RivalDecisions

# Separate passes of DeepSpeed over fp32 values, each of which is read and written: before the update, scaling gradients
# in place, or in Super-Offload copying them to the worker; and there, before the upload, both copying the worker's
# result and scaling.
_PASS_BYTES_PER_PARAM = 8
_PASSES_BEFORE_UPLOAD = 2
# Passes of PyTorch over gradients on the host: the norm, and scaling in place.
_CLIP_PASSES = 3


def updates(decisions: RivalDecisions, program: Program) -> None:
    """Update every subgroup as the engine does."""
    if decisions.publishes_late:
        _update_late(decisions, program)
        return
    core_updates(program, _ways(decisions))
    for draft in program.drafts if decisions.chain_bytes else ():
        if draft.op is Op.UPDATE and draft.lane is Lane.GPU_UPDATE:
            draft.num_bytes += decisions.chain_bytes * draft.num_params
    if _worker_goes_on(decisions) and not decisions.overlap_next_forward:
        for unit in program.units:  # updated shards are gathered when they are back on the device
            behind = program.behind[unit.backwards[-1].index]
            late = [draft for draft in behind if draft.op is Op.GATHER and draft.phase is Phase.UPDATE]
            program.tail += late
            program.behind[unit.backwards[-1].index] = [draft for draft in behind if draft not in late]
    if decisions.gradient_path is GradientPath.ON_DEVICE and decisions.update_start == "backward":
        _bound_gradients(decisions, program)
    for before, unit in itertools.pairwise(reversed(program.units)) if decisions.awaits_updates else ():
        if unit.flushes and before.updates:
            unit.flushes[decisions.num_micro_batches - 1].after += (before.updates[-1].index,)


def _ways(decisions: RivalDecisions) -> Mapping[Place, Way]:
    """Return the ways to update that differ from ours."""
    blocker: list[int] = []  # the key of the copy that the next update waits for, if any

    def on_host(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
        unit, num_params = subgroup.unit, subgroup.num_params
        waits = () if _worker_goes_on(decisions) else tuple(blocker)
        updated = _on_cpu(decisions, program, subgroup, subgroup.ready + waits)
        unit.changes.append(updated)
        uploaded = _upload(decisions, program, subgroup, updated, tuple(blocker))
        if uploaded and decisions.host_update is not HostUpdate.FUSED:
            blocker[:] = [uploaded.index]  # the update thread waits for the copy
        done = [uploaded or updated]
        if decisions.publish_bytes:
            num_bytes = decisions.publish_bytes * num_params
            done.append(_pass(program, unit, subgroup.piece, num_bytes, (updated.index,)))
        return done

    def through_nvme(program: Program, subgroup: LoweredSubgroup) -> list[Task]:
        swap_in = add_swap_in(program, subgroup)
        updated = _on_cpu(decisions, program, subgroup, (*subgroup.ready, swap_in.index))
        uploaded = _upload(decisions, program, subgroup, updated)
        # The writing thread waits for the upload, unless that happens in the next iteration or after backward.
        waits = decisions.host_update is not HostUpdate.FUSED and not decisions.overlap_next_forward
        waits = waits and not _worker_goes_on(decisions)
        swap_out = add_swap_out(program, subgroup, uploaded if uploaded and waits else updated)
        subgroup.ring.free(swap_in, swap_out)
        if subgroup.unit.amounts.params == "nvme":
            return [swap_out]
        return [uploaded or updated] + ([] if decisions.overlap_next_forward else [swap_out])

    ways: dict[Place, Way] = {Place.CPU: on_host, Place.NVME: through_nvme}
    if decisions.gradient_path is GradientPath.ON_DEVICE:
        ways[Place.STREAM] = functools.partial(_streamed, decisions)
    return ways


def _worker_goes_on(decisions: RivalDecisions) -> bool:
    """Return whether a worker goes on to the next update while updated parameters wait for the end of backward."""
    return decisions.host_update is HostUpdate.SUPER_OFFLOAD and decisions.update_start == "backward"


def _on_cpu(decisions: RivalDecisions, program: Program, subgroup: LoweredSubgroup, after: Keys) -> Task:
    unit, piece, num_params, *_ = subgroup
    passed_bytes = 0
    if decisions.prepare_bytes is not None:
        passed_bytes = decisions.prepare_bytes
    elif not decisions.host_update.is_pinned:
        passed_bytes = _PASS_BYTES_PER_PARAM
    elif decisions.clip and decisions.gradient_path is GradientPath.FSDP2:
        passed_bytes = _CLIP_PASSES * decisions.precision.master_bytes
    if passed_bytes:
        after = (_pass(program, unit, piece, passed_bytes * num_params, after).index,)
    return add_update(program, unit, piece, Lane.CPU, num_params, after)


def _pass(program: Program, unit: LoweredUnit, piece: int, num_bytes: int, after: Keys) -> Task:
    passed = add(program, unit, piece, Lane.CPU, Op.PASS, after)
    passed.num_bytes = num_bytes
    return passed


def _upload(
    decisions: RivalDecisions, program: Program, subgroup: LoweredSubgroup, updated: Task, blocker: Keys = ()
) -> Task | None:
    """Copy parameters that the host updated to the device, in the engine's type and from its memory."""
    unit, piece, num_params, *_ = subgroup
    if unit.amounts.fetched:
        return None
    late = decisions.host_update is HostUpdate.SUPER_OFFLOAD
    if late:
        after = (updated.index, program.spine[-1].index, *blocker)
        updated = program.draft(Lane.CPU, Op.PASS, Phase.UPDATE, unit, after=after, piece=piece)
        updated.num_bytes = _PASSES_BEFORE_UPLOAD * _PASS_BYTES_PER_PARAM * num_params
        program.tail.append(updated)
    draft = upload(program, subgroup, updated)
    assert draft is not None
    if decisions.host_update is HostUpdate.DEVICE_CAST:
        draft.num_bytes = 4 * num_params
    if decisions.sums_on_host:  # whole weights
        draft.num_bytes = draft.num_bytes * unit.amounts.padded_params // sum(n for n, _ in unit.amounts.pieces)
    draft.pinned = decisions.host_update.is_pinned
    if late and not decisions.overlap_next_forward and tail(program, unit) is not program.tail:
        tail(program, unit).remove(draft)
        program.tail.append(draft)
    return draft


def _streamed(decisions: RivalDecisions, program: Program, subgroup: LoweredSubgroup) -> list[Task]:
    """Stream state to gradients that are on the device: only the update waits for them, and weights are there too.

    At the step, neither is: both come with the state. If each rank's host has whole weights, ranks gather what they
    updated before it goes there.
    """
    unit, piece, num_params, _, after, ring = subgroup
    own_bytes = decisions.resident_weight_bytes_per_param * num_params  # of weights, in the state
    state_bytes = unit.amounts.state_bytes[piece] - own_bytes
    leaves = decisions.sums_leave and Place.STREAM in unit.amounts.flushes
    load = add(program, unit, piece, Lane.STATE_IN, Op.LOAD, after if leaves else ())
    load.num_bytes = state_bytes + (decisions.precision.weight_bytes * num_params if leaves else 0)
    if decisions.update_start == "step" and unit.amounts.fetched:
        load.num_bytes += own_bytes
    ring.take(load)
    update = add_update(program, unit, piece, Lane.GPU_UPDATE, num_params, (load.index, *after))
    updated, new_bytes = update, decisions.precision.weight_bytes * num_params if unit.amounts.fetched else 0
    if decisions.replicates(unit.name) and (ranks := unit.amounts.replicas) > 1:
        new_bytes *= ranks
        updated = add(program, unit, piece, Lane.COLLECTIVE, Op.GATHER, (update.index,))
        updated.num_bytes = new_bytes
    store = add(program, unit, piece, Lane.STATE_OUT, Op.STORE, (updated.index,))
    store.num_bytes = state_bytes + new_bytes + (num_params if decisions.fetches_fp8 and unit.amounts.fetched else 0)
    ring.free(load, store)
    unit.changes.append(store)
    return [store if unit.amounts.fetched else update]


def _bound_gradients(decisions: RivalDecisions, program: Program) -> None:
    """Let the last backward run a few units ahead of updates, because gradients wait for them on the device."""
    updated: list[Task] = []
    for unit in reversed(program.units):
        if unit.amounts.flushed_params:
            if len(updated) >= decisions.num_gradient_slots:
                unit.backwards[-1].after += (updated[-decisions.num_gradient_slots].index,)
            updated.append(unit.updates[-1])


def _update_late(decisions: RivalDecisions, program: Program) -> None:
    """Publish what the updates of the iteration before made, and start this iteration's updates.

    ZenFlow's caller waits for the worker, uploads its weights one subgroup after the other, scales the gradients and
    starts the worker again (``zenflow/engine_stage3.py::step``). RoundPipe's optimizer thread copies its weights to
    those that are fetched, then gradients to its own, and updates; only a layer's next use waits for the copy of its
    weights (``roundpipe.py::RoundPipe.step``).
    """
    end = program.spine[-1].index
    pieces = [
        (position, unit, piece, num_params)
        for position, unit in enumerate(program.units)
        for piece, (num_params, _) in enumerate(unit.amounts.pieces)
    ]
    published: list[Task] = []
    done: dict[str, list[Task]] = {unit.name: [] for unit in program.units}
    for _, unit, piece, num_params in pieces:
        if unit.amounts.fetched:
            draft = _pass(program, unit, piece, decisions.publish_bytes * num_params, (end,))
        else:
            draft = add(program, unit, piece, Lane.H2D, Op.UPLOAD, (end, *(d.index for d in published[-1:])))
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
            (decisions.prepare_bytes or 0) * num_params,
            (*ready(program, unit, Place.CPU), published[-1].index),
        )
        for _, unit, piece, num_params in pieces
    ]
    for (position, unit, piece, num_params), new, prepare in zip(pieces, published, prepared, strict=True):
        updated = add_update(program, unit, piece, Lane.CPU, num_params, (prepare.index,))
        unit.changes.append(updated)
        new.after_previous += (updated.index,)
        if not decisions.overlap_next_forward:
            done[unit.name].append(prepare)
        if piece == len(unit.amounts.pieces) - 1:
            gate(program, unit, position, done[unit.name])
