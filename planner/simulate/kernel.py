"""The simulator: the results of ``benchmarks/simulator/reference.py``, at millions of tasks per second."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from planner.simulate.state import ENDED, NUM_COUNTS, Ints32, Lanes, Resources, State, Tasks
from planner.simulate.system import Floats, FluidSystem, dtypes_of


@dataclasses.dataclass(frozen=True, eq=False)
class TaskTimes:
    """Start and end of every task of a system.

    Attributes:
        start_s: float64[n], when each task left its queue; its latency follows.
        end_s: float64[n], when each task ended.
        num_events: times after 0 at which a latency or a task ended.
    """

    start_s: Floats
    end_s: Floats
    num_events: int

    @property
    def makespan_s(self) -> float:
        """The time of the last end; the simulation begins at 0."""
        return float(self.end_s.max(initial=0.0))


def simulate(system: FluidSystem) -> TaskTimes:
    """Run a system in virtual time.

    Raises:
        ValueError: a task can never end, because a resource that it uses has capacity 0.
    """
    from planner.simulate.loaded import kernel_for  # noqa: PLC0415 - loads LLVM, and not all commands simulate

    state = _state(system, np.empty(system.num_lanes, dtype=np.int32))
    num_events = kernel_for(state)(state)
    start_s, end_s = state.tasks.start_s, state.tasks.end_s
    if state.counts[ENDED] < system.num_tasks:
        raise system.never_ends(int(np.argmax((end_s < 0) & (start_s >= 0))))
    return TaskTimes(start_s, end_s, num_events)


def solve_speeds(system: FluidSystem, running: Sequence[int]) -> Floats:
    """Return the speeds, float64[len(running)] in [0, 1], of these tasks while no others run."""
    from planner.simulate.loaded import kernel_for  # noqa: PLC0415 - as above

    state = _state(system, np.array(running, dtype=np.int32))
    kernel_for(state)(state, only_heads=True)
    return state.lanes.speed


def _state(system: FluidSystem, head: Ints32) -> State:
    """Return the kernel's state, in memory that the kernel initialises itself, because calls from here are slow."""
    entries = dict.fromkeys(("rate", "following", "preceding"), len(head) * system.max_uses)
    return State(
        Tasks(*_arrays(Tasks, system.num_tasks, vars(system))),
        Lanes(*_arrays(Lanes, len(head), {"head": head}, entries)),
        Resources(*_arrays(Resources, len(system.capacity), vars(system))),
        np.empty(NUM_COUNTS, np.int64),
    )


def _arrays(kind: type, size: int, given: Mapping[str, Any], sizes: Mapping[str, int] | None = None) -> Iterator[Any]:
    """Yield the arrays of a part of the state: those that are given by their names, and others without values.

    Args:
        kind: the part, whose fields have the types of arrays.
        size: of an array.
        given: arrays, and perhaps other things.
        sizes: of arrays that have another size.
    """
    for name, dtype in dtypes_of(kind).items():
        yield given[name] if name in given else np.empty((sizes or {}).get(name, size), dtype)
