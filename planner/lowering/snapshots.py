"""The pass that takes state for checkpoints before it changes."""

from planner.decisions import Place
from planner.lowering.program import Program
from planner.schedule.tasks import Draft, Lane, Op, Phase

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
    gates: dict[int, Draft] = {}  # by what they are issued just before
    for update in changing:
        unit = program.named[update.unit]
        _, place = unit.amounts.pieces[update.piece]
        change = unit.changes[update.piece]
        snapshot = program.draft(Lane.SNAPSHOT, Op.SNAPSHOT, Phase.UPDATE, unit, piece=update.piece)
        snapshot.num_bytes = unit.amounts.state_bytes[update.piece]
        snapshot.after_previous += (change.key,)
        ahead.append(snapshot)
        waiting = snapshot
        if place in _ON_HOST:  # the gate waits for all that the change waits for, so it copies as late as possible
            waiting = gates[change.key] = program.draft(
                Lane.GATE, Op.GATE, Phase.UPDATE, unit, after=(snapshot.key, *change.after), piece=update.piece
            )
            waiting.num_bytes = snapshot.num_bytes
        change.after += (waiting.key,)
    for issued in (*program.before.values(), *program.behind.values(), program.tail):
        issued[:] = [
            each for draft in issued for each in ((gates[draft.key], draft) if draft.key in gates else (draft,))
        ]
