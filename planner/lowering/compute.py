"""Passes for compute tasks (forward, recompute, backward) and for the host's time to issue them.

[Note: Reports] The scripts of the published DeepSpeed runs report memory: before and after every forward and backward,
and before and after the step (``engine.py``, ``memory_breakdown``). Each report collects Python's garbage
(``utils.py::see_memory_usage``), which takes 40 to 70 ms. Timers of phases leave them out. So they are one task at the
end of the iteration; its ``micro_batch`` is the last one and tells how many there were.
"""

from collections import Counter

from planner.lowering import pipeline
from planner.lowering.by_layer import AGAIN, compute_by_layer, lay_backward
from planner.lowering.program import Program
from planner.schedule.tasks import Lane, Op, Phase


def compute(program: Program) -> None:
    """Make the spine: forward and backward of every micro-batch, then the clip barrier.

    Segments whose activations are recomputed run forward again just before their backward, as
    ``torch.utils.checkpoint`` does. Segments that offload activations recompute only cheap operators.
    """
    decisions = program.decisions
    if decisions.pipeline_parallel > 1:
        pipeline.compute(program)
    elif decisions.layer_by_layer:
        compute_by_layer(program)
    else:
        _compute_in_turn(program)
    program.computing = program.spine.copy()
    tensors = Counter[int]()
    for unit in program.units:
        tensors[unit.stage] += len(unit.unit.parameters)
    start, end = program.spine[0], program.spine[-1]
    if decisions.clip:
        end = program.clip = program.draft(Lane.LAUNCH, Op.CLIP, Phase.UPDATE, after=(end.key,))
        program.spine.append(end)
    # Before the next iteration, the caller waits for the norm and goes through all parameters. Stages do so at the same
    # time.
    step = program.draft(Lane.LAUNCH, Op.STEP, Phase.UPDATE, after=(end.key,))
    step.num_tensors = max(tensors.values())
    start.after_previous += (step.key,)
    program.tail.append(step)
    if decisions.loop:
        last = decisions.num_micro_batches - 1
        program.loop = program.draft(Lane.LAUNCH, Op.LOOP, Phase.LOOP, micro_batch=last)  # [Note: Reports]
        start.after_previous += (program.loop.key,)


def _compute_in_turn(program: Program) -> None:
    habits = program.decisions.habits
    block = habits.recompute_block if habits else 0
    for micro_batch in range(program.decisions.num_micro_batches):
        for unit in program.units:
            program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
        for number, segment in reversed(list(enumerate(program.segments))):
            if block and AGAIN.get(segment[0].activations):
                _first_pass(program, number, block, micro_batch)
            lay_backward(program, segment, micro_batch)


def _first_pass(program: Program, number: int, block: int, micro_batch: int) -> None:
    """If a segment is the last of its block, compute the outputs of all segments of the block.

    Blocks are counted from the first segment that recomputes. The engine computes the last output too, and drops it.
    """
    again = [i for i, segment in enumerate(program.segments) if segment[0].activations in AGAIN]
    place = again.index(number)
    if number != again[-1] and (place + 1) % block:
        return
    for i in again[place - place % block : place + 1]:
        for unit in program.segments[i]:
            program.lay(unit.first_passes, Op.RECOMPUTE, unit, micro_batch)


def launch(program: Program) -> None:
    """Add the host's time to issue kernels before every compute task, if the device runs asynchronously.

    PyTorch allocates gradients when backward is issued, not when it runs. So if a backward must wait until an earlier
    gradient has left, the host waits, not the device. Otherwise gradients of many units would be allocated at once.
    This holds for engines that block, and for ours, because a plan limits the number of gradients on the device.
    """
    if program.decisions.pipeline_parallel > 1:
        pipeline.launch(program)
        return
    hooks = program.decisions.module_hooks
    path, last = program.decisions.gradient_path, program.decisions.num_micro_batches - 1
    awaited = set[Op]()
    if path.is_one_copy:
        awaited = {Op.FLUSH, Op.SCATTER}
    elif path.blocks(last, last):
        awaited = {Op.OVERWRITE}
    for unit in program.units:
        num_modules = unit.unit.num_modules if hooks else 0
        for tasks in (unit.forwards, unit.first_passes, unit.agains, unit.backwards):
            num_kernels = unit.unit.num_kernels[tasks[0].op] if tasks else 0
            for draft in tasks:
                issue = program.draft(Lane.LAUNCH, Op.ISSUE, draft.phase, unit, draft.micro_batch)
                issue.num_kernels, issue.num_modules = num_kernels, num_modules
                if draft.after:
                    issue.after = tuple(key for key in draft.after if program.drafts[key].op in awaited)
                draft.after += (issue.key,)
                program.before[draft.key].append(issue)
