"""The way of state in and out of the memory where a plan keeps it.

Whoever has state has named flat tensors: a checkpoint, a saved ``state_dict``, a file between two
plans. A tensor's name is that of a parameter's shard, after a key that says which of its state it is
(:func:`tensor_name`). A plan keeps the same values as pieces of units in slabs, in its own types. State comes in by
:func:`write_state`, which asks a :class:`Source` for ranges of its tensors, and goes out by :func:`whole_state`.

State in host memory is read straight into place, in one call. Other state is copied through the host:
one piece at a time to NVMe, and about :data:`STAGED_BYTES` at a time to a device. So a rank reads only its own state,
and each range about once. Beside its own state it needs memory for one piece, and for the readers' buffers ([Note: Read
ahead] in :mod:`executor.checkpoint.format.reader`). There are two exceptions. If weights of other ranks' shards are
resident, their master copies are read too, one unit at a time. If a layer was divided over other ranks than now, its
parameters are read whole.

Moments in 8 bits are codes, with one scale per block of values (:mod:`executor.optimizer.blocks`). Shards and rows of a
parameter may begin or end inside a block. So before state is cut or joined, each scale is repeated for all values of
its block: state is then *by value*, and all its tensors are cut in the same places. Afterwards, blocks are made again.
If the values of a new block come from several old blocks, their scales may differ. Such moments are converted to
float32 and quantized again.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from executor.checkpoint.files.writer import Buffer
from executor.checkpoint.format.layout import Dtype
from executor.checkpoint.format.reader import ReadRequest
from executor.checkpoint.source import MASTER
from executor.distributed.ranks import Ranks
from executor.distributed.shards import unshard
from executor.memory.arenas import ALIGNMENT_BYTES
from executor.memory.pieces import Piece, state_buffers
from executor.memory.state import ModelState
from executor.memory.units import UnitState
from executor.optimizer.blocks import SCALES, VALUES, Table, encode, spread
from executor.optimizer.passes import BLOCK, cut
from planner.decisions import Place
from planner.optimizers import Optimizer

State = Mapping[str, torch.Tensor]


def by_value(state: State) -> dict[str, torch.Tensor]:
    """Return a parameter's state by value. It may be so already."""
    found = dict(state)
    for key, scales_key in SCALES.items():
        scales = found.get(scales_key)
        if scales is not None and scales.shape != found[key].shape:
            found[scales_key] = spread(scales, found[key].numel()).view(found[key].shape)
    return found


def converted(state: State, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return state with moments as codes or as float32 values.

    Args:
        state: flat tensors, by value. If moments are to be codes, the first value is the first of a block.
        keys: the wanted keys. A moment becomes codes if the key of its scales is among them, and float32 otherwise.

    Returns:
        Codes with scales by block, or float32 moments. Moments that had no scales and get none keep their type, and so
        do tensors that are no moments.
    """
    found = dict(state)
    keys = frozenset(keys)
    for key, scales_key in SCALES.items():
        if key not in state:
            continue
        values, scales = state[key], found.pop(scales_key, None)
        if scales_key in keys:
            found[key], found[scales_key] = _blocks(values, scales, VALUES[key])
        elif scales is not None:
            found[key] = _values(values, scales, VALUES[key])
    return found


def _values(codes: torch.Tensor, scales: torch.Tensor, table: Table) -> torch.Tensor:
    """Return the float32 values of codes, with a scale for each."""
    return torch.from_numpy(table)[codes.int()].mul_(scales)


def _blocks(values: torch.Tensor, scales: torch.Tensor | None, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales by block.

    Args:
        values: codes, or float values if there are no ``scales``.
        scales: of each code.
        table: what each code stands for.
    """
    if scales is not None:
        first = scales[::BLOCK].clone()
        if torch.equal(spread(first, len(values)).view(torch.int32), scales.contiguous().view(torch.int32)):
            return values.to(torch.uint8), first
        values = _values(values, scales, table)
    codes, made = (
        torch.empty(len(values), dtype=torch.uint8, device="cpu"),
        torch.empty(-(-len(values) // BLOCK), device="cpu"),
    )
    encode(values.to(torch.float32, copy=True), codes, made, table)
    return codes, made


STAGED_BYTES: Final = 256 << 20
"""Approximate host memory for state that is being copied to a device."""

DTYPES: Final[Mapping[Dtype, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors, by their names in safetensors."""

NAMES: Final[Mapping[torch.dtype, Dtype]] = {dtype: name for name, dtype in DTYPES.items()}

_Held = tuple[UnitState, Piece]


class Source(NamedTuple):
    """Named flat tensors of state, and how to read ranges of them.

    Attributes:
        dtypes: the type of each tensor, by its name.
        read: copies ranges to the requests' memory. It gets all requests of a batch at once.
    """

    dtypes: Mapping[str, torch.dtype]
    read: Callable[[Iterable[ReadRequest]], None]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Source":
        """Return a source of flat tensors on the host."""

        def read(wanted: Iterable[ReadRequest]) -> None:
            for name, start, out in ((one.name, one.start, one.out) for one in wanted):
                values = tensors[name][start : start + len(out) // tensors[name].itemsize]
                torch.from_numpy(out).view(values.dtype).copy_(values)

        return cls({name: values.dtype for name, values in tensors.items()}, read)

    def saved(self, name: str, keys: Sequence[str]) -> tuple[str, ...]:
        """Return the keys under which it may have a parameter's state that is to have ``keys`` now."""
        scales = [SCALES[key] for key in keys if key in SCALES and tensor_name(name, SCALES[key]) in self.dtypes]
        return (*(key for key in keys if key not in SCALES.values()), *scales)


def tensor_name(name: str, key: str) -> str:
    """Return the name of a tensor of a parameter's state: its master copy, or a buffer of the optimizer."""
    return name if key == MASTER else f"{key}.{name}"


def room_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that :func:`in_room` needs for tensors."""
    return sum(map(_aligned_bytes, tensors))


def in_room(tensors: Iterable[torch.Tensor], room: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors like others, one after another in memory, uint8."""
    start = 0
    for tensor in tensors:
        yield room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _aligned_bytes(tensor)


def _aligned_bytes(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def bytes_of(values: torch.Tensor) -> Buffer:
    """Return the memory of a tensor on the host."""
    flat: Buffer = values.reshape(-1).view(torch.uint8).numpy()
    return flat


def whole_state(
    state: ModelState, ranks: Ranks | None, *, only_masters: bool = False
) -> Callable[[str], list[torch.Tensor]]:
    """Return a function that returns a parameter's whole state by value, float32, on the host: master copy, buffers.

    Its results may be views of memory that the next call reuses. All ranks make the same calls in the same order.
    """
    flat: dict[str, list[torch.Tensor]] = {}  # of the units that have rows of the latest parameter

    def read(name: str) -> list[torch.Tensor]:
        held = state.by_parameter[name]
        for other in flat.keys() - {unit.name for unit, _ in held}:
            del flat[other]
        for unit, _ in held:
            if unit.name not in flat:
                flat[unit.name] = [unit.unsharded(own) for own in _own_state(state, unit, only_masters=only_masters)]
        count = 1 if only_masters else len(state_buffers(held[0][1].kind))
        return [
            unshard([(p.shard, flat[unit.name][i][p.start : p.stop].view(p.shard.shape)) for unit, p in held], ranks)
            for i in range(count)
        ]

    return read


def _own_state(state: ModelState, unit: UnitState, *, only_masters: bool) -> tuple[torch.Tensor, ...]:
    """Return the rank's state of a unit by value, float32 ``[shard]``, on the host."""
    most = max((len(state_buffers(parameter.kind)) for parameter in unit.parameters), default=1)
    whole = torch.empty(1 if only_masters else most, sum(piece.num_params for piece in unit.pieces), device="cpu")
    for piece in unit.pieces:
        own = slice(piece.start - unit.start, piece.stop - unit.start)
        with state.state_of(unit, piece) as tensors:
            for target, values in zip(whole, tensors, strict=False):
                target[own].copy_(spread(values, piece.num_params) if len(values) < piece.num_params else values)
    return whole.unbind()


Buffers = Callable[[Optimizer], tuple[str, ...]]
"""Returns the keys of the buffers that an optimizer keeps."""


def write_state(
    state: ModelState, units: Sequence[UnitState], source: Source, buffers_of: Buffers, *, reads: bool = True
) -> None:
    """Set what a source has of units' state, and their weights if it has master copies; see the module.

    Args:
        state: all state.
        units: some of its units.
        source: has the exact shards of their parameters, or of some of them.
        buffers_of: the keys of the buffers that each optimizer keeps.
        reads: whether other state of the same pieces stays. If not, it may become 0.
    """
    for pieces in _batches(units, source, buffers_of):
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(state.state_of(*held, reads=reads, writes=True)) for held in pieces]
            parts = [
                _parts_of(source, buffers_of, *held, tensors) for held, tensors in zip(pieces, opened, strict=True)
            ]
            source.read(wanted for of_piece in parts for part in of_piece for wanted in part.requests())
            for held, tensors, of_piece in zip(pieces, opened, parts, strict=True):
                for part in of_piece:
                    part.end()
                if any(MASTER in part.dtypes for part in of_piece):
                    for weights in held[0].weights_of(held[1]):
                        weights.copy_(tensors[0])
    for unit in units:
        if unit.is_resident and len(unit.own_weights) < len(unit.device_weights):
            _read_resident(source, unit)


def _batches(units: Iterable[UnitState], source: Source, buffers_of: Buffers) -> Iterator[list[_Held]]:
    """Yield the pieces of which a source has something, in the batches in which they are read."""
    at_once: list[_Held] = []
    passing: list[_Held] = []
    by_itself: list[_Held] = []
    for unit, piece in ((each, piece) for each in units for piece in each.pieces):
        keys = (MASTER, *buffers_of(piece.kind))
        names = [parameter.shard.shard_name for parameter in unit.parameters if any(parameter.parts_in(piece))]
        if not any(tensor_name(name, key) in source.dtypes for name in names for key in keys):
            continue
        if piece.place is Place.NVME:
            by_itself.append((unit, piece))
        elif all(part.is_direct for part in _parts_of(source, buffers_of, unit, piece, unit.state(piece))):
            at_once.append((unit, piece))
        else:
            passing.append((unit, piece))
    yield at_once
    ends = itertools.accumulate(piece.state_bytes for _, piece in passing)
    for _, batch in itertools.groupby(zip(passing, ends, strict=True), key=lambda held: held[1] // STAGED_BYTES):
        yield [held for held, _ in batch]
    yield from ([held] for held in by_itself)


def _parts_of(
    source: Source, buffers_of: Buffers, unit: UnitState, piece: Piece, tensors: tuple[Any, ...]
) -> list["_SavedPart"]:
    """Return the parts of parameters in a piece of which a source has something."""
    keys = (MASTER, *buffers_of(piece.kind))
    parts = [
        _SavedPart(
            source,
            parameter.shard.shard_name,
            part.start - parameter.start,
            part.stop - parameter.start,
            dict(zip(keys, cut(tensors, part.within.start, part.within.stop), strict=True)),
        )
        for parameter in unit.parameters
        for part in parameter.parts_in(piece)
    ]
    return [part for part in parts if part.dtypes]


class _SavedPart:
    """A part of a parameter's state in a source, and where it goes.

    Args:
        source: has the parameter's values ``start`` to ``stop``, or some of its tensors.
        name: of the parameter in it.
        own: the tensors to set, by key.

    Attributes:
        dtypes: types of the tensors that the source has, by key.
    """

    def __init__(self, source: Source, name: str, start: int, stop: int, own: Mapping[str, Any]) -> None:
        self._name, self._start, self._stop = name, start, stop
        saved = {key: tensor_name(name, key) for key in source.saved(name, list(own))}
        self.dtypes = {key: source.dtypes[name] for key, name in saved.items() if name in source.dtypes}
        scaled = {SCALES[key] for key in self.dtypes.keys() & SCALES.keys()}
        self._own = {key: tensor for key, tensor in own.items() if key in self.dtypes or key in scaled}
        self._read: dict[str, torch.Tensor] = {}

    @property
    def is_direct(self) -> bool:
        """Whether values are read to where they are kept: in host memory, as they were saved."""
        return self._own.keys() == self.dtypes.keys() and all(
            isinstance(tensor, torch.Tensor) and not tensor.is_cuda and tensor.dtype is self.dtypes[key]
            for key, tensor in self._own.items()
        )

    def requests(self) -> Iterator[ReadRequest]:
        """Yield what is to be read."""
        for key, dtype in self.dtypes.items():
            grain = BLOCK if key in SCALES.values() else 1
            start, stop = self._start // grain, -(-self._stop // grain)
            self._read[key] = self._own[key] if self.is_direct else torch.zeros(stop - start, dtype=dtype, device="cpu")
            yield ReadRequest(tensor_name(self._name, key), start, bytes_of(self._read[key]))

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


def _read_resident(source: Source, unit: UnitState) -> None:
    """Read all resident weights of a unit, if the rank has the state of only one shard."""
    found = {
        parameter.shard.shard_name: (parameter, torch.empty(parameter.shard.shape.numel(), dtype=dtype, device="cpu"))
        for parameter in unit.parameters
        if (dtype := source.dtypes.get(parameter.shard.shard_name)) is not None
    }
    source.read(ReadRequest(name, 0, bytes_of(values)) for name, (_, values) in found.items())
    for parameter, values in found.values():
        unit.device_weights[parameter.start : parameter.stop].copy_(values)
