"""Cuts a unit's parameters into pieces (subgroups), and assigns their places in memory.

A unit's parameters form one flat range, in the order of ``Unit.parameters``, without gaps. Its pieces
are cut from that range. Pieces with state on the host lie one after another in the host's slabs. Pieces with state on
the device lie in the device's slabs. If the master copy has the type of the weights (in float32, or with a master copy
in bf16) and both are in one place, they are the same memory. In this case the host's slab of master copies also holds
the weights of pieces with state on NVMe (:mod:`executor.memory.nvme`), so that a fetch is one copy. If parameters are
on NVMe too, the host has no copy of them. The same holds for weights of split master copies
([Note: Split masters] in :mod:`executor.optimizer.split`): they take the master copy's place, and remainders and ties
are slabs of their own.

[Note: Shards] Under ZeRO the range is padded to equal shards, one per rank, and a rank has the pieces of its own shard.
Some parameters may have no part in that shard. Padding is at the end of the range, or between parameters that lie whole
in one shard ([Note: Whole matrices] in :mod:`planner.subgroups`). Padding belongs to no parameter, so no norm, update
or saved state reads it. It is zero at first. Copies of neighbouring parameters may overwrite it later.
"""

import dataclasses
import functools
import itertools
from collections import Counter

import torch

from executor.direct_io import in_blocks
from executor.optimizer.split import SplitMaster
from planner.decisions import Decisions, Place
from planner.decisions.precision import TIE_PARAMS
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS, Optimizer

DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32}
"""Types of weights and state, by the bytes of a value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A subgroup: ``[start, stop)`` of the unit's flat range, with its offsets in the slabs of its tier.

    Attributes:
        index: number within the unit's shard.
        kind: the optimizer that updates it.
        form: the tensors of its state, master copy first.
        splits: whether its master copy is split.
        place: the tier of its state, and where it is updated.
        start, stop: range within the unit; the last piece of the last rank may go beyond, see [Note: Shards].
        offsets: the beginning of each tensor of its state in its slab, in values. If its state is on NVMe, of its
            weights in the host's slab of master copies alone, if they are there; see the module.
        staging: its beginning among the weights that the host updates and copies to the device.
        leaves: whether its gradient goes to the host.
        in_place: whether the gradient overwrites the host's weights [Note: In place].
        spilled: whether the gradient goes on to NVMe.
        arrival: offset of the gradient in the host's memory for gradients, if it is neither in place nor spilled.
        stored_weight_bytes: bytes of its weights on NVMe beside its state, see :mod:`executor.memory.nvme`.
    """

    index: int
    kind: Optimizer
    form: "tuple[StateBuffer, ...]"
    splits: bool
    place: Place
    start: int
    stop: int
    offsets: tuple[int, ...]
    staging: int
    leaves: bool
    in_place: bool
    spilled: bool
    arrival: int
    stored_weight_bytes: int

    @property
    def num_params(self) -> int:
        """Number of its parameters."""
        return self.stop - self.start

    @property
    def state_bytes(self) -> int:
        """Bytes of its state."""
        return sum(buffer.num_bytes(self.num_params) for buffer in self.form)

    def state_in(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of its state in uint8 memory, one after another from the beginning."""
        return state_tensors(memory, self.num_params, self.form)

    @property
    def state_start(self) -> int:
        """Offset of its state in its record on NVMe."""
        return in_blocks(self.stored_weight_bytes)

    @property
    def record_bytes(self) -> int:
        """Length of this record, in whole blocks."""
        return self.state_start + in_blocks(self.state_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The overlap of a parameter and a piece: ``[start, stop)`` of the unit's flat range."""

    piece: Piece
    start: int
    stop: int

    @property
    def within(self) -> slice:
        """The same range, relative to the beginning of the piece."""
        return slice(self.start - self.piece.start, self.stop - self.piece.start)


@dataclasses.dataclass(frozen=True, slots=True)
class StateBuffer:
    """A tensor of a piece's state.

    Attributes:
        dtype: its type.
        params: how many parameters share a value.
    """

    dtype: torch.dtype
    params: int = 1

    def length(self, num_params: int) -> int:
        """Return how many values it has for so many parameters."""
        return -(-num_params // self.params)

    def num_bytes(self, num_params: int) -> int:
        """Return its bytes for so many parameters."""
        return self.dtype.itemsize * self.length(num_params)


TIES = StateBuffer(torch.int16, TIE_PARAMS)


@functools.cache
def state_buffers(optimizer: Optimizer, master_bytes: int = 4, *, splits: bool = False) -> tuple[StateBuffer, ...]:
    """Return the tensors of an optimizer's state: the master copy, with so many bytes a value, then its buffers.

    If master copies are split, the first two are weights and remainders, and ties are last: so float32 values begin at
    a multiple of their size.
    """
    buffers = (StateBuffer(DTYPES[num_bytes], params) for num_bytes, params in OPTIMIZERS[optimizer].buffers)
    if splits:
        return (StateBuffer(torch.bfloat16), StateBuffer(torch.int16), *buffers, TIES)
    return (StateBuffer(DTYPES[master_bytes]), *buffers)


State = tuple[torch.Tensor | SplitMaster, *tuple[torch.Tensor, ...]]
"""The state of a piece as updates take it: the master copy, and buffers."""


def as_state(tensors: tuple[torch.Tensor, ...], *, splits: bool) -> State:
    """Return state from its tensors, see :func:`state_buffers`."""
    if not splits:
        return tensors[0], *tensors[1:]
    weights, remainders, *buffers, ties = tensors
    return SplitMaster(weights, remainders, ties, 0, len(weights)), *buffers


def state_tensors(memory: torch.Tensor, num_params: int, form: tuple[StateBuffer, ...]) -> tuple[torch.Tensor, ...]:
    """Return the flat tensors of state in uint8 memory, one after another from its beginning."""
    ends = itertools.accumulate((buffer.num_bytes(num_params) for buffer in form), initial=0)
    return tuple(
        memory[start:stop].view(buffer.dtype)
        for buffer, (start, stop) in zip(form, itertools.pairwise(ends), strict=True)
    )


def pieces_of(unit: Unit, decisions: Decisions, start: int) -> tuple[Piece, ...]:
    """Return the pieces, in order, of the shard that begins at ``start`` in a unit's flat range."""
    sizes, precision, decided = decisions.piece_params(unit), decisions.precision, decisions.units[unit.name]
    starts = tuple(itertools.accumulate(sizes, initial=start))
    taken: Counter[str | tuple[str, int]] = Counter()  # in slabs, by their tier and position
    pieces = []
    kinds = (subgroup.kind for subgroup in decisions.subgroups(unit))
    for index, (place, num_params, kind) in enumerate(zip(decided.update, sizes, kinds, strict=True)):
        tier = "device" if place is Place.GPU else "host"
        splits, leaves = decisions.splits(place), decisions.flushes(unit.name, place)
        in_place = decisions.arrives_in_place(unit.name, place)
        spilled = place is Place.NVME and decisions.spill_gradients
        form = state_buffers(kind, precision.master_bytes, splits=splits)
        slabs = [(tier, i) for i in range(len(form) - splits)] + [(tier, -1)] * splits
        if place is Place.NVME:  # the first slab has its weights
            slabs = slabs[:1] if decisions.weight_in_state and decided.params != "nvme" else []
        offsets = [taken[slab] for slab in slabs]
        if place is Place.GPU and precision.master_is_weight:
            offsets[0] = starts[index] - start
        pieces.append(
            Piece(
                index=index,
                kind=kind,
                form=form,
                splits=splits,
                place=place,
                start=starts[index],
                stop=starts[index] + num_params,
                offsets=tuple(offsets),
                staging=taken["staging"],
                leaves=leaves,
                in_place=in_place,
                spilled=spilled,
                arrival=taken["arrival"],
                stored_weight_bytes=num_params * decisions.stored_weight_bytes(unit.name) * (place is Place.NVME),
            )
        )
        for slab, buffer in zip(slabs, form, strict=False):
            taken[slab] += buffer.length(num_params)
        taken["staging"] += num_params if pieces[-1].place.by_host else 0
        taken["arrival"] += num_params if leaves and not (in_place or spilled) else 0
    return tuple(pieces)
