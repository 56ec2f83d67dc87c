"""The pass that takes gradients from backward to where they are needed."""

import itertools

from planner.decisions import GradientPath
from planner.graph import Unit
from planner.lowering.compute import compute_drafts
from planner.lowering.pipeline import exchange_tied, exchanged
from planner.lowering.program import Draft, Program
from planner.lowering.storage import spill
from planner.schedule import Lane, Op, Phase


def gradients(program: Program) -> None:
    """Reduce gradients over the ranks and flush those that the host updates, as soon as a unit's backward ends."""
    decisions = program.decisions
    units = {unit.name: unit for unit in program.units}
    following = {a.key: b for a, b in itertools.pairwise(program.spine)}
    leaving: list[str] = []
    spilled: list[str] = []
    for draft in [d for d in compute_drafts(program) if d.op is Op.BACKWARD]:
        unit = units[draft.unit]
        if not unit.num_params:
            continue
        # Each of those, not only the latest: collectives and copies have lanes of their own, and end in any order.
        num_over = max(len(leaving) + 1 - decisions.num_gradient_slots, 0)
        draft.after += leaving[:num_over]
        del leaving[:num_over]
        ready = _reduce(program, unit, draft)
        flushed = _flush(program, unit, draft, ready)
        if flushed:
            spill(program, unit, draft, flushed, spilled)
        if (gone := flushed or ready) != draft.key:
            leaving.append(gone)
        waits = flushed if flushed and decisions.gradient_path.blocks else None
        if waits is None and ready != draft.key and not decisions.gathers_ahead(unit.num_params):
            waits = ready
        if waits and draft.key in following:
            behind = following[draft.key]
            for waiting in (behind, *(d for d in program.before[behind.key] if d.op is Op.GATHER)):
                waiting.after.append(waits)
    if program.decisions.reduce_start == "step":
        _reduce_at_step(program)
    if program.decisions.clip:
        # The norm is that of the sum over ranks and micro-batches, which host-updated units have on the host.
        program.drafts["clip"].after += [summed(program, unit) for unit in program.units if unit.num_params]


def gradient_ready(program: Program, unit: Unit) -> str:
    """Return the key of the task after which a unit's summed gradient is on the device."""
    last = program.decisions.num_micro_batches - 1
    backward = f"{Op.BACKWARD}:{unit.name}:{last}"
    return next((key for key in (f"scatter:{unit.name}:{last}", exchanged(unit)) if key in program.drafts), backward)


def summed(program: Program, unit: Unit) -> str:
    """Return the key of the task after which all of a unit's summed gradient is where it will be updated."""
    flushed = f"flush:{unit.name}:{program.decisions.num_micro_batches - 1}"
    return flushed if flushed in program.drafts else gradient_ready(program, unit)


def _reduce(program: Program, unit: Unit, backward: Draft) -> str:
    """Add the collective over the ranks; return the key after which this micro-batch's gradient is final."""
    decisions = program.decisions
    # Where whole gradients pile up on the device, ranks need to agree only once, after the last micro-batch.
    piles_up = decisions.zero_stage < 2 and not program.flushed_params[unit.name]
    last = backward.micro_batch == decisions.num_micro_batches - 1
    if program.replicas[unit.name] == 1 or (piles_up and not (last and decisions.reduce_start == "backward")):
        return backward.key
    scatter = _scatter(program, unit, backward.micro_batch)
    scatter.after = [backward.key]
    program.behind[backward.key].append(program.add(scatter))
    return scatter.key


def _reduce_at_step(program: Program) -> None:
    """Add up what piled up on the device over the ranks, when all of a rank's backward has ended."""
    exchange_tied(program)
    ends = {program.stage_of[draft.unit]: draft.key for draft in compute_drafts(program)}
    for unit in reversed(program.units):
        if unit.num_params and program.replicas[unit.name] > 1 and not program.flushed_params[unit.name]:
            scatter = _scatter(program, unit, program.decisions.num_micro_batches - 1)
            if scatter.key not in program.drafts:
                exchange = exchanged(unit)
                scatter.after = [exchange if exchange in program.drafts else ends[program.stage_of[unit.name]]]
                program.at_step(scatter)


def _scatter(program: Program, unit: Unit, micro_batch: int) -> Draft:
    """Return the collective over the ranks that adds up a unit's gradient."""
    decisions = program.decisions
    # An all-reduce is a reduce-scatter and an all-gather: twice the bytes.
    num_bytes = decisions.precision.weight_bytes * unit.num_params * (2 if decisions.zero_stage == 0 else 1)
    key = f"scatter:{unit.name}:{micro_batch}"
    return Draft(key, Lane.COLLECTIVE, Op.SCATTER, Phase.BACKWARD, unit.name, micro_batch, num_bytes=num_bytes)


def _flush(program: Program, unit: Unit, backward: Draft, ready: str) -> str | None:
    """Add the copies of one micro-batch's gradient to the host; return the key of the last one."""
    decisions = program.decisions
    num_params = program.flushed_params[unit.name]
    if not num_params:
        return None
    blocking = decisions.gradient_path is GradientPath.ZERO3_BLOCKING
    once = decisions.gradient_path is GradientPath.ONCE
    steps: list[tuple[str, Lane, Op, int, bool]]
    if once:
        steps = [("flush", Lane.D2H, Op.FLUSH, decisions.precision.weight_bytes, True)]
    else:
        steps = [
            ("flush-bf16", Lane.D2H, Op.FLUSH, decisions.precision.weight_bytes, True),
            ("flush-back", Lane.H2D, Op.LOAD, decisions.precision.weight_bytes, True),
            ("flush", Lane.D2H, Op.FLUSH, 4, not blocking),
        ]
    for name, lane, op, bytes_per_param, pinned in steps:
        draft = Draft(
            f"{name}:{unit.name}:{backward.micro_batch}", lane, op, Phase.BACKWARD, unit.name, backward.micro_batch
        )
        draft.num_bytes, draft.pinned, draft.after = bytes_per_param * num_params, pinned, [ready]
        program.behind[backward.key].append(program.add(draft))
        ready = draft.key
    draft.stalls = not once and not decisions.gradient_path.blocks
    if decisions.clip and backward.micro_batch == decisions.num_micro_batches - 1:
        draft.num_params = num_params  # the norm is taken on the way
    return ready
