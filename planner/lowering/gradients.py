"""The pass that moves gradients from backward to where they are used.

Each micro-batch's gradient is copied to the host once, and the host adds it to the sum: 2 B/param
of traffic in bf16. Those that stay on the device add up there. So do tiles of a micro-batch: see [Note: Breadth order]
in :mod:`planner.lowering.compute`, and micro-batches that pass a round of a pipeline one after another.
"""

from collections import Counter

from planner.lowering.program import LoweredUnit, Program
from planner.lowering.storage import spill
from planner.schedule.tasks import Lane, MemoryClass, Op, Phase, Task

ADDING_PASSES = 3  # two gradients in, their sum out
_MAKING = frozenset({Op.BACKWARD, Op.WEIGHT_GRADIENT})


def gradients(program: Program) -> None:
    """Reduce gradients over ranks, and copy those of host updates to the host, as soon as a unit's backward ends."""
    decisions, num_slots = program.decisions, program.decisions.num_gradient_slots
    adds_up, last = decisions.in_rounds, decisions.num_micro_batches - 1
    tied, leaving = decisions.tied_weights, list[int]()
    spilled: list[Task] = []
    for draft in program.spine:
        if draft.op not in _MAKING or not (unit := program.named[draft.unit]).num_params:
            continue
        if draft.op is Op.BACKWARD and unit.weight_gradients:
            continue  # all of its gradients wait for those that come later
        is_first = draft.tile == unit.unit.num_tiles - 1 and not (adds_up and draft.micro_batch)
        if is_first:  # its gradients are new; those of later tiles are added to them
            wait_for_slot(draft, leaving, num_slots)
        else:
            draft.num_bytes = ADDING_PASSES * decisions.precision.gradient_bytes * unit.num_params
        if draft.tile or (adds_up and draft.micro_batch < last):
            continue
        if not adds_up:
            add_up(program, unit, draft)
        ready = reduce(program, unit, draft)
        flushed = _flush(program, unit, draft, ready)
        if flushed:
            spill(program, unit, draft, flushed, spilled, num_slots)
        if draft.micro_batch == last and (num_tied := sum(unit.unit.sizes.get(name, 0) for name in tied)):
            _exchange(program, unit, flushed or ready, num_tied)
        if (gone := flushed or ready) is not draft:
            leaving.append(gone.index)
    settle(program)


def wait_for_slot(backward: Task, leaving: list[int], num_slots: int) -> None:
    """Let backward run at most so many units ahead of the gradients that leave; ``leaving`` lists those on their way.

    It waits for all of them, not only the latest: collectives and copies have different lanes and end in any order.
    """
    num_over = max(len(leaving) + 1 - num_slots, 0)
    backward.after += tuple(leaving[:num_over])
    del leaving[:num_over]


def add_up(program: Program, unit: LoweredUnit, backward: Task, *, whole: bool = False) -> None:
    """Add the passes over what is added to the sum of earlier micro-batches on the device: one kernel a parameter.

    Args:
        program: the program to extend.
        unit: whose gradients are made.
        backward: the task that makes them.
        whole: whether all of them stay on the device until the last micro-batch.
    """
    amounts = unit.amounts
    whole = whole or (program.decisions.piles_up and amounts.replicas > 1 and not amounts.flushed_params)
    num_params = unit.num_params if whole else sum(count for count, _ in amounts.pieces) - amounts.flushed_params
    if backward.micro_batch and num_params:
        backward.num_bytes += ADDING_PASSES * program.decisions.precision.gradient_bytes * num_params
        backward.num_tensors = len(unit.unit.parameters)


def reduce(program: Program, unit: LoweredUnit, backward: Task, *, at_step: bool = False) -> Task:
    """Add the collective over ranks; return the task after which this micro-batch's gradient is final.

    If whole gradients accumulate on the device, ranks reduce them once, after the last micro-batch; ``at_step`` leaves
    that to :func:`reduce_at_step`.
    """
    if unit.amounts.replicas == 1:
        return backward
    decisions = program.decisions
    piles_up = decisions.piles_up and not unit.amounts.flushed_params
    last = backward.micro_batch == decisions.num_micro_batches - 1
    if piles_up and (at_step or not last):
        return backward
    scatter = add_scatter(program, unit, backward.micro_batch, backward)
    program.behind[backward.index].append(scatter)
    return scatter


def add_scatter(program: Program, unit: LoweredUnit, micro_batch: int, after: Task) -> Task:
    """Add and return the collective that reduces a unit's gradient over ranks."""
    scatter = program.draft(Lane.COLLECTIVE, Op.SCATTER, Phase.BACKWARD, unit, micro_batch, (after.index,))
    scatter.num_bytes = exchanged_bytes(program, unit)
    unit.scatters[micro_batch] = scatter
    return scatter


def exchanged_bytes(program: Program, unit: LoweredUnit) -> int:
    """Return the bytes that the reduction of a unit's gradient exchanges.

    An all-reduce is a reduce-scatter and an all-gather: twice the bytes.
    """
    decisions = program.decisions
    num_bytes = decisions.precision.gradient_bytes * unit.amounts.exchanged_params
    return num_bytes * (2 if decisions.zero_stage == 0 else 1)


def _flush(program: Program, unit: LoweredUnit, backward: Task, ready: Task) -> Task | None:
    """Add the copy of one micro-batch's gradient to the host, and return it."""
    num_params, decisions = unit.amounts.flushed_params, program.decisions
    if not num_params:
        return None
    draft = program.draft(Lane.D2H, Op.FLUSH, Phase.BACKWARD, unit, backward.micro_batch, (ready.index,))
    draft.num_bytes = decisions.precision.weight_bytes * num_params
    if decisions.clip and backward.micro_batch == decisions.num_micro_batches - 1:
        draft.num_params = num_params  # the copy also computes the norm
    unit.flushes[backward.micro_batch] = draft
    program.behind[backward.index].append(draft)
    return draft


def _exchange(program: Program, unit: LoweredUnit, summed: Task, num_tied: int) -> None:
    """Add up the gradient of a weight that another stage has too, when both have theirs.

    Each stage does so where its gradient is: what went to the host comes back to a buffer on the device, as do shards
    of ranks. Other collectives do not wait for it, so it is issued behind them.
    """
    decisions = program.decisions
    draft = program.draft(Lane.COLLECTIVE, Op.SEND, Phase.BACKWARD, unit, summed.micro_batch, (summed.index,))
    draft.num_bytes = decisions.precision.gradient_bytes * num_tied
    draft.num_params = min(num_tied, unit.amounts.flushed_params)
    program.at_step(draft)
    program.hold_while(MemoryClass.WORKSPACE, draft.num_bytes, f"{unit.name} exchange", draft, draft)
    unit.exchange = unit.final = unit.summed = draft


def settle(program: Program) -> None:
    """Note the tasks after which summed gradients are where they are used, and let clipping wait for all of them."""
    last = program.decisions.num_micro_batches - 1
    for unit in program.units:
        made = (unit.weight_gradients or unit.backwards)[-1]
        unit.final = unit.final or unit.scatters.get(last) or unit.exchange or made
        unit.summed = unit.summed or unit.flushes.get(last) or unit.final
    if not (clip := program.clip):
        return
    # The norm is of gradients summed over ranks and micro-batches. Those of host updates are on the host.
    clip.after += tuple(unit.summed.index for unit in program.units if unit.num_params and unit.summed)
    # The norm of those that stay on the device is computed by this task.
    staying = Counter[int]()
    for unit in program.units:
        staying[unit.stage] += sum(count for count, _ in unit.amounts.pieces) - unit.amounts.flushed_params
    clip.num_params = max(staying.values())
