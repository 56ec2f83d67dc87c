"""The pass that takes state for checkpoints before it changes."""

from planner.decisions import Place
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase


def snapshots(program: Program) -> None:
    """Take every piece of state between its update and the next one, in the order of updates.

    [Note: Snapshots] State is at rest from its update to the next iteration's. A snapshot waits for the first and the
    second waits for the snapshot: a gate for each piece, and no other. In iterations of which no checkpoint is made
    these tasks do nothing. They are issued at the start of an iteration, on a lane of their own.

    Raises:
        ValueError: some state lives on NVMe, which is not captured so far.
    """
    changing = [draft for draft in program.ordered() if draft.op is Op.UPDATE and draft.num_params]
    ahead = program.before[program.spine[0].key]
    for update in changing:
        place = program.pieces[update.unit][update.piece][1]
        if place is Place.NVME:
            raise ValueError(
                f"optimizer state of {update.unit} lives on nvme, and checkpoints have only what is on the device or "
                "the host so far; plan with --storage never, or train without checkpoints"
            )
        change = update
        if place is Place.STREAM:  # it lives on the host, and changes when it is stored back
            change = program.drafts[f"{Op.STORE}:{update.unit}:{update.piece}"]
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
