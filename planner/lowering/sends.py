"""The pass that adds what a stage of a pipeline sends to other stages, and receives from them.

A stage receives what it computes from just before, and sends what it has made at once. What passes a link between two
stages has one order, which both follow: tasks of a lane run first-in first-out, and :func:`links` shows what each of
the two has. Whoever joins stages into one schedule pairs these tasks in order (:mod:`.stages`). Whoever runs them
compares the orders first (:mod:`executor.tasks.links`).

What is sent is on the device until the other stage has it, which may be later than simulated: nothing waits for its
memory, since the other stage may wait for this one (:mod:`executor.devices.room`). So the plan has room for what a cell
has sent until the cell behind has ended, too.
"""

import itertools
from collections.abc import Sequence

from planner.lowering.program import Program
from planner.schedule.tasks import Lane, MemoryClass, Op, Phase, Task

Cell = tuple[Op, int, int]
"""Forward, backward or gradients of weights; the round; and the micro-batch."""


def cell_of(program: Program, task: Task) -> Cell:
    """Return the cell that a compute task belongs to, or that sends or receives."""
    within = Op.FORWARD if task.phase is Phase.FORWARD else Op.BACKWARD  # where some is computed again
    op = task.op if task.op is Op.WEIGHT_GRADIENT else within
    return op, program.named[task.unit].turn, task.micro_batch


def sends(program: Program) -> None:
    """Let each cell receive what it is computed from, and send what it has made."""
    decisions, before = program.decisions, tuple[int, ...]()
    late_bytes, late = 0, ""
    if not decisions.cuts:
        return
    for (op, turn, micro_batch), group in itertools.groupby(program.computing, lambda task: cell_of(program, task)):
        cell = list(group)
        first, last, ready = cell[0], cell[-1], before
        before = (last.index,)
        program.hold_while(MemoryClass.ACTIVATIONS, late_bytes, f"{late} sent late", first, last)
        late_bytes = 0
        if op is Op.WEIGHT_GRADIENT:
            continue
        comes, goes = decisions.cuts[turn] if op is Op.FORWARD else decisions.cuts[turn][::-1]
        if comes:
            unit = program.named[first.unit]
            receive = program.draft(Lane.RECEIVE, Op.RECEIVE, first.phase, unit, micro_batch, ready)
            receive.num_bytes = -(-comes // decisions.tensor_parallel)
            first.after += (receive.index,)
            program.before[first.index].append(receive)
            if op is Op.BACKWARD:  # until that has ended; what forward receives is its input
                label = f"{first.unit} gradient received"
                program.hold_while(MemoryClass.ACTIVATIONS, comes, label, receive, last)
        if goes:
            lane = Lane.SEND if op is Op.FORWARD else Lane.SEND_BACK
            send = program.draft(lane, Op.SEND, last.phase, program.named[last.unit], micro_batch, (last.index,))
            send.num_bytes = -(-goes // decisions.tensor_parallel)
            program.behind[last.index].insert(0, send)
            program.hold_while(MemoryClass.ACTIVATIONS, goes, f"{last.unit} sent", last, send)
            late_bytes, late = goes, last.unit


def links(tasks: Sequence[Task]) -> tuple[tuple[list[Task], list[Task]], ...]:
    """Return what a stage exchanges with the next stage and with the one before: what goes forward, what comes back.

    All are in the order of the stage's tasks.
    """
    received = [task for task in tasks if task.lane is Lane.RECEIVE]
    forward, back = ([task for task in received if (task.phase is Phase.FORWARD) is way] for way in (True, False))
    sent, sent_back = ([task for task in tasks if task.lane is lane] for lane in (Lane.SEND, Lane.SEND_BACK))
    return (sent, back), (forward, sent_back)
