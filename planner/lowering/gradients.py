"""The pass that moves gradients from backward to where they are used.

[Note: Accumulation] We copy each micro-batch's gradient once, and the host adds it to the sum: 2 B/param of traffic in
bf16. DeepSpeed adds on the device. With ZeRO-3 and the optimizer on the host, ``partition_grads`` in ``stage3.py``
copies the first micro-batch's gradient to a pinned buffer and back; of each later one it copies the sum to the device
and, with the gradient added, back to the buffer. These copies are asynchronous. Only after the last micro-batch is the
sum copied once more, in fp32, to the optimizer's gradients: that copy is exposed.

[Note: Reductions] DeepSpeed's ZeRO-3 works on gradients on the device, on a stream of its own: each is copied into a
bucket, from there into the input of the reduction, and divided there: 3 values read and 3 written, even on one rank
(``stage3.py::__add_grad_to_ipg_bucket``, ``coalesced_collectives.py::reduce_scatter_coalesced``). After the last
micro-batch the norm of what leaves the device is taken in fp64: one value read, 8 bytes written and read
(``stage3.py::_constant_buffered_norm2``). These passes take device time from backward, whose tasks have their bytes.
Gathers for later units are issued behind the reduction, when the next module is reached (``fetch_sub_module``). So a
caller that waits for a copy of the gradient does not issue them either. Without ZeRO, it joins all gradients into
buckets after the last micro-batch, divides these, and copies the sums back: as many values read and written again
(``engine.py::allreduce_bucket``, ``allreduce_no_retain``).

[Note: Buckets] DeepSpeed's ZeRO-3 reduces gradients, and copies them to the host, when that of the next parameter would
not fit into a bucket of ``reduce_bucket_size`` parameters
(``stage3.py::reduce_independent_p_g_buckets_and_remove_grads``). Only then does a caller that blocks wait. Before that,
it issues the kernels and gathers of all layers in the bucket. Here, buckets hold whole units.

Engines that stream layers add up on the device too, in the products of backward. They bring the sum one unit ahead, and
after the last micro-batch they leave it there for the update. Backward then runs a few units ahead of updates.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable

from planner.decisions import REDUCE_BUCKET_PARAMS, GradientPath
from planner.lowering.pipeline import exchange_tied
from planner.lowering.program import Draft, LoweredUnit, Program
from planner.lowering.storage import spill
from planner.schedule.tasks import Lane, Op, Phase

# See [Note: Reductions].
_PASSES = 6
_NORM_BYTES = 16


def gradients(program: Program) -> None:
    """Reduce gradients over ranks, and copy those of host updates to the host, as soon as a unit's backward ends."""
    decisions = program.decisions
    last = decisions.num_micro_batches - 1
    leaving: list[int] = []
    spilled: list[Draft] = []
    bucket: list[_Leaving] = []
    _bring_sums(program)
    for draft, following in zip(program.spine, (*program.spine[1:], None), strict=True):
        if draft.op is not Op.BACKWARD or not (unit := program.named[draft.unit]).num_params:
            continue
        # Wait for all of them, not only the latest: collectives and copies have different lanes and end in any order.
        num_over = max(len(leaving) + 1 - decisions.num_gradient_slots, 0)
        draft.after += tuple(leaving[:num_over])
        del leaving[:num_over]
        ready = _reduce(program, unit, draft)
        flushed = _flush(program, unit, draft, ready)
        if decisions.module_hooks:
            program.behind[draft.key].sort(key=lambda behind: behind.op is Op.GATHER)
            _work_on_gradient(program, unit, draft)
        if flushed:
            spill(program, unit, draft, flushed, spilled)
            _sum(program, unit, flushed, following)
        gradient = _Leaving(unit, draft, following, ready, flushed)
        if flushed and decisions.fills_buckets and draft.micro_batch == last:
            _put(program, bucket, gradient)
            continue
        if (gone := flushed or ready) is not draft:
            leaving.append(gone.key)
        _wait_for(program, gradient, last)
    if decisions.reduce_start == "step":
        _reduce_at_step(program)
    if program.clip:
        _clip(program, program.clip)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaving:
    """A gradient that leaves the device.

    Attributes:
        unit: whose gradient it is.
        backward: the task that makes it.
        following: the compute task after that.
        ready: the task after which it is final.
        flushed: the last copy to the host, if there is one.
    """

    unit: LoweredUnit
    backward: Draft
    following: Draft | None
    ready: Draft
    flushed: Draft | None


def _put(program: Program, bucket: list[_Leaving], gradient: _Leaving) -> None:
    """Put a gradient into the bucket; if the next one does not fit, empty it. See [Note: Buckets]."""
    bucket.append(gradient)
    following, behind, last = gradient.following, program.behind, gradient.backward.micro_batch
    coming = program.named[following.unit].num_params if following and following.unit else 0
    if coming and sum(each.unit.num_params for each in bucket) + coming <= REDUCE_BUCKET_PARAMS:
        return
    moved: list[Draft] = []
    for earlier in bucket[:-1]:
        unit, backward = earlier.unit, earlier.backward
        passed = (unit.scatters.get(last), *unit.flushes[last], unit.sums.get(last), unit.spill)
        own = {draft.key for draft in passed if draft}
        leaving = [draft for draft in behind[backward.key] if draft.key in own]
        leaving[0].after += (gradient.backward.key,)
        behind[backward.key] = [draft for draft in behind[backward.key] if draft.key not in own]
        moved += leaving
    behind[gradient.backward.key] = moved + behind[gradient.backward.key]
    bucket.clear()
    _wait_for(program, gradient, last)


def _wait_for(program: Program, gradient: _Leaving, last: int) -> None:
    """Let the next compute task wait for a gradient, if the engine does; ``last`` is the last micro-batch."""
    decisions = program.decisions
    backward, following, flushed = gradient.backward, gradient.following, gradient.flushed
    if following and flushed and decisions.gradient_path.blocks(backward.micro_batch, last):
        ahead = program.behind[backward.key] if decisions.module_hooks else ()
        _wait(flushed, following, (*ahead, *program.before[following.key]))
    elif following and gradient.ready is not backward and not decisions.gathers_ahead(gradient.unit.num_params):
        _wait(gradient.ready, following, program.before[following.key])


def _clip(program: Program, clip: Draft) -> None:
    # The norm is of gradients summed over ranks and micro-batches. Those of host updates are on the host.
    clip.after += tuple(summed(program, unit).key for unit in program.units if unit.num_params)
    # The norm of those that stay on the device is computed by this task.
    staying = Counter[int]()
    for unit in program.units:
        staying[unit.stage] += sum(count for count, _ in unit.amounts.pieces) - unit.amounts.flushed_params
    clip.num_params = max(staying.values())


def _wait(awaited: Draft, following: Draft, drafts: Iterable[Draft]) -> None:
    """Let the next compute task, and those of the drafts that gather, wait for a task."""
    for waiting in (following, *(draft for draft in drafts if draft.op is Op.GATHER)):
        waiting.after += (awaited.key,)


def gradient_ready(program: Program, unit: LoweredUnit) -> Draft:
    """Return the task after which a unit's summed gradient is on the device."""
    return unit.scatters.get(program.decisions.num_micro_batches - 1) or unit.exchange or unit.backwards[-1]


def summed(program: Program, unit: LoweredUnit) -> Draft:
    """Return the task after which a unit's whole summed gradient is where it will be used."""
    last = program.decisions.num_micro_batches - 1
    if added := unit.sums.get(last):
        return added
    copies = unit.flushes.get(last)
    stays = program.decisions.gradient_path is GradientPath.ON_DEVICE
    return copies[-1] if copies and not stays else gradient_ready(program, unit)


def _reduce(program: Program, unit: LoweredUnit, backward: Draft) -> Draft:
    """Add the collective over ranks; return the task after which this micro-batch's gradient is final."""
    if unit.amounts.replicas == 1:
        return backward
    decisions = program.decisions
    # If whole gradients accumulate on the device, ranks reduce them once, after the last micro-batch.
    piles_up = decisions.zero_stage < 2 and not unit.amounts.flushed_params
    last = backward.micro_batch == decisions.num_micro_batches - 1
    if piles_up and not (last and decisions.reduce_start == "backward"):
        return backward
    scatter = _scatter(program, unit, backward.micro_batch, backward)
    program.behind[backward.key].append(scatter)
    return scatter


def _work_on_gradient(program: Program, unit: LoweredUnit, backward: Draft) -> None:
    """Add the bytes of DeepSpeed's passes over a gradient on the device to its backward; see [Note: Reductions]."""
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    backward.num_bytes = _PASSES * weight_bytes * unit.amounts.padded_params
    if decisions.clip and backward.micro_batch == decisions.num_micro_batches - 1:
        backward.num_bytes += (weight_bytes + _NORM_BYTES) * unit.amounts.flushed_params


def _reduce_at_step(program: Program) -> None:
    """Reduce gradients that accumulated on the device over ranks, after the last backward of each rank."""
    exchange_tied(program)
    last = program.decisions.num_micro_batches - 1
    ends = {draft.stage: draft for draft in program.computing}
    habits = program.decisions.habits
    bucket_params, joint = habits.bucket_params if habits else 0, dict[tuple[int, int], tuple[Draft, int]]()
    for unit in reversed(program.units):
        piled_up = unit.amounts.replicas > 1 and not unit.amounts.flushed_params
        if not (unit.num_params and piled_up and last not in unit.scatters):
            continue
        end, num_params = unit.exchange or ends[unit.stage], unit.amounts.exchanged_params
        if bucket_params:
            ends[unit.stage].num_bytes += _PASSES * program.decisions.precision.gradient_bytes * num_params
        group = unit.stage, unit.amounts.replicas
        before, num_before = joint.get(group, (None, 0))
        if before and num_before + num_params <= bucket_params:
            before.num_bytes += _exchanged_bytes(program, unit)
            before.after += (end.key,)
            unit.scatters[last] = before
            joint[group] = before, num_before + num_params
        else:
            scatter = _scatter(program, unit, last, end)
            program.at_step(scatter)
            joint[group] = scatter, num_params


def _scatter(program: Program, unit: LoweredUnit, micro_batch: int, after: Draft) -> Draft:
    """Add and return the collective that reduces a unit's gradient over ranks."""
    scatter = program.draft(Lane.COLLECTIVE, Op.SCATTER, Phase.BACKWARD, unit, micro_batch, (after.key,))
    scatter.num_bytes = _exchanged_bytes(program, unit)
    unit.scatters[micro_batch] = scatter
    return scatter


def _exchanged_bytes(program: Program, unit: LoweredUnit) -> int:
    """Return the bytes that the reduction of a unit's gradient exchanges.

    An all-reduce is a reduce-scatter and an all-gather: twice the bytes.
    """
    decisions = program.decisions
    num_bytes = decisions.precision.gradient_bytes * unit.amounts.exchanged_params
    return num_bytes * (2 if decisions.zero_stage == 0 else 1)


def _sum(program: Program, unit: LoweredUnit, flushed: Draft, following: Draft | None) -> None:
    """Let a pass of the host add a copied gradient to the sum, in engines that have one.

    The next micro-batch waits for the last pass.
    """
    habits = program.decisions.habits
    if habits is None or not habits.sum_bytes:
        return
    added = program.draft(Lane.CPU, Op.PASS, Phase.BACKWARD, unit, flushed.micro_batch, (flushed.key,))
    added.num_bytes = habits.sum_bytes * unit.amounts.flushed_params
    program.behind[unit.backwards[flushed.micro_batch].key].append(added)
    unit.sums[flushed.micro_batch] = added
    if following and following.op is Op.FORWARD:
        following.after += (added.key,)


def _bring_sums(program: Program) -> None:
    """Copy the sum of earlier micro-batches to the device, one unit ahead of the backward that adds to it."""
    decisions = program.decisions
    if decisions.gradient_path is not GradientPath.ON_DEVICE:
        return
    for before, ahead, backward in zip(program.spine, program.spine[1:], program.spine[2:], strict=False):
        if backward.op is not Op.BACKWARD or not backward.micro_batch:
            continue
        unit = program.named[backward.unit]
        if not unit.amounts.flushed_params:
            continue
        bring = program.draft(Lane.H2D, Op.LOAD, Phase.BACKWARD, unit, backward.micro_batch, (before.key,))
        bring.num_bytes = decisions.precision.weight_bytes * unit.amounts.flushed_params
        unit.flushes[backward.micro_batch] = [bring]
        program.before[ahead.key].append(bring)
        backward.after += (bring.key,)


def _flush(program: Program, unit: LoweredUnit, backward: Draft, ready: Draft) -> Draft | None:
    """Add the copies of one micro-batch's gradient to the host; return the last one."""
    num_params = unit.amounts.flushed_params
    decisions, micro_batch = program.decisions, backward.micro_batch
    weight_bytes, path = decisions.precision.weight_bytes, decisions.gradient_path
    last = micro_batch == decisions.num_micro_batches - 1
    if not num_params or (decisions.layer_by_layer and not last):  # then micro-batches add up on the device
        return None
    if path.is_one_copy:
        op = Op.OVERWRITE if path is GradientPath.BUFFERED else Op.FLUSH
        steps: tuple[tuple[Lane, Op, int], ...] = ((Lane.D2H, op, decisions.flushed_bytes_per_param),)
    else:  # [Note: Accumulation]
        out, back = (Lane.D2H, Op.OVERWRITE, weight_bytes), (Lane.H2D, Op.LOAD, weight_bytes)
        if path is GradientPath.ON_DEVICE:
            steps = () if last else (out,)
        else:
            steps = (back, out) if micro_batch else (out, back)
            steps += ((Lane.D2H, Op.OVERWRITE, 4),) if last else ()
    draft = ready
    brought, copies = unit.flushes.get(micro_batch, []), list[Draft]()
    for lane, op, bytes_per_param in steps:
        draft = program.draft(lane, op, Phase.BACKWARD, unit, micro_batch, (draft.key,))
        draft.num_bytes = bytes_per_param * num_params
        copies.append(draft)
    unit.flushes[micro_batch] = brought + copies
    if micro_batch and not path.is_one_copy:
        unit.flushes[micro_batch][0].after += (unit.flushes[micro_batch - 1][-1].key,)
    program.behind[backward.key] += copies
    if last and copies:
        draft.pinned = path is not GradientPath.ZERO3_BLOCKING
        draft.stalls = path is GradientPath.ZERO3_ASYNC
    if path is GradientPath.FSDP2 and micro_batch:
        draft.pinned = False
    norm_on_host = path in {GradientPath.FSDP2, GradientPath.BUFFERED}
    if decisions.clip and last and copies and not norm_on_host:
        draft.num_params = num_params  # the copy also computes the norm
    return draft
