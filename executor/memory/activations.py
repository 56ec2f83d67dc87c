"""Activations that leave the device between forward and backward: to the host, or by way of it to NVMe.

What leaves, and how it is used when it is back, says [Note: Kept products] in :mod:`executor.memory.recompute_cache`.

[Note: Room] A unit has exactly the room that the plan counts. What a model's products make beyond that (a device whose
attention is not fused hands on all scores) stays, and is made again: the least of it that makes the rest fit, and the
latest of equals, as recomputation may not reach it. So the bits do not depend on it, but how long backward takes does.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from executor.devices.backend import Backend
from executor.direct_io import BLOCK_BYTES, in_blocks
from executor.listener import Marks
from executor.memory.arenas import Arena
from executor.memory.nvme_files import RecordFile, as_bytes, folder_of
from executor.memory.recompute_cache import Keeping, Leaving, Taking, Visit, changed
from planner.decisions import Decisions
from planner.graph import Unit, segments
from planner.lowering.activations import OffloadRooms
from planner.schedule.tasks import Lane, MemoryClass


@final
class OffloadedActivations:
    """Everything of the model's activations that leaves.

    Args:
        units: in forward order.
        decisions: which of them offload.
        folder: for those that go on to NVMe.
        rank: this one, which has a file of its own there.
        host: where their rooms are taken.
        backend: the device.

    Attributes:
        file: what is on NVMe, a record for each unit; ``None`` if nothing is.

    Raises:
        ValueError: it is not said where on NVMe.
        StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
        DeviceMemoryError: the host has too little.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        folder: Path | None,
        rank: int,
        host: Arena,
        backend: Backend,
    ) -> None:
        self._backend = backend
        rooms = OffloadRooms(units, decisions)
        self._room = {
            name: host.take(f"{name} activations", MemoryClass.ACTIVATIONS, num_bytes, torch.uint8)
            for name, num_bytes in rooms.on_host.items()
        }
        self._room |= _take_ring(rooms, segments(units), host)
        self._num_bytes = sum(rooms.on_nvme.values())
        self._record = {name: record for record, name in enumerate(rooms.on_nvme)}
        what = "activations"
        self.file = (
            RecordFile(folder_of(folder, what) / f"{what}-rank-{rank}.state", list(rooms.on_nvme.values()), 1, what)
            if self._record
            else None
        )
        self._visit: dict[str, Visit] = {}  # the latest, by unit

    @property
    def by_class(self) -> dict[MemoryClass, int]:
        """Bytes on NVMe by what they are for, without what rounds them up to blocks."""
        return {MemoryClass.ACTIVATIONS: self._num_bytes} if self._num_bytes else {}

    def begin(self, names: Sequence[str]) -> Visit:
        """Begin the forward of a segment with these units."""
        visit = Visit(names)
        self._visit |= dict.fromkeys(names, visit)
        return visit

    def leave(self, unit: str) -> None:
        """Copy to the host what a unit has made, and wait until the device has it no more.

        Raises:
            ActivationError: a tensor was changed while it left.
        """
        visit, room = self._visit[unit], self._room[unit]
        _assign(visit, unit, len(room))
        leaving = list(visit.moved(unit))
        for tensor in leaving:
            self._backend.copy(room[tensor.start : tensor.start + tensor.num_bytes], tensor.flat())
        # Memory is free for the next segment when this task ends, and not when the host gets to know of that.
        self._backend.seconds(self._backend.mark(Lane.ACTIVATION_OUT))
        if not all(tensor.is_as_made for tensor in leaving):
            raise changed(f"what {unit} was given or made")
        for tensor in (*leaving, *(t for product in visit.made[unit] for t in product.tensors)):
            tensor.tensor = None

    def evict(self, unit: str) -> None:
        """Write to NVMe what has left with a unit."""
        assert self.file is not None
        self.file.write(self._record[unit], as_bytes(_in_blocks(self._room[unit])))

    def recall(self, unit: str) -> None:
        """Read what is to come back with a unit from NVMe into host memory."""
        assert self.file is not None
        self.file.read(self._record[unit], as_bytes(_in_blocks(self._room[unit])))

    def close(self) -> None:
        """Remove the file. Closing twice is allowed."""
        if self.file is not None:
            self.file.close()

    def come_back(self, unit: str) -> None:
        """Bring back to the device what has left with a unit, into memory that goes when it has been used."""
        room = self._room[unit]
        for tensor in self._visit[unit].moved(unit):
            flat = self._backend.scratch(tensor.shape.numel(), tensor.dtype)
            self._backend.copy(flat.view(torch.uint8), room[tensor.start : tensor.start + tensor.num_bytes])
            tensor.tensor = flat.as_strided(tensor.shape, tensor.stride)
            tensor.version = tensor.tensor._version

    def forget(self, unit: str) -> None:
        """Give up what came back for a unit's segment and was not used."""
        self._visit[unit].forget()

    def forget_all(self) -> None:
        """Give up everything, as backward has ended: also of segments where nothing needed a gradient."""
        for visit in self._visit.values():
            visit.forget()
        self._visit.clear()


def _take_ring(rooms: OffloadRooms, of_model: Sequence[Sequence[Unit]], host: Arena) -> dict[str, torch.Tensor]:
    """Take the slots that activations on NVMe pass through; return each unit's room in its segment's."""
    through = [[unit.name for unit in segment] for segment in of_model if segment[0].name in rooms.on_nvme]
    sizes = [[in_blocks(rooms.on_nvme[name]) for name in names] for names in through]
    room_bytes = max((sum(parts) for parts in sizes), default=0)
    planned = {MemoryClass.ACTIVATIONS: rooms.slot_bytes}
    slots = [
        host.take_blocks(f"activation slot {i}", planned, BLOCK_BYTES, room_bytes=room_bytes)
        for i in range(rooms.num_slots)
    ]
    found: dict[str, torch.Tensor] = {}
    for names, parts in zip(through, sizes, strict=True):
        slot = slots[rooms.slot_of[names[0]]]
        cut = torch.split(slot[: sum(parts)], parts)
        found |= {name: part[: rooms.on_nvme[name]] for name, part in zip(names, cut, strict=True)}
    return found


def _in_blocks(room: torch.Tensor) -> torch.Tensor:
    """Return a room in the ring with what rounds it up to whole blocks."""
    return room.as_strided((in_blocks(len(room)),), (1,))


def _assign(visit: Visit, unit: str, room_bytes: int) -> None:
    """Say what of a unit leaves, and where to; see [Note: Room]."""
    end = 0
    for tensor in visit.given if unit == next(iter(visit.made)) else ():
        if tensor.is_dense and end + tensor.num_bytes <= room_bytes:  # else it stays: nothing can make it again
            tensor.start = end
            end += tensor.num_bytes
    chosen = [p for p in visit.made[unit] if all(tensor.is_as_made and tensor.is_dense for tensor in p.tensors)]
    while (excess := sum(product.num_bytes for product in chosen) - (room_bytes - end)) > 0:
        enough = [product for product in reversed(chosen) if product.num_bytes >= excess]
        chosen.remove(
            min(enough, key=lambda product: product.num_bytes)
            if enough
            else max(reversed(chosen), key=lambda product: product.num_bytes)
        )
    for product in chosen:
        product.leaves_device = True
        for tensor in product.tensors:
            tensor.start = end
            end += tensor.num_bytes


def _leaving(args: Sequence[Any]) -> list[torch.Tensor]:
    """Return what leaves of what a segment is given: tensors with a gradient, or else the first of floating point.

    The rest are masks and positions, which all segments are given.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    return trained or [tensor for tensor in tensors if tensor.is_floating_point()][:1]


class SegmentOffload:
    """What :func:`torch.utils.checkpoint.checkpoint` needs to offload one segment.

    Args:
        activations: of the model.
        names: of the segment's units, in forward order.
        marks: knows which unit computes, and wants to know when the segment is about to run again, before anything
            that came back is used.
    """

    def __init__(self, activations: OffloadedActivations, names: Sequence[str], marks: Marks) -> None:
        self._activations = activations
        self._names = names
        self._marks = marks

    @contextlib.contextmanager
    def forward(self, args: Sequence[Any]) -> Iterator[Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]]:
        """Enter a forward with these arguments: yields what makes the modes of both runs."""
        visit, backend = self._activations.begin(self._names), self._activations._backend
        leaving = {tensor.untyped_storage()._cdata for tensor in _leaving(args)}

        def pack(tensor: torch.Tensor) -> Leaving | torch.Tensor:
            if tensor.untyped_storage()._cdata not in leaving:
                return tensor
            visit.given.append(Leaving.of(tensor))
            return visit.given[-1]

        def unpack(kept: Leaving | torch.Tensor) -> torch.Tensor:
            self._run_again()
            if isinstance(kept, torch.Tensor):
                return kept
            return kept.take(backend)

        def modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            return Keeping(visit, self._unit), Taking(visit, backend, self._run_again)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield modes

    def _run_again(self) -> None:
        self._marks.at_forward(self._names[0])

    def made_again(self) -> None:
        """Give up what the segment's second run did not need."""
        self._activations.forget(self._names[0])

    def _unit(self) -> str:
        """Return the unit of the segment that computes; what comes before the first belongs to that."""
        unit = self._marks.unit
        return unit if unit in self._names else self._names[0]
