"""The pass that moves gradients of other engines from backward to where they are used.

DeepSpeed adds gradients of micro-batches on the device. With ZeRO-3 and the optimizer on the host, ``partition_grads``
in ``stage3.py`` copies the first micro-batch's gradient to a pinned buffer and back; of each later one it copies the
sum to the device and, with the gradient added, back to the buffer. These copies are asynchronous, if ``pin_memory`` of
``offload_optimizer`` is on: otherwise the caller waits for each. After the last micro-batch the sum is copied once
more, in fp32, to the optimizer's gradients: that copy is exposed.

[Note: Reductions] DeepSpeed's ZeRO-3 works on gradients on the device, on a stream of its own: each is copied into a
bucket, from there into the input of the reduction, and divided there: 3 values read and 3 written, even on one rank
(``stage3.py::__add_grad_to_ipg_bucket``, ``coalesced_collectives.py::reduce_scatter_coalesced``). After the last
micro-batch the norm of what leaves the device is taken in fp64: one value read, 8 bytes written and read
(``stage3.py::_constant_buffered_norm2``). These passes take device time from backward, whose tasks have their bytes.
Gathers for later units are issued behind the reduction, when the next module is reached (``fetch_sub_module``). So a
caller that waits for a copy of the gradient does not issue them either. Without ZeRO, it joins all gradients into
buckets after the last micro-batch, divides these, and copies the sums back: as many values read and written again
(``engine.py::allreduce_bucket``, ``allreduce_no_retain``). ZeRO-1 and 2 all-reduce too, although each rank needs a
share only (``use_multi_rank_bucket_allreduce``), ZeRO-2 in every micro-batch, and computing waits for it unless
``overlap_comm`` is on (``stage_1_and_2.py::average_tensor``).

DeepSpeed's ZeRO-3 reduces gradients, and copies them to the host, when that of the next parameter would
not fit into a bucket of ``reduce_bucket_size`` parameters
(``stage3.py::reduce_independent_p_g_buckets_and_remove_grads``). Only then does a caller that blocks wait. Before that,
it issues the kernels and gathers of all layers in the bucket. Here, buckets hold whole units.

Engines that stream layers add up on the device too, in the products of backward. They bring the sum one unit ahead, and
after the last micro-batch they leave it there for the update. Backward then runs a few units ahead of updates. If these
wait for the norm of all gradients, the last sum goes to the host, too, and comes back with the state.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from planner.lowering.gradients import add_scatter, add_up, exchanged_bytes, reduce, settle, wait_for_slot
from planner.lowering.program import LoweredUnit, Program
from planner.lowering.storage import spill
from planner.schedule.tasks import Lane, Op, Phase, Task
from ullage.rivals.decisions import REDUCE_BUCKET_PARAMS, GradientPath, RivalDecisions
from ullage.rivals.passes.stages import exchange_tied

# See [Note: Reductions].
_PASSES = 6
_NORM_BYTES = 16
# DeepSpeed's swapper lets the gradients of so many units wait on the host for their write: its usual ``buffer_count``.
SWAPPER_SLOTS = 20


def gradients(decisions: RivalDecisions, program: Program) -> None:
    """Reduce gradients over ranks, and copy those of host updates to the host, as the engine does."""
    last = decisions.num_micro_batches - 1
    at_step = decisions.reduce_start == "step" or decisions.pipeline_parallel > 1
    num_spills = decisions.num_gradient_slots if decisions.gradient_path is GradientPath.ONCE else SWAPPER_SLOTS
    leaving: list[int] = []
    spilled: list[Task] = []
    bucket: list[_Leaving] = []
    brought = _bring_sums(decisions, program)
    for draft, following in zip(program.spine, (*program.spine[1:], None), strict=True):
        if draft.op is not Op.BACKWARD or not (unit := program.named[draft.unit]).num_params:
            continue
        wait_for_slot(draft, leaving, decisions.num_gradient_slots)
        ready = _add_and_reduce(decisions, program, unit, draft, at_step=at_step)
        copies = _copy_out(decisions, program, unit, draft, ready, brought)
        flushed = copies[-1] if copies else None
        if decisions.module_hooks:
            program.behind[draft.index].sort(key=lambda behind: behind.op is Op.GATHER)
            _work_on_gradient(decisions, unit, draft)
        added = None
        if flushed:
            spill(program, unit, draft, flushed, spilled, num_spills)
            added = _sum(decisions, program, unit, flushed, following)
        gradient = _Leaving(unit, draft, following, ready, (*copies, *filter(None, [added])), flushed)
        if flushed and decisions.fills_buckets and decisions.gradient_path.blocks(draft.micro_batch, last):
            _put(decisions, program, bucket, gradient)
            continue
        if (gone := flushed or ready) is not draft:
            leaving.append(gone.index)
        _wait_for(decisions, program, gradient, last)
    if at_step:
        _reduce_at_step(decisions, program)
    if decisions.all_reduces:
        for draft in program.drafts:
            draft.num_bytes *= 2 if draft.op is Op.SCATTER else 1
    _settle(program)


def _settle(program: Program) -> None:
    settle(program)
    if program.clip:
        program.clip.num_params = max(program.clip.num_params, 0)  # of whole gradients more leave than ranks update


def _add_and_reduce(
    decisions: RivalDecisions, program: Program, unit: LoweredUnit, backward: Task, *, at_step: bool
) -> Task:
    """Add a gradient to the sum on the device, and reduce it over ranks; return the task after which it is final."""
    if not (decisions.adds_in_products or decisions.sums_on_host):
        add_up(program, unit, backward, whole=decisions.layer_by_layer)
    if decisions.replicates(unit.name) and backward.micro_batch < decisions.num_micro_batches - 1:
        return backward  # ranks reduce the sum
    return reduce(program, unit, backward, at_step=at_step)


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaving:
    """A gradient that leaves the device.

    Attributes:
        unit: whose gradient it is.
        backward: the task that makes it.
        following: the compute task after that.
        ready: the task after which it is final.
        moves: the copies of this micro-batch's gradient, and the pass that adds it to the sum.
        flushed: the last copy to the host, if there is one.
    """

    unit: LoweredUnit
    backward: Task
    following: Task | None
    ready: Task
    moves: tuple[Task, ...]
    flushed: Task | None


def _put(decisions: RivalDecisions, program: Program, bucket: list[_Leaving], gradient: _Leaving) -> None:
    """Put a gradient into the bucket; if the next one does not fit, empty it; see the module."""
    bucket.append(gradient)
    following, behind, micro_batch = gradient.following, program.behind, gradient.backward.micro_batch
    goes_on = following and following.unit and following.op is not Op.FORWARD  # of the next micro-batch
    coming = program.named[following.unit].num_params if following and goes_on else 0
    if coming and sum(each.unit.num_params for each in bucket) + coming <= REDUCE_BUCKET_PARAMS:
        return
    moved: list[Task] = []
    for earlier in bucket[:-1]:
        unit, backward = earlier.unit, earlier.backward
        passed = (unit.scatters.get(micro_batch), *earlier.moves, unit.spill)
        own = {draft.index for draft in passed if draft}
        leaving = [draft for draft in behind[backward.index] if draft.index in own]
        leaving[0].after += (gradient.backward.index,)
        behind[backward.index] = [draft for draft in behind[backward.index] if draft.index not in own]
        moved += leaving
    behind[gradient.backward.index] = moved + behind[gradient.backward.index]
    bucket.clear()
    _wait_for(decisions, program, gradient, decisions.num_micro_batches - 1)


def _wait_for(decisions: RivalDecisions, program: Program, gradient: _Leaving, last: int) -> None:
    """Let the next compute task wait for a gradient, if the engine does; ``last`` is the last micro-batch."""
    backward, following, flushed = gradient.backward, gradient.following, gradient.flushed
    if following and flushed and decisions.gradient_path.blocks(backward.micro_batch, last):
        ahead = program.behind[backward.index] if decisions.module_hooks else ()
        _wait(flushed, following, (*ahead, *program.before[following.index]))
    elif following and gradient.ready is not backward and not decisions.gathers_ahead(gradient.unit.num_params):
        _wait(gradient.ready, following, program.before[following.index])


def _wait(awaited: Task, following: Task, drafts: Iterable[Task]) -> None:
    """Let the next compute task, and those of the drafts that gather, wait for a task."""
    for waiting in (following, *(draft for draft in drafts if draft.op is Op.GATHER)):
        waiting.after += (awaited.index,)


def _work_on_gradient(decisions: RivalDecisions, unit: LoweredUnit, backward: Task) -> None:
    """Add the bytes of DeepSpeed's passes over a gradient on the device to its backward; see [Note: Reductions]."""
    weight_bytes = decisions.precision.weight_bytes
    backward.num_bytes += _PASSES * weight_bytes * unit.amounts.padded_params
    if decisions.clip and backward.micro_batch == decisions.num_micro_batches - 1:
        backward.num_bytes += (weight_bytes + _NORM_BYTES) * unit.amounts.flushed_params


def _reduce_at_step(decisions: RivalDecisions, program: Program) -> None:
    """Reduce gradients that accumulated on the device over ranks, after the last backward of each rank."""
    exchange_tied(program)
    last = decisions.num_micro_batches - 1
    ends = {draft.stage: draft for draft in program.computing}
    bucket_params, joint = decisions.bucket_params, dict[tuple[int, int], tuple[Task, int]]()
    for unit in reversed(program.units):
        piled_up = unit.amounts.replicas > 1 and not unit.amounts.flushed_params
        if not (unit.num_params and piled_up and last not in unit.scatters):
            continue
        end, num_params = unit.exchange or ends[unit.stage], unit.amounts.exchanged_params
        if bucket_params:
            ends[unit.stage].num_bytes += _PASSES * decisions.precision.gradient_bytes * num_params
        group = unit.stage, unit.amounts.replicas
        before, num_before = joint.get(group, (None, 0))
        if before and num_before + num_params <= bucket_params:
            before.num_bytes += exchanged_bytes(program, unit)
            before.after += (end.index,)
            unit.scatters[last] = before
            joint[group] = before, num_before + num_params
        else:
            scatter = add_scatter(program, unit, last, end)
            program.at_step(scatter)
            joint[group] = scatter, num_params


def _sum(
    decisions: RivalDecisions, program: Program, unit: LoweredUnit, flushed: Task, following: Task | None
) -> Task | None:
    """Let a pass of the host add a copied gradient to the sum, in engines that have one.

    The next micro-batch waits for the last pass.
    """
    if not decisions.sum_bytes:
        return None
    added = program.draft(Lane.CPU, Op.PASS, Phase.BACKWARD, unit, flushed.micro_batch, (flushed.index,))
    added.num_bytes = decisions.sum_bytes * unit.amounts.flushed_params
    program.behind[unit.backwards[flushed.micro_batch].index].append(added)
    unit.summed = added  # in the end, that of the last micro-batch
    if following and following.op is Op.FORWARD:
        following.after += (added.index,)
    return added


def _bring_sums(decisions: RivalDecisions, program: Program) -> dict[tuple[str, int], Task]:
    """Copy the sum of earlier micro-batches to the device, one unit ahead of the backward that adds to it.

    Returns:
        The copies, by unit and micro-batch.
    """
    brought: dict[tuple[str, int], Task] = {}
    if decisions.gradient_path is not GradientPath.ON_DEVICE:
        return brought
    for before, ahead, backward in zip(program.spine, program.spine[1:], program.spine[2:], strict=False):
        if backward.op is not Op.BACKWARD or not backward.micro_batch:
            continue
        unit = program.named[backward.unit]
        if not unit.amounts.flushed_params:
            continue
        bring = program.draft(Lane.H2D, Op.LOAD, Phase.BACKWARD, unit, backward.micro_batch, (before.index,))
        bring.num_bytes = decisions.precision.weight_bytes * unit.amounts.flushed_params
        program.before[ahead.index].append(bring)
        backward.after += (bring.index,)
        brought[unit.name, backward.micro_batch] = bring
    return brought


def _copy_out(
    decisions: RivalDecisions,
    program: Program,
    unit: LoweredUnit,
    backward: Task,
    ready: Task,
    brought: Mapping[tuple[str, int], Task],
) -> list[Task]:
    """Add and return the copies of one micro-batch's gradient to the host and back."""
    num_params = unit.amounts.flushed_params
    micro_batch = backward.micro_batch
    weight_bytes, path = decisions.precision.weight_bytes, decisions.gradient_path
    last = micro_batch == decisions.num_micro_batches - 1
    if not num_params or (decisions.layer_by_layer and not last):  # then micro-batches add up on the device
        return []
    if path.is_one_copy:
        op = Op.OVERWRITE if path is GradientPath.BUFFERED else Op.FLUSH
        steps: tuple[tuple[Lane, Op, int], ...] = ((Lane.D2H, op, decisions.moved_bytes_per_param),)
    else:  # what was added up on the device is copied
        out, back = (Lane.D2H, Op.OVERWRITE, weight_bytes), (Lane.H2D, Op.LOAD, weight_bytes)
        if path is GradientPath.ON_DEVICE:
            steps = () if last and not decisions.sums_leave else (out,)
        else:
            steps = (back, out) if micro_batch else (out, back)
            steps += ((Lane.D2H, Op.OVERWRITE, 4),) if last else ()
    draft = ready
    copies = list[Task]()
    for lane, op, bytes_per_param in steps:
        draft = program.draft(lane, op, Phase.BACKWARD, unit, micro_batch, (draft.index,))
        draft.num_bytes = bytes_per_param * num_params
        copies.append(draft)
    if micro_batch and not path.is_one_copy:
        begin = brought.get((unit.name, micro_batch)) or copies[0]
        begin.after += (unit.flushes[micro_batch - 1].index,)
    if copies:
        unit.flushes[micro_batch] = draft
    program.behind[backward.index] += copies
    for number, copy in enumerate(copies, 1):
        copy.pinned = path.pins(micro_batch, is_final=last and number == len(copies))
    if last and copies:
        draft.stalls = path is GradientPath.ZERO3_ASYNC
    norm_on_host = path in {GradientPath.FSDP2, GradientPath.BUFFERED}
    if decisions.clip and last and copies and not norm_on_host:
        draft.num_params = num_params  # the copy also computes the norm
    return copies
