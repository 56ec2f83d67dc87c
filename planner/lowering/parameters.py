"""The pass that prefetches and all-gathers parameters.

[Note: Static slots] A unit that is not resident always uses the same slot of the ring of its size. So autograd may keep
views of the weights that it saved in forward: the same bytes are back at the same address before backward reads them. A
slot is refilled as soon as its previous unit has been used, so a ring of S slots looks S - 1 units ahead. Parameters
that are still in their slot are not fetched again.

[Note: Unused units] Modules that the example batch does not reach (a tower of images, in a batch of text) make units of
their own. No task brings their weights, and they use slots of other units that are large enough. If a batch does reach
one, the iteration leaves the plan, and its weights come into that slot, see [Note: On demand] in
:mod:`executor.driver.on_demand`. Gradients and updates are planned as those of all others.
"""

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from planner.decisions import Fp8Weights
from planner.lowering.program import LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Task

_Size = tuple[int, Fp8Weights | None, int]  # padded parameters, what moves in fp8, padded bytes of frozen weights


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slot of each unit, and the size of each slot.

    Attributes:
        of_unit: the slot of every unit that is not resident, by name.
        num_params: trained parameters that each slot holds, padded to equal shards.
        fp8: of each slot, what it holds instead where trained parameters come in fp8; ``None`` where they do not.
        frozen_bytes: bytes of frozen weights that each slot holds, padded to equal shards.
    """

    of_unit: dict[str, int]
    num_params: tuple[int, ...]
    fp8: tuple[Fp8Weights | None, ...]
    frozen_bytes: tuple[int, ...]

    def sizes(self, weight_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each slot."""
        columns = zip(self.num_params, self.fp8, self.frozen_bytes, strict=True)
        return tuple((fp8.slot_bytes if fp8 else weight_bytes * count) + frozen for count, fp8, frozen in columns)


def assign_slots(program: Program) -> Slots:
    """Give every unit that is fetched or gathered a slot in the ring of units of its size.

    If tiles pass a segment one after another, its units stay until the last tile: then a slot of the ring is one for
    each unit of a segment. So it is with micro-batches and a round of a pipeline.

    If a unit needs several units of one size at once (its own and another's weights, or those of two others), each of
    the others has a ring of its own. Units that the batch does not reach take the smallest slot that is large enough.
    """
    rings: dict[tuple[_Size, str], list[LoweredUnit]] = defaultdict(list)
    alone = _needed_at_once(program)
    for unit in program.units:
        if needs_slot(unit):
            rings[_size(unit), unit.name if unit.name in alone else ""].append(unit)
    of_unit: dict[str, int] = {}
    sizes: list[_Size] = []
    for (size, _), ring in rings.items():
        count = min(program.decisions.num_param_slots * _held_at_once(program, ring), len(ring))
        of_unit |= {unit.name: len(sizes) + i % count for i, unit in enumerate(ring)}
        sizes += [size] * count
    unused = [unit for unit in program.units if unit.unit.is_unused and _moves(unit)]
    for unit in sorted(unused, key=_size_without_fp8, reverse=True):
        num_params, frozen_bytes = _size_without_fp8(unit)
        large = [i for i, size in enumerate(sizes) if size[0] >= num_params and not size[1] and size[2] >= frozen_bytes]
        of_unit[unit.name] = min(large, key=lambda i: sizes[i][::2], default=len(sizes))
        if not large:
            sizes.append((num_params, None, frozen_bytes))
    return Slots(of_unit, *(zip(*sizes, strict=True) if sizes else ((), (), ())))


def _held_at_once(program: Program, ring: Iterable[LoweredUnit]) -> int:
    """Return how many units of a ring stay in their slots while tiles pass their segment, or micro-batches a round."""
    if len(program.rounds) > 1:
        return max(Counter(unit.turn for unit in ring).values())
    return max(Counter(unit.unit.segment for unit in ring if unit.unit.num_tiles > 1).values(), default=1)


def _size(unit: LoweredUnit) -> _Size:
    return unit.amounts.padded_params, unit.amounts.fp8, unit.amounts.padded_frozen_bytes


def _size_without_fp8(unit: LoweredUnit) -> tuple[int, int]:
    return unit.amounts.padded_params, unit.amounts.padded_frozen_bytes


def _needed_at_once(program: Program) -> set[str]:
    """Return the units that others use, where a user needs several of one size at once."""
    found: set[str] = set()
    for user in (unit for unit in program.units if unit.unit.shared_units):
        together: dict[_Size, list[LoweredUnit]] = defaultdict(list)
        for unit in (user, *(program.named[name] for name in user.unit.shared_units)):
            together[_size(unit)].append(unit)
        found |= {unit.name for units in together.values() if len(units) > 1 for unit in units if unit is not user}
    return found


def needs_slot(unit: LoweredUnit) -> bool:
    """Return whether tasks bring a unit's full parameters into a slot: not those of an expert that no token visits."""
    return _moves(unit) and bool(unit.unit.forward)


def _moves(unit: LoweredUnit) -> bool:
    return bool((unit.amounts.gathered or unit.amounts.fetched) and unit.unit.num_weights)


Released = Callable[[LoweredUnit, Task, int], bool]


def parameters(program: Program, released: Released | None = None) -> None:
    """Fetch (host to device) and all-gather parameters that are not resident, as early as their slots allow.

    Args:
        program: the program to extend.
        released: whether parameters that are still in their slot are brought again: of a unit, for a user, after so
            many parameters were used since. By default they stay until another unit needs the slot.
    """
    slots = assign_slots(program)
    if not slots.of_unit:
        return
    occupant: dict[int, tuple[LoweredUnit, Task]] = {}  # by slot: the unit in it and its latest use
    first_fill: dict[int, Task] = {}
    reads: dict[int, list[tuple[Task, Task]]] = defaultdict(list)  # by slot: reads from NVMe, each with its fetch
    positions = {draft.index: position for position, draft in enumerate(program.spine)}
    latest = -1  # the position in the spine behind which the latest fill was issued
    passed = 0  # the number of parameters used so far
    used_at: dict[str, int] = {}
    for user in program.computing:
        computes = program.named[user.unit].unit
        is_trained = computes.backward or computes.num_params
        if user.op is Op.BACKWARD and (computes.evaluates or not is_trained):
            continue  # nothing in or before it is trained, or it ran without gradients
        if user.op is Op.WEIGHT_GRADIENT:
            continue  # which needs no weights
        for name in (user.unit, *computes.shared_units):
            slot, unit = slots.of_unit.get(name), program.named[name]
            if slot is None or unit.unit.is_unused:
                continue
            held, used = occupant.get(slot, (None, None))
            if held is not unit or (released and released(unit, user, passed - used_at[name])):
                # Lanes are first-in first-out, so fills are issued in the order of use. Otherwise a fill whose slot is
                # free early, but whose weights are updated late, would delay all fills behind it.
                latest = max(latest, positions[used.index] if used else -1)
                anchor = program.spine[latest] if latest >= 0 else None
                filled = _fill(program, unit, slot, user, used, anchor)
                user.after += (filled[-1].index,)
                if filled[0].op is Op.READ:
                    reads[slot].append((filled[0], filled[1]))
                    del filled[0]
                first_fill.setdefault(slot, filled[0])
            occupant[slot] = (unit, user)
            passed += unit.unit.num_weights
            used_at[name] = passed
    for slot, fill in first_fill.items():
        fill.after_previous += (occupant[slot][1].index,)
    _bound_reads(reads)


def _bound_reads(reads: dict[int, list[tuple[Task, Task]]]) -> None:
    """Give every slot one host buffer. The next read into it waits until its content has been copied to the device."""
    for through in reads.values():
        for (_, fetched), (read, _) in itertools.pairwise(through):
            read.after += (fetched.index,)
        through[0][0].after_previous += (through[-1][1].index,)


def _fill(
    program: Program, unit: LoweredUnit, slot: int, user: Task, used: Task | None, anchor: Task | None
) -> list[Task]:
    """Add the tasks that bring a unit into its slot, and return them.

    Args:
        program: the program to extend.
        unit: the unit whose parameters are copied.
        slot: its slot.
        user: the compute task that needs the parameters.
        used: the latest task that used the slot.
        anchor: the spine task to issue them behind; ``None`` for the start of the iteration.
    """
    amounts, weight_bytes = unit.amounts, program.decisions.precision.weight_bytes
    start = (used.index,) if used else ()
    tasks: list[Task] = []
    if unit.amounts.fetched:
        fetch = program.draft(Lane.H2D, Op.FETCH, user.phase, unit, user.micro_batch, start)
        own_bytes = weight_bytes * amounts.shard_params
        fetch.num_bytes = (amounts.fp8.fetched_bytes if amounts.fp8 else own_bytes) + amounts.frozen_bytes
        tasks.append(fetch)
    if amounts.gathered:
        after = (*start, tasks[0].index) if tasks else start
        gather = program.draft(Lane.COLLECTIVE, Op.GATHER, user.phase, unit, user.micro_batch, after)
        all_bytes = amounts.fp8.gathered_bytes if amounts.fp8 else weight_bytes * amounts.exchanged_params
        gather.num_bytes = all_bytes + unit.unit.frozen_bytes(weight_bytes)
        if amounts.fp8 and not amounts.fetched:
            gather.num_params = amounts.shard_params
        tasks.append(gather)
    tasks[-1].slot = slot
    where = program.behind[anchor.index] if anchor else program.before[program.spine[0].index]
    if unit.amounts.params == "nvme":
        read = program.draft(Lane.NVME_READ, Op.READ, user.phase, unit, user.micro_batch)
        read.num_bytes, read.slot = fetch.num_bytes, slot
        fetch.after += (read.index,)
        tasks.insert(0, read)
    where += tasks
    # Weights change once an iteration: only the first fill waits for updates (the pass ``updates`` sees to it).
    unit.first_fill = unit.first_fill or (where, tasks[0])
    return tasks


def issue_ahead(program: Program, unit: LoweredUnit, position: int, draft: Task) -> None:
    """Issue a task for a unit's first use in the iteration: just before its fill, or as far ahead as slots allow.

    So uploads and fetches queue up in the order of use.
    """
    if unit.first_fill:
        issued, fill = unit.first_fill
        issued.insert(issued.index(fill), draft)
        return
    ahead = position - program.decisions.num_param_slots
    if ahead < 0:
        program.before[program.spine[0].index].append(draft)
    else:
        program.behind[program.units[ahead].forwards[0].index].append(draft)
