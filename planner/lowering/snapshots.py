"""The pass that takes state for checkpoints before it changes."""

from planner.decisions import Place
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

# What changes state where it lives, if that is not the update itself.
_WRITES = {Place.STREAM: Op.STORE, Place.NVME: Op.SWAP_OUT}
_ON_HOST = frozenset({Place.CPU, Place.STREAM})


def snapshots(program: Program) -> None:
    """Take every piece of state between its update and the next one, in the order of updates.

    [Note: Snapshots] State is at rest from its update to the next iteration's. A snapshot waits for the first and the
    second waits for the snapshot. State on the device is copied by it. State on the host is not: it is written from
    where it is, and a *gate* just before it changes copies what is not written by then, or waits. State on NVMe is
    there in two versions, and changes when the new one has been written: its update waits for nothing. All this is per
    piece. Snapshots are issued at the start of an iteration, on a lane of their own; in iterations of which no
    checkpoint is made they do nothing, and neither do gates.
    """
    changing = [draft for draft in program.ordered() if draft.op is Op.UPDATE and draft.num_params]
    ahead = program.before[program.spine[0].key]
    changes = {}
    for update in changing:
        place = program.pieces[update.unit][update.piece][1]
        change = update
        if writes := _WRITES.get(place):
            change = program.drafts[f"{writes}:{update.unit}:{update.piece}"]
        draft = Draft(
            f"{Op.SNAPSHOT}:{update.unit}:{update.piece}",
            Lane.SNAPSHOT,
            Op.SNAPSHOT,
            Phase.UPDATE,
            update.unit,
            piece=update.piece,
            num_bytes=program.decisions.state_bytes_per_param * update.num_params,
        )
        draft.after_previous.append(change.key)
        ahead.append(program.add(draft))
        if place in _ON_HOST:
            changes[change.key] = _gate(program, draft, change)
        else:
            change.after.append(draft.key)
    for issued in (*program.before.values(), *program.behind.values(), program.tail):
        issued[:] = [each for draft in issued for each in (*changes.get(draft.key, ()), draft)]


def _gate(program: Program, snapshot: Draft, change: Draft) -> tuple[Draft]:
    """Let a change wait for a gate, which waits for whatever else the change does: no copy is made before it has to."""
    gate = Draft(
        f"{Op.GATE}:{snapshot.unit}:{snapshot.piece}",
        Lane.GATE,
        Op.GATE,
        Phase.UPDATE,
        snapshot.unit,
        piece=snapshot.piece,
        num_bytes=snapshot.num_bytes,
        after=[snapshot.key, *change.after],
    )
    change.after.append(gate.key)
    return (program.add(gate),)
