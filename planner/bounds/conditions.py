"""Necessary conditions: what every schedule of a model on a machine satisfies, as linear rows over decisions.

Nothing here describes a good schedule. Each row follows from the rules of the simulator,
so the least iteration time under all rows is a lower bound for every schedule:

- *work*: a lane does one task after another, and a resource has a capacity. So an iteration lasts at least as long as
  any lane or resource needs for its work.
- *windows*: with clipping, no update starts before all gradients have arrived where they are used, and a unit's forward
  waits for its update. So between the last backward of unit j and the next forward of unit i there must be time for the
  gradients of units 0..j to leave, and then for the updates of units 0..i and their way back. From the forward of i to
  the backward of j the device computes everything in between. This holds for any order of updates: one of units 0..i is
  the last, and after its forward the device still has to compute at least as much. Without clipping, the window of
  units 0..i begins when the backward of i ends. Streamed state is stored again within the window and the backwards that
  follow, except for the amount that fits on the device. State on NVMe is read and written within it, except for the
  amount that fits in host buffers (:mod:`.storage`); weights there are written with it, and read again. When the last
  backward begins, activations that wait on NVMe have been written too.
- *memory*: at the backward of each unit the device holds at least the resident data, the activations of all segments
  before it, and the unit's own activations, workspace and gradient. Other parameters are in slots [Note: Static slots].
  There is at least one slot for each size of units, and one more for each unit that is kept between two uses while
  another unit of its size is used.
- *weights in fp8*: if weights that are fetched or gathered come in fp8, the device casts the others, and the host casts
  those that are fetched within the window. Windows and recomputation count no casts on the device, nor do gathers.
- *rates* are the best of a curve. A subgroup takes as long per parameter as the cheapest subgroup of its unit.

Yes-or-no decisions become fractions, so the bound also covers mixtures that cannot be run. Variables (``U`` is a unit,
``S`` a segment): ``U:gpu|stream|cpu|nvme`` are shares of its updates; ``U:host`` and ``U:onnvme`` say where its
parameters are; ``U:fills``, ``U:wide`` and ``U:reads`` count how often they are copied to the device, gathered in their
own type where that may be fp8, and read from NVMe;
``U:spill`` is the share of gradients that wait on NVMe; ``S:recompute|offload|evict`` say what happens to activations.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

from planner.bounds.memory import memory
from planner.bounds.pipelines import pipelined
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import NEVER_S, OVERRUN, ROOM, LinearProgram
from planner.bounds.windows import windows
from planner.bounds.work import work
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.setup import Setup


def conditions(
    setup: Setup, cost: CostModel, limit_s: float, *, soft: bool = False, few: bool = False
) -> LinearProgram:
    """Return the conditions of an iteration that takes at most ``limit_s``.

    Args:
        setup: the decisions that are compared.
        cost: prices of tasks, and the machine.
        limit_s: an upper limit on the iteration time.
        soft: minimise the fraction by which memory is overrun instead of the time; see :data:`OVERRUN`.
        few: of a pipeline, only those from which a search starts: see :func:`.pipelines.pipelined`.
    """
    program = (
        pipelined(setup, cost, few=True) if few and setup.given.pipeline_parallel > 1 else _conditions(setup, cost)
    )
    if limit_s != NEVER_S:
        program = program.within({n: (low, limit_s) for n, (low, high) in program.boxes.items() if high == NEVER_S})
    return _softened(program) if soft else program


# A search and the certificate of its result need the same conditions, those of up to four ZeRO stages.
_KNOWN: deque[tuple[Setup, CostModel, LinearProgram]] = deque(maxlen=4)


def _conditions(setup: Setup, cost: CostModel) -> LinearProgram:
    """Return the conditions without a limit on the time; setups with equal conditions share one program."""
    for known, of_cost, program in tuple(_KNOWN):
        same = known.units is setup.units and of_cost is cost and known.storage == setup.storage
        if same and known.given == setup.given:
            return program
    if setup.given.pipeline_parallel > 1:
        program = pipelined(setup, cost)
    else:
        placement = Placement(setup, cost)
        work(placement)
        windows(placement, *memory(placement))
        program = placement.program
    _KNOWN.append((setup, cost, program))
    return program


def memory_conditions(setup: Setup, cost: CostModel) -> LinearProgram:
    """Return the conditions on memory alone; the objective is the fraction by which it is overrun."""
    if setup.given.pipeline_parallel > 1:
        return conditions(setup, cost, NEVER_S, soft=True)
    placement = Placement(setup, cost)
    memory(placement)
    return _softened(placement.program)


def _softened(program: LinearProgram) -> LinearProgram:
    """Return a program that allows memory to be overrun, and minimises by how much."""
    soft = LinearProgram(OVERRUN)
    (time, time_box), *others = program.boxes.items()
    soft.boxes = {time: time_box, OVERRUN: (0.0, 1e6), **dict(others)}
    rooms = set(ROOM.values())
    for row in program.rows:
        room, *terms = row.terms
        more = room[0] in rooms
        soft.rows.append(dataclasses.replace(row, terms=(room, (OVERRUN, 1.0), *terms)) if more else row)
    return soft


def decided(program: LinearProgram, units: Sequence[Unit], decisions: Decisions) -> LinearProgram:
    """Return the conditions with the placement fixed to that of ``decisions``."""
    fixed: dict[str, float] = {}
    for unit in units:
        choice = decisions.units[unit.name]
        cut = zip(decisions.subgroups(unit), choice.update, strict=True)
        placed = decisions.placed_subgroups(unit)
        pieces = [(subgroup.num_params, place) for subgroup, place in cut if subgroup in placed]
        for place in Place:
            share = sum(size for size, where in pieces if where is place) / max(sum(size for size, _ in pieces), 1)
            fixed[f"{unit.name}:{place}"] = share
        stays = not decisions.flushes(unit.name, Place.STREAM)
        fixed[f"{unit.name}:stays"] = fixed[f"{unit.name}:{Place.STREAM}"] if stays else 0.0
        fixed[f"{unit.name}:spill"] = fixed[f"{unit.name}:{Place.NVME}"] if decisions.spill_gradients else 0.0
        fixed[f"{unit.name}:host"] = float(choice.params == "host")
        fixed[f"{unit.name}:onnvme"] = float(choice.params == "nvme")
        way = {"offload-nvme": "evict"}.get(choice.activations, choice.activations)
        fixed |= {f"{unit.segment}:{other}": float(other == way) for other, _ in AGAIN}
    return program.within({name: (value, value) for name, value in fixed.items() if name in program.boxes})
