"""The pass that says what launching collectives in one order costs.

[Note: One order] Ranks whose modules exchange data (tensor-, expert- or context-parallel ones) use several NCCL
communicators at the same time: those of modules, and those of weights and gradients. Each has streams and a thread of
its own. A collective's kernel occupies the device until all ranks run it. So if two ranks launch two of them in
different orders, and the device or the driver lets one wait for the other, both wait for ever
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html). Therefore every rank launches the
tasks that exchange data (:func:`exchanges`) in the issue order of the schedule, which is the same on all ranks:

- A compute task is launched when all collectives issued before it have been.
- Collectives issued behind a compute task are launched when its kernels have been: no thread can issue them before.

A task may only wait for what was issued earlier, so the earliest task that has not been launched on all ranks can be,
and :func:`planner.schedule.schedule.validate` is the proof. On the device, collectives run beside each other, as
planned: there is room for the kernels of all of them (:class:`executor.distributed.ranks.Ranks` sees to it).

What this costs: a launch waits for what the host does before it. The weights of a unit that the host updates are
gathered ``num_param_slots`` units before they are needed, so forward begins only when those units are up to date too.
:func:`launches` adds these waits to the schedule, so that they are simulated.

Hidden states that stages of a pipeline send each other are not in this order: each direction has a group and a thread
of its own, and an order of its own (:mod:`.sends`). Nor are collectives through the host, which have no
kernels that wait for those of others.

Where the host computes, lanes share no device and gloo's groups wait for nothing but each other. So each lane keeps its
own order, which is the same on all ranks too.
"""

import itertools
from collections.abc import Iterator

from planner.decisions import Decisions
from planner.lowering.program import Program
from planner.optimizers import OPTIMIZERS
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import CALLER_LANES, HOST_LANES, Lane, Op, Task

_Waits = dict[Lane, tuple[bool, int]]
"""Of each of the host's lanes, the latest task that must end: whether of this iteration, and its position there."""


def exchanges(task: Task, decisions: Decisions) -> bool:
    """Return whether ranks exchange data between devices during a task, and must launch it in one order."""
    if not (decisions.divides_weights or decisions.context_parallel > 1):
        return False  # only the lane of collectives exchanges data
    if task.lane is Lane.GPU_UPDATE:
        return task.num_bytes > 0 and OPTIMIZERS[decisions.optimizer].others is not None
    if task.lane is Lane.COLLECTIVE:  # before it gathers casts, ranks agree on scales, over the fabric
        return not task.through_host or task.num_params > 0
    return task.lane is Lane.COMPUTE


def agreed(schedule: Schedule, decisions: Decisions) -> tuple[object, ...]:
    """Return what ranks must have in common if each has a plan of its own: collectives in order, and how they are done.

    See [Note: Unlike devices] in :mod:`planner.plan.unlike`.
    """
    lane = [task for task in schedule.tasks if task.lane is Lane.COLLECTIVE]
    tasks = tuple((task.op.value, task.unit, task.micro_batch, task.num_bytes) for task in lane)
    return decisions.shares, decisions.zero_stage, decisions.collectives, decisions.fp8_weights, tasks


def launches(program: Program) -> None:
    """Let what is launched in one order wait for what the host does before it launches the collectives before it."""
    decisions, order = program.decisions, program.ordered()
    if not program.asynchronous or not any(exchanges(task, decisions) for task in program.computing[:1]):
        return
    position = {task.index: at for at, task in enumerate(order)}
    waits = _host_waits(order, position, _host_waits(order, position, {}))
    pending: _Waits = {}  # what later launches have to wait for; at first, for collectives at the end of an iteration
    for task in itertools.takewhile(lambda task: task.op is not Op.ISSUE, reversed(order)):
        if task.lane not in CALLER_LANES and exchanges(task, decisions):
            pending = {lane: (False, at) for lane, (is_now, at) in waits[task.index].items() if is_now} | pending
    issuing: _Waits = {}  # what an earlier compute task has waited for
    for task in order:
        if task.op is Op.ISSUE:
            own = issuing
        elif task.lane not in CALLER_LANES and exchanges(task, decisions):
            own = waits[task.index]
        else:
            continue
        more = {lane: last for lane, last in pending.items() if lane not in own or own[lane] < last}
        task.after += tuple(order[at].index for is_now, at in more.values() if is_now)
        task.after_previous += tuple(order[at].index for is_now, at in more.values() if not is_now)
        if task.op is Op.ISSUE:
            issuing |= more
            pending = {}
        else:
            pending |= more | own


def _host_waits(order: list[Task], position: dict[int, int], before: dict[int, _Waits]) -> dict[int, _Waits]:
    """Return what the host must have done before each task of a stream can be submitted, by the task's key.

    Args:
        order: all tasks, in issue order.
        position: the position of each key there.
        before: the same of the previous iteration, where it is known.
    """
    waits: dict[int, _Waits] = {}
    latest = {task.lane: (False, position[task.index]) for task in order}  # of each lane, the task before

    def of(is_now: bool, at: int) -> Iterator[tuple[Lane, tuple[bool, int]]]:
        task = order[at]
        if task.lane in CALLER_LANES:
            return
        if task.lane in HOST_LANES:
            yield task.lane, (is_now, at)
        elif is_now:
            yield from waits.get(task.index, {}).items()
        else:
            yield from (
                (lane, (False, its)) for lane, (was_then, its) in before.get(task.index, {}).items() if was_then
            )

    for at, task in enumerate(order):
        if task.lane not in CALLER_LANES and task.lane not in HOST_LANES:
            needed = [(True, position[key]) for key in task.after]
            needed += [(False, position[key]) for key in task.after_previous]
            mine = waits[task.index] = {}
            for lane, found in (each for one in (latest[task.lane], *needed) for each in of(*one)):
                mine[lane] = max(mine.get(lane, found), found)
        latest[task.lane] = True, at
    return waits
