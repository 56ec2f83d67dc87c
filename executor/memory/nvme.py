"""State on NVMe, and the host buffers for reading and writing it.

The file of optimizer state has one record per piece. If parameters are on NVMe too, the record begins
with the piece's weights. If the weight is in the state, as in float32, this holds anyway. So an update writes
weights and state at once, and a read of parameters reads the beginning of every piece's record. Each part begins at a
block.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Final, final

import torch

from executor.checkpoint.source import Key
from executor.direct_io import BLOCK_BYTES, in_blocks, pages
from executor.memory.arenas import Arena
from executor.memory.nvme_files import Storage
from executor.memory.pieces import DTYPES, State, as_state, pieces_of
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering.storage import spill_rooms
from planner.schedule.tasks import MemoryClass

_SCRATCH_BYTES: Final = 1 << 20


@final
@dataclasses.dataclass(frozen=True, slots=True)
class UnreadBytes:
    """A range of bytes that are somewhere else. It is sliced like a tensor, and read only when it is copied.

    Attributes:
        read_range: reads the bytes between its first two arguments; the others are those of :meth:`read`.
        start, stop: the range.
    """

    read_range: Callable[[int, int, torch.Tensor, torch.Tensor], None]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, part: slice) -> "UnreadBytes":
        start, stop, _ = part.indices(len(self))
        return UnreadBytes(self.read_range, self.start + start, self.start + stop)

    def read(self, target: torch.Tensor, scratch: torch.Tensor) -> None:
        """Read the current version into ``target``, uint8, through ``scratch``, uint8, which has whole blocks."""
        self.read_range(self.start, self.stop, target, scratch)


@final
class StoredState:
    """Optimizer state and gradients on NVMe, and the host buffers that they pass through. It begins without values.

    See [Note: Host buffers] in :mod:`planner.lowering.storage`. A buffer belongs to one piece from :meth:`swap_in` to
    :meth:`swap_out`, in the order of the schedule. Between iterations all buffers are free. In a buffer, a piece's
    record is followed by its gradient, if it is spilled.

    Args:
        slot_of: slot of each unit whose weights are not resident.
        storage: takes the files.

    Attributes:
        file: the state, with one record per piece.
        landing: for each unit whose parameters are on NVMe, a buffer for the weights of each piece, uint8, whole
            blocks. Units with the same slot share these buffers.
        rooms: the host memory in which the gradient of each piece arrives that is spilled, uint8, whole blocks. Pieces
            that do not need it at the same time share memory.

    Raises:
        ValueError: no folder was given.
        StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
        DeviceMemoryError: the host has too little memory for the buffers.
    """

    def __init__(
        self, units: tuple[Unit, ...], decisions: Decisions, slot_of: Mapping[str, int], host: Arena, storage: Storage
    ) -> None:
        self._dtype = dtype = DTYPES[decisions.precision.weight_bytes]
        self._pieces = {
            (unit.name, piece.index): piece
            for unit in units
            for piece in pieces_of(unit, decisions, 0)
            if piece.place is Place.NVME
        }
        pieces = self._pieces.values()
        self._gradient_bytes = {key: dtype.itemsize * p.num_params for key, p in self._pieces.items() if p.spilled}
        self._spilled = None
        if spilled := self._gradient_bytes:
            self._spilled = storage.take("gradients", spilled, {MemoryClass.GRADIENTS: sum(spilled.values())})
        sizes_bytes: dict[str, list[int]] = {}
        for (name, _), num_bytes in spilled.items():
            sizes_bytes.setdefault(name, []).append(num_bytes)
        planned_bytes, room_of = spill_rooms(units, decisions)
        rooms = host.take_rooms("spilled gradients", MemoryClass.GRADIENTS, room_of, sizes_bytes, planned_bytes)
        self.rooms = {key: rooms[key[0]].pop(0) for key in spilled}
        self._on_nvme: set[Key] = set()  # pieces whose gradients were written, and not fetched since
        parts_bytes = [
            (piece.stored_weight_bytes, piece.state_bytes, spilled.get(key, 0)) for key, piece in self._pieces.items()
        ]
        most = {MemoryClass.OPTIMIZER: max(map(sum, parts_bytes))}
        room_bytes = max(sum(map(in_blocks, parts)) for parts in parts_bytes)
        self._ring = [
            host.take_blocks(f"nvme slot {i}", most, BLOCK_BYTES, room_bytes=room_bytes)
            for i in range(min(decisions.num_nvme_slots, len(pieces)))
        ]
        read = [unit for unit in units if decisions.units[unit.name].params == "nvme" and unit.name in slot_of]
        self.landing = host.take_rooms(
            "buffer of slot",
            MemoryClass.PARAMETERS,
            slot_of,
            {unit.name: [dtype.itemsize * count for count in decisions.piece_params(unit)] for unit in read},
        )
        self.file = storage.take(
            "optimizer",
            {key: piece.record_bytes for key, piece in self._pieces.items()},
            {
                MemoryClass.OPTIMIZER: sum(piece.state_bytes for piece in pieces),
                MemoryClass.PARAMETERS: sum(piece.stored_weight_bytes for piece in pieces),
            },
            "the optimizer state",
            num_versions=2,
        )
        self._held: dict[Key, torch.Tensor] = {}  # pieces that have a buffer now, uint8, whole blocks
        self._loaded: set[Key] = set()  # those whose state is in it
        self._changed: set[Key] = set()  # those whose state in it is newer than in the file

    def read_weights(self, unit: str) -> None:
        """Read the weights of a unit into its landing buffers."""
        for index, buffer in enumerate(self.landing[unit]):
            self._read((unit, index), buffer, 0)

    def swap_in(self, key: Key, slot: int, *, reads: bool) -> None:
        """Give a piece a buffer. If ``reads``, read its state and its spilled gradient into the buffer."""
        assert key not in self._held
        self._held[key] = self._ring[slot]
        if reads:
            self.state(key)

    def state(self, key: Key) -> State:
        """Return the state of a piece that has a buffer, master copy first. Read it if that has not been done."""
        buffer, piece = self._held[key], self._pieces[key]
        if key not in self._loaded:
            self._read(key, buffer[piece.state_start : piece.record_bytes], piece.state_start)
            self._fetch_gradient(key, buffer[piece.record_bytes :])
            self._loaded.add(key)
        return self._state_in(key, buffer)

    def gradient(self, key: Key) -> torch.Tensor:
        """Return a piece's spilled gradient. It is valid after the piece's state has been read."""
        start = self._pieces[key].record_bytes
        return self._held[key][start : start + self._gradient_bytes[key]].view(self._dtype)

    def weights(self, key: Key) -> torch.Tensor | None:
        """Return the memory to which an update writes a piece's weights; ``None`` if the master copy is the weight."""
        num_bytes = self._pieces[key].stored_weight_bytes
        return self._held[key][:num_bytes].view(self._dtype) if num_bytes else None

    def restore_weights(self, key: Key, target: torch.Tensor) -> None:
        """Read a piece's weights of the last step into ``target``: its state begins with them, or with masters."""
        scratch, values, piece = torch.from_numpy(pages(_SCRATCH_BYTES)), self.values(key)[0], self._pieces[key]
        stored = torch.empty(len(target), dtype=piece.form[0].dtype, device="cpu")
        values.read(stored.view(torch.uint8), scratch)
        target.copy_(stored)

    def spill(self, key: Key) -> None:
        """Write a piece's gradient from its host memory to NVMe."""
        assert self._spilled is not None
        self._spilled.write(key, self.rooms[key])
        self._on_nvme.add(key)

    def has_spilled(self, key: Key) -> bool:
        """Return whether a piece's gradient has left the host memory in which it arrived."""
        return key in self._on_nvme or key in self._loaded

    def take_back_gradient(self, key: Key) -> None:
        """Bring a spilled gradient back to the host memory in which it arrived. Its update reads it anew."""
        room = self.rooms[key]
        if key in self._loaded:
            arrived = self.gradient(key).view(torch.uint8)
            room[: len(arrived)].copy_(arrived)
        self._fetch_gradient(key, room)

    def spill_again(self, key: Key) -> None:
        """Write a gradient that was taken back to NVMe, so that its update reads it."""
        self.spill(key)
        self._loaded.discard(key)

    def set_changed(self, key: Key) -> None:
        """Mark a piece's buffer as newer than the file. Its weights and state must be complete."""
        self._changed.add(key)

    def swap_out(self, key: Key) -> None:
        """Write a piece's buffer if it has changed, and free it."""
        if key in self._changed:
            self.file.write(key, self._held[key])
        self._loaded.discard(key)
        self._changed.discard(key)
        del self._held[key]

    @contextlib.contextmanager
    def at_rest(self, key: Key, *, reads: bool = True, writes: bool = False) -> Iterator[State]:
        """Return a context with a piece's state, for use between iterations.

        If ``writes``, it writes the state at the end.

        Unless ``reads``, the state is zero.
        """
        assert not self._held, "buffers are in use"
        piece, buffer = self._pieces[key], self._ring[0]
        if reads:
            self._read(key, buffer[piece.state_start : piece.record_bytes], piece.state_start)
        else:
            buffer.zero_()
        state = self._state_in(key, buffer)
        yield state
        if writes:
            if piece.stored_weight_bytes:  # they are rounded from the master copy
                assert isinstance(state[0], torch.Tensor)  # else the weight is in it
                buffer[: piece.stored_weight_bytes].view(self._dtype).copy_(state[0])
            self.file.write(key, buffer)

    def values(self, key: Key) -> list[UnreadBytes]:
        """Return the tensors of a piece's state as byte ranges of the file, see :meth:`UnitState.tensors`."""
        piece = self._pieces[key]
        sizes = [buffer.num_bytes(piece.num_params) for buffer in piece.form]
        ends = itertools.accumulate(sizes, initial=piece.state_start)
        read = functools.partial(self._read_range, key)
        return [UnreadBytes(read, *ends_of) for ends_of in itertools.pairwise(ends)]

    def _state_in(self, key: Key, buffer: torch.Tensor) -> State:
        piece = self._pieces[key]
        return as_state(piece.state_in(buffer[piece.state_start :]), splits=piece.splits)

    def _read(self, key: Key, buffer: torch.Tensor, start: int) -> None:
        if self.file.is_written(key):
            self.file.read(key, buffer, start)
        else:  # only padding, see [Note: Shards] in executor.memory.pieces
            buffer.zero_()

    def _read_range(self, key: Key, start: int, stop: int, target: torch.Tensor, scratch: torch.Tensor) -> None:
        """Read any bytes of a piece's record; see :class:`UnreadBytes`."""
        if not self.file.is_written(key):  # only padding, see [Note: Shards] in executor.memory.pieces
            target.zero_()
            return
        at = start
        while at < stop:
            block = at // BLOCK_BYTES * BLOCK_BYTES
            end = min(in_blocks(stop), block + len(scratch))
            self.file.read(key, scratch[: end - block], block)
            last = min(end, stop)
            target[at - start : last - start].copy_(scratch[at - block : last - block])
            at = last

    def _fetch_gradient(self, key: Key, buffer: torch.Tensor) -> None:
        """Read a piece's gradient into its part of a buffer, if one was spilled since the last fetch."""
        if key in self._on_nvme:
            assert self._spilled is not None
            self._on_nvme.remove(key)
            self._spilled.read(key, buffer)
