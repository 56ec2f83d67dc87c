"""Optimizer state that lives on NVMe: on its way to the host, through an update there, and back.

[Note: Host buffers] State passes through a ring of ``num_nvme_slots`` host buffers of one size: a subgroup is read as
soon as the one that used its buffer before has been written back. One buffer reads, updates and writes in turn; with
more, one subgroup is read or written while another is updated.
"""

from planner.decisions import Decisions, GradientPath, Place
from planner.graph import Unit
from planner.lowering.program import Draft, Program
from planner.schedule import Lane, Op, Phase

# DeepSpeed's swapper: gradients of this many units may wait on the host to be written, its usual ``buffer_count``.
_SWAPPER_SLOTS = 20


class SpillRooms:
    """The memory on the host that gradients arrive in before they are written to NVMe.

    With one micro-batch they only pass, through a ring of ``num_gradient_slots`` rooms of one size; of several they are
    added up there, so that every unit has a room of its own. Other engines take memory as gradients come.

    Attributes:
        sizes_bytes: of every room.
        room_of: for every unit of which a gradient is spilled, its room.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions) -> None:
        spills = decisions.spill_gradients and decisions.gradient_path is GradientPath.ONCE
        sizes_bytes = {
            unit.name: decisions.spilled_bytes_per_param * num_params
            for unit in reversed(units)
            if spills and (num_params := sum(n for n, place in decisions.placed_pieces(unit) if place is Place.NVME))
        }
        self.sizes_bytes = list(sizes_bytes.values())
        if decisions.num_micro_batches == 1:
            count = min(num_spill_slots(decisions), len(sizes_bytes))
            self.sizes_bytes = [max(sizes_bytes.values(), default=0)] * count
        self.room_of = {name: i % len(self.sizes_bytes) for i, name in enumerate(sizes_bytes)}


def num_spill_slots(decisions: Decisions) -> int:
    """Return how many units' gradients may be on the host on their way to NVMe."""
    return decisions.num_gradient_slots if decisions.gradient_path is GradientPath.ONCE else _SWAPPER_SLOTS


def spilled_bytes(program: Program) -> int:
    """Return the bytes per parameter of gradients that wait on NVMe."""
    return program.decisions.spilled_bytes_per_param if program.decisions.spill_gradients else 0


def spill(program: Program, unit: Unit, backward: Draft, flushed: str, spilled: list[str]) -> None:
    """Write the gradient of the last micro-batch, the sum of all, to NVMe; ``spilled`` lists the writes so far."""
    num_params = program.placed_params(unit, Place.NVME)
    last = backward.micro_batch == program.decisions.num_micro_batches - 1
    if not (program.decisions.spill_gradients and num_params and last):
        return
    if len(spilled) >= (count := num_spill_slots(program.decisions)):
        backward.after.append(spilled[-count])
    key = f"{Op.SPILL}:{unit.name}"
    draft = Draft(key, Lane.NVME_STATE_OUT, Op.SPILL, Phase.BACKWARD, unit.name, backward.micro_batch)
    draft.num_bytes, draft.after = spilled_bytes(program) * num_params, [flushed]
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
        swap.num_bytes = (state_bytes + self._program.decisions.stored_weight_bytes(unit.name)) * num_params
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
