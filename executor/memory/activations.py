"""Offloads saved activations between forward and backward: to the host, or through the host to NVMe.

[Note: Saved products] in :mod:`executor.memory.recompute_cache` describes which tensors are offloaded, and how backward
uses them.

A unit has exactly the host memory that the plan counts. The outputs of its products may be larger: without
fused attention, for example, they include all attention scores. In this case some outputs are not offloaded but
recomputed: as few bytes as possible, and among equal choices the latest outputs, which recomputation may not reach.
This choice changes the time of backward, but never the bits of the result.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from executor.callbacks import ModuleCallbacks
from executor.devices.backend import Backend
from executor.memory.arenas import Arena
from executor.memory.nvme_files import Storage, whole_blocks
from executor.memory.recompute_cache import (
    ReuseProducts,
    SavedTensor,
    SegmentActivations,
    modified_in_place,
    saving_products,
)
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.activations import OffloadRooms
from planner.schedule.tasks import Lane, MemoryClass


@final
class OffloadedActivations:
    """All activations of a model that are offloaded.

    Args:
        storage: takes the file for activations on NVMe.

    Attributes:
        rooms: the rooms of a run of a segment, and their names.
        file: activations on NVMe, one record per unit; ``None`` if there are none.

    Raises:
        ValueError: activations go to NVMe, but no folder was given.
        StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
        DeviceMemoryError: the host has too little memory.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        host: Arena,
        storage: Storage,
        backend: Backend,
    ) -> None:
        self._backend = backend
        self.rooms = rooms = OffloadRooms(units, decisions)
        self._room = {
            name: host.take(f"{name} activations", MemoryClass.ACTIVATIONS, num_bytes, torch.uint8)
            for name, num_bytes in rooms.on_host.items()
        }
        through = rooms.through
        ring = host.take_rooms(
            "activation slot",
            MemoryClass.ACTIVATIONS,
            rooms.slot_of,
            {names[0]: [rooms.on_nvme[name] for name in names] for names in through},
            [rooms.slot_bytes] * rooms.num_slots,
        )
        for names in through:
            self._room |= {name: room[: rooms.on_nvme[name]] for name, room in zip(names, ring[names[0]], strict=True)}
        self.file = None
        if on_nvme := rooms.on_nvme:
            self.file = storage.take("activations", on_nvme, {MemoryClass.ACTIVATIONS: sum(on_nvme.values())})
        self._on_nvme = on_nvme.keys()
        self._segments: dict[str, SegmentActivations] = {}  # the latest run of each segment, by room
        self._unwritten: set[str] = set()  # rooms whose activations are in a slot on their way to NVMe

    @property
    def is_in_use(self) -> bool:
        """Whether a backward may still ask for activations."""
        return any(not segment.is_dropped for segment in self._segments.values())

    @contextlib.contextmanager
    def forward(
        self, names: Sequence[str], callbacks: ModuleCallbacks, args: Sequence[Any]
    ) -> Iterator[Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]]:
        """Return a context for a forward of a segment; it yields the ``context_fn`` of both runs of ``checkpoint``.

        Args:
            names: names of the segment's units, in forward order.
            callbacks: report which unit computes. They are called when recomputation begins, before it uses reloaded
                tensors.
            args: arguments of the forward.
        """
        micro_batch, tile = callbacks.micro_batch, callbacks.tile
        segment = SegmentActivations({name: self.rooms.name(name, micro_batch, tile) for name in names}, micro_batch)
        self._segments |= dict.fromkeys(segment.rooms.values(), segment)
        offloadable = {tensor.untyped_storage()._cdata for tensor in offloadable_inputs(args)}

        def pack(tensor: torch.Tensor) -> SavedTensor | torch.Tensor:
            # A parameter (DeBERTa gives every layer its positions) moves as its unit does, and has values only then.
            stays = isinstance(tensor, torch.nn.Parameter) or not _has_memory(tensor)
            if stays or tensor.untyped_storage()._cdata not in offloadable:
                return tensor
            segment.inputs.append(SavedTensor.of(tensor))
            return segment.inputs[-1]

        def begin_recompute() -> None:
            callbacks.on_forward(names[0])
            if callbacks.on_demand:
                self._bring_back(segment)

        def unpack(saved: SavedTensor | torch.Tensor) -> torch.Tensor:
            begin_recompute()
            if isinstance(saved, torch.Tensor):
                return saved
            return saved.restore(self._backend, keep=segment.is_kept)

        def unit() -> str:  # operators before the segment's first unit belong to that unit
            return callbacks.unit if callbacks.unit in names else names[0]

        def modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            return saving_products(segment, unit), ReuseProducts(segment, self._backend, begin_recompute)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield modes
        segment.in_forward = False

    def offload(self, unit: str, name: str) -> None:
        """Copy a unit's activations to a room, free them on the device, and wait until that is done.

        A segment that forward has passed over has none.

        Raises:
            ActivationError: a tensor was modified in place before it was copied.
        """
        if (segment := self._latest(name)) is None:
            return
        room = self._room[name]
        _assign(segment, unit, len(room))
        tensors = list(segment.offloaded(unit))
        for tensor in tensors:
            self._backend.copy(room[tensor.start : tensor.start + tensor.num_bytes], tensor.flat())
        # When this task has ended, the next segment may reuse the memory. So wait for the copies here.
        self._backend.event_time_s(self._backend.record_event(Lane.ACTIVATION_OUT))
        for product in segment.products_of[unit]:
            product.is_offloaded &= product.is_unmodified  # if it has changed since it was chosen, it runs again
        if not all(tensor.is_unmodified for tensor in segment.offloaded(unit)):
            raise modified_in_place(f"an input of {unit}")
        for tensor in (*tensors, *(t for product in segment.products_of[unit] for t in product.tensors)):
            tensor.tensor = None
        segment.moved.add(unit)
        segment.away.add(unit)
        if name in self._on_nvme:
            self._unwritten.add(name)

    def evict(self, name: str) -> None:
        """Write offloaded activations to NVMe; ``name`` is that of their room."""
        assert self.file is not None
        self.file.write(name, whole_blocks(self._room[name]))
        self._unwritten.discard(name)

    def end_evictions(self) -> None:
        """Write all offloaded activations to NVMe that are on their way there, when no task of the plan runs."""
        for name in tuple(self._unwritten):
            self.evict(name)

    def _bring_back(self, segment: SegmentActivations) -> None:
        """Bring back the activations of a run of a segment that the plan has offloaded and not reloaded.

        Those of an earlier run stay away: their memory on the host is another run's.
        """
        for unit in tuple(segment.away):
            if self._segments[name := segment.rooms[unit]] is segment:
                if name in self._on_nvme:
                    self.recall(name)
                self._reload(segment, unit)

    def recall(self, name: str) -> None:
        """Read offloaded activations from NVMe into host memory; ``name`` is that of their room."""
        assert self.file is not None
        self.file.read(name, whole_blocks(self._room[name]))

    def reload(self, unit: str, name: str) -> None:
        """Copy activations back to the device. Their memory there is freed when backward has used them."""
        if (segment := self._latest(name)) is not None:
            self._reload(segment, unit)

    def _latest(self, name: str) -> SegmentActivations | None:
        """Return the run of a segment that has filled a room; ``None`` if forward has passed over it."""
        segment = self._segments.get(name)
        return None if segment is None or segment.is_dropped else segment

    def _reload(self, segment: SegmentActivations, unit: str) -> None:
        room = self._room[segment.rooms[unit]]
        for tensor in segment.offloaded(unit):
            flat = self._backend.scratch(tensor.shape.numel(), tensor.dtype)
            self._backend.copy(flat.view(torch.uint8), room[tensor.start : tensor.start + tensor.num_bytes])
            tensor.tensor = flat.as_strided(tensor.shape, tensor.stride)
            tensor.version = tensor.tensor._version
        segment.away.discard(unit)

    def drop_all(self) -> None:
        """Free all tensors, including those of segments without gradients."""
        for segment in self._segments.values():
            segment.drop()

    def drop(self, micro_batch: int, turn: int) -> None:
        """Free all tensors of a micro-batch whose backward in a round has ended, see :meth:`drop_all`."""
        name, turn_of = self.rooms.name, self.rooms.turn_of
        for segment in self._segments.values():
            first = next(iter(segment.rooms))
            if turn_of[first] == turn and name(first, segment.micro_batch) == name(first, micro_batch):
                segment.drop()


def _assign(segment: SegmentActivations, unit: str, room_bytes: int) -> None:
    """Choose the tensors of a unit to offload, and their offsets in its host memory; see the module."""
    end = 0
    for tensor in segment.inputs if unit == next(iter(segment.products_of)) else ():
        if tensor.is_dense and end + tensor.num_bytes <= room_bytes:  # else it stays: an input cannot be recomputed
            tensor.start = end
            end += tensor.num_bytes
    chosen = [p for p in segment.products_of[unit] if p.is_unmodified and all(t.is_dense for t in p.tensors)]
    while (excess := sum(product.num_bytes for product in chosen) - (room_bytes - end)) > 0:
        enough = [product for product in reversed(chosen) if product.num_bytes >= excess]
        chosen.remove(
            min(enough, key=lambda product: product.num_bytes)
            if enough
            else max(reversed(chosen), key=lambda product: product.num_bytes)
        )
    for product in chosen:
        product.is_offloaded = True
        for tensor in product.tensors:
            tensor.start = end
            end += tensor.num_bytes


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory of its own: it is not sparse, and no transform of ``torch.func`` runs."""
    return tensor.layout is torch.strided and not is_functorch_wrapped_tensor(tensor)


def offloadable_inputs(args: Sequence[Any]) -> list[torch.Tensor]:
    """Return the inputs of a segment to offload: those that need gradients, or else the first floating-point input.

    The other inputs are masks and positions, which all segments share.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and _has_memory(arg)]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    return trained or [tensor for tensor in tensors if tensor.is_floating_point()][:1]
