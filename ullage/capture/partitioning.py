"""Assign every recorded operator to a unit and a segment.

*Segments* are repeated blocks: children of one class, with submodules, in a ``ModuleList`` or another container. If
blocks are nested, the outermost ones count that are more than lists of blocks. Within a segment, *units* are the
children of the block that have parameters. A child with submodules (attention, an MLP) is a unit of its own, plain
children (``nn.Linear``) form a unit with their neighbours, and a small child (a norm) joins the next one. Outside
segments, neighbours with parameters are joined until they are large enough for a unit.

[Note: Steps] A step of the user's loop may call the model several times, or parts of it (``model.encode``), before one
backward. Where a module runs again, another call of the model begins. Each call has units and segments of its own, in
the order in which they run. A weight belongs to a unit of the first call that uses it, in whose backward its whole
gradient is ready. The units of other calls use it as they use tied weights: it comes into the same slot for each of
them. A call without gradients has units whose backward is empty.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import networkx as nx
from torch import nn

from planner.models.captured import join
from ullage.capture.executable import Unseen
from ullage.capture.records import Block, Recording, Visit

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Modules with a smaller share of the parameters join a neighbour. In a block, the share is of the block's parameters.
# Outside blocks, it is of the largest block, or of the whole model if there are no blocks.
_SMALL_PLAIN, _SMALL_COMPOSITE = 1 / 16, 1 / 1000
_SMALL_OUTSIDE, _SMALL_ALONE = 1 / 4, 1 / 16


@dataclasses.dataclass(slots=True)
class UnitVisits:
    """A unit with its visits and events.

    Attributes:
        name: path of its largest module.
        segment: path of its block; empty outside blocks.
        call: its call, see [Note: Steps].
        visits: indices of the visits of its modules, in order.
        events: indices of its forward events, in order. Events after the segment's block are at the end.
    """

    name: str
    segment: str
    visits: list[int]
    call: int = 1
    events: list[int] = dataclasses.field(default_factory=list)

    @property
    def block(self) -> Block:
        """Its block, and the call in which it runs."""
        return self.segment, self.call


def partition(recording: Recording) -> list[UnitVisits]:
    """Return the units of a recording in forward order. Every forward event is in exactly one unit."""
    visits = recording.visits
    blocks = _block_visits(recording)
    places: list[UnitVisits] = []
    largest = max((_num_params(visits[block].module) for block in blocks), default=0)
    small = _SMALL_OUTSIDE * largest or _SMALL_ALONE * _num_params(recording.model)
    inside = {block: range(block, visits[block].last + 1) for block in blocks}
    block_of = {index: block for block, members in inside.items() for index in members}
    atoms = [
        index
        for index, visit in enumerate(visits)
        if index in inside or (index not in block_of and _has_parameters(visit.module, recurse=False))
    ]
    for (block, _), group in itertools.groupby(atoms, key=lambda index: (block_of.get(index), visits[index].call)):
        places += _outside(visits, list(group), small) if block is None else _inside(visits, block)
    if not places:
        places = [UnitVisits("model", "", [0])]
    places = _joined(places, _called_again(visits, places))
    _assign(recording, places, block_of)
    places = _joined(places, _used_in_several(recording, places))
    return _named(_computing(recording, places))


def as_one(places: list[UnitVisits]) -> list[UnitVisits]:
    """Return units as one, whose weights are there from its first module on, whatever hooks see after that."""
    return _joined(places, [(0, len(places) - 1)])


def joined_around(recording: Recording, places: list[UnitVisits], unseen: Unseen) -> list[UnitVisits] | None:
    """Return the units where those are one that a weight needs to be seen; ``None`` if they cannot be.

    If the weight belongs to a module that calls others, these are the units inside it: a hook on its output then
    reports its backward. Else they are the weight's own, and the one that computes when it is read.
    """
    path = unseen.weight.rpartition(".")[0]
    copied = {copy.of for copy in recording.copies}
    ranges = []
    for call in {unit.call for unit in places}:
        number_of = {unit.name: number for number, unit in enumerate(places) if unit.call == call}
        inside = [
            number
            for number in number_of.values()
            if any(f"{recording.visits[index].path}.".startswith(f"{path}.") for index in places[number].visits)
        ]
        if not path or len(inside) < 2:
            names = [name.partition("@")[0] for name in (unseen.owner, unseen.reading)]
            inside = [number_of[name] for name in names if name in number_of]
        first, last = min(inside, default=0), max(inside, default=0)
        if first != last and not any(unit.segment in copied for unit in places[first : last + 1]):
            ranges.append((first, last))
    return _joined(places, ranges) if ranges else None


def _block_visits(recording: Recording) -> list[int]:
    """Return the visits of repeated blocks that each run once in a call."""
    count = Counter(visit.block for visit in recording.visits)
    found: list[int] = []
    for call in dict.fromkeys(visit.call for visit in recording.visits):
        visit_of = {
            visit.path: index
            for index, visit in enumerate(recording.visits)
            if visit.call == call and count[visit.block] == 1
        }
        found += (visit_of[path] for path in _blocks(recording, visit_of, recording.model, ""))
    return sorted(found)


def _blocks(recording: Recording, visit_of: dict[str, int], module: nn.Module, path: str) -> Iterator[str]:
    children = list(module.named_children())
    classes = Counter(type(child) for _, child in children if _is_composite(child))
    is_list = isinstance(module, _LISTS) or all(name.isdigit() for name, _ in children)
    repeats = is_list and max(classes.values(), default=0) > 1
    for name, child in children:
        below = join(path, name)
        inner = list(_blocks(recording, visit_of, child, below))
        if repeats and _is_composite(child) and below in visit_of and not _is_stage(recording, visit_of, below, inner):
            yield below
        else:
            yield from inner


def _is_stage(recording: Recording, visit_of: dict[str, int], path: str, inner: list[str]) -> bool:
    """Return whether a block is mostly a list of blocks that it calls itself. Experts are called by their MLP."""
    visits = recording.visits
    for block in inner:
        parent = visits[visit_of[block]].parent
        while visits[parent].path != path and isinstance(visits[parent].module, _LISTS):
            parent = visits[parent].parent
        if visits[parent].path != path:
            return False
    whole = _num_params(visits[visit_of[path]].module)
    copied = [copy.path for copy in recording.copies if copy.path.startswith(f"{path}.")]
    num_params = sum(_num_params(recording.model.get_submodule(block)) for block in (*inner, *copied))
    return num_params > whole / 2


def _is_composite(module: nn.Module) -> bool:
    """Return whether a module has submodules and parameters."""
    return next(module.children(), None) is not None and _has_parameters(module)


def _has_parameters(module: nn.Module, *, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def _num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _inside(visits: list[Visit], block: int) -> list[UnitVisits]:
    """Return the units of a block."""
    segment, call, last = visits[block].path, visits[block].call, visits[block].last
    size = {index: _num_params(visits[index].module) for index in range(block, last + 1)}
    children = [index for index in size if visits[index].parent == block and _has_parameters(visits[index].module)]
    runs: list[list[int]] = []
    plain = False  # whether the last run has plain modules
    for child in children:
        composite = size[child] >= _SMALL_COMPOSITE * size[block] and _is_composite(visits[child].module)
        if composite or not plain:
            runs.append([])
        runs[-1].append(child)
        plain = not composite
    result: list[list[int]] = []
    carried: list[int] = []
    for run in runs:
        carried = carried + run
        is_large = sum(size[index] for index in carried) >= _SMALL_PLAIN * size[block]
        if is_large or (len(run) == 1 and _is_composite(visits[run[0]].module)):
            result.append(carried)
            carried = []
    if carried and result:
        result[-1] += carried
    elif carried:
        result.append(carried)
    return [UnitVisits(visits[max(run, key=size.__getitem__)].path, segment, run, call) for run in result or [[block]]]


def _outside(visits: list[Visit], atoms: list[int], small: float) -> list[UnitVisits]:
    """Return units of neighbouring modules with parameters outside blocks."""
    runs: list[list[int]] = []
    for atom in atoms:
        if not runs or _own(visits, runs[-1]) >= small:
            runs.append([])
        runs[-1].append(atom)
    if len(runs) > 1 and _own(visits, runs[-1]) < small:
        last = runs.pop()
        runs[-1] += last
    largest = [max(run, key=lambda index: _own(visits, [index])) for run in runs]
    pairs = zip(runs, largest, strict=True)
    return [UnitVisits(visits[index].path, "", run, visits[run[0]].call) for run, index in pairs]


def _own(visits: list[Visit], run: Iterable[int]) -> int:
    return sum(p.numel() for index in run for p in visits[index].module.parameters(recurse=False))


def units_of_visits(visits: Sequence[Visit], places: Iterable[UnitVisits]) -> list[int]:
    """Return the number of each visit's unit: its own, or else that of the visit around it; -1 if it is in none."""
    unit_of = {index: number for number, unit in enumerate(places) for index in unit.visits}
    found: list[int] = []
    for index, visit in enumerate(visits):  # parents come first
        found.append(unit_of.get(index, found[visit.parent] if visit.parent >= 0 else -1))
    return found


def _called_again(visits: list[Visit], places: list[UnitVisits]) -> Iterator[tuple[int, int]]:
    """Yield ranges of units between two runs of a module with parameters in one call of the model.

    They must be one unit, which runs once.
    """
    ranges: dict[tuple[nn.Module, int], tuple[int, int]] = {}
    for visit, number in zip(visits, units_of_visits(visits, places), strict=True):
        if number >= 0 and _has_parameters(visit.module, recurse=False):
            first, last = ranges.get((visit.module, visit.call), (number, number))
            ranges[visit.module, visit.call] = (min(first, number), max(last, number))
    yield from ((first, last) for first, last in ranges.values() if first != last)


def _used_in_several(recording: Recording, places: list[UnitVisits]) -> Iterator[tuple[int, int]]:
    """Yield ranges of a segment's units that use parameters of one module, because its hook runs where it is called."""
    used: dict[tuple[str, int], set[int]] = {}
    for number, unit in enumerate(places):
        for index in unit.events:
            for name in recording.forward[index].parameters:
                used.setdefault((name.rpartition(".")[0], unit.call), set()).add(number)
    for numbers in used.values():
        first = min(numbers)
        last = max(n for n in numbers if places[n].block == places[first].block)
        if places[first].segment and first != last:
            yield first, last


def _joined(places: list[UnitVisits], ranges: Iterable[tuple[int, int]]) -> list[UnitVisits]:
    graph: nx.Graph[int] = nx.empty_graph(len(places))
    for first, last in ranges:
        # Whole segments, which are then no longer segments: a part of one cannot be recomputed without the rest.
        ends = (first, last) if places[first].segment == places[last].segment else _whole(places, first, last)
        nx.add_path(graph, range(ends[0], ends[1] + 1))
    result = []
    for numbers in sorted(nx.connected_components(graph), key=min):
        members = [places[number] for number in sorted(numbers)]
        names = {unit.segment for unit in members}
        joined = UnitVisits(members[0].name, names.pop() if len(names) == 1 else "", [], members[0].call)
        for unit in members:
            joined.visits += unit.visits
            joined.events += unit.events
        result.append(joined)
    return result


def _whole(places: list[UnitVisits], first: int, last: int) -> tuple[int, int]:
    while first and places[first].segment and places[first - 1].block == places[first].block:
        first -= 1
    while last + 1 < len(places) and places[last].segment and places[last + 1].block == places[last].block:
        last += 1
    return first, last


def _assign(recording: Recording, places: list[UnitVisits], block_of: Mapping[int, int]) -> None:
    """Assign each forward event to the unit of its visit, or of a visit around it.

    If a visit contains several units, or only part of one, an event directly in it goes to the unit that computes then:
    at the beginning of the visit its first unit, otherwise the unit before the event.
    """
    visits = recording.visits
    unit_of = {index: number for number, unit in enumerate(places) for index in unit.visits}
    within: dict[int, tuple[int, int]] = {}  # for each visit, the first and the last unit inside it
    for index, number in unit_of.items():
        for at in _around(visits, index):
            first, last = within.get(at, (number, number))
            within[at] = (min(first, number), max(last, number))
    current = 0
    for index, event in enumerate(recording.forward):
        if index in recording.skipped:
            continue
        at = next((at for at in _around(visits, event.visit) if at in within), -1)
        first, last = within.get(at, (current, current))
        if at in unit_of:
            current = max(current, unit_of[at])
        elif at in block_of or not places[first].segment:
            current = max(current, min(max(current, first), last))
        places[current].events.append(index)


def _around(visits: list[Visit], at: int) -> Iterator[int]:
    """Yield a visit and those around it, from the innermost."""
    while at != -1:
        yield at
        at = visits[at].parent


def _computing(recording: Recording, places: list[UnitVisits]) -> list[UnitVisits]:
    """Return the units that run kernels. Other units are merged into neighbours."""
    found: list[UnitVisits] = []
    before: list[int] = []
    for unit in places:
        if any(recording.forward[index].kernels for index in unit.events):
            unit.events = before + unit.events
            before = []
            found.append(unit)
        elif found:
            found[-1].events += unit.events
        else:
            before += unit.events
    return found


def _named(places: list[UnitVisits]) -> list[UnitVisits]:
    """Make the names of the units of a call unique."""
    seen: Counter[tuple[str, int]] = Counter()
    for unit in places:
        unit.name = unit.name or "model"
        seen[unit.name, unit.call] += 1
        if (count := seen[unit.name, unit.call]) > 1:
            unit.name += f"#{count}"
    return places
