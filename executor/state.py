"""Where every parameter's weight, optimizer state and gradient are, according to the decisions.

[Note: Version counters] ``leaf.data`` is set once, to a view of the unit's block or slot. Whatever is written
there later goes through the block's own tensor, which autograd does not count as a change of the parameter: what it
saved of the weights in forward is the same address, and holds the same bytes again before backward reads them (see
[Note: Static slots] in :mod:`planner.lowering.parameters`).
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from executor.memory import ALIGNMENT_BYTES, Arena
from executor.parallel.groups import Group
from executor.parallel.shares import Share
from executor.pieces import Part, Piece, pieces_of
from executor.ranks import Ranks
from executor.storage import StoredState
from planner.decisions import SECTOR_PARAMS, Decisions, Place
from planner.graph import Unit
from planner.lowering import slots
from planner.optimizers import OPTIMIZERS
from planner.schedule import MemoryClass, Tier

NEVER = -1
_SECTOR_BYTES = 4 * SECTOR_PARAMS


@dataclasses.dataclass(slots=True)
class ParameterState:
    """One parameter.

    Attributes:
        name: by which its unit has it; of rows of a parameter, these too.
        share: what it is of the model's parameters, and what computes and accumulates with it.
        start, stop: its range within the unit.
        parts: the rank's own pieces that it falls into.
        step: number of its updates, the one that is due included once its gradient has arrived.
        arrived: the iteration in which its gradient arrived last.
        flushed: the iteration in which its gradient reached the host last.
        squares: sums of squares of its latest gradient, part by part.
    """

    name: str
    share: Share
    start: int
    stop: int
    parts: tuple[Part, ...]
    step: int = 0
    arrived: int = NEVER
    flushed: int = NEVER
    squares: list[torch.Tensor] = dataclasses.field(default_factory=list)

    def leaving_parts(self) -> Iterator[Part]:
        """Yield the parts whose gradient goes to the host."""
        return (part for part in self.parts if part.piece.leaves)

    def staying_parts(self) -> Iterator[Part]:
        """Yield the parts whose gradient stays on the device."""
        return (part for part in self.parts if not part.piece.leaves)

    def values_of(self, part: Part, values: torch.Tensor) -> torch.Tensor:
        """Return what a part has of the share's values, which are flat."""
        return values[part.start - self.start : part.stop - self.start]


class Arrived(NamedTuple):
    """A gradient that is on its way to the host: flat values, and where in the unit's range these begin."""

    values: torch.Tensor
    start: int

    def of(self, part: Part) -> torch.Tensor:
        """Return the values of a part."""
        return self.values[part.start - self.start : part.stop - self.start]


@dataclasses.dataclass(frozen=True, slots=True)
class Pile:
    """What this rank alone has of a unit's gradient, until the ranks add it up.

    Attributes:
        values: ``[padded]``, of which only what is ``present`` and the pads are defined.
        present: names of the parameters that are in it.
    """

    values: torch.Tensor
    present: set[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """Slabs of optimizer state on one tier, float32 ``[num_params of that tier]`` each.

    Attributes:
        master: ``None`` where the weight itself is the master.
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
        group: ranks that have the same of it; ``None`` if there is no other.
        start: where the rank's own shard begins in the unit's range.
        on_device: whether the weights that the rank updates are resident: all, or its shard.
        slot: number of the slot that all weights are brought to, or -1 where all are resident.
        device_weights: ``[padded]``, the resident block or the view of the slot.
        own_weights: ``[shard]``, where the rank's own weights are on the device: always if ``on_device``, else in the
            slot, once they have been fetched.
        host_weights: what the host serves or updates, in the type of the weights: the shard of a unit that is fetched,
            the ``CPU`` pieces of one that is resident; ``None`` where the master copy serves, or parameters are on
            NVMe.
        landing: where the weights of each piece are read to from NVMe, if they are there; empty otherwise.
        host, device: optimizer state on either tier.
        host_gradients: of all pieces whose gradients arrive apart from weights, in the type of the weights.
        spilled: where gradients of pieces arrive that go on to NVMe, by piece.
        piles: gradients that the ranks have not added up yet, by the micro-batch in which they will.
        flushing: gradients on their way to the host, by micro-batch, then by parameter.
        device_gradients: gradients that stay on the device, by parameter and piece.
        changed: pieces that the host has updated since they were uploaded last.
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
    piles: dict[int, Pile] = dataclasses.field(default_factory=dict)
    flushing: dict[int, dict[str, Arrived]] = dataclasses.field(default_factory=dict)
    device_gradients: dict[tuple[str, int], torch.Tensor] = dataclasses.field(default_factory=dict)
    changed: set[int] = dataclasses.field(default_factory=set)

    @property
    def on_nvme(self) -> bool:
        """Whether its parameters are on NVMe."""
        return bool(self.landing)

    def master(self, piece: Piece) -> torch.Tensor:
        """Return the float32 master copy of a piece."""
        moments = self.moments(piece)
        if moments.master is None:
            return self.own(piece)
        start = piece.offset if piece.place is Place.GPU else piece.served
        return moments.master[start : start + piece.num_params]

    def own(self, piece: Piece) -> torch.Tensor:
        """Return where a piece's weights are on the device."""
        return self.own_weights[piece.start - self.start : piece.stop - self.start]

    def buffers(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return the optimizer's own buffers of a piece."""
        held = slice(piece.offset, piece.offset + piece.num_params)
        return tuple(buffer[held] for buffer in self.moments(piece).buffers)

    def is_trained(self, piece: Piece) -> bool:
        """Return whether a gradient may come for any of a piece."""
        return any(
            part.piece.index == piece.index and parameter.share.trains
            for parameter in self.parameters
            for part in parameter.parts
        )

    def state(self, piece: Piece) -> tuple[torch.Tensor, ...]:
        """Return all optimizer state of a piece: the master copy first."""
        return (self.master(piece), *self.buffers(piece))

    def moments(self, piece: Piece) -> Moments:
        """Return the slabs that a piece lies in; on NVMe it is in none, see :class:`executor.storage.StoredState`."""
        assert piece.place is not Place.NVME
        return self.device if piece.place is Place.GPU else self.host

    def gradient(self, piece: Piece) -> torch.Tensor:
        """Return the host's copy of a gradient that leaves."""
        if piece.in_place:
            weights = self.host_weight(piece)
            assert weights is not None
            return weights
        if piece.spilled:
            return self.spilled[piece.index]
        return self.host_gradients[piece.arrival : piece.arrival + piece.num_params]

    def host_weight(self, piece: Piece) -> torch.Tensor | None:
        """Return where the host keeps a piece's weights apart from the master copy, if it does."""
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
        """Return what an upload of a piece copies to the device."""
        weight = self.host_weight(piece)
        return self.master(piece) if weight is None else weight

    def served(self) -> torch.Tensor:
        """Return the weights that the host serves the device with, unless they are on NVMe."""
        weights = self.host.master if self.host_weights is None else self.host_weights
        assert weights is not None
        return weights

    def fetches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what a fetch of the unit copies, each with its place on the device."""
        if not self.on_nvme:
            yield self.own_weights, self.served()
        for piece, landed in zip(self.pieces, self.landing, strict=False):
            yield self.own(piece), landed

    def weight_of(self, parameter: ParameterState, flat: torch.Tensor | None = None) -> torch.Tensor:
        """Return the current weights of a share, once all updates, uploads and gathers are done; a view.

        Args:
            parameter: one of the unit's.
            flat: where all weights of the unit are; left out, where they are kept, which must be whole.
        """
        if flat is None:
            flat = self.device_weights if self.on_device else self.served()
        return flat[parameter.start : parameter.stop].view(parameter.share.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class StateSlot:
    """Device memory that a streamed piece's state passes through.

    Attributes:
        state: float32: master copy and buffers.
        weights: the gradient if it comes along, until the update is done; then the new weights, if those go back to
            the host; empty if no piece needs it.
    """

    state: tuple[torch.Tensor, ...]
    weights: torch.Tensor

    def first(self, num_params: int) -> "StateSlot":
        """Return the part of it that a piece of this size takes."""
        return StateSlot(tuple(tensor[:num_params] for tensor in self.state), self.weights[:num_params])


class ModelState:
    """All units of a model, and the memory they are in.

    Parameters are copied out of the model and become views of slots and blocks, one by one, so that no more than one
    of them is in memory twice.

    Args:
        units: in forward order.
        decisions: where things live.
        shares: what this rank has of the model's parameters, by the names that the units use.
        gpu, host: where memory is taken.
        ranks: all ranks, which begin with the first one's values; ``None`` if there is one.
        storage_dir: where state on NVMe is kept.
        written: names of the units in the order in which checkpoints are written, see [Note: Slabs as in files].

    Raises:
        ValueError: the plan keeps state on NVMe, and it is not said where.
        StorageError: it cannot be kept there.
        DeviceMemoryError: a tier is too small.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        shares: Mapping[str, Share],
        gpu: Arena,
        host: Arena,
        ranks: Ranks | None = None,
        storage_dir: Path | None = None,
        written: Iterable[str] = (),
    ) -> None:
        self.dtype = torch.bfloat16 if decisions.precision.weights == "bf16" else torch.float32
        self._decisions = decisions
        self._num_buffers = OPTIMIZERS[decisions.optimizer].num_buffers
        self._gpu = gpu
        self._host = host
        self._ranks = ranks
        self._shift_bytes = _shifts(units, written)
        assigned = slots(units, decisions)
        self._slots = [
            gpu.take(f"slot {i}", MemoryClass.PARAMETERS, num_params, self.dtype)
            for i, num_params in enumerate(assigned.num_params)
        ]
        self.state_slots = self._take_state_slots(units)
        self.stored = StoredState.of(units, decisions, assigned.of_unit, storage_dir, ranks.rank if ranks else 0, host)
        self.units: dict[str, UnitState] = {}
        left = Counter(share.name for share in shares.values())
        for unit in units:
            if unit.num_params:
                state = self._take(unit, assigned.of_unit.get(unit.name, -1), shares)
                self.units[unit.name] = state
                _clear_pads(state, unit.num_params)
                self._move_in(state)
                left.subtract(parameter.share.name for parameter in state.parameters)
                for share in (parameter.share for parameter in state.parameters):
                    if share.leaf is not share.whole and not left[share.name]:
                        share.whole.data = _without_values(share.whole_shape, self.dtype)

    def parameters(self) -> Iterator[tuple[UnitState, ParameterState]]:
        """Yield every parameter with its unit."""
        return ((unit, parameter) for unit in self.units.values() for parameter in unit.parameters)

    def _move_in(self, unit: UnitState) -> None:
        with self.stored.begin(unit.name) if self.stored else contextlib.nullcontext() as keep:
            for parameter in unit.parameters:
                share = parameter.share
                of_all = share.of_all(share.whole.detach())
                values = share.mine(self._ranks.of_first(of_all) if self._ranks else of_all).reshape(-1)
                for part in parameter.parts:
                    if part.piece.place is Place.NVME:
                        assert keep is not None
                        keep(part.piece.index, part.start - part.piece.start, parameter.values_of(part, values))
                _move_in(unit, parameter, values)

    def _take(self, unit: Unit, slot: int, shares: Mapping[str, Share]) -> UnitState:
        name, dtype = unit.name, self.dtype
        on_device = self._decisions.units[name].params == "gpu"
        shard, padded = self._decisions.shard_params(unit), self._decisions.padded_params(unit)
        group = self._ranks.replicas(unit) if self._ranks and self._decisions.replicas(unit) > 1 else None
        start = group.rank * shard if group and padded > shard else 0
        pieces = pieces_of(unit, self._decisions, start)
        num_host, num_nvme, num_device = (
            sum(p.num_params for p in pieces if p.place in places)
            for places in ({Place.CPU, Place.STREAM}, {Place.NVME}, {Place.GPU})
        )
        num_apart = sum(p.num_params for p in pieces if p.leaves and not (p.in_place or p.spilled))
        on_nvme = self._decisions.units[name].params == "nvme"
        num_served = 0 if on_nvme else sum(p.num_params for p in pieces if p.by_host) if on_device else shard
        kept = None
        if on_device:
            num_kept = shard if self._decisions.gathers(unit) else padded
            kept = self._gpu.take(f"{name} weights", MemoryClass.PARAMETERS, num_kept, dtype)
        weights = self._slots[slot][:padded] if kept is None or self._decisions.gathers(unit) else kept
        own = weights[start : start + shard] if kept is None or kept is weights else kept
        served = None
        if dtype is torch.bfloat16 and not on_nvme:
            served = self._host.take(f"{name} weights", MemoryClass.PARAMETERS, num_served, dtype)
        landing = self.stored.landing.get(name, ()) if self.stored else ()
        spilled = self.stored.spilled if self.stored else None
        return UnitState(
            name=name,
            parameters=_parameters(unit, pieces, shares),
            pieces=pieces,
            group=group,
            start=start,
            on_device=on_device,
            slot=slot,
            device_weights=weights,
            own_weights=own,
            host_weights=served,
            landing=tuple(self._typed(buffer, p) for buffer, p in zip(landing, pieces, strict=False)),
            host=self._take_moments(
                self._host, name, num_host, num_host, num_nvme if served is None and not on_nvme else 0
            ),
            device=self._take_moments(self._gpu, name, num_device, 0 if dtype is torch.float32 else num_device),
            host_gradients=self._host.take(f"{name} gradients", MemoryClass.GRADIENTS, num_apart, dtype),
            spilled={p.index: self._typed(spilled.rooms[name, p.index], p) for p in pieces if spilled and p.spilled},
        )

    def _typed(self, buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return a piece's values at the beginning of a buffer, in the weights' type."""
        return buffer[: self.dtype.itemsize * piece.num_params].view(self.dtype)

    def _take_state_slots(self, units: tuple[Unit, ...]) -> list[StateSlot]:
        streamed = [
            (piece.num_params, self._decisions.weights_pass(unit.name))
            for unit in units
            for piece in pieces_of(unit, self._decisions, 0)
            if piece.place is Place.STREAM
        ]
        num_weights = max((num_params for num_params, passes in streamed if passes), default=0)
        result = []
        for i in range(min(self._decisions.num_state_slots, len(streamed))):
            name, count = f"state slot {i}", max(num_params for num_params, _ in streamed)
            num_tensors = 1 + self._num_buffers
            state = self._gpu.take(name, MemoryClass.OPTIMIZER, num_tensors * count, torch.float32)
            weights = self._gpu.take(f"{name} weights", MemoryClass.OPTIMIZER, num_weights, self.dtype)
            result.append(StateSlot(state.view(num_tensors, count).unbind(), weights))
        return result

    def _take_moments(
        self, arena: Arena, unit: str, num_params: int, num_masters: int, num_weights: int = 0
    ) -> Moments:
        """Take slabs; that of master copies has room for so many weights besides."""

        def slab(name: str, num_bytes_of: Mapping[MemoryClass, int]) -> torch.Tensor:
            aligned = (ALIGNMENT_BYTES, 0) if arena.tier is Tier.GPU else (_SECTOR_BYTES, self._shift_bytes[unit])
            taken = arena.take_blocks(f"{unit} {name}", num_bytes_of, aligned[0], shift_bytes=aligned[1])
            return taken[: sum(num_bytes_of.values())].view(torch.float32)

        buffers = tuple(
            slab(f"buffer {i}", {MemoryClass.OPTIMIZER: 4 * num_params}).zero_() for i in range(self._num_buffers)
        )
        if arena.tier is Tier.GPU and num_masters < num_params:
            return Moments(None, buffers)
        num_bytes_of = {MemoryClass.OPTIMIZER: 4 * num_masters, MemoryClass.PARAMETERS: 4 * num_weights}
        return Moments(slab("master", num_bytes_of), buffers)


def _shifts(units: Iterable[Unit], written: Iterable[str]) -> Mapping[str, int]:
    """Return how far behind a whole sector each unit's slabs of state on the host begin.

    [Note: Slabs as in files] A checkpoint has the values of one kind of state unit behind unit, from a whole block on.
    Where a slab begins as far behind a sector as its values do in that file, these can be written from where they are.
    That is so for one rank; ranges of several lie anywhere in their files ([Note: Boxes] in
    :mod:`executor.checkpoint.layout`). Kernels come first: what is no multiple of a cache line is left out.
    """
    num_params = {unit.name: unit.num_params for unit in units}
    shifts, end_bytes = dict.fromkeys(num_params, 0), 0
    for name in dict.fromkeys(written):
        shift_bytes = end_bytes % _SECTOR_BYTES
        shifts[name] = 0 if shift_bytes % ALIGNMENT_BYTES else shift_bytes
        end_bytes += 4 * num_params[name]
    return shifts


def _parameters(unit: Unit, pieces: tuple[Piece, ...], shares: Mapping[str, Share]) -> tuple[ParameterState, ...]:
    result, start = [], 0
    for spec in unit.parameters:
        stop = start + spec.num_params
        parts = tuple(
            Part(piece, max(piece.start, start), min(piece.stop, stop))
            for piece in pieces
            if max(piece.start, start) < min(piece.stop, stop)
        )
        result.append(ParameterState(spec.name, shares[spec.name], start, stop, parts))
        start = stop
    assert start == unit.num_params
    return tuple(result)


def _clear_pads(unit: UnitState, num_params: int) -> None:
    """Set to zero what lies behind the unit's last parameter, see [Note: Shards] in :mod:`executor.pieces`."""
    if unit.slot < 0:
        unit.device_weights[num_params:].zero_()
    for piece in unit.pieces:
        beyond = slice(min(max(num_params - piece.start, 0), piece.num_params), None)
        held = [unit.own(piece)] if unit.on_device else []
        held += [unit.master(piece)] if piece.place is not Place.NVME else []
        held += [unit.gradient(piece)] if piece.leaves else []
        weight = unit.host_weight(piece)
        for tensor in held if weight is None else (*held, weight):
            tensor[beyond].zero_()


def _move_in(unit: UnitState, parameter: ParameterState, values: torch.Tensor) -> None:
    """Copy a share into the unit's memory and make what computes a view of its slot or block."""
    write_weights(unit, parameter, values)
    share = parameter.share
    share.leaf.data = unit.device_weights[parameter.start : parameter.stop].view(share.shape)


def _without_values(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor that takes no memory; who computes with it nevertheless gets what is no number."""
    return torch.full((), torch.nan, dtype=dtype).expand(shape)


def write_weights(unit: UnitState, parameter: ParameterState, values: torch.Tensor) -> None:
    """Set the weights of a share and what the rank has of its master copy, but on NVMe.

    ``values`` are the share's, flat.
    """
    if unit.slot < 0:
        unit.device_weights[parameter.start : parameter.stop].copy_(values)
    for part in parameter.parts:
        piece, within = part.piece, slice(part.start - part.piece.start, part.stop - part.piece.start)
        source = parameter.values_of(part, values)
        if piece.place is not Place.NVME:
            unit.master(piece)[within].copy_(source)
        if unit.on_device:
            unit.own(piece)[within].copy_(source)
        weight = unit.host_weight(piece)
        if weight is not None:
            weight[within].copy_(source)
