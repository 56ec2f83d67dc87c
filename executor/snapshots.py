"""A session's state as checkpoints take it."""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from executor.backend import Backend
from executor.checkpoint.engine import MASTER, CheckpointEngine, Key, Slice
from executor.checkpoint.flusher import CHUNK_BYTES, Buffer
from executor.memory import Arena
from executor.optimizer.table import OptimizerEntry
from executor.options import SessionOptions
from executor.pieces import Part
from executor.state import ModelState, ParameterState
from planner.schedule import Lane, MemoryClass, Op, Schedule

_LEAST_BUFFERS = 4  # one for each tensor of state that is being filled, and one that is being written


@final
class Snapshots:
    """Where the state is that the schedule's snapshots take, and the memory that it goes through.

    Args:
        state: of the session.
        schedule: says in which order.
        entry: the optimizer.
        backend: copies.
        host: where memory for buffers is taken.
        options: how much.

    Attributes:
        ring: the buffers, uint8 ``[num_buffers, chunk]``, from which a device can be copied to asynchronously.
        engine: takes what the schedule offers; ``None``: nobody does.

    Raises:
        ValueError: tensor-parallel ranks share parameters.
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
    ) -> None:
        self.engine: CheckpointEngine | None = None
        self._state = state
        self._backend = backend
        self.keys = (MASTER, *entry.buffers)
        count = max(options.checkpoint_buffer_bytes // CHUNK_BYTES, _LEAST_BUFFERS)
        memory = host.take_blocks("checkpoint buffers", {MemoryClass.CHECKPOINT: count * CHUNK_BYTES}, CHUNK_BYTES)
        self.ring: Buffer = memory.numpy().reshape(count, CHUNK_BYTES)
        pieces = [(task.unit, task.piece) for task in schedule.tasks if task.op is Op.SNAPSHOT]
        self.slices: Mapping[Key, Sequence[Slice]] = {key: self._slices_of(key) for key in pieces}

    def take(self, key: Key, iteration: int) -> None:
        """Give a piece to the engine, in the thread of the lane of snapshots."""
        if self.engine is not None:
            self.engine.take(key, iteration)

    def tensors(self, key: Key) -> Sequence[torch.Tensor]:
        """See :class:`executor.checkpoint.engine.Source`."""
        unit = self._state.units[key[0]]
        return [tensor.view(torch.uint8) for tensor in unit.state(unit.pieces[key[1]])]

    def copy(self, buffer: Buffer, values: Any) -> None:
        """See :class:`executor.checkpoint.engine.Source`."""
        self._backend.copy(torch.from_numpy(buffer), values)
        self._backend.seconds(self._backend.mark(Lane.SNAPSHOT))

    def _slices_of(self, key: Key) -> list[Slice]:
        unit = self._state.units[key[0]]
        return [
            _slice(parameter, part)
            for parameter in unit.parameters
            for part in parameter.parts
            if part.piece.index == key[1]
        ]


def _slice(parameter: ParameterState, part: Part) -> Slice:
    """Return what a part has of a share: experts that are units of their own are tensors of their own, too.

    Raises:
        ValueError: tensor-parallel ranks have shares of the parameter.
    """
    share = parameter.share
    if share.dim is not None:
        raise ValueError(
            f"tensor-parallel ranks share {share.name}, and checkpoints of shares are not taken so far; plan with "
            "--tensor-parallel 1, or save the model's and the optimizer's state_dict(), which are whole"
        )
    start, stop = part.start - parameter.start, part.stop - parameter.start
    return Slice(share.own_name, tuple(share.shape), start, stop, part.start - part.piece.start)
