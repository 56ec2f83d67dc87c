"""Passes for compute tasks (forward, recompute, backward) and for the host's time to issue them.

[Note: Breadth order] An iteration is a sequence of cells: a segment, the sequences that pass it, and whether forward or
backward. Most plans are in depth order: a micro-batch passes all segments before the next micro-batch begins. A
micro-batch may be cut into tiles of sequences (``segment_tile_sequences`` of :class:`planner.models.choice.Choice`),
which pass a layer one after another before the next layer begins. So weights come for all tiles at once, and gradients
leave once, while inner tensors exist for one tile. Backward is the mirror image: it takes the last tile first, and
autograd adds up the gradients of all tiles before it hands them over. What is outside of layers, such as the loss,
computes the whole micro-batch, so losses are what they are without tiles. The cells' order is that of the spine alone:
nothing else, in lowering or execution, says which comes next.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence

from planner.decisions import Decisions
from planner.lowering.program import LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Phase, Task

# The task that runs just before the backward of a segment, by the decision on its activations.
AGAIN = {"recompute": Op.RECOMPUTE, "offload": Op.REMAKE, "offload-nvme": Op.REMAKE}


def lay_in_turn(program: Program) -> None:
    """Append forward and backward of micro-batches to the spine, in the order of :func:`turns`."""
    decisions = program.decisions
    for op, turn, micro_batch in turns_of(decisions):
        for segment in program.rounds[turn] if op is Op.FORWARD else reversed(program.rounds[turn]):
            tiles = range(segment[0].unit.num_tiles)
            for tile in tiles if op is Op.FORWARD else reversed(tiles):
                if op is Op.BACKWARD:
                    lay_backward(program, segment, micro_batch, tile)
                    continue
                for unit in segment if op is Op.FORWARD else ():
                    program.lay(unit.forwards, Op.FORWARD, unit, micro_batch, tile)
                for unit in reversed(segment) if op is Op.WEIGHT_GRADIENT else ():
                    if unit.unit.weight_gradients:
                        program.lay(unit.weight_gradients, Op.WEIGHT_GRADIENT, unit, micro_batch, tile)


def turns_of(decisions: Decisions) -> Iterator[tuple[Op, int, int]]:
    """Return the :func:`turns` of a stage, or of what has none."""
    num_rounds, num_behind = len(decisions.round_starts) + 1, decisions.num_backwards_ahead
    return turns(decisions.num_forwards_ahead, decisions.num_micro_batches, num_rounds, num_behind)


def turns(
    num_ahead: int, num_micro_batches: int, num_rounds: int = 1, num_behind: int | None = None
) -> Iterator[tuple[Op, int, int]]:
    """Yield what is computed in turn: forward, backward or gradients of weights, the round, and the micro-batch.

    In the last round, and so without rounds, ``num_ahead`` forwards come first, and then backwards and forwards in
    turn. In each round before, all forwards come before the next round; their backwards follow in the same way.
    Gradients of weights follow ``num_behind`` backwards later, of whatever round; ``None``: backward makes them.
    """
    *before, last = range(num_rounds)
    everything = range(num_micro_batches)
    for turn, micro_batch in itertools.product(before, everything):
        yield Op.FORWARD, turn, micro_batch
    num_ahead = min(num_ahead, num_micro_batches)
    for micro_batch in everything[:num_ahead]:
        yield Op.FORWARD, last, micro_batch
    left = deque[tuple[int, int]]()  # whose gradients of weights are to come
    for turn, micro_batch in itertools.product((last, *reversed(before)), everything):
        yield Op.BACKWARD, turn, micro_batch
        if turn == last and micro_batch + num_ahead < num_micro_batches:
            yield Op.FORWARD, last, micro_batch + num_ahead
        left.append((turn, micro_batch))
        if num_behind is not None and len(left) > num_behind:
            yield Op.WEIGHT_GRADIENT, *left.popleft()
    for turn, micro_batch in left if num_behind is not None else ():
        yield Op.WEIGHT_GRADIENT, turn, micro_batch


def lay_backward(program: Program, segment: Sequence[LoweredUnit], micro_batch: int, tile: int = 0) -> None:
    """Append what the backward of a segment computes, in order: perhaps its forward again, then its backward."""
    if again := AGAIN.get(segment[0].activations):
        for unit in segment:
            program.lay(unit.agains, again, unit, micro_batch, tile)
    for unit in reversed(segment):
        program.lay(unit.backwards, Op.BACKWARD, unit, micro_batch, tile)


def compute(program: Program, lay: Callable[[Program], None] = lay_in_turn) -> None:
    """Make the spine: forward and backward of every micro-batch, then the clip barrier.

    Segments whose activations are recomputed run forward again just before their backward, as
    ``torch.utils.checkpoint`` does. Segments that offload activations recompute only cheap operators.

    Args:
        program: the program to extend.
        lay: appends forwards and backwards to the spine, in order.
    """
    decisions = program.decisions
    lay(program)
    program.computing = program.spine.copy()
    tensors = Counter[int]()
    for unit in program.units:
        tensors[unit.stage] += len(unit.unit.parameters)
    start, end = program.spine[0], program.spine[-1]
    if decisions.clip:
        end = program.clip = program.draft(Lane.LAUNCH, Op.CLIP, Phase.UPDATE, after=(end.index,))
        program.spine.append(end)
    # Before the next iteration, the caller waits for the norm and goes through all parameters. Stages do so at the same
    # time.
    step = program.draft(Lane.LAUNCH, Op.STEP, Phase.UPDATE, after=(end.index,))
    step.num_tensors = max(tensors.values())
    start.after_previous += (step.index,)
    program.tail.append(step)


def launch(program: Program, awaited: Collection[Op] = (Op.FLUSH, Op.SCATTER)) -> None:
    """Add the host's time to issue kernels before every compute task, if the device runs asynchronously.

    PyTorch allocates gradients when backward is issued, not when it runs. So if a backward must wait until an earlier
    gradient has left, the host waits, not the device. Otherwise gradients of many units would be allocated at once.

    Args:
        program: the program to extend.
        awaited: what the host waits for: the tasks that move gradients.
    """
    if not program.asynchronous:
        return
    for unit in program.units:
        for tasks in (unit.forwards, unit.agains, unit.backwards, unit.weight_gradients):
            num_kernels = unit.unit.num_kernels[tasks[0].op] if tasks else 0
            for draft in tasks:
                add_issue(program, unit, draft, num_kernels, awaited)


def add_issue(program: Program, unit: LoweredUnit, draft: Task, num_kernels: int, awaited: Collection[Op]) -> None:
    """Add the host's time to issue the kernels of a compute task."""
    issue = program.draft(Lane.LAUNCH, Op.ISSUE, draft.phase, unit, draft.micro_batch)
    issue.num_kernels = num_kernels + draft.num_tensors
    if draft.after:
        issue.after = tuple(key for key in draft.after if program.drafts[key].op in awaited)
    draft.after += (issue.index,)
    program.before[draft.index].append(issue)
