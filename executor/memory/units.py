"""State of units and parameters: views of the memory that :mod:`executor.memory.state` takes."""

import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from executor.distributed.groups import Group
from executor.distributed.shards import ParameterShard
from executor.memory.fp8_weights import Fp8Copy
from executor.memory.frozen import FrozenWeights
from executor.memory.pieces import Part, Piece, State, as_state
from planner.decisions import Place
from planner.optimizers import Optimizer

NEVER = -1

_Of = TypeVar("_Of", Piece, Part)
_View = TypeVar("_View")


@dataclasses.dataclass(slots=True)
class ParameterState:
    """State of one parameter.

    Attributes:
        name: the name that its unit uses. For rows of a parameter, it includes the rows.
        shard: the shard of the model's parameter that it belongs to.
        start, stop: its range within the unit.
        parts: its overlaps with the rank's pieces.
        kind: the optimizer that updates it.
        step: number of its updates. The next update counts as soon as its gradient has arrived.
        numbers: other numbers of its optimizer's state, after each of the latest updates.
        arrived: the latest iteration in which its gradient arrived.
        flushed: the latest iteration in which its gradient reached the host.
        exchanged: the latest iteration in which another stage's gradient was added to its own.
        squares: sums of squares of its latest gradient, part by part, as the backend returns them.
        leaving, staying: the parts whose gradients go to the host, and those whose gradients stay on the device.
    """

    name: str
    shard: ParameterShard
    start: int
    stop: int
    parts: tuple[Part, ...]
    kind: Optimizer
    step: int = 0
    numbers: dict[int, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    arrived: int = NEVER
    flushed: int = NEVER
    exchanged: int = NEVER
    squares: list[torch.Tensor | float] = dataclasses.field(default_factory=list)
    leaving: tuple[Part, ...] = dataclasses.field(init=False)
    staying: tuple[Part, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.leaving = tuple(part for part in self.parts if part.piece.leaves)
        self.staying = tuple(part for part in self.parts if not part.piece.leaves)

    def arrive(self, iteration: int) -> None:
        """Note that a gradient of an iteration has arrived."""
        if self.arrived != iteration:
            self.arrived = iteration
            self.step += 1

    def parts_in(self, piece: Piece) -> Iterator[Part]:
        """Yield the parts that lie in a piece."""
        return (part for part in self.parts if part.piece.index == piece.index)

    def values_of(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Return the values of a part, given the shard's flat ``values``."""
        return values[part.start - self.start : part.stop - self.start]

    def own_of(self, values: torch.Tensor, start: int) -> torch.Tensor:
        """Return what the rank's pieces have of flat ``values``, which begin at ``start`` in the unit's range."""
        first, last = (self.parts[0].start, self.parts[-1].stop) if self.parts else (start, start)
        is_all = first == start and last - first == len(values)  # the most frequent case, without a view
        return values if is_all else values[first - start : last - start]

    def part_of(self, part: Part, own: torch.Tensor) -> torch.Tensor:
        """Return the values of a part, given what :meth:`own_of` returned."""
        first = self.parts[0].start
        return own if part.stop - part.start == len(own) else own[part.start - first : part.stop - first]


class Holding(enum.Enum):
    """Who holds the bytes of a unit's weights now.

    Attributes:
        RESIDENT: the device, all of them, in a block of the unit's own. With ZeRO-1 and 2, each rank's part of the
            block is new after an update, and the others' parts after the all-gather that follows.
        SHARDED: the device of each rank, its shard. The unit's slot has all of them from their all-gather until it is
            filled for another unit.
        FETCHED: the host, all of them or the rank's shard. The slot has all of them from their fetch, or the all-gather
            after it, until it is filled for another unit.
        ON_NVME: a file, all of them or the rank's shard. Host memory has them only on their way to the slot, which then
            has them as if they had been fetched.
    """

    RESIDENT = "resident"
    SHARDED = "sharded"
    FETCHED = "fetched"
    ON_NVME = "on NVMe"


GradientBucket = tuple[torch.Tensor, set[str]]
"""This rank's gradient of a unit, ``[padded]``, before the ranks reduce it, and the names of the parameters in it.

Other values are not defined.
"""


def _cached(view: Callable[["UnitState", _Of], _View]) -> Callable[["UnitState", _Of], _View]:
    """Let a method keep its views of each piece or part: to slice memory costs host time in every task."""

    @functools.wraps(view)
    def kept(unit: "UnitState", of: _Of) -> _View:
        key = view.__name__, of.start
        if key not in unit.views:
            unit.views[key] = view(unit, of)
        found: _View = unit.views[key]
        return found

    return kept


@dataclasses.dataclass(slots=True)
class UnitState:
    """State of one unit.

    Attributes:
        name: the unit's name.
        parameters: in the order of the unit's flat range.
        pieces: in the order of the unit's flat range.
        group: ranks that hold the same part of the unit.
        start: first index of the rank's shard in the unit's range.
        holding: who holds its weights.
        slot: number of the slot that all weights are copied to, unless they are resident.
        device_weights: ``[padded]``, the resident block or a view of the slot.
        own_weights: ``[shard]``, the rank's own weights on the device. If not ``on_device``, they are in the slot, and
            valid after they have been fetched.
        host_weights: weights in host memory, in their own type. If the unit is fetched, these are its shard; if it is
            resident, its ``CPU`` pieces. ``None`` if the master copies are the weights, or the weights are on NVMe.
        landing: host buffers for the weights of each piece that are read from NVMe; empty if none are.
        host, device: slabs of optimizer state on each tier, in the order of the longest form of its pieces (see
            :func:`executor.memory.pieces.state_buffers`), ``[num_params of that tier that have it]`` each, or their
            blocks. The first of the device is ``own_weights`` if the weights are the master copies.
        host_gradients: gradients of pieces that have their own memory for them, in the type of the weights.
        spilled: host memory of gradients that go on to NVMe, by piece.
        frozen: the weights that are not trained; ``None`` if there are none.
        fp8: where its weights are fetched in fp8, what it has instead of ``device_weights`` and ``own_weights``, which
            then have only shapes; else ``None``.
        buckets: gradients that the ranks have not reduced yet, by the micro-batch after which they will be.
        flushing: the rank's own gradients on their way to the host, by micro-batch, then by parameter.
        device_gradients: gradients that stay on the device, by parameter and piece.
        spent: gradients that updates on the device have read, held until the unit's next forward [Note: Spent].
        changed: pieces that the host has updated since their last upload.
        views: of the memory above, by method and start. Clear it when that memory becomes another.
    """

    name: str
    parameters: tuple[ParameterState, ...]
    pieces: tuple[Piece, ...]
    group: Group
    start: int
    holding: Holding
    slot: int
    device_weights: torch.Tensor
    own_weights: torch.Tensor
    host_weights: torch.Tensor | None
    landing: tuple[torch.Tensor, ...]
    host: tuple[torch.Tensor, ...]
    device: tuple[torch.Tensor, ...]
    host_gradients: torch.Tensor
    spilled: Mapping[int, torch.Tensor]
    frozen: FrozenWeights | None = None
    fp8: Fp8Copy | None = None
    buckets: dict[int, GradientBucket] = dataclasses.field(default_factory=dict)
    flushing: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    device_gradients: dict[tuple[str, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    spent: list[torch.Tensor] = dataclasses.field(default_factory=list)
    changed: set[int] = dataclasses.field(default_factory=set)
    views: dict[tuple[str, int], Any] = dataclasses.field(default_factory=dict)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps or updates only a shard of it."""
        return next(self.gathers(), None) is not None

    @property
    def is_resident(self) -> bool:
        """Whether all its weights are on the device all the time."""
        return self.holding is Holding.RESIDENT

    @property
    def on_device(self) -> bool:
        """Whether the weights that the rank updates (all, or its shard) are on the device all the time."""
        return self.holding is Holding.RESIDENT or self.holding is Holding.SHARDED

    @property
    def on_nvme(self) -> bool:
        """Whether its weights are on NVMe."""
        return self.holding is Holding.ON_NVME

    def pads(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of padding, see [Note: Shards] in :mod:`executor.memory.pieces`."""
        ends = (0, *(parameter.stop for parameter in self.parameters))
        starts = (*(parameter.start for parameter in self.parameters), len(self.device_weights))
        return ((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def unsharded(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a whole tensor from the ranks' shards, flat, on the host. All ranks call this together."""
        return self.group.all_gather_on_host(shard) if self.is_sharded else shard

    def masters(self, piece: Piece) -> torch.Tensor:
        """Return the master copy of a piece, or its weights if it is split."""
        return self.tensors(piece)[0]

    @_cached
    def own(self, piece: Piece) -> torch.Tensor:
        """Return a piece's weights on the device."""
        return self.own_weights[piece.start - self.start : piece.stop - self.start]

    def is_trained(self, piece: Piece) -> bool:
        """Return whether any parameter in a piece is trained."""
        return any(parameter.shard.trains and any(parameter.parts_in(piece)) for parameter in self.parameters)

    def has_gradient(self, piece: Piece, iteration: int) -> bool:
        """Return whether a gradient of a piece has arrived in an iteration, even if no update reads it.

        The gradient may have overwritten weights [Note: In place], or be on the device until it is dropped.
        """

        def has_arrived(parameter: ParameterState) -> bool:
            if piece.leaves:
                return parameter.flushed == iteration
            return (parameter.name, piece.index) in self.device_gradients

        return any(any(parameter.parts_in(piece)) and has_arrived(parameter) for parameter in self.parameters)

    def keep_gradient(self, parameter: ParameterState, gradient: torch.Tensor, *, copy: bool) -> None:
        """Keep the parts of a gradient on the device that are updated there, or add them to those of this iteration.

        Args:
            parameter: the parameter.
            gradient: the rank's own part of its gradient, see :meth:`ParameterState.own_of`.
            copy: whether to copy the values. A view would keep all of ``gradient`` alive.
        """
        for part in parameter.staying:
            key, values = (parameter.name, part.piece.index), parameter.part_of(part, gradient)
            if key in self.device_gradients:
                self.device_gradients[key].add_(values)
            else:
                self.device_gradients[key] = values.clone() if copy else values

    @_cached
    def tensors(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a piece's state, which must not be on NVMe: see :mod:`executor.memory.nvme`."""
        assert piece.place is not Place.NVME
        slabs = self.device if piece.place is Place.GPU else self.host
        if piece.splits:  # ties are last
            slabs = (*slabs[: len(piece.form) - 1], slabs[-1])
        ranges = zip(slabs, piece.offsets, piece.form, strict=False)
        return tuple(slab[offset : offset + buffer.length(piece.num_params)] for slab, offset, buffer in ranges)

    @_cached
    def state(self, piece: Piece) -> State:
        """Return all optimizer state of a piece, master copy first."""
        return as_state(self.tensors(piece), splits=piece.splits)

    @_cached
    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return a piece's gradient in host memory."""
        if piece.in_place:
            weights = self.host_weight(piece)
            assert weights is not None
            return weights
        if piece.spilled:
            return self.spilled[piece.index]
        return self.host_gradients[piece.arrival : piece.arrival + piece.num_params]

    @_cached
    def arrival(self, part: Part) -> torch.Tensor:
        """Return a part's gradient in host memory."""
        return self.gradient(part.piece)[part.within]

    @_cached
    def host_weight(self, piece: Piece) -> torch.Tensor | None:
        """Return a piece's weights in host memory; ``None`` if there are none beside the master copy."""
        if self.on_nvme:
            return None
        if self.host_weights is None and piece.place is Place.NVME:
            return self.host[0][piece.offsets[0] : piece.offsets[0] + piece.num_params]
        if self.host_weights is None or (self.on_device and not piece.place.by_host):
            return None
        start = piece.staging if self.on_device else piece.start - self.start
        return self.host_weights[start : start + piece.num_params]

    def weights_of(self, piece: Piece) -> list[torch.Tensor]:
        """Return a piece's weights in all places that hold them all the time, besides its master copy and NVMe."""
        held = (self.own(piece) if self.on_device else None, self.host_weight(piece))
        return [weights for weights in held if weights is not None]

    def uploaded(self, piece: Piece) -> torch.Tensor:
        """Return the host memory that an upload of a piece reads."""
        weight = self.host_weight(piece)
        return self.masters(piece) if weight is None else weight

    def served(self) -> torch.Tensor:
        """Return the weights in host memory that are fetched. The unit must not be on NVMe."""
        return self.host[0] if self.host_weights is None else self.host_weights

    def fetches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the copies of a fetch, each as target on the device and source."""
        if self.fp8 is not None:
            yield from self.fp8.fetches(self.served())
        elif not self.on_nvme and self.parameters:
            yield self.own_weights, self.served()
        for piece, landed in zip(self.pieces, self.landing, strict=False):
            yield self.own(piece), landed
        if self.frozen is not None:
            yield self.frozen.own, self.frozen.host

    def gathers(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the all-gathers of all weights, each as target on the device and the rank's shard."""
        if self.fp8 is not None:
            yield from self.fp8.gathers()
        elif len(self.own_weights) < len(self.device_weights):
            yield self.device_weights, self.own_weights
        if self.frozen is not None and self.frozen.is_sharded:
            yield self.frozen.device, self.frozen.own

    def shards(self) -> Iterator[ParameterShard]:
        """Yield the shards of all parameters, trained and frozen."""
        yield from (parameter.shard for parameter in self.parameters)
        if self.frozen is not None:
            yield from (parameter.shard for parameter in self.frozen.parameters)

    def shown(self, parameter: ParameterState) -> torch.Tensor:
        """Return the view of the slot or block that a parameter is while the unit computes; NaN if it is in fp8."""
        in_others = self.fp8 is not None and parameter.start < self.fp8.sizes.num_others
        flat = self.fp8.others if self.fp8 is not None and in_others else self.device_weights
        return self.weight_of(parameter, flat)

    def weight_of(self, parameter: ParameterState, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Return a view of a shard's current weights. All updates, uploads and all-gathers must be done.

        Args:
            parameter: one of the unit's.
            flat: all weights of the unit. By default, those in the memory that holds them, which must not be sharded.
        """
        if flat is None:
            flat = self.device_weights if self.on_device else self.served()
        return flat[parameter.start : parameter.stop].view(parameter.shard.shape)
