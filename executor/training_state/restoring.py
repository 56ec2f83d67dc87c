"""Restores state from checkpoints to where a plan keeps it. Another plan with other ranks may have saved it.

[Note: Restoring] State in host memory is read straight into place, in one call. Other state is copied through the host:
one piece at a time to NVMe, and about :data:`STAGED_BYTES` at a time to a device. So a rank reads only its own state,
and each chunk about once. Beside its own state it needs memory for one piece, and for the readers' buffers ([Note: Read
ahead] in :mod:`executor.checkpoint.format.reader`). There are two exceptions. If weights of other ranks' shards are
resident, their master copies are read too, one unit at a time. If a layer was divided over other ranks than now, its
parameters are read whole.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from executor.checkpoint import Checkpoint, CheckpointError, DamagedError, ReadRequest
from executor.checkpoint.files.flusher import Buffer
from executor.checkpoint.source import MASTER
from executor.distributed.shards import assemble, whole_name
from executor.memory.moments import State, converted
from executor.memory.pieces import Piece
from executor.memory.units import ParameterState, UnitState
from executor.optimizer.blocks import SCALES, spread
from executor.optimizer.passes import BLOCK, cut
from executor.optimizer.reference import ROUNDS
from executor.prepare import OffloadedOptimizer, check_prepared
from executor.training_state.groups import groups_in_order, warn_of_differences
from executor.training_state.rng_state import set_rng_state
from planner.decisions import Place
from planner.optimizers import Optimizer

STAGED_BYTES: Final = 256 << 20
"""Approximate host memory for state that is being copied to a device."""

_Held = tuple[UnitState, Piece]

_DTYPES: Final[Mapping[str, torch.dtype]] = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}


def restore(optimizer: OffloadedOptimizer, checkpoint: Checkpoint) -> dict[str, Any]:
    """Restore weights, optimizer state, step counts, groups and RNG state; return this rank's ``extra``.

    The checkpoint may be from another plan, with other tiers and another number of ranks. Every rank reads the state
    that it needs, see [Note: Restoring], and checks every byte. Ranks begin together, and exchange nothing while they
    read. So if one rank finds damage, no other rank waits for it.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer; nothing has changed.
        DamagedError: a needed part of it is damaged or missing, and some state has changed. Restore another checkpoint.
    """
    check_prepared(optimizer)
    session = optimizer.session
    of_ranks = checkpoint.manifest.extra["ranks"]
    collectives = session.collectives
    extra: dict[str, Any] = of_ranks[collectives.rank if collectives.rank < len(of_ranks) else 0]
    class_name = optimizer.entry.torch_class.__name__
    if extra["optimizer"] not in {class_name, *optimizer.entry.converts}:
        raise CheckpointError(
            f"{checkpoint.folder} has the state of {extra['optimizer']}, but the optimizer is {class_name}; make the "
            "optimizer that was saved"
        )
    groups, saved_groups = optimizer.param_groups, extra["groups"]
    names = [[session.name_of(parameter) for parameter in group["params"]] for group in groups]
    order = groups_in_order(saved_groups, extra.get("parameters"), names, str(checkpoint.folder))
    held = list(session.access.parameter_states().values())
    if missing := {entry.shard.name for _, entry in held} - extra["steps"].keys():
        raise CheckpointError(f"{checkpoint.folder} has no {min(missing)}; the checkpoint is of another model")
    _check_tensors(optimizer, checkpoint, (entry for _, entry in held), extra["shapes"])
    if session.runtime.snapshots is not None:
        session.runtime.snapshots.take_remaining()  # running checkpoints need the old state
    units = list({unit.name: unit for unit, _ in held}.values())
    alike = [
        unit
        for unit in units
        if all(_has_exact_shard(checkpoint, entry, _keys(optimizer, entry.kind)) for entry in unit.parameters)
    ]
    before = [dict(group) for group in groups]
    with session.access.changing("resume()", DamagedError):
        _read_exact_shards(optimizer, checkpoint, alike)
        _read_whole_parameters(optimizer, checkpoint, [unit for unit in units if unit not in alike], extra["steps"])
        session.runtime.state.absent -= session.runtime.state.by_parameter.keys()
        for _, entry in held:
            entry.step = int(extra["steps"][entry.shard.name])
        for group, index in zip(groups, order, strict=True):
            for key, value in saved_groups[index].items():
                if key == ROUNDS:  # the plan says what the master copy is
                    continue
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
        if len(of_ranks) == collectives.size:
            set_rng_state(extra["rng"])
            session.sync_rng_state()  # the checkpoint may have had other tensor-parallel ranks
    warn_of_differences(before, saved_groups, order, str(checkpoint.folder))
    return extra


def _check_tensors(
    optimizer: OffloadedOptimizer,
    checkpoint: Checkpoint,
    parameters: Iterable[ParameterState],
    shapes: Mapping[str, Sequence[int]],
) -> None:
    """Check, before anything changes, that a checkpoint has all tensors of parameters, in the shapes of the model.

    ``shapes`` has the whole shapes of parameters that were saved in shards. Tensors without elements may be missing.

    Raises:
        CheckpointError: it has not.
    """
    saved: dict[str, list[str]] = {}
    for own in checkpoint.manifest.tensors:
        saved.setdefault(whole_name(own), []).append(own)
    for parameter in parameters:
        name, shape = parameter.shard.name, tuple(parameter.shard.whole_shape)
        keys = _saved_keys(checkpoint, _any_shard(checkpoint, name), _keys(optimizer, parameter.kind))
        for tensor in (_tensor(name, key) for key in keys if key not in SCALES.values()):
            parts = saved.get(tensor, [])
            found = checkpoint.manifest.tensors[tensor].shape if tensor in parts else tuple(shapes.get(name, shape))
            if found != shape or not (parts or parameter.shard.whole_shape.numel() == 0):
                what = f"has shape {found}, but {shape} in the model" if parts else "is missing"
                raise CheckpointError(f"{checkpoint.folder}: {tensor} {what}; the checkpoint is of another model")


def _keys(optimizer: OffloadedOptimizer, kind: Optimizer) -> tuple[str, ...]:
    """Return the names of the tensors of a parameter that ``kind`` updates."""
    return (MASTER, *optimizer.entry.of(kind).buffers)


def _tensor(name: str, key: str) -> str:
    return name if key == MASTER else f"{key}.{name}"


def _saved_keys(checkpoint: Checkpoint, name: str, keys: Sequence[str]) -> tuple[str, ...]:
    """Return the keys of the tensors in which a parameter's state was saved, if it was to have ``keys`` now."""
    scales = [SCALES[key] for key in keys if _tensor(name, SCALES.get(key, "")) in checkpoint.manifest.tensors]
    return (*(key for key in keys if key not in SCALES.values()), *scales)


def _has_exact_shard(checkpoint: Checkpoint, parameter: ParameterState, keys: Sequence[str]) -> bool:
    """Return whether the checkpoint has exactly this shard of a parameter; of one without elements it has nothing."""
    shard, tensors = parameter.shard, checkpoint.manifest.tensors
    if not shard.shape.numel():
        return True
    values = [key for key in keys if key not in SCALES.values()]
    found = [tensors.get(_tensor(shard.shard_name, key)) for key in values]
    return all(record is not None and record.shape == tuple(shard.shape) for record in found)


def _read_exact_shards(optimizer: OffloadedOptimizer, checkpoint: Checkpoint, units: Sequence[UnitState]) -> None:
    """Read the state of units whose exact shards are in the checkpoint; see [Note: Restoring]."""
    at_once: list[_Held] = []
    passing: list[_Held] = []
    by_itself: list[_Held] = []
    for unit in units:
        for piece in unit.pieces:
            if piece.place is Place.NVME:
                by_itself.append((unit, piece))
            elif all(part.is_direct for part in _parts(optimizer, checkpoint, unit, piece, unit.state(piece))):
                at_once.append((unit, piece))
            else:
                passing.append((unit, piece))
    for pieces in (at_once, *_batches(passing), *([one] for one in by_itself)):
        _read_pieces(optimizer, checkpoint, pieces)
    for unit in units:
        if unit.slot < 0 and len(unit.own_weights) < len(unit.device_weights):
            _read_resident(checkpoint, unit)


def _batches(pieces: Sequence[_Held]) -> Iterator[list[_Held]]:
    batch: list[_Held] = []
    num_bytes = 0
    for held in pieces:
        batch.append(held)
        num_bytes += held[1].state_bytes
        if num_bytes >= STAGED_BYTES:
            yield batch
            batch, num_bytes = [], 0
    yield batch


def _read_pieces(optimizer: OffloadedOptimizer, checkpoint: Checkpoint, pieces: Sequence[_Held]) -> None:
    with contextlib.ExitStack() as stack:
        states = [
            stack.enter_context(optimizer.session.runtime.state.state_of(*held, reads=False, writes=True))
            for held in pieces
        ]
        parts = [
            part
            for held, state in zip(pieces, states, strict=True)
            for part in _parts(optimizer, checkpoint, *held, state)
        ]
        checkpoint.read(wanted for part in parts for wanted in part.requests())
        for part in parts:
            part.end()
        for (unit, piece), state in zip(pieces, states, strict=True):
            _write_weights(unit, piece, state[0])


def _parts(
    optimizer: OffloadedOptimizer,
    checkpoint: Checkpoint,
    unit: UnitState,
    piece: Piece,
    state: tuple[Any, ...],
) -> Iterator["_SavedPart"]:
    """Yield the parts of parameters in a piece, with this state."""
    keys = _keys(optimizer, piece.kind)
    for parameter in unit.parameters:
        for part in parameter.parts_in(piece):
            own = dict(zip(keys, cut(state, part.within.start, part.within.stop), strict=True))
            name, start = parameter.shard.shard_name, part.start - parameter.start
            yield _SavedPart(checkpoint, name, start, start + part.stop - part.start, own)


class _SavedPart:
    """A part of a parameter's state in a checkpoint, and where it goes.

    Args:
        checkpoint: has the parameter's values ``start`` to ``stop``.
        name: of the parameter in it.
        own: the tensors to set, by key.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, start: int, stop: int, own: State) -> None:
        self._name, self._start, self._stop, self._own = name, start, stop, own
        records = {
            key: checkpoint.manifest.tensors.get(_tensor(name, key)) for key in _saved_keys(checkpoint, name, list(own))
        }
        self._dtypes = {
            key: _DTYPES[record.dtype] if record is not None else torch.float32 for key, record in records.items()
        }
        self._read: dict[str, torch.Tensor] = {}

    @property
    def is_direct(self) -> bool:
        """Whether values are read to where they are kept: in host memory, as they were saved."""
        return self._own.keys() == self._dtypes.keys() and all(
            isinstance(tensor, torch.Tensor) and not tensor.is_cuda and tensor.dtype is self._dtypes[key]
            for key, tensor in self._own.items()
        )

    def requests(self) -> Iterator[ReadRequest]:
        """Yield what is to be read."""
        for key, dtype in self._dtypes.items():
            grain = BLOCK if key in SCALES.values() else 1
            start, stop = self._start // grain, -(-self._stop // grain)
            self._read[key] = self._own[key] if self.is_direct else torch.zeros(stop - start, dtype=dtype)
            yield ReadRequest(_tensor(self._name, key), start, _bytes_of(self._read[key]))

    def end(self) -> None:
        """Set what was not read to its place."""
        if self.is_direct:
            return
        values = {key: self._of_part(key, read) for key, read in self._read.items()}
        for key, read in converted(values, self._own).items():
            self._own[key].copy_(read)
        self._read.clear()

    def _of_part(self, key: str, read: torch.Tensor) -> torch.Tensor:
        """Return what was read, by value; the first block may begin before the part."""
        if key not in SCALES.values():
            return read
        skipped = self._start % BLOCK
        return spread(read, skipped + self._stop - self._start)[skipped:]


def _write_weights(unit: UnitState, piece: Piece, master: torch.Tensor) -> None:
    """Set a piece's weights from its master copy, in all places that hold them."""
    if unit.on_device:
        unit.own(piece).copy_(master)
    weight = unit.host_weight(piece)
    if weight is not None:
        weight.copy_(master)


def _read_resident(checkpoint: Checkpoint, unit: UnitState) -> None:
    """Read all resident weights of a unit, if the rank has the state of only one shard."""
    parameters = [parameter for parameter in unit.parameters if parameter.shard.shape.numel()]
    names = [parameter.shard.shard_name for parameter in parameters]
    flat = torch.zeros(unit.parameters[-1].stop, dtype=_DTYPES[checkpoint.manifest.tensors[names[0]].dtype])
    checkpoint.read(
        ReadRequest(parameter.shard.shard_name, 0, _bytes_of(flat[parameter.start : parameter.stop]))
        for parameter in parameters
    )
    unit.device_weights[: len(flat)].copy_(flat)


def _read_whole_parameters(
    optimizer: OffloadedOptimizer,
    checkpoint: Checkpoint,
    units: Sequence[UnitState],
    steps: Mapping[str, int],
) -> None:
    """Read the state of units that were saved with other shards. It reads whole parameters."""
    groups = {
        optimizer.session.name_of(parameter): group for group in optimizer.param_groups for parameter in group["params"]
    }
    done: set[str] = set()
    for unit in units:
        parameters = [parameter for parameter in unit.parameters if parameter.shard.name not in done]
        done.update(parameter.shard.name for parameter in parameters)  # other units may have rows of the same parameter
        entries = {}
        for parameter in parameters:
            shard = parameter.shard
            keys = _saved_keys(checkpoint, _any_shard(checkpoint, shard.name), _keys(optimizer, parameter.kind))
            values = {key: _whole(checkpoint, shard.name, key, shard.whole_shape) for key in keys}
            step = torch.tensor(float(steps[shard.name]))
            entries[shard.name] = ({"step": step, **values}, groups.get(shard.name, {}))
        optimizer.write_states(entries)


def _any_shard(checkpoint: Checkpoint, name: str) -> str:
    """Return the name of a parameter, or of a shard of it, in a checkpoint."""
    return next((own for own in checkpoint.manifest.tensors if whole_name(own) == name), name)


def _whole(checkpoint: Checkpoint, name: str, key: str, shape: torch.Size) -> torch.Tensor:
    """Return a whole tensor by value, float32, assembled from the shards that were saved."""
    tensor = _tensor(name, key)
    parts = {}
    for own, record in checkpoint.manifest.tensors.items():
        if whole_name(own) == tensor:
            parts[own] = torch.empty(record.shape, dtype=_DTYPES[record.dtype])
    checkpoint.read(ReadRequest(own, 0, _bytes_of(values)) for own, values in parts.items())
    if key in SCALES.values():
        for own, scales in parts.items():
            own_shape = checkpoint.manifest.tensors[own.removeprefix(f"{key}.")].shape
            parts[own] = spread(scales, math.prod(own_shape)).view(own_shape)
    whole = torch.empty(shape)
    try:
        assemble(tensor, {own: values.float() for own, values in parts.items()}, whole)
    except (ValueError, RuntimeError) as error:  # RuntimeError: torch found shapes that do not match
        raise CheckpointError(f"{checkpoint.folder}: {error}; the checkpoint is of another model") from error
    return whole


def _bytes_of(values: torch.Tensor) -> Buffer:
    flat: Buffer = values.reshape(-1).view(torch.uint8).numpy()
    return flat
