"""The order of compute tasks, where every micro-batch passes a segment before the next segment begins (RoundPipe).

[Note: Round robin] RoundPipe cuts the model into stages of a few layers and hands them to its devices in turn. A stage
is copied to its device, all micro-batches pass it, and it leaves again. So every device works on another stage at any
time, and its share of copies and computing is that of one rank that computes every segment for its share of the
micro-batches with its share of the parameters' copies. That rank is what is lowered. Inputs of stages, their outputs,
and the gradients of both travel through the host (``roundpipe/run.py``).

What such a rank does not show is how the pipe fills and drains. The first stages of an iteration follow the last ones
of the iteration before (``roundpipe.py::RoundPipe.forward_backward`` waits only for the loss), so this costs nothing if
weights may be one update old. Otherwise a device waits in every iteration while one micro-batch passes as many stages
as there are other devices. The first tasks of the schedule take that time. All stages are about as long as the longest
segment's forward and backward (``scheduler.py::ModelExecutePlan.auto``), so they are forwards of layers with as many
FLOP.
"""

from collections.abc import Sequence

from planner.lowering.program import LoweredUnit, Program
from planner.models.kernels import flop
from planner.schedule.tasks import Lane, Op, Phase

# The task that runs just before the backward of a segment, by the decision on its activations.
AGAIN = {"recompute": Op.RECOMPUTE, "offload": Op.REMAKE, "offload-nvme": Op.REMAKE, "offload-input": Op.RECOMPUTE}

SEGMENTS_OF_STAGE = 3
"""Segments in a stage of forward, of which backward has one; see [Note: Round robin]."""


def lay_backward(program: Program, segment: Sequence[LoweredUnit], micro_batch: int) -> None:
    """Append what the backward of a segment computes, in order: perhaps its forward again, then its backward."""
    if again := AGAIN.get(segment[0].activations):
        for unit in segment:
            program.lay(unit.agains, again, unit, micro_batch)
    for unit in reversed(segment):
        program.lay(unit.backwards, Op.BACKWARD, unit, micro_batch)


def compute_by_layer(program: Program) -> None:
    """Make the spine segment by segment. The last segment runs forward and backward of each micro-batch together."""
    count = program.decisions.num_micro_batches
    *others, last = program.segments
    for segment in others:
        for micro_batch in range(count):
            for unit in segment:
                program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
    for segment in (last, *reversed(others)):
        for micro_batch in range(count):
            for unit in segment if segment is last else ():
                program.lay(unit.forwards, Op.FORWARD, unit, micro_batch)
            lay_backward(program, segment, micro_batch)
    habits = program.decisions.habits
    if habits is not None and not habits.publishes_late:
        _fill(program)


def _fill(program: Program) -> None:
    """Let the device wait until the pipe is full; see [Note: Round robin]."""
    longest = max(
        sum(flop((*unit.unit.forward, *unit.unit.backward)) for unit in segment) for segment in program.segments
    )
    layer = max(
        program.segments[:-1] or program.segments, key=lambda segment: sum(flop(unit.unit.forward) for unit in segment)
    )
    of_layer = sum(flop(unit.unit.forward) for unit in layer)
    for _ in range(round((program.decisions.data_parallel - 1) * longest / of_layer) if of_layer else 0):
        for unit in layer:
            wait = program.draft(Lane.COMPUTE, Op.FORWARD, Phase.FORWARD, unit)
            program.before[program.spine[0].key].append(wait)
