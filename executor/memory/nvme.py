"""State on NVMe, and the host buffers for reading and writing it.

[Note: Records] The file of optimizer state has one record per piece. If parameters are on NVMe too, the record begins
with the piece's weights. If the weight is in the state, as in float32, this holds anyway. So an update writes
weights and state at once, and a read of parameters reads the beginning of every piece's record. Each part begins at a
block.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, final

import torch

from executor.direct_io import BLOCK_BYTES, in_blocks, pages
from executor.memory.arenas import Arena
from executor.memory.nvme_files import RecordFile, as_bytes, folder_of
from executor.memory.pieces import DTYPES, State, as_state, state_buffers, state_tensors
from executor.optimizer.split import SplitMaster
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering.storage import SpillRooms
from planner.optimizers import Optimizer
from planner.schedule.tasks import MemoryClass
from planner.subgroups import Subgroup

_SCRATCH_BYTES: Final = 1 << 20

Key = tuple[str, int]
"""Identifies a piece: the name of its unit, and its index within the rank's shard."""


def pieces_on_nvme(units: tuple[Unit, ...], decisions: Decisions) -> dict[Key, Subgroup]:
    """Return all pieces whose state is on NVMe."""
    return {
        (unit.name, index): subgroup
        for unit in units
        for index, (subgroup, place) in enumerate(
            zip(decisions.subgroups(unit), decisions.units[unit.name].update, strict=True)
        )
        if place is Place.NVME
    }


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of a piece in its buffer: weights, state, gradient, each aligned to a block. The first two are its record.

    Attributes:
        num_params: number of parameters of the piece.
        weight_bytes, state_bytes, gradient_bytes: bytes of each part; 0 if it is missing.
        kind: the optimizer that updates it.
        master_bytes: bytes of one value of its master copy.
        splits: whether its master copy is split.
    """

    num_params: int
    weight_bytes: int
    state_bytes: int
    kind: Optimizer
    master_bytes: int
    splits: bool
    gradient_bytes: int

    @property
    def state_start(self) -> int:
        """Offset of its state."""
        return in_blocks(self.weight_bytes)

    @property
    def record_bytes(self) -> int:
        """Length of its record, and offset of its gradient."""
        return self.state_start + in_blocks(self.state_bytes)

    @property
    def room_bytes(self) -> int:
        """Bytes that it takes in a buffer."""
        return self.record_bytes + in_blocks(self.gradient_bytes)

    @property
    def num_bytes(self) -> int:
        """The same, without rounding up to blocks."""
        return self.weight_bytes + self.state_bytes + self.gradient_bytes


@dataclasses.dataclass(slots=True)
class _Held:
    """A piece that has a host buffer now.

    Attributes:
        buffer: uint8, whole blocks.
        is_loaded: whether its state is in it.
        is_changed: whether the state in the buffer is newer than that in the file.
    """

    buffer: torch.Tensor
    is_loaded: bool = False
    is_changed: bool = False


@final
class StoredValues:
    """A range of bytes of a record. It is sliced like a tensor, and read only when it is copied."""

    def __init__(self, file: RecordFile, record: int, start: int, stop: int) -> None:
        self._file = file
        self._record = record
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, part: slice) -> "StoredValues":
        start, stop, _ = part.indices(len(self))
        return StoredValues(self._file, self._record, self._start + start, self._start + stop)

    def read(self, target: torch.Tensor, scratch: torch.Tensor) -> None:
        """Read the current version into ``target``, uint8, through ``scratch``, uint8, which has whole blocks."""
        if not self._file.is_written(self._record):  # only padding, see [Note: Shards] in executor.memory.pieces
            target.zero_()
            return
        at = self._start
        while at < self._stop:
            block = at // BLOCK_BYTES * BLOCK_BYTES
            end = min(in_blocks(self._stop), block + len(scratch))
            self._file.read(self._record, as_bytes(scratch[: end - block]), block)
            stop = min(end, self._stop)
            target[at - self._start : stop - self._start].copy_(scratch[at - block : stop - block])
            at = stop


@final
class SpilledGradients:
    """Gradients that are on NVMe until their update, and the host memory in which they arrive.

    Args:
        rooms: host memory of each piece, uint8, whole blocks. Pieces that do not need it at the same time share memory.
        file: one record per piece, in the order of ``rooms``.
    """

    def __init__(self, rooms: Mapping[Key, torch.Tensor], file: RecordFile) -> None:
        self.rooms = rooms
        self.file = file
        self._record = {key: record for record, key in enumerate(rooms)}
        self._on_nvme: set[Key] = set()

    @classmethod
    def of(
        cls, units: tuple[Unit, ...], decisions: Decisions, folder: Path | None, rank: int, host: Arena
    ) -> Self | None:
        """Return memory and a file for spilled gradients; ``None`` if none are spilled.

        Raises as :meth:`StoredState.of`.
        """
        planned = SpillRooms(units, decisions)
        if not planned.room_of:
            return None
        num_params = {key: piece.num_params for key, piece in pieces_on_nvme(units, decisions).items()}
        item_bytes = decisions.spilled_bytes_per_param
        needed = [0] * len(planned.sizes_bytes)
        starts: dict[Key, int] = {}
        for unit, room in planned.room_of.items():
            start = 0
            for key in (key for key in num_params if key[0] == unit):
                starts[key] = start
                start += in_blocks(item_bytes * num_params[key])
            needed[room] = max(needed[room], start)
        sizes_bytes = [item_bytes * count for count in num_params.values()]
        what = "gradients"
        file = RecordFile(folder_of(folder, what) / f"gradients-rank-{rank}.state", sizes_bytes, 1, what)
        memory = [
            host.take_blocks(f"spilled gradients {i}", {MemoryClass.GRADIENTS: size}, BLOCK_BYTES, room_bytes=needed[i])
            for i, size in enumerate(planned.sizes_bytes)
        ]
        rooms = {
            key: memory[planned.room_of[key[0]]][starts[key] : starts[key] + in_blocks(item_bytes * count)]
            for key, count in num_params.items()
        }
        return cls(rooms, file)

    def spill(self, key: Key) -> None:
        """Write a piece's gradient from its host memory to NVMe."""
        self.file.write(self._record[key], as_bytes(self.rooms[key]))
        self._on_nvme.add(key)

    def is_on_nvme(self, key: Key) -> bool:
        """Return whether a piece's gradient was written, and not fetched since."""
        return key in self._on_nvme

    def fetch(self, key: Key, buffer: torch.Tensor) -> None:
        """Read a piece's gradient into its part of a buffer, if one was spilled since the last fetch."""
        if key in self._on_nvme:
            self._on_nvme.remove(key)
            self.file.read(self._record[key], as_bytes(buffer))


@final
class StoredState:
    """Optimizer state on NVMe, and its ring of host buffers.

    See [Note: Host buffers] in :mod:`planner.lowering.storage`. A buffer belongs to one piece from :meth:`swap_in` to
    :meth:`swap_out`, in the order of the schedule. Between iterations all buffers are free.

    Args:
        ring: host buffers, each uint8 with whole blocks.
        landing: for each unit whose parameters are on NVMe, a buffer for the weights of each piece, uint8, whole
            blocks. Units with the same slot share these buffers.
        file: the state, with one record per piece, in the order of ``layouts``.
        spilled: gradients on NVMe; ``None`` if there are none.
    """

    def __init__(
        self,
        layouts: Mapping[Key, _Layout],
        dtype: torch.dtype,
        ring: Sequence[torch.Tensor],
        landing: Mapping[str, Sequence[torch.Tensor]],
        file: RecordFile,
        spilled: SpilledGradients | None,
    ) -> None:
        self.file = file
        self.landing = landing
        self.spilled = spilled
        self._layouts = layouts
        self._dtype = dtype
        self._ring = ring
        self._record = {key: record for record, key in enumerate(layouts)}
        self._held: dict[Key, _Held] = {}

    @classmethod
    def of(
        cls,
        units: tuple[Unit, ...],
        decisions: Decisions,
        slot_of: Mapping[str, int],
        folder: Path | None,
        rank: int,
        host: Arena,
    ) -> Self | None:
        """Take files and buffers for state on NVMe, without values; return ``None`` if the plan has no state there.

        Raises:
            ValueError: no folder was given.
            StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
            DeviceMemoryError: the host has too little memory for the ring.
        """
        pieces = pieces_on_nvme(units, decisions)
        if not pieces:
            return None
        spilled = SpilledGradients.of(units, decisions, folder, rank, host)
        gradient_bytes = 0 if spilled is None else decisions.spilled_bytes_per_param
        layouts = {
            key: _Layout(
                piece.num_params,
                decisions.stored_weight_bytes(key[0]) * piece.num_params,
                decisions.state_bytes(piece, Place.NVME),
                piece.kind,
                decisions.precision.master_bytes,
                decisions.splits(Place.NVME),
                gradient_bytes * piece.num_params,
            )
            for key, piece in pieces.items()
        }
        planned = {MemoryClass.OPTIMIZER: max(layout.num_bytes for layout in layouts.values())}
        room_bytes = max(layout.room_bytes for layout in layouts.values())
        ring = [
            host.take_blocks(f"nvme slot {i}", planned, BLOCK_BYTES, room_bytes=room_bytes)
            for i in range(min(decisions.num_nvme_slots, len(pieces)))
        ]
        landing = _take_landing(units, decisions, slot_of, host)
        what = "the optimizer state"
        sizes_bytes = [layout.record_bytes for layout in layouts.values()]
        file = RecordFile(folder_of(folder, what) / f"optimizer-rank-{rank}.state", sizes_bytes, 2, what)
        dtype = DTYPES[decisions.precision.weight_bytes]
        return cls(layouts, dtype, ring, landing, file, spilled)

    @property
    def by_class(self) -> dict[MemoryClass, int]:
        """Bytes on NVMe by class, with both versions of state, without rounding up to blocks."""
        layouts = self._layouts.values()
        totals = {
            MemoryClass.OPTIMIZER: 2 * sum(layout.state_bytes for layout in layouts),
            MemoryClass.PARAMETERS: 2 * sum(layout.weight_bytes for layout in layouts),
            MemoryClass.GRADIENTS: sum(layout.gradient_bytes for layout in layouts),
        }
        return {memory_class: num_bytes for memory_class, num_bytes in totals.items() if num_bytes}

    @contextlib.contextmanager
    def writing_masters(self, unit: str, *, reads: bool) -> Iterator[Callable[[int, int, torch.Tensor], None]]:
        """Return a context to write a unit's master copies. It yields a function that takes ranges of them, in order.

        Other state stays the same, or becomes 0 unless ``reads``. Only one piece at a time is in memory.
        """
        current: int | None = None
        master: torch.Tensor | SplitMaster = self._ring[0]
        with contextlib.ExitStack() as piece:

            def keep(index: int, start: int, values: torch.Tensor) -> None:
                nonlocal current, master
                if index != current:
                    piece.close()
                    current = index
                    master = piece.enter_context(self.at_rest((unit, index), reads=reads, writes=True))[0]
                master[start : start + len(values)].copy_(values)

            yield keep

    def read_weights(self, unit: str) -> None:
        """Read the weights of a unit into its landing buffers."""
        for index, buffer in enumerate(self.landing[unit]):
            self._read((unit, index), buffer, 0)

    def swap_in(self, key: Key, slot: int, *, reads: bool) -> None:
        """Give a piece a buffer. If ``reads``, read its state and its spilled gradient into the buffer."""
        assert key not in self._held
        self._held[key] = _Held(self._ring[slot])
        if reads:
            self.state(key)

    def state(self, key: Key) -> State:
        """Return the state of a piece that has a buffer, master copy first. Read it if that has not been done."""
        held, layout = self._held[key], self._layouts[key]
        if not held.is_loaded:
            self._read(key, held.buffer[layout.state_start : layout.record_bytes], layout.state_start)
            if self.spilled is not None:
                self.spilled.fetch(key, held.buffer[layout.record_bytes : layout.room_bytes])
            held.is_loaded = True
        return self._tensors(key, held.buffer)

    def gradient(self, key: Key) -> torch.Tensor:
        """Return a piece's spilled gradient. It is valid after the piece's state has been read."""
        layout = self._layouts[key]
        start = layout.record_bytes
        return self._held[key].buffer[start : start + layout.gradient_bytes].view(self._dtype)

    def weights(self, key: Key) -> torch.Tensor | None:
        """Return the memory to which an update writes a piece's weights; ``None`` if the master copy is the weight."""
        layout = self._layouts[key]
        return self._held[key].buffer[: layout.weight_bytes].view(self._dtype) if layout.weight_bytes else None

    def restore_weights(self, key: Key, target: torch.Tensor) -> None:
        """Read a piece's weights of the last step into ``target``: its state begins with them, or with masters."""
        scratch, values, layout = torch.from_numpy(pages(_SCRATCH_BYTES)), self.values(key)[0], self._layouts[key]
        stored = torch.empty(
            len(target), dtype=self._dtype if layout.splits else DTYPES[layout.master_bytes], device="cpu"
        )
        values.read(stored.view(torch.uint8), scratch)
        target.copy_(stored)

    def has_spilled(self, key: Key) -> bool:
        """Return whether a piece's gradient has left the host memory in which it arrived."""
        held = self._held.get(key)
        return self.spilled is not None and (self.spilled.is_on_nvme(key) or (held is not None and held.is_loaded))

    def take_back_gradient(self, key: Key) -> None:
        """Bring a spilled gradient back to the host memory in which it arrived. Its update reads it anew."""
        assert self.spilled is not None
        room, held = self.spilled.rooms[key], self._held.get(key)
        if held is not None and held.is_loaded:
            arrived = self.gradient(key).view(torch.uint8)
            room[: len(arrived)].copy_(arrived)
        self.spilled.fetch(key, room)

    def spill_again(self, key: Key) -> None:
        """Write a gradient that was taken back to NVMe, so that its update reads it."""
        assert self.spilled is not None
        self.spilled.spill(key)
        if (held := self._held.get(key)) is not None:
            held.is_loaded = False

    def set_changed(self, key: Key) -> None:
        """Mark a piece's buffer as newer than the file. Its weights and state must be complete."""
        self._held[key].is_changed = True

    def swap_out(self, key: Key) -> None:
        """Write a piece's buffer if it has changed, and free it."""
        held = self._held[key]
        if held.is_changed:
            self.file.write(self._record[key], as_bytes(held.buffer))
        del self._held[key]

    @contextlib.contextmanager
    def at_rest(self, key: Key, *, reads: bool = True, writes: bool = False) -> Iterator[State]:
        """Return a context with a piece's state, for use between iterations.

        If ``writes``, it writes the state at the end.

        Unless ``reads``, the state is zero.
        """
        assert not self._held, "buffers are in use"
        layout, buffer = self._layouts[key], self._ring[0]
        if reads:
            self._read(key, buffer[layout.state_start : layout.record_bytes], layout.state_start)
        else:
            buffer.zero_()
        yield self._tensors(key, buffer)
        if writes:
            self._write_at_rest(key)

    def values(self, key: Key) -> list[StoredValues]:
        """Return the tensors of a piece's state as byte ranges of the file, see :meth:`UnitState.tensors`."""
        layout = self._layouts[key]
        buffers = state_buffers(layout.kind, layout.master_bytes, splits=layout.splits)
        sizes = [buffer.num_bytes(layout.num_params) for buffer in buffers]
        ends = itertools.accumulate(sizes, initial=layout.state_start)
        return [StoredValues(self.file, self._record[key], *ends_of) for ends_of in itertools.pairwise(ends)]

    def close(self) -> None:
        """Remove the files. Closing twice is allowed."""
        self.file.close()
        if self.spilled is not None:
            self.spilled.file.close()

    def _tensors(self, key: Key, buffer: torch.Tensor) -> State:
        layout = self._layouts[key]
        memory, splits = buffer[layout.state_start :], layout.splits
        tensors = state_tensors(memory, layout.num_params, layout.kind, layout.master_bytes, splits=splits)
        return as_state(tensors, splits=splits)

    def _read(self, key: Key, buffer: torch.Tensor, start: int) -> None:
        if self.file.is_written(self._record[key]):
            self.file.read(self._record[key], as_bytes(buffer), start)
        else:  # only padding, see [Note: Shards] in executor.memory.pieces
            buffer.zero_()

    def _write_at_rest(self, key: Key) -> None:
        """Write the state in the first buffer, and weights that are rounded from its master copy."""
        layout, buffer = self._layouts[key], self._ring[0]
        if layout.weight_bytes:
            master = self._tensors(key, buffer)[0]
            assert isinstance(master, torch.Tensor)  # else the weight is in it
            buffer[: layout.weight_bytes].view(self._dtype).copy_(master)
        self.file.write(self._record[key], as_bytes(buffer))


def _take_landing(
    units: tuple[Unit, ...], decisions: Decisions, slot_of: Mapping[str, int], host: Arena
) -> dict[str, list[torch.Tensor]]:
    """Take a host buffer for each slot that gets parameters from NVMe, and divide it for each of the slot's units."""
    weight_bytes = decisions.precision.weight_bytes
    parts = {
        unit.name: [in_blocks(weight_bytes * count) for count in decisions.piece_params(unit)]
        for unit in units
        if decisions.units[unit.name].params == "nvme" and unit.name in slot_of
    }
    landing: dict[str, list[torch.Tensor]] = {}
    for slot in sorted({slot_of[name] for name in parts}):
        names = [name for name in parts if slot_of[name] == slot]
        planned = weight_bytes * max(decisions.shard_params(unit) for unit in units if unit.name in names)
        room_bytes = max(sum(parts[name]) for name in names)
        buffer = host.take_blocks(
            f"buffer of slot {slot}", {MemoryClass.PARAMETERS: planned}, BLOCK_BYTES, room_bytes=room_bytes
        )
        landing |= {name: list(torch.split(buffer[: sum(parts[name])], parts[name])) for name in names}
    return landing
