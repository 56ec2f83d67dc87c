"""Passes for what computes: forward, recompute and backward, and the host's own time to issue them."""

from collections import Counter
from collections.abc import Iterator

from planner.lowering import pipeline
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

_COMPUTE_OPS = frozenset({Op.FORWARD, Op.RECOMPUTE, Op.REMAKE, Op.BACKWARD})

# What runs just before the backward of a segment, by what was decided for its activations.
AGAIN = {"recompute": Op.RECOMPUTE, "offload": Op.REMAKE, "offload-nvme": Op.REMAKE}


def compute(program: Program) -> None:
    """Lay the spine: every micro-batch forward and backward, then the clip barrier.

    Segments whose activations are recomputed run forward again just before their backward, as
    ``torch.utils.checkpoint`` does; of those that are offloaded only what is cheap is made again.
    """
    decisions = program.decisions
    if decisions.pipeline_parallel > 1:
        pipeline.compute(program)
    else:
        _compute_in_turn(program)
    tensors = Counter[int]()
    for unit in program.units:
        tensors[program.stage_of[unit.name]] += len(unit.parameters)
    # The caller waits for the norm, and goes through all its parameters, before it turns to the next iteration. Stages
    # do so at the same time.
    step = Draft("step", Lane.LAUNCH, Op.STEP, Phase.UPDATE, after=[program.spine[-1].key])
    step.num_tensors = max(tensors.values())
    program.spine[0].after_previous.append(step.key)
    program.tail.append(program.add(step))
    if decisions.loop:
        loop = Draft("loop", Lane.LAUNCH, Op.LOOP, Phase.LOOP)
        program.spine[0].after_previous.append(loop.key)
        program.loop = program.add(loop)
    if decisions.clip:
        clip = Draft("clip", Lane.LAUNCH, Op.CLIP, Phase.UPDATE, after=step.after)
        step.after = [clip.key]
        program.spine.append(program.add(clip))


def _compute_in_turn(program: Program) -> None:
    decisions = program.decisions
    for micro_batch in range(decisions.num_micro_batches):
        for unit in program.units:
            _append(program, Op.FORWARD, Phase.FORWARD, unit.name, micro_batch)
        for segment in reversed(program.segments):
            if again := AGAIN.get(decisions.units[segment[0].name].activations):
                for unit in segment:
                    _append(program, again, Phase.BACKWARD, unit.name, micro_batch)
            for unit in reversed(segment):
                _append(program, Op.BACKWARD, Phase.BACKWARD, unit.name, micro_batch)


def launch(program: Program) -> None:
    """Put the host's time to issue kernels before every compute task (devices that run asynchronously)."""
    kernels = {unit.name: unit.num_kernels for unit in program.units}
    modules = {unit.name: unit.num_modules for unit in program.units if program.decisions.module_hooks}
    if program.decisions.pipeline_parallel > 1:
        pipeline.launch(program, compute_drafts(program), kernels)
        return
    blocks = program.decisions.gradient_path.blocks
    for draft in compute_drafts(program):
        issue = Draft(f"issue:{draft.key}", Lane.LAUNCH, Op.ISSUE, draft.phase, draft.unit, draft.micro_batch)
        issue.num_kernels = kernels[draft.unit][draft.op]
        issue.num_modules = modules.get(draft.unit, 0)
        if blocks:  # the caller itself waits for the copy
            issue.after = [key for key in draft.after if program.drafts[key].op is Op.FLUSH]
        draft.after.append(issue.key)
        program.before[draft.key].append(program.add(issue))


def compute_drafts(program: Program) -> Iterator[Draft]:
    """Yield the compute tasks of the spine."""
    return (d for d in program.spine if d.op in _COMPUTE_OPS)


def _append(program: Program, op: Op, phase: Phase, unit: str, micro_batch: int) -> None:
    draft = Draft(f"{op}:{unit}:{micro_batch}", Lane.COMPUTE, op, phase, unit, micro_batch)
    program.spine.append(program.add(draft))
