"""The pass that brings parameters to the device in time.

[Note: Static slots] A unit that is not resident always lands in the same slot of the ring of its size. Autograd may
then keep views of the weights it saved in forward: the same bytes come back to the same address before backward
reads them. A slot is refilled as soon as its previous occupant's last use in sight has ended, so rings of S slots look
S - 1 units ahead, and what is still in a slot is not fetched again.
"""

import dataclasses
import itertools
from collections import defaultdict

from planner.graph import Unit
from planner.lowering.compute import compute_drafts
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op


@dataclasses.dataclass(frozen=True)
class Slots:
    """Which unit uses which slot, and how large the slots are.

    Attributes:
        of_unit: slot of every unit that is not resident.
        num_params: parameters that each slot holds, padded to equal shards.
    """

    of_unit: dict[str, int]
    num_params: tuple[int, ...]


def assign_slots(program: Program) -> Slots:
    """Give every unit that is fetched or gathered a slot in the ring of units of its size."""
    rings: dict[int, list[Unit]] = defaultdict(list)
    for unit in program.units:
        if needs_slot(program, unit):
            rings[program.padded_params[unit.name]].append(unit)
    of_unit: dict[str, int] = {}
    num_params: list[int] = []
    for size, ring in rings.items():
        count = min(program.decisions.num_param_slots, len(ring))
        of_unit |= {unit.name: len(num_params) + i % count for i, unit in enumerate(ring)}
        num_params += [size] * count
    return Slots(of_unit, tuple(num_params))


def needs_slot(program: Program, unit: Unit) -> bool:
    """Return whether a unit's full parameters are on the device only while they are in a slot."""
    # An expert that no token visits is needed nowhere.
    return bool(unit.num_params and unit.forward) and (
        program.decisions.units[unit.name].fetched or unit.name in program.gathered
    )


def parameters(program: Program) -> None:
    """Fetch (host to device) and gather (from the other ranks) what is not resident, as early as its slot allows."""
    slots = assign_slots(program)
    units = {unit.name: unit for unit in program.units}
    occupant: dict[int, tuple[str, str]] = {}  # slot -> unit in it, key of its latest use
    first_fill: dict[int, str] = {}
    reads: dict[int, list[str]] = defaultdict(list)  # of parameters on NVMe, by the slot that they are on the way to
    positions = {draft.key: position for position, draft in enumerate(program.spine)}
    latest = -1  # behind what the latest fill was issued, as a position of the spine
    passed = 0  # parameters used so far
    used_at: dict[str, int] = {}
    for draft in list(compute_drafts(program)):
        for name in (draft.unit, *units[draft.unit].shared_units):
            slot = slots.of_unit.get(name)
            if slot is None:
                continue
            held, used = occupant.get(slot, ("", ""))
            if held != name or _released(program, units[name], passed - used_at[name]):
                # Lanes are first-in first-out, so fills are issued in the order of use: one whose slot is free early,
                # but whose weights are updated late, would hold up all behind it.
                latest = max(latest, positions.get(used, -1))
                anchor = program.spine[latest].key if latest >= 0 else None
                filled = _fill(program, units[name], slot, draft, after=used or None, anchor=anchor)
                draft.after.append(filled[-1])
                if program.drafts[filled[0]].op is Op.READ:
                    reads[slot].append(filled.pop(0))
                first_fill.setdefault(slot, filled[0])
            occupant[slot] = (name, draft.key)
            passed += units[name].num_params
            used_at[name] = passed
    for slot, key in first_fill.items():
        program.drafts[key].after_previous.append(occupant[slot][1])
    _bound_reads(program, reads)


def _released(program: Program, unit: Unit, num_params: int) -> bool:
    """Return whether what was gathered is given up before it is needed again, so many parameters later."""
    limit = program.decisions.max_reuse_params
    return unit.name in program.gathered and limit is not None and num_params > limit


def _bound_reads(program: Program, reads: dict[int, list[str]]) -> None:
    """Give every slot one host buffer: it is read into again once what it held has gone on to the device."""
    for keys in reads.values():
        fetches = [key.replace(f"{Op.READ}:", f"{Op.FETCH}:", 1) for key in keys]
        for key, fetched in zip(keys[1:], fetches, strict=False):
            program.drafts[key].after.append(fetched)
        program.drafts[keys[0]].after_previous.append(fetches[-1])


def _fill(program: Program, unit: Unit, slot: int, user: Draft, after: str | None, anchor: str | None) -> list[str]:
    """Add the tasks that bring a unit into its slot for ``user``, issued behind ``anchor``; return their keys."""
    decisions = program.decisions
    weight_bytes = decisions.precision.weight_bytes
    tasks: list[Draft] = []
    if decisions.units[unit.name].fetched:
        num_bytes = weight_bytes * program.shard_params[unit.name]
        tasks.append(Draft(f"fetch:{user.key}:{unit.name}", Lane.H2D, Op.FETCH, user.phase, num_bytes=num_bytes))
    if unit.name in program.gathered:
        num_bytes = weight_bytes * unit.num_params
        tasks.append(
            Draft(f"gather:{user.key}:{unit.name}", Lane.COLLECTIVE, Op.GATHER, user.phase, num_bytes=num_bytes)
        )
    tasks[-1].slot = slot
    if after:
        tasks[-1].after.append(after)
        tasks[0].after = [after]
    for previous, task in itertools.pairwise(tasks):
        task.after.append(previous.key)
    where = program.behind[anchor] if anchor else program.before[program.spine[0].key]
    if unit.name in program.gathered and not decisions.gathers_ahead(
        unit.num_params
    ):  # not before the caller gets there
        where = program.before[user.key]
        position = program.spine.index(user)
        tasks[-1].after += [draft.key for draft in program.spine[max(position - 1, 0) : position]]
    if decisions.units[unit.name].params == "nvme":
        read = Draft(f"read:{user.key}:{unit.name}", Lane.NVME_READ, Op.READ, user.phase, slot=slot)
        read.num_bytes = tasks[0].num_bytes
        tasks[0].after.append(read.key)
        tasks[0].pinned = decisions.pinned_reads
        tasks.insert(0, read)
    for task in tasks:
        task.unit, task.micro_batch = unit.name, user.micro_batch
        where.append(program.add(task))
    # Weights change once an iteration: only the first fill waits for updates (the pass ``updates`` sees to it).
    program.first_use.setdefault(unit.name, (where, tasks[0].key))
    return [task.key for task in tasks]


def first_forward(program: Program, unit: str) -> Draft:
    """Return the first forward of a unit in the iteration."""
    return program.drafts[f"{Op.FORWARD}:{unit}:0"]


def issue_ahead(program: Program, unit: Unit, position: int, draft: Draft) -> None:
    """Issue what a unit's first use in the iteration needs: just before it is gathered, or as far ahead as slots look.

    Uploads and fetches then queue up in the order of use.
    """
    program.add(draft)
    if unit.name in program.first_use:
        issued, gather = program.first_use[unit.name]
        issued.insert(issued.index(program.drafts[gather]), draft)
        return
    ahead = position - program.decisions.num_param_slots
    if ahead < 0:
        program.before[program.spine[0].key].append(draft)
    else:
        program.behind[f"{Op.FORWARD}:{program.units[ahead].name}:0"].append(draft)
