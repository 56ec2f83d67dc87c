"""Turn a recording into a captured model: operators with kernels, saved activations and workspace."""

import bisect
import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import networkx as nx

from executor.module.binding import in_common
from executor.packed import StoredParameter, stored_parameters
from planner.models.captured import (
    CapturedBlock,
    CapturedKernels,
    CapturedModel,
    CapturedOperator,
    CapturedSegment,
    join,
)
from planner.models.kernels import Elementwise, Kernel, flop
from planner.models.operators import UNUSED
from planner.models.parameters import FrozenFormat, ParameterSpec
from ullage.capture.partitioning import UnitVisits, units_of_visits
from ullage.capture.records import DTYPES, Block, Recording, Save, Visit
from ullage.capture.repeats import UnequalError

# Work after the last block without a unit of its own counts as part of that block, but recomputation does not rerun it.
# If it saves more than this fraction of the block's saved bytes, the block is not described as a segment.
_NEGLIGIBLE = 0.1


@dataclasses.dataclass(slots=True)
class _Draft:
    """An operator under construction: its forward events, and their kernels, parameters and bytes."""

    path: str
    kind: str
    unit: int
    events: list[int] = dataclasses.field(default_factory=list)
    backward: list[Kernel] = dataclasses.field(default_factory=list)
    parameters: list[str] = dataclasses.field(default_factory=list)
    shared: list[str] = dataclasses.field(default_factory=list)
    saved_bytes: int = 0
    workspace_bytes: int = 0
    output_bytes: int = 0


def assemble(
    recording: Recording,
    places: list[UnitVisits],
    dtype: Literal["bf16", "fp32"],
    about: Mapping[str, Any],
) -> CapturedModel:
    """Return the captured model: its operators in these units, and other fields, ``about`` what was captured."""
    drafts = _operators(recording, places)
    operator_of = {index: number for number, draft in enumerate(drafts) for index in draft.events}
    for event in recording.backward:
        if event.source in operator_of:
            drafts[operator_of[event.source]].backward += event.kernels
    _assign_parameters(recording, places, drafts)
    _count_saved(recording, drafts, operator_of, places)
    _dissolve_segments(recording, places, drafts)
    _set_workspace(recording, drafts, operator_of, len(places))
    _set_outputs(recording, places, drafts)
    unused = [
        _Draft(names[0].rpartition(".")[0], UNUSED, number, parameters=names)
        for number, names in enumerate(_unused(recording, drafts))
    ]
    for draft in drafts:
        draft.unit += len(unused)
    drafts[:0] = unused
    places = [*(UnitVisits(draft.path, "", []) for draft in unused), *places]
    blocks: dict[CapturedBlock, int] = {}
    segments, several, num_unused = [], places[-1].call > 1, len(unused)
    outside: dict[int, dict[str, int]] = defaultdict(dict)  # for each call, the number of operators outside segments

    def place_of(number: int) -> tuple[Block, bool]:
        return places[number].block, several and number < num_unused

    for ((path, call), is_unused), numbers in itertools.groupby(range(len(places)), key=place_of):
        units = set(numbers)
        inside = [draft for draft in drafts if draft.unit in units]
        block = _block(recording, places, inside, (path, call), {} if path else outside[call], dtype)
        number = blocks.setdefault(block, len(blocks))
        visits = [recording.visits[index] for unit in units for index in places[unit].visits]
        evaluates = True if several and not is_unused and all(visit.evaluates for visit in visits) else None
        of_call = call if call > 1 else None
        segments.append(CapturedSegment(path=path, block=number, call=of_call, evaluates=evaluates))
    return CapturedModel(
        **about,
        loss=recording.loss,
        dtype=dtype,
        blocks=tuple(blocks),
        segments=tuple(segments),
        calls=recording.calls,
        second_order=recording.second_order or None,
        compiled=recording.compiled or None,
        written=tuple(sorted(recording.rewrites)) or None,
    )


def repeated(captured: CapturedModel, recording: Recording) -> CapturedModel:
    """Add the blocks that were not recorded to a captured model; see :mod:`ullage.capture.repeats`.

    Raises:
        UnequalError: these blocks are not equal to the recorded ones, or are not between segments, or code outside of
            them reads their weights, which copies do not show.
    """
    for path in {copy.of for copy in recording.copies}:
        inside = [range(visit.first, visit.stop) for visit in recording.visits if visit.path == path]
        for index, event in enumerate(recording.forward):
            reads = any(name.startswith(f"{path}.") for name in event.parameters)
            if reads and not any(index in events for events in inside):
                raise UnequalError(path)
    segments = list(captured.segments)
    block_of = {segment.path: segment.block for segment in segments}
    for copy in recording.copies:
        original = next(visit for visit in recording.visits if visit.path == copy.of)
        until = recording.begins[bisect.bisect_left(recording.begins, original.stop)]
        after = [index for index, segment in enumerate(segments) if segment.path == copy.after]
        if (
            copy.of not in block_of
            or not after
            or _between(recording, copy.first, copy.stop) != _between(recording, original.stop, until)
        ):
            raise UnequalError(copy.path)
        block_of[copy.path] = block_of[copy.of]
        like = next(segment for segment in segments if segment.path == copy.of)
        segments.insert(after[-1] + 1, like.model_copy(update={"path": copy.path}))
    return captured.model_copy(update={"segments": tuple(segments)})


def _between(recording: Recording, first: int, stop: int) -> list[Kernel]:
    """Return the kernels that run between two blocks.

    Raises:
        UnequalError: these kernels read weights.
    """
    events = recording.forward[first:stop]
    if any(event.parameters for event in events if event.kernels):
        raise UnequalError(recording.visits[events[0].visit].path)
    return [kernel for event in events for kernel in event.kernels]


def _operators(recording: Recording, places: list[UnitVisits]) -> list[_Draft]:
    """Group consecutive forward events of one module. Events without kernels belong to the group around them."""
    drafts: list[_Draft] = []
    for number, unit in enumerate(places):
        begun = False
        for index in unit.events:
            event = recording.forward[index]
            visit = recording.visits[event.visit]
            if not begun or (visit.path != drafts[-1].path and event.kernels and _runs(recording, drafts[-1])):
                drafts.append(
                    _Draft(visit.path, type(visit.module).__name__, number, _views(recording, drafts, number, visit))
                )
                begun = True
            elif event.kernels and not _runs(recording, drafts[-1]):  # the group has had no kernels so far
                drafts[-1].path, drafts[-1].kind = visit.path, type(visit.module).__name__
            drafts[-1].events.append(index)
    return drafts


def _views(recording: Recording, drafts: list[_Draft], unit: int, visit: Visit) -> list[int]:
    """Take the views of weights that a module made for its coming kernel from the end of the unit's last group."""
    events = drafts[-1].events if drafts and drafts[-1].unit == unit else []
    begin = len(events)
    while begin and (last := recording.forward[events[begin - 1]]).parameters and not last.kernels:
        if recording.visits[last.visit] is not visit:
            break
        begin -= 1
    taken = events[begin:]
    del events[begin:]
    return taken


def _runs(recording: Recording, draft: _Draft) -> bool:
    return any(recording.forward[index].kernels for index in draft.events)


def _assign_parameters(recording: Recording, places: list[UnitVisits], drafts: list[_Draft]) -> None:
    """Assign every parameter to the operator that uses it first. All parameters of a module go to one unit.

    Parameters that modules share go where they are used first, which need not be in the module that names them.
    """
    events = [(recording.forward[index], number) for number, draft in enumerate(drafts) for index in draft.events]
    uses = [(name, number) for event, number in events for name in event.parameters]
    first_use = dict(reversed(uses))
    count = Counter(map(id, dict(recording.model.named_parameters(remove_duplicate=False)).values()))
    tied = {name for name in first_use if count[id(recording.model.get_parameter(name))] > 1}

    def home(name: str) -> str:
        return name if name in tied else name.rpartition(".")[0]

    unit_of: dict[str, int] = {}  # unit of each module, and of each tied parameter
    for name, number in uses:
        unit_of.setdefault(home(name), drafts[number].unit)
    last = {draft.unit: number for number, draft in enumerate(drafts)}
    readers = {drafts[number].path: drafts[number].unit for _, number in reversed(uses)}
    _place_unused(recording, places, unit_of, readers)
    for name in recording.parameters:
        if (unit := unit_of.get(home(name))) is not None:
            number = first_use.get(name, -1)
            drafts[number if number >= 0 and drafts[number].unit == unit else last[unit]].parameters.append(name)
    for draft in drafts:
        first = {name: i for i in reversed(draft.events) for name in recording.forward[i].parameters}
        draft.parameters.sort(key=lambda name: first.get(name, len(recording.forward)))
    shared: set[tuple[int, str]] = set()
    # A view of a weight may be among the events of the operator before the one that computes with it. Of several calls,
    # whatever touches the weight first shows where forward is.
    computing = [(name, number) for event, number in events if event.kernels for name in event.parameters]
    computing = computing if recording.calls is None else []
    for name, number in (*computing, *uses):
        draft = drafts[number]
        if unit_of[home(name)] != draft.unit and (draft.unit, name) not in shared:
            shared.add((draft.unit, name))
            draft.shared.append(name)


def _units_of_calls(recording: Recording, places: list[UnitVisits]) -> dict[str, int]:
    """Return the unit in which each module is first called: its own unit, or else the unit that computes then."""
    computes = {event: number for number, unit in enumerate(places) for event in unit.events}
    found: dict[str, int] = {}
    current = 0
    for visit, unit in zip(recording.visits, units_of_visits(recording.visits, places), strict=True):
        current = max(current, unit if unit >= 0 else computes.get(visit.first - 1, 0))
        found.setdefault(visit.path, current)
    return found


def _place_unused(
    recording: Recording, places: list[UnitVisits], unit_of: dict[str, int], readers: Mapping[str, int]
) -> None:
    """Choose units for the modules of which no parameter is used, but for those of :func:`_unused`.

    A module goes to the unit that calls it. In a block, it goes to that of the nearest module. Below a module that has
    or reads weights of its own, it goes to that module's unit: these stay on the device while it runs.
    """
    called, used = _units_of_calls(recording, places), {**readers, **unit_of}
    segment_of = {path: places[number].segment for path, number in used.items()}
    for module in dict.fromkeys(name.rpartition(".")[0] for name in recording.parameters):
        if module in unit_of:
            continue
        near = max(used, key=lambda other: len(in_common(module.split("."), other.split("."))), default="")
        inside = bool(segment_of.get(near)) and _is_below(segment_of[near], module)
        if module in called or inside:
            unit_of[module] = called.get(module, used.get(near, 0))
        elif (above := next((path for path in _above(module) if path in used), None)) is not None:
            unit_of[module] = used[above]


def _above(path: str) -> Iterator[str]:
    """Yield the paths of the modules around one, from the innermost."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _unused(recording: Recording, drafts: Iterable[_Draft]) -> Iterator[list[str]]:
    """Yield the parameters that are in no draft, in parts that need no larger slot than units do, if possible.

    A module that has weights of its own stays in one part with those inside it, so that these weights are there while
    it runs; see [Note: Unused units] in :mod:`planner.lowering.parameters`.
    """
    sizes, placed = Counter[int](), set[str]()
    for draft in drafts:
        placed.update(draft.parameters)
        sizes[draft.unit] += _count(recording, draft.parameters)
    left = [name for name in recording.parameters if name not in placed]
    owners = {name.rpartition(".")[0] for name in left}

    def outermost(name: str) -> str:
        return [path for path in _above(name) if path in owners][-1]

    part: list[str] = []
    for _, group in itertools.groupby(left, key=outermost):
        names = list(group)
        if part and _count(recording, part + names) > max(sizes.values()):
            yield part
            part = []
        part += names
    if part:
        yield part


def _count(recording: Recording, names: Iterable[str]) -> int:
    return sum(recording.model.get_parameter(name).numel() for name in names)


def _count_saved(
    recording: Recording, drafts: list[_Draft], operator_of: dict[int, int], places: list[UnitVisits]
) -> None:
    """Count saved activations: each storage once, at the first operator that saves it.

    If several segments save a storage (rotary factors, a mask), it outlives the recomputation of each, so it counts at
    the operator that made it. Buffers always exist, and count at the first operator.
    """
    keepers: defaultdict[int, list[int]] = defaultdict(list)
    for save in recording.saves:
        number = operator_of.get(_event_of(recording, save.position, save.visit))
        if number is not None and recording.storages[save.storage].owner in {"", "input"}:
            keepers[save.storage].append(number)
    for storage, numbers in keepers.items():
        keeper = min(numbers)
        blocks = (places[drafts[number].unit].block for number in numbers)
        segments = {block if block[0] else drafts[number].unit for number, block in zip(numbers, blocks, strict=True)}
        born = recording.storages[storage].born
        if len(segments) > 1 and 0 <= born < len(recording.forward):
            keeper = operator_of.get(born, keeper)
        drafts[keeper].saved_bytes += recording.storages[storage].num_bytes
    drafts[0].saved_bytes += sum(storage.num_bytes for storage in recording.storages if storage.owner == "buffer")


def _event_of(recording: Recording, position: int, visit: int) -> int:
    """Return the forward event that saved a tensor. Autograd saves inputs just before it and results just after."""
    events = recording.forward
    return position if position < len(events) and events[position].visit == visit else max(position - 1, 0)


def _dissolve_segments(recording: Recording, places: list[UnitVisits], drafts: list[_Draft]) -> None:
    """Dissolve segments whose recomputation would differ from their description."""
    behind, saved = Counter[Block](), Counter[Block]()
    spoilt = {visit.block for visit in recording.visits if _runs_backward(recording, visit)}
    spoilt.update(_run_others(recording, places, drafts))
    for draft in drafts:
        segment = places[draft.unit].block
        if not segment[0]:
            continue
        saved[segment] += draft.saved_bytes
        if not recording.of_written.isdisjoint(draft.events):  # run again, it would read other values, and write again
            spoilt.add(segment)
        late = [index for index in draft.events if index >= recording.visit_of[segment].stop]
        if any(flop(recording.forward[index].kernels) for index in late):
            spoilt.add(segment)
        if late and late[0] == draft.events[0]:
            behind[segment] += draft.saved_bytes
        if any(not name.startswith(f"{segment[0]}.") for name in draft.parameters):
            spoilt.add(segment)
    spoilt |= {segment for segment, num_bytes in behind.items() if num_bytes > _NEGLIGIBLE * saved[segment]}
    for unit in places:
        if unit.block in spoilt:
            unit.segment = ""


def _run_others(recording: Recording, places: list[UnitVisits], drafts: list[_Draft]) -> Iterator[Block]:
    """Yield the blocks that run other ones in their forward, and so would run them again."""
    ran = sorted((index, places[draft.unit].block) for draft in drafts for index in draft.events)
    for segment in {block for _, block in ran if block[0]}:
        visit = recording.visit_of[segment]
        inside = ran[bisect.bisect_left(ran, (visit.first,)) : bisect.bisect_left(ran, (visit.stop,))]
        if any(block != segment for _, block in inside):
            yield segment


def _runs_backward(recording: Recording, visit: Visit) -> bool:
    inside = (recording.visits[index] for index in recording.backward_inside if index >= 0)
    return any(visit.first <= inner.first and inner.stop <= visit.stop for inner in inside)


def _set_workspace(recording: Recording, drafts: list[_Draft], operator_of: dict[int, int], num_units: int) -> None:
    """Set each operator's workspace: peak bytes that are alive beyond saved activations of units up to its own."""
    events = (*recording.forward, *recording.backward)
    change = [0] * (len(events) + 1)
    elsewhere = _tied_gradients(recording, drafts)
    for number, storage in enumerate(recording.storages):
        if storage.owner not in {"parameter", "gradient"} and number not in elsewhere:
            change[max(storage.born, 0)] += storage.num_bytes
            if storage.died is not None:
                change[max(storage.died, storage.born, 0) + 1] -= storage.num_bytes
    saved = [0] * num_units
    for draft in drafts:
        saved[draft.unit] += draft.saved_bytes
    held = list(itertools.accumulate(saved))
    for event, alive in zip(events, itertools.accumulate(change), strict=False):
        if event.source not in operator_of:
            continue
        draft = drafts[operator_of[event.source]]
        draft.workspace_bytes = max(draft.workspace_bytes, alive - held[draft.unit])


def _tied_gradients(recording: Recording, drafts: list[_Draft]) -> set[int]:
    """Return storages whose sum is the gradient of a weight that several units use; lowering accounts for them."""
    tied = {recording.gradients[name] for draft in drafts for name in draft.shared if name in recording.gradients}
    sums = ((number, term) for number, terms in recording.sums.items() for term in terms)
    graph = nx.DiGraph((number, term) for number, term in sums if not recording.storages[term].owner)
    return tied.union(*(nx.descendants(graph, number) for number in tied if number in graph))


def _set_outputs(recording: Recording, places: list[UnitVisits], drafts: list[_Draft]) -> None:
    """Set the output bytes of operators.

    For the first unit of a block and the unit before it, use the block's inputs and the buffers that recomputation
    starts from. These are ``Unit.activation_output_bytes``, which must be kept to recompute the block.
    """
    for number, draft in enumerate(drafts):
        made = (recording.forward[i].output_bytes for i in reversed(draft.events) if recording.forward[i].kernels)
        draft.output_bytes = next(made, 0)
        if number + 1 < len(drafts) and drafts[number + 1].unit == draft.unit:
            continue
        around = [places[unit].block for unit in range(max(draft.unit - 1, 0), min(draft.unit + 2, len(places)))]
        segment = places[draft.unit].block
        if segment[0] and (not draft.unit or around[0] != segment):
            kept = recording.visit_of[segment]
        elif around[-1][0] and around[-1] != segment:
            kept = recording.visit_of[around[-1]]
        else:
            continue
        draft.output_bytes = (kept.input_bytes or draft.output_bytes) + kept.state_bytes


def _block(
    recording: Recording,
    places: list[UnitVisits],
    drafts: Sequence[_Draft],
    of: Block,
    seen: dict[str, int],
    dtype: Literal["bf16", "fp32"],
) -> CapturedBlock:
    path, call = of
    specs = {
        name: ParameterSpec(_below(path, name), tuple(stored.shape), _frozen_format(stored, dtype))
        for name, stored in stored_parameters(recording.model).items()
        if _is_below(path, name)
    }
    saves = _saves(recording, of) if path else []
    # Non-reentrant recomputation stops after the last saved tensor.
    rerun_until = max((save.position for save in saves), default=0)
    inputs = recording.visit_of[of].inputs if path else frozenset()
    operators: list[CapturedOperator] = []
    others = tuple(f"{place.segment}." for place in places if place.segment != path)
    for draft in drafts:
        unit = _below(path, places[draft.unit].name)
        # A module that blocks share with what is outside of them has its path in one of them.
        is_own = draft.path and _is_below(path, draft.path) and (path or not draft.path.startswith(others))
        name = _below(path, draft.path) if is_own else unit
        seen[name] = seen.get(name, 0) + 1
        cut = bisect.bisect_left(draft.events, rerun_until) if path else len(draft.events)
        rerun, not_rerun = (
            _merged(kernel for index in part for kernel in recording.forward[index].kernels)
            for part in (draft.events[:cut], draft.events[cut:])
        )
        operators.append(
            CapturedOperator(
                name=name if seen[name] == 1 else f"{name}#{seen[name]}",
                kind=draft.kind,
                unit=unit,
                parameters=tuple(specs[name] for name in draft.parameters),
                shared_parameters=tuple(
                    f".{_below(path, name)}" if call > 1 and path and name.startswith(f"{path}.") else name
                    for name in draft.shared
                ),
                forward=rerun + not_rerun,
                backward=_merged(draft.backward),
                saved_bytes=draft.saved_bytes,
                output_bytes=draft.output_bytes,
                workspace_bytes=draft.workspace_bytes,
                num_skipped=len(not_rerun),
                product_bytes=sum(
                    recording.forward[index].product_bytes
                    for index in draft.events[:cut]  # offloading cannot keep results that are changed later
                    if all(recording.changed.get(number, -1) <= index for number in recording.forward[index].storages)
                ),
                in_tiles=draft.path in recording.tiled and seen[name] == 1,
                changed_inputs=(_changed_inputs(recording, of) or None) if path and not operators else None,
                copies_input=not operators and bool(saves) and inputs.isdisjoint(save.storage for save in saves),
            )
        )
    return CapturedBlock(operators=tuple(operators))


def _changed_inputs(recording: Recording, of: Block) -> tuple[int, ...]:
    """Return the arguments of a block in one call, by position, that are changed in place when it runs or later."""
    visit = recording.visit_of[of]
    return tuple(sorted({p for p, storage in visit.given if recording.changed.get(storage, -1) >= visit.first}))


def _frozen_format(stored: StoredParameter, dtype: Literal["bf16", "fp32"]) -> FrozenFormat | None:
    """Return the stored format of a frozen parameter if it differs from the type of the weights."""
    if stored.parameter.requires_grad:
        return None
    return "plain" if stored.parameter.dtype is DTYPES[dtype] and not stored.is_quantized else stored.num_bytes


def _saves(recording: Recording, of: Block) -> list[Save]:
    """Return the tensors that autograd saves in a block in one call."""
    inside = {
        number for i, visit in enumerate(recording.visits) if visit.block == of for number in range(i, visit.last + 1)
    }
    return [save for save in recording.saves if save.visit in inside]


def _merged(kernels: Iterable[Kernel]) -> CapturedKernels:
    """Merge equal neighbouring kernels that are bound by memory into one entry."""
    result: list[Kernel] = []
    for kernel in kernels:
        last = result[-1] if result else None
        match last, kernel:
            case Elementwise(), Elementwise() if dataclasses.replace(last, count=kernel.count) == kernel:
                result[-1] = dataclasses.replace(kernel, count=last.count + kernel.count)
            case _:
                result.append(kernel)
    return tuple(result)  # type: ignore[arg-type]  # a capture has no collectives


def _is_below(path: str, name: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _below(path: str, name: str) -> str:
    """Return ``name`` relative to ``path``."""
    if path and name.startswith(f"{path}#"):  # a second unit with the block's name
        return name[len(path) :]
    assert join(path, "") == path
    return name[len(path) :].removeprefix(".") if path else name
