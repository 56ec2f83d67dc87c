"""What every schedule of a model on a machine must satisfy, as linear conditions on what is decided.

[Note: Necessary conditions] Nothing here describes a good schedule. Each row is a consequence of the rules that the
simulator walks by, so that the least iteration time under all rows is a lower bound for every schedule:

- *work*: a lane does one task after another, and a resource gives no more than it has, so an iteration lasts at least
  as long as either needs for its work;
- *windows*: with clipping no update starts before all gradients are where they are updated, and a unit's forward waits
  for its update. So between the last backward of unit j and the next forward of unit i there must be time for the
  gradients of units 0..j to leave, and then for the updates of units 0..i to be made and brought back, while between
  the forward of i and the backward of j the device computes all that lies there. This holds in whatever order updates
  are made: of units 0..i one is last, and from its forward on the device still has to compute at least as much.
  Without clipping the window of units 0..i begins when the backward of i ends;
  State that is streamed in is stored again meanwhile, but for what the device has room for: at the end of the window,
  and at each backward that follows. State on NVMe comes and goes meanwhile, but for what host buffers hold
  [Note: State ahead];
- *memory*: at the backward of each unit the device holds at least what stays there, the activations of all segments
  before it, and the unit's own activations, workspace and gradient. Parameters that come are in slots
  [Note: Static slots], of which there is one for each size of units at least, and one more for each unit that is kept
  between two uses while another of its size is used;
- *rates* are the best that a curve reaches; what a subgroup takes is what the cheapest of its unit takes per parameter.

A decision that is yes or no becomes a fraction, so the bound is also one for mixtures that nobody can run.
Variables (``U`` a unit, ``S`` a segment): ``U:gpu|stream|cpu|nvme`` shares of its updates, ``U:host``, ``U:onnvme``
where its parameters are, ``U:fills`` how often they come and ``U:reads`` from NVMe, ``U:spill`` the share of gradients
that wait there, ``S:recompute|offload|evict`` what happens to activations.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence

from planner.bounds.memory import Memory
from planner.bounds.pipelines import pipelined
from planner.bounds.placement import AGAIN, Placement
from planner.bounds.program import LinearProgram
from planner.bounds.windows import Windows
from planner.bounds.work import Work
from planner.choices.space import NEVER_S, OVERRUN, ROOM, Space
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place
from planner.graph import Unit


def conditions(space: Space, cost: CostModel, limit_s: float, *, soft: bool = False) -> LinearProgram:
    """Return the conditions of an iteration that takes at most ``limit_s``.

    Args:
        space: what is compared.
        cost: prices of tasks, and the machine.
        limit_s: schedules that take longer are of no interest.
        soft: minimise by what fraction memory is overrun, rather than time; see :data:`OVERRUN`.
    """
    if space.given.pipeline_parallel > 1:
        return pipelined(space, cost, limit_s, soft=soft)
    program = _conditions(space, cost)
    if limit_s != NEVER_S:
        program = program.within({n: (low, limit_s) for n, (low, high) in program.boxes.items() if high == NEVER_S})
    return _softened(program) if soft else program


@dataclasses.dataclass(frozen=True, eq=False)
class _Known:
    space: Space
    cost: CostModel
    program: LinearProgram

    def is_of(self, space: Space, cost: CostModel) -> bool:
        same = self.space.units is space.units and self.cost is cost and self.space.storage == space.storage
        return same and self.space.given == space.given


# The same are asked for by a search and by the certificate of what it found: of one request, those of four stages.
_KNOWN: deque[_Known] = deque(maxlen=4)


def _conditions(space: Space, cost: CostModel) -> LinearProgram:
    """Return the conditions of an iteration of any length; made once for the spaces that they are the same for."""
    space = space.without_order()
    if known := next((known for known in _KNOWN if known.is_of(space, cost)), None):
        return known.program
    placement = Placement(space, cost, NEVER_S)
    Work(placement)
    Windows(placement, Memory(placement))
    _KNOWN.append(_Known(space, cost, placement.program))
    return placement.program


def memory_conditions(space: Space, cost: CostModel) -> LinearProgram:
    """Return those of the conditions that say whether anything fits, to be minimised by what memory is overrun."""
    if space.given.pipeline_parallel > 1:
        return pipelined(space, cost, NEVER_S, soft=True)
    placement = Placement(space.without_order(), cost, NEVER_S)
    Memory(placement)
    return _softened(placement.program)


def _softened(program: LinearProgram) -> LinearProgram:
    """Return a program in which memory may be overrun, by as little as can be."""
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
    """Return the conditions on schedules that place everything as some decisions do."""
    fixed: dict[str, float] = {}
    for unit in units:
        choice = decisions.units[unit.name]
        pieces = decisions.placed_pieces(unit)
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
