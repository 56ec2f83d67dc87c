"""A session's state as checkpoints take it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from executor.checkpoint.engine import CheckpointEngine
from executor.checkpoint.files.flusher import CHUNK_BYTES, Buffer
from executor.checkpoint.source import MASTER, Key, Slice, files_of
from executor.devices.backend import Backend
from executor.memory.arenas import Arena
from executor.memory.nvme import StoredValues
from executor.memory.state import ModelState
from executor.optimizer.table import OptimizerEntry
from executor.options import SessionOptions
from planner.decisions import Place
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Lane, MemoryClass, Op


@final
class Snapshots:
    """Where the state is that the schedule's snapshots take, and the memory that it goes through.

    Shares of parameters, and rows of them that are units of their own, are tensors by their own names.

    Args:
        state: of the session.
        schedule: says in which order.
        entry: the optimizer.
        backend: copies.
        host: where memory for buffers is taken.
        options: how much.
        rank: which of the ranks this is. What several of them hold is shared among them, unit by unit.

    Attributes:
        ring: the buffers, uint8 ``[num_buffers, chunk]``, from which a device can be copied to asynchronously.
        engine: takes what the schedule offers; ``None``: nobody does.

    Raises:
        DeviceMemoryError: the host has not enough for the buffers.
    """

    def __init__(
        self,
        state: ModelState,
        schedule: Schedule,
        entry: OptimizerEntry,
        backend: Backend,
        host: Arena,
        options: SessionOptions,
        rank: int = 0,
    ) -> None:
        self.engine: CheckpointEngine | None = None
        self._state = state
        self._backend = backend
        self.keys = (MASTER, *entry.buffers)
        pieces = [(task.unit, task.piece) for task in schedule.tasks if task.op is Op.SNAPSHOT]
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(unit for unit, _ in pieces))}
        self.slices: Mapping[Key, Sequence[Slice]] = {key: self._slices_of(key, numbers[key[0]]) for key in pieces}
        count = max(options.checkpoint_buffer_bytes // CHUNK_BYTES, len(files_of(self, rank)) + 1)
        count += state.stored is not None  # what is read from there is cut from whole blocks
        memory = host.take_blocks("checkpoint buffers", {MemoryClass.CHECKPOINT: count * CHUNK_BYTES}, CHUNK_BYTES)
        rows = memory.view(count, CHUNK_BYTES)
        self._scratch = rows[-1]
        self.ring: Buffer = rows[: count - (state.stored is not None)].numpy()

    def take(self, key: Key, iteration: int) -> None:
        """Give a piece to the engine, in the thread of the lane of snapshots."""
        if self.engine is not None:
            self.engine.take(key, iteration)

    def release(self, key: Key) -> None:
        """Wait until a piece may change, in the thread of the lane of gates."""
        if self.engine is not None:
            self.engine.release(key)

    def take_remaining(self) -> None:
        """Take all that is left of checkpoints that have begun, while nothing is under way; state may change then."""
        if self.engine is not None:
            self.engine.take_remaining()

    def tensors(self, key: Key) -> Sequence[torch.Tensor | Buffer | StoredValues]:
        """See :class:`executor.checkpoint.source.Source`."""
        unit = self._state.units[key[0]]
        piece = unit.pieces[key[1]]
        if piece.place is Place.NVME:
            return self._state.nvme.values(key)
        tensors = [tensor.detach().view(torch.uint8) for tensor in unit.state(piece)]
        if piece.place is Place.GPU:
            return tensors
        self._wait()  # what has been copied here has arrived
        return [tensor.numpy() for tensor in tensors]

    def copy(self, buffer: Buffer, values: Any) -> None:
        """See :class:`executor.checkpoint.source.Source`."""
        if isinstance(values, StoredValues):
            values.read(torch.from_numpy(buffer), self._scratch)
            return
        self._backend.copy(torch.from_numpy(buffer), values)
        self._wait()

    def _wait(self) -> None:
        """Wait until what the lane has been given, or waits for, is done."""
        self._backend.event_time_s(self._backend.record_event(Lane.SNAPSHOT))

    def _slices_of(self, key: Key, number: int) -> list[Slice]:
        """Return what this rank gives of a piece; what several ranks have one of them gives, in turn by unit."""
        unit = self._state.units[key[0]]
        if unit.group is not None and not unit.is_sharded and number % unit.group.size != unit.group.rank:
            return []
        return [
            Slice(
                parameter.share.own_name,
                tuple(parameter.share.shape),
                part.start - parameter.start,
                part.stop - parameter.start,
                part.within.start,
            )
            for parameter in unit.parameters
            for part in parameter.parts
            if part.piece.index == key[1] and (parameter.share.dim is not None or not parameter.share.mesh.tensor)
        ]
