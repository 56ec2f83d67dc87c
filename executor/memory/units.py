"""State of units and parameters: views of the memory that :mod:`executor.memory.state` takes."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from executor.distributed.groups import Group
from executor.distributed.shards import ParameterShard
from executor.memory.frozen import FrozenWeights
from executor.memory.pieces import Part, Piece, state_buffers
from executor.optimizer.passes import BLOCK
from planner.decisions import Place
from planner.optimizers import Optimizer

NEVER = -1


@dataclasses.dataclass(slots=True)
class ParameterState:
    """One parameter.

    Attributes:
        name: that its unit uses; for rows of a parameter, it includes the rows.
        shard: which of the model's parameters it belongs to.
        start, stop: its range within the unit.
        parts: its parts, one for each of the rank's pieces that it lies in.
        kind: what updates it.
        step: number of its updates; counts the next one as soon as its gradient has arrived.
        arrived: the latest iteration in which its gradient arrived.
        flushed: the latest iteration in which its gradient reached the host.
        squares: sums of squares of its latest gradient, part by part.
        leaving, staying: the parts whose gradient goes to the host, and those whose gradient stays on the device.
    """

    name: str
    shard: ParameterShard
    start: int
    stop: int
    parts: tuple[Part, ...]
    kind: Optimizer
    step: int = 0
    arrived: int = NEVER
    flushed: int = NEVER
    squares: list[torch.Tensor] = dataclasses.field(default_factory=list)
    leaving: tuple[Part, ...] = dataclasses.field(init=False)
    staying: tuple[Part, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.leaving = tuple(part for part in self.parts if part.piece.leaves)
        self.staying = tuple(part for part in self.parts if not part.piece.leaves)

    def parts_in(self, piece: Piece) -> Iterator[Part]:
        """Yield the parts that lie in a piece."""
        return (part for part in self.parts if part.piece.index == piece.index)

    def state_of(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Return a part of a state of the shard, flat, by value or by block."""
        start, stop = part.start - self.start, part.stop - self.start
        return (
            values[start:stop] if len(values) == self.stop - self.start else values[start // BLOCK : -(-stop // BLOCK)]
        )

    def values_of(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Return the values of a part, from the shard's flat ``values``."""
        return values[part.start - self.start : part.stop - self.start]


class FlatGradient(NamedTuple):
    """Values of a gradient, flat, and where in the unit's range they begin."""

    values: torch.Tensor
    start: int

    def of(self, part: Part) -> torch.Tensor:
        """Return the values of a part."""
        return self.values[part.start - self.start : part.stop - self.start]


@dataclasses.dataclass(frozen=True, slots=True)
class GradientBucket:
    """This rank's gradient of a unit, until the ranks reduce it.

    Attributes:
        values: ``[padded]``; only parameters that are ``present``, and the padding, are defined.
        present: names of the parameters that are in it.
    """

    values: torch.Tensor
    present: set[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """Slabs of optimizer state on one tier, ``[num_params of that tier that have it]`` each, or their blocks.

    Attributes:
        master: float32; ``None`` where the weight itself is the master.
        buffers: the optimizer's own, in the order of its entry in :mod:`executor.optimizer.table`.
    """

    master: torch.Tensor | None
    buffers: tuple[torch.Tensor, ...]


@dataclasses.dataclass(slots=True)
class UnitState:
    """One unit.

    Attributes:
        name: the unit's name.
        parameters: in the order of the unit's flat range.
        pieces: in the order of the unit's flat range.
        group: ranks that hold the same part of it; ``None`` if it is only this one.
        start: where the rank's shard begins in the unit's range.
        on_device: whether the weights that the rank updates (all, or its shard) are resident.
        slot: number of the slot that all weights are copied to; -1 if all are resident.
        device_weights: ``[padded]``, the resident block or the view of the slot.
        own_weights: ``[shard]``, the rank's own weights on the device. If not ``on_device``, they are in the slot, and
            valid once they have been fetched.
        host_weights: weights in host memory, in their own type: the shard of a unit that is fetched, or the ``CPU``
            pieces of one that is resident. ``None`` if the master copy serves as weights, or they are on NVMe.
        landing: host buffers that the weights of each piece are read into from NVMe; empty if they are not there.
        host, device: optimizer state on each tier.
        host_gradients: gradients of pieces that have memory of their own for them, in the type of the weights.
        spilled: host memory of gradients that go on to NVMe, by piece.
        frozen: the weights that are not trained; ``None`` without any.
        buckets: gradients that the ranks have not reduced yet, by the micro-batch in which they will.
        flushing: gradients on their way to the host, by micro-batch, then by parameter.
        device_gradients: gradients that stay on the device, by parameter and piece.
        spent: gradients that updates on the device have read, kept until the unit's next forward [Note: Spent].
        changed: pieces that the host has updated since their last upload.
    """

    name: str
    parameters: tuple[ParameterState, ...]
    pieces: tuple[Piece, ...]
    group: Group | None
    start: int
    on_device: bool
    slot: int
    device_weights: torch.Tensor
    own_weights: torch.Tensor
    host_weights: torch.Tensor | None
    landing: tuple[torch.Tensor, ...]
    host: Moments
    device: Moments
    host_gradients: torch.Tensor
    spilled: Mapping[int, torch.Tensor]
    frozen: FrozenWeights | None = None
    buckets: dict[int, GradientBucket] = dataclasses.field(default_factory=dict)
    flushing: dict[int, dict[str, FlatGradient]] = dataclasses.field(default_factory=dict)
    device_gradients: dict[tuple[str, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    spent: list[torch.Tensor] = dataclasses.field(default_factory=list)
    changed: set[int] = dataclasses.field(default_factory=set)

    @property
    def is_sharded(self) -> bool:
        """Whether ranks keep, or update, only shards of it."""
        return next(self.gathers(), None) is not None

    @property
    def on_nvme(self) -> bool:
        """Whether its parameters are on NVMe."""
        return bool(self.landing) or (self.frozen is not None and self.frozen.file is not None)

    def pads(self) -> Iterator[tuple[int, int]]:
        """Yield where padding begins and ends, see [Note: Shards] in :mod:`executor.memory.pieces`."""
        ends = (0, *(parameter.stop for parameter in self.parameters))
        starts = (*(parameter.start for parameter in self.parameters), len(self.device_weights))
        return ((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def unsharded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the whole of a sharded tensor, flat, on the host; all ranks call this together."""
        return self.group.all_gather_on_host(shard) if self.group is not None and self.is_sharded else shard

    def master(self, piece: Piece) -> torch.Tensor:
        """Return the float32 master copy of a piece."""
        moments = self.moments(piece)
        if moments.master is None:
            return self.own(piece)
        start = piece.offset if piece.place is Place.GPU else piece.served
        return moments.master[start : start + piece.num_params]

    def own(self, piece: Piece) -> torch.Tensor:
        """Return a piece's weights on the device."""
        return self.own_weights[piece.start - self.start : piece.stop - self.start]

    def buffers(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return the optimizer's own buffers of a piece."""
        slabs = self.moments(piece).buffers
        kept = zip(slabs, piece.buffer_offsets, state_buffers(piece.kind)[1:], strict=False)
        return tuple(slab[offset : offset + buffer.length(piece.num_params)] for slab, offset, buffer in kept)

    def is_trained(self, piece: Piece) -> bool:
        """Return whether any parameter in a piece is trained."""
        return any(parameter.shard.trains and any(parameter.parts_in(piece)) for parameter in self.parameters)

    def has_gradient(self, piece: Piece, iteration: int) -> bool:
        """Return whether a gradient of a piece has arrived in an iteration, even if no update reads it.

        It may have taken the place of weights [Note: In place], or wait on the device to be dropped.
        """

        def has_arrived(parameter: ParameterState) -> bool:
            if piece.leaves:
                return parameter.flushed == iteration
            return (parameter.name, piece.index) in self.device_gradients

        return any(any(parameter.parts_in(piece)) and has_arrived(parameter) for parameter in self.parameters)

    def keep_gradient(self, parameter: ParameterState, gradient: FlatGradient, *, first: bool, copy: bool) -> None:
        """Keep on the device the parts of a gradient that are updated there.

        Args:
            parameter: whose gradient it is.
            gradient: its values.
            first: whether this is the first one of the iteration; later ones are added to it.
            copy: whether to copy the values; a view would keep all of ``gradient`` alive.
        """
        for part in parameter.staying:
            key, values = (parameter.name, part.piece.index), gradient.of(part)
            if not first:
                self.device_gradients[key].add_(values)
            else:
                self.device_gradients[key] = values.clone() if copy else values

    def state(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return all optimizer state of a piece: the master copy first."""
        return (self.master(piece), *self.buffers(piece))

    def moments(self, piece: Piece) -> Moments:
        """Return the slabs that a piece lies in; on NVMe it is in none (:class:`executor.memory.nvme.StoredState`)."""
        assert piece.place is not Place.NVME
        return self.device if piece.place is Place.GPU else self.host

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return a piece's gradient in host memory."""
        if piece.in_place:
            weights = self.host_weight(piece)
            assert weights is not None
            return weights
        if piece.spilled:
            return self.spilled[piece.index]
        return self.host_gradients[piece.arrival : piece.arrival + piece.num_params]

    def host_weight(self, piece: Piece) -> torch.Tensor | None:
        """Return a piece's weights in host memory, if they are kept beside the master copy."""
        if self.on_nvme:
            return None
        if self.host_weights is None and piece.place is Place.NVME:
            assert self.host.master is not None
            return self.host.master[piece.served : piece.served + piece.num_params]
        if self.host_weights is None or (self.on_device and not piece.by_host):
            return None
        start = piece.staging if self.on_device else piece.start - self.start
        return self.host_weights[start : start + piece.num_params]

    def uploaded(self, piece: Piece) -> torch.Tensor:
        """Return the source of an upload of a piece."""
        weight = self.host_weight(piece)
        return self.master(piece) if weight is None else weight

    def served(self) -> torch.Tensor:
        """Return the weights in host memory that are fetched; not for units on NVMe."""
        weights = self.host.master if self.host_weights is None else self.host_weights
        assert weights is not None
        return weights

    def fetches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies of a fetch: target on the device, and source."""
        if not self.on_nvme and self.parameters:
            yield self.own_weights, self.served()
        for piece, landed in zip(self.pieces, self.landing, strict=False):
            yield self.own(piece), landed
        if self.frozen is not None:
            yield self.frozen.own, self.frozen.host

    def gathers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the all-gathers of all weights: target on the device, and the rank's shard."""
        if len(self.own_weights) < len(self.device_weights):
            yield self.device_weights, self.own_weights
        if self.frozen is not None and self.frozen.is_sharded:
            yield self.frozen.device, self.frozen.own

    def shards(self) -> Iterator[ParameterShard]:
        """Yield the shards of all parameters, trained and frozen."""
        yield from (parameter.shard for parameter in self.parameters)
        if self.frozen is not None:
            yield from (parameter.shard for parameter in self.frozen.parameters)

    def weight_of(self, parameter: ParameterState, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Return the current weights of a shard, once all updates, uploads and gathers are done; a view.

        Args:
            parameter: one of the unit's.
            flat: all weights of the unit; left out, they are taken from where they are kept, which must not be sharded.
        """
        if flat is None:
            flat = self.device_weights if self.on_device else self.served()
        return flat[parameter.start : parameter.stop].view(parameter.shard.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StateSlot:
    """Device memory that a streamed piece's state passes through.

    Attributes:
        state: uint8, flat: room for the master copy and buffers of any piece.
        weights: the gradient, if it comes from the host, until the update is done; then the new weights, if they go
            back to the host; empty if no piece needs it.
    """

    state: torch.Tensor
    weights: torch.Tensor

    def of(self, piece: Piece) -> "SlotPart":
        """Return the part that a piece needs."""
        return SlotPart(piece.state_in(self.state), self.weights[: piece.num_params])


class SlotPart(NamedTuple):
    """A piece's part of a :class:`StateSlot`: master copy and buffers, and weights."""

    state: tuple[torch.Tensor, ...]
    weights: torch.Tensor
