"""Optimizer state that lives on NVMe: on its way to the host, through an update there, and back.

[Note: Host buffers] State passes through a ring of ``num_nvme_slots`` host buffers of one size: a subgroup is read as
soon as the one that used its buffer before has been written back. One buffer reads, updates and writes in turn; with
more, one subgroup is read or written while another is updated.
"""

from planner.decisions import SPILLED_BYTES_PER_PARAM, Place
from planner.graph import Unit
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

# Gradients of this many units may wait on the host for their turn to be written: the swapper's usual ``buffer_count``.
NUM_SPILL_SLOTS = 20


def written_weight_bytes(program: Program, unit: Unit) -> int:
    """Return the bytes per parameter of updated weights that are written to NVMe beside the state."""
    decisions = program.decisions
    if decisions.units[unit.name].params != "nvme" or decisions.precision.master_is_weight:
        return 0
    return decisions.precision.weight_bytes


def spilled_bytes(program: Program) -> int:
    """Return the bytes per parameter of gradients that wait on NVMe."""
    return SPILLED_BYTES_PER_PARAM if program.decisions.spill_gradients else 0


def spill(program: Program, unit: Unit, backward: Draft, flushed: str, spilled: list[str]) -> None:
    """Write the gradient of the last micro-batch, the sum of all, to NVMe; ``spilled`` lists the writes so far."""
    num_params = program.placed_params(unit, Place.NVME)
    last = backward.micro_batch == program.decisions.num_micro_batches - 1
    if not (program.decisions.spill_gradients and num_params and last):
        return
    if len(spilled) >= NUM_SPILL_SLOTS:
        backward.after.append(spilled[-NUM_SPILL_SLOTS])
    key = f"{Op.SPILL}:{unit.name}"
    draft = Draft(key, Lane.NVME_STATE_OUT, Op.SPILL, Phase.BACKWARD, unit.name, backward.micro_batch)
    draft.num_bytes, draft.after = SPILLED_BYTES_PER_PARAM * num_params, [flushed]
    program.behind[backward.key].append(program.add(draft))
    spilled.append(key)


class StateRing:
    """The host buffers, handed out in the order of updates."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._swaps: list[tuple[Draft, Draft]] = []  # in, out

    def swap_in(self, where: list[Draft], unit: Unit, piece: int, num_params: int, ready: list[str]) -> Draft:
        """Add the read of a subgroup into the next buffer.

        It waits for the gradient (``ready``) only if that is read too.
        """
        swap = self._draft(Lane.NVME_STATE_IN, Op.SWAP_IN, unit, piece)
        spilled = spilled_bytes(self._program)
        swap.num_bytes = (self._program.decisions.state_bytes_per_param + spilled) * num_params
        count = self._program.decisions.num_nvme_slots
        swap.slot = len(self._swaps) % count
        swap.after = list(ready) if spilled else []
        if len(self._swaps) >= count:
            swap.after.append(self._swaps[-count][1].key)
        where.append(swap)
        return swap

    def swap_out(self, where: list[Draft], swap_in: Draft, unit: Unit, num_params: int, updated: str) -> Draft:
        """Add the write of an updated subgroup, which frees its buffer."""
        swap = self._draft(Lane.NVME_STATE_OUT, Op.SWAP_OUT, unit, swap_in.piece)
        state_bytes = self._program.decisions.state_bytes_per_param
        swap.num_bytes = (state_bytes + written_weight_bytes(self._program, unit)) * num_params
        swap.after = [updated]
        swap_in.after_previous.append(swap.key)  # not before last iteration's state is back
        where.append(swap)
        self._swaps.append((swap_in, swap))
        return swap

    def recycle(self) -> None:
        """Let the first reads of an iteration wait for the buffers that the previous one used last."""
        count = self._program.decisions.num_nvme_slots
        for first, (swap_in, _) in enumerate(self._swaps[:count]):
            swap_in.after_previous.append(self._swaps[first::count][-1][1].key)

    def _draft(self, lane: Lane, op: Op, unit: Unit, piece: int) -> Draft:
        draft = Draft(f"{op}:{unit.name}:{piece}", lane, op, Phase.UPDATE, unit.name, piece=piece)
        return self._program.add(draft)
