"""The simulator: the results of ``benchmarks/simulator/reference.py``, at millions of tasks per second."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from planner.simulate.state import NUM_COUNTS, Lanes, Resources, State, Tasks
from planner.simulate.system import Floats, FluidSystem, dtypes_of


def simulate(system: FluidSystem) -> tuple[Floats, Floats]:
    """Run a system in virtual time; return when each task left its queue (its latency follows), and when it ended."""
    from planner.simulate.loaded import kernel_for  # noqa: PLC0415 - loads LLVM, and not all commands simulate

    # The kernel initialises memory itself, because calls from here are slow.
    most_uses = int(np.diff(system.use_ptr).max(initial=0))  # resources of a task
    entries = dict.fromkeys(("rate", "following", "preceding"), system.num_lanes * most_uses)
    state = State(
        Tasks(*_arrays(Tasks, system.num_tasks, vars(system))),
        Lanes(*_arrays(Lanes, system.num_lanes, {}, entries)),
        Resources(*_arrays(Resources, len(system.capacity), vars(system))),
        np.empty(NUM_COUNTS, np.int64),
    )
    num_ended = kernel_for(state)(state)
    assert num_ended == system.num_tasks, "all resources have capacity"
    return state.tasks.start_s, state.tasks.end_s


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
