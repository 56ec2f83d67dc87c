"""The pass that takes state for checkpoints before it changes."""

from planner.decisions import Place
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

# What changes state where it lives, if that is not the update itself.
_WRITES = {Place.STREAM: Op.STORE, Place.NVME: Op.SWAP_OUT}


def snapshots(program: Program) -> None:
    """Take every piece of state between its update and the next one, in the order of updates.

    [Note: Snapshots] State is at rest from its update to the next iteration's. A snapshot waits for the first and the
    second waits for the snapshot: a gate for each piece, and no other. In iterations of which no checkpoint is made
    these tasks do nothing. They are issued at the start of an iteration, on a lane of their own. State on NVMe is there
    in two versions, and changes when the new one has been written: its update waits for nothing.
    """
    changing = [draft for draft in program.ordered() if draft.op is Op.UPDATE and draft.num_params]
    ahead = program.before[program.spine[0].key]
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
        change.after.append(draft.key)
        ahead.append(program.add(draft))
