"""Optimizer state on NVMe: its way to the host, through an update, and back.

[Note: Host buffers] State passes through a ring of ``num_nvme_slots`` host buffers of one size. A subgroup is read as
soon as the previous subgroup in its buffer has been written back. With one buffer, reads, updates and writes take
turns. With more, one subgroup is read or written while another is updated.
"""

from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering.program import LoweredUnit, Program
from planner.schedule.tasks import Lane, Op, Phase, Task


def spill_rooms(units: tuple[Unit, ...], decisions: Decisions) -> tuple[list[int], dict[str, int]]:
    """Return the host buffers for gradients on their way to NVMe.

    With one micro-batch, gradients pass through a ring of ``num_gradient_slots`` buffers of one size. With several,
    they accumulate there, so every unit has its own buffer.

    Returns:
        The bytes of every buffer, and the buffer of every unit with spilled gradients, by name.
    """
    of_units = {
        unit.name: decisions.spilled_bytes_per_param * num_params
        for unit in reversed(units)
        if decisions.spill_gradients
        and (num_params := sum(n for n, place in decisions.placed_pieces(unit) if place is Place.NVME))
    }
    sizes_bytes = list(of_units.values())
    if decisions.num_micro_batches == 1:
        sizes_bytes = [max(sizes_bytes, default=0)] * min(decisions.num_gradient_slots, len(sizes_bytes))
    return sizes_bytes, {name: i % len(sizes_bytes) for i, name in enumerate(of_units)}


def spilled_bytes(decisions: Decisions) -> int:
    """Return the bytes per parameter of gradients that wait on NVMe."""
    return decisions.spilled_bytes_per_param if decisions.spill_gradients else 0


def spill(
    program: Program, unit: LoweredUnit, backward: Task, flushed: Task, spilled: list[Task], num_slots: int
) -> None:
    """Write the accumulated gradient to NVMe after the last micro-batch.

    Args:
        program: the program to extend.
        unit: whose gradient it is.
        backward: the task that makes it.
        flushed: its copy to the host.
        spilled: the writes so far.
        num_slots: units whose gradients may be on the host on their way to NVMe.
    """
    last = backward.micro_batch == program.decisions.num_micro_batches - 1
    if not (unit.amounts.from_nvme and last and program.decisions.spill_gradients):
        return
    if len(spilled) >= num_slots:
        backward.after += (spilled[-num_slots].index,)
    unit.spill = program.draft(
        Lane.NVME_STATE_OUT, Op.SPILL, Phase.BACKWARD, unit, backward.micro_batch, (flushed.index,)
    )
    unit.spill.num_bytes = spilled_bytes(program.decisions) * sum(unit.amounts.from_nvme)
    program.behind[backward.index].append(unit.spill)
    spilled.append(unit.spill)


class Ring:
    """Buffers for state, used in turn in the order of updates.

    Args:
        num_slots: how many there are.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._passages: list[tuple[Task, Task]] = []  # in, out

    def take(self, arrival: Task) -> None:
        """Give the next arrival a buffer. It waits until the buffer is free."""
        arrival.slot = len(self._passages) % self._num_slots
        if len(self._passages) >= self._num_slots:
            arrival.after += (self._passages[-self._num_slots][1].index,)

    def free(self, arrival: Task, leaving: Task) -> None:
        """Free the buffer of an arrival when its data has left."""
        arrival.after_previous += (leaving.index,)  # only after the previous iteration's write
        self._passages.append((arrival, leaving))

    def recycle(self) -> None:
        """Make the first arrivals of an iteration wait for the buffers that the previous iteration used last."""
        for first, (arrival, _) in enumerate(self._passages[: self._num_slots]):
            arrival.after_previous += (self._passages[first :: self._num_slots][-1][1].index,)
