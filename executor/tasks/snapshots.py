"""A session's state, as checkpoints take it."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from executor.checkpoint.engine import CheckpointEngine
from executor.checkpoint.files.writer import Buffer
from executor.checkpoint.format.layout import Dtype
from executor.checkpoint.source import MASTER, Key, Slice, files_of
from executor.devices.backend import Backend
from executor.memory.arenas import Arena
from executor.memory.nvme import UnreadBytes
from executor.memory.pieces import Piece, StateBuffer, state_buffers
from executor.memory.state import ModelState
from executor.memory.stream import NAMES
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import OptimizerEntry
from executor.options import Options
from planner.checkpoints.policy import CHUNK_BYTES
from planner.decisions import Place
from planner.decisions.precision import TIE_PARAMS
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op


@final
class Snapshots:
    """The state that snapshot tasks copy to checkpoints, and the buffers for these copies.

    A tensor-parallel shard of a parameter is saved under its own name, and so are its rows in one of several units.
    Of weights that two stages of a pipeline have, the first saves the state.

    Args:
        host: host memory, from which the buffers are taken.
        options: the size of the buffers.
        rank: this process's rank. If several ranks hold the same unit, one of them saves it; they take turns.

    Attributes:
        ring: the buffers, uint8 ``[num_buffers, chunk]``, pinned.
        engine: writes checkpoints; ``None`` if there is none.

    Raises:
        DeviceMemoryError: the host has too little memory for the buffers.
    """

    def __init__(
        self,
        state: ModelState,
        schedule: Schedule,
        entry: OptimizerEntry,
        backend: Backend,
        host: Arena,
        options: Options,
        rank: int = 0,
    ) -> None:
        self.engine: CheckpointEngine | None = None
        self._state = state
        self._backend = backend
        self._entry, self._copies = entry, options.copies
        pieces = [(task.unit, task.piece) for task in schedule.tasks if task.op is Op.SNAPSHOT]
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in pieces))}
        self.slices: Mapping[Key, Sequence[Slice]] = {key: self._slices_of(key, numbers[key[0]]) for key in pieces}
        count = max(options.checkpoint_buffer_bytes // CHUNK_BYTES, len(files_of(self, rank)) + 1)
        count += state.stored is not None  # reads from NVMe need one more, for whole blocks
        memory = host.take_blocks("checkpoint buffers", {MemoryClass.CHECKPOINT: count * CHUNK_BYTES}, CHUNK_BYTES)
        rows = memory.view(count, CHUNK_BYTES)
        self._scratch = rows[-1]
        self.ring: Buffer = rows[: count - (state.stored is not None)].numpy()

    def take(self, key: Key, iteration: int) -> None:
        """Pass a piece to the engine. Runs in the thread of the snapshot lane."""
        if self.engine is not None:
            self.engine.take(key, iteration)

    def release(self, key: Key) -> None:
        """Wait, in the thread of the gate lane, until a checkpoint has taken a piece, so that it may change."""
        if self.engine is not None:
            self.engine.release(key)

    def keys(self, key: Key) -> tuple[str, ...]:
        """See :class:`executor.checkpoint.source.Source`."""
        return (MASTER, *self._entry.of(self._state.units[key[0]].pieces[key[1]].kind).buffers)

    def dtype(self, state: str) -> Dtype:
        """See :class:`executor.checkpoint.source.Source`."""
        return NAMES[self._buffer(state).dtype]

    def grain(self, state: str) -> int:
        """See :class:`executor.checkpoint.source.Source`."""
        return self._buffer(state).params

    def tensors(self, key: Key) -> Sequence[Any]:
        """See :class:`executor.checkpoint.source.Source`."""
        unit = self._state.units[key[0]]
        piece = unit.pieces[key[1]]
        if piece.place is Place.NVME:
            return _joined(piece, self._state.nvme.values(key))
        tensors = [tensor.detach().view(torch.uint8) for tensor in unit.tensors(piece)]
        if piece.place is Place.GPU:
            return tensors
        self._wait()  # copies to host memory may still run
        return _joined(piece, [tensor.numpy() for tensor in tensors])

    def copy(self, buffer: Buffer, values: Any) -> None:
        """See :class:`executor.checkpoint.source.Source`."""
        if isinstance(values, UnreadBytes):
            values.read(torch.from_numpy(buffer), self._scratch)
            return
        self._backend.copy(torch.from_numpy(buffer), values)
        self._wait()

    def _buffer(self, state: str) -> StateBuffer:
        if state == MASTER:
            return self._state.master_copy
        entry = next(e for e in (self._entry, self._entry.others) if e is not None and state in e.buffers)
        return state_buffers(entry.planned_as)[1 + entry.buffers.index(state)]

    def _wait(self) -> None:
        """Wait until all work of the lane is done."""
        self._backend.event_time_s(self._backend.record_event(Lane.SNAPSHOT))

    def _slices_of(self, key: Key, number: int) -> list[Slice]:
        """Return the slices of a piece that this rank saves. If several ranks hold it, they take turns by unit."""
        unit = self._state.units[key[0]]
        if not unit.is_sharded and number % unit.group.size != unit.group.rank:
            return []
        return [
            Slice(
                parameter.shard.shard_name,
                tuple(parameter.shard.shape),
                part.start - parameter.start,
                part.stop - parameter.start,
                part.within.start,
            )
            for parameter in unit.parameters
            if parameter.shard.name not in self._copies
            for part in parameter.parts
            if part.piece.index == key[1] and (parameter.shard.dim is not None or not parameter.shard.mesh.tensor)
        ]


def _joined(piece: Piece, tensors: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of a piece's state with a split master copy as one."""
    if not piece.splits:
        return tensors
    weights, remainders, *buffers, ties = tensors
    masters = functools.partial(_read_masters, (weights, remainders, ties))
    return [UnreadBytes(masters, 0, 4 * piece.num_params), *buffers]


def _read_masters(
    halves: tuple[Any, ...], start_bytes: int, stop_bytes: int, target: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Read whole values of split master copies, as float32, see :class:`executor.memory.nvme.UnreadBytes`.

    ``halves`` are weights, remainders and ties of a piece, as bytes on the host or on NVMe.
    """
    start, stop = start_bytes // 4, stop_bytes // 4
    first, last = start // TIE_PARAMS, -(-stop // TIE_PARAMS)  # whole blocks
    begin, num_params = first * TIE_PARAMS, len(halves[0]) // 2
    end = min(last * TIE_PARAMS, num_params)
    parts = zip(halves, ((begin, end), (begin, end), (first, last)), strict=True)
    weights, remainders, ties = (_read(half[2 * a : 2 * b], scratch).view(torch.int16) for half, (a, b) in parts)
    blocks = SplitMaster(weights.view(torch.bfloat16), remainders, ties, start - begin, stop - begin)
    target.copy_(blocks.joined().view(torch.uint8))


def _read(values: Any, scratch: torch.Tensor) -> torch.Tensor:
    if not isinstance(values, UnreadBytes):
        return torch.from_numpy(values)
    read = torch.empty(len(values), dtype=torch.uint8, device="cpu")
    values.read(read, scratch)
    return read
