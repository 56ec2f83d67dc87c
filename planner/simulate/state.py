"""The state of the simulator's kernel: named arrays, plain data without a compiler."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.simulate.system import Floats, Ints

Ints32 = npt.NDArray[np.int32]

# Positions of counters: used entries of each stack or list, and ended tasks.
HEAP, READY, CHANGED, MEMBERS, ENDED = range(5)
NUM_COUNTS = 5
NONE = -1
"""Stands for no task, no lane or no entry."""


class Tasks(NamedTuple):
    """The kernel's arrays per task; see :class:`planner.simulate.system.FluidSystem`."""

    lane: Ints32
    latency_s: Floats
    duration_s: Floats
    weight: Floats
    pred_ptr: Ints
    pred: Ints32
    use_ptr: Ints
    use_resource: Ints32
    use_rate: Floats
    next_in_lane: Ints32
    waiting: Ints32  # the first lane that waits for it to end
    start_s: Floats
    end_s: Floats


class Lanes(NamedTuple):
    """The kernel's arrays per lane. ``head`` is the running or the next task, ``NONE`` at the end.

    ``rate``, ``following`` and ``preceding`` have ``width`` entries per lane, one per resource that a task may use.
    They link the running users of each resource.
    """

    head: Ints32
    state: npt.NDArray[np.int8]  # of the head
    next_pred: Ints  # position of the first predecessor of the head not known to have ended
    next_waiting: Ints32  # the next lane that waits for the same task
    event_s: Floats  # when the latency or the task ends
    work_s: Floats  # work left at since_s
    since_s: Floats
    speed: Floats
    new_speed: Floats
    solved: Ints  # last moment at which its speed had to be solved
    heap: Ints32  # lanes under way, a binary heap by event_s
    place: Ints32  # where in the heap a lane is
    ready: Ints32  # stack: lanes whose head may be able to start, or to run
    members: Ints32  # list: lanes whose speed has to be solved
    rate: Floats
    following: Ints32
    preceding: Ints32


class Resources(NamedTuple):
    """The kernel's arrays per resource."""

    capacity: Floats
    first: Ints32  # entry of its first running user
    num_users: Ints
    crowded: npt.NDArray[np.bool_]  # whether its running users need more than its capacity
    room: Floats  # scratch: the capacity that tasks with a settled speed leave
    load: Floats  # scratch: how fast the others fill it
    changed_at: Ints  # last moment at which it was put on the list
    changed: Ints32  # list: resources whose users have to be solved


class State(NamedTuple):
    """All arrays of the kernel. Only those that a system provides are initialised."""

    tasks: Tasks
    lanes: Lanes
    resources: Resources
    counts: Ints
