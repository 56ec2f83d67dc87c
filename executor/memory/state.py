"""Memory of every parameter's weights, optimizer state and gradient, as the decisions place it.

While a unit computes, ``leaf.data`` is always the same view of the unit's block or slot (see
[Note: Out of sight] in :mod:`executor.module.visibility`). Writes go through the block's own tensor, so autograd does
not count them as modifications of the parameter. Autograd saves weights in forward by their address. Before backward
reads that address, the slot holds the same bytes again (see [Note: Static slots] in
:mod:`planner.lowering.parameters`).
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from executor.distributed.ranks import ALONE, Ranks
from executor.distributed.shards import ParameterShard, unshard
from executor.memory.arenas import ALIGNMENT_BYTES, Arena
from executor.memory.fp8_weights import Fp8Copy
from executor.memory.frozen import FrozenParameter, take_frozen
from executor.memory.nvme import StoredState
from executor.memory.nvme_files import Storage
from executor.memory.pieces import DTYPES, TIES, Part, Piece, State, StateBuffer, pieces_of, state_buffers
from executor.memory.units import Holding, ParameterState, UnitState
from executor.optimizer.split import SplitMaster, opened
from executor.packed import as_real, with_own_storage
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering import slots
from planner.lowering.memory import host_workspace_bytes
from planner.optimizers import OPTIMIZERS
from planner.schedule.tasks import MemoryClass
from planner.subgroups import SECTOR_PARAMS

_HOLDING = {"gpu": Holding.RESIDENT, "host": Holding.FETCHED, "nvme": Holding.ON_NVME}
_SECTOR_BYTES = 4 * SECTOR_PARAMS

Values = Callable[[ParameterState], Iterable[torch.Tensor]]
"""Yields the values of this rank's shard of a parameter as consecutive flat parts, of any type."""


class ModelState:
    """All units of a model, and their memory.

    Parameters are copied out of the model one by one, and become views of slots and blocks. So at most one parameter at
    a time is in memory twice. Parameters without values get them by :meth:`set_weights`.

    Args:
        shards: this rank's shards of the model's parameters, by the names that the units use.
        ranks: all ranks, which begin with rank 0's values; ``None`` if there is only one.
        storage: takes files for state on NVMe.
        written: names of the units in the order in which a checkpoint writes them.

    Attributes:
        dtype: data type of weights.
        master_copy: the form of master copies.
        absent: names of parameters and buffers that have no values yet.
        units: state of each unit that has parameters, by name.
        by_name: each parameter with its unit, by the name that the unit uses.
        by_parameter: this rank's shards of each trained parameter, by the parameter's name in the model.
        state_slots: device memory for streamed pieces, each in two parts: uint8, with room for the state of any piece;
            and for weights. Before the update, the second has the gradient, if it comes from the host. After it, it has
            the new weights, if they go back to the host. It is empty if no piece needs it.
        update_memory: uint8, workspace of updates on the host.
        frozen_by_parameter: this rank's shards of each frozen parameter, by the parameter's name in the model.
        as_buffers: frozen parameters that are in no unit, by name; see [Note: Written weights] in
            :mod:`planner.setup`.
        stored: state on NVMe; ``None`` if there is none.

    Raises:
        ValueError: the plan keeps state on NVMe, but no folder was given.
        StorageError: see :class:`executor.memory.nvme_files.RecordFile`.
        DeviceMemoryError: a tier is too small.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        shards: Mapping[str, ParameterShard],
        gpu: Arena,
        host: Arena,
        storage: Storage,
        ranks: Ranks | None = None,
        written: Iterable[str] = (),
    ) -> None:
        self.absent = {shard.name for shard in shards.values() if shard.is_absent}
        self.dtype = DTYPES[decisions.precision.weight_bytes]
        self._decisions = decisions
        self._gpu = gpu
        self._host = host
        self._ranks = ranks
        kinds = (decisions.optimizer, OPTIMIZERS[decisions.optimizer].others or decisions.optimizer)
        self._forms = [
            max((state_buffers(kind, decisions.precision.master_bytes, splits=splits) for kind in kinds), key=len)
            for splits in (False, decisions.split_masters is not None)
        ]
        self.master_copy = self._forms[0][0]
        written = tuple(written)
        self._shifts = {buffer: _shifts(units, written, buffer) for buffer in self._forms[0]}
        assigned = slots(units, decisions)
        self._slots = [
            gpu.take(f"slot {i}", MemoryClass.PARAMETERS, fp8.slot_bytes, torch.uint8)
            if fp8
            else gpu.take(f"slot {i}", MemoryClass.PARAMETERS, num_params, self.dtype)
            for i, (num_params, fp8) in enumerate(zip(assigned.num_params, assigned.fp8, strict=True))
        ]
        self.state_slots = self._take_state_slots(units)
        workspace_bytes = host_workspace_bytes(units, decisions)
        self.update_memory = host.take("update workspace", MemoryClass.WORKSPACE, workspace_bytes, torch.uint8)
        self.stored = None
        if any(Place.NVME in decisions.units[unit.name].update for unit in units):
            self.stored = StoredState(units, decisions, assigned.of_unit, host, storage)
        self._frozen = take_frozen(units, decisions, assigned, shards, gpu, host, storage, ranks)
        self.units: dict[str, UnitState] = {}
        self.by_name: dict[str, tuple[UnitState, ParameterState]] = {}
        self.by_parameter: dict[str, list[tuple[UnitState, ParameterState]]] = {}
        self.as_buffers: dict[str, torch.nn.Parameter] = {}
        self.frozen_by_parameter: dict[str, list[tuple[UnitState, FrozenParameter]]] = {}
        try:
            self._move_all_in(units, assigned.of_unit, shards)
        except BaseException:
            self.give_back_last()
            raise

    def _move_all_in(
        self, units: tuple[Unit, ...], slot_of: Mapping[str, int], shards: Mapping[str, ParameterShard]
    ) -> None:
        left = Counter(shard.name for shard in shards.values())
        for unit in units:
            if unit.parameters or unit.frozen:  # perhaps without elements
                state = self._take(unit, slot_of.get(unit.name, -1), shards)
                self.units[unit.name] = state
                _clear_pads(state)
                self._move_in(state)
                if state.frozen is not None:
                    state.frozen.move_in(self.absent, self._ranks)
                    for parameter in state.frozen.parameters:
                        self.frozen_by_parameter.setdefault(parameter.shard.name, []).append((state, parameter))
                left.subtract(shard.name for shard in state.shards())
                for shard in state.shards():
                    if shard.leaf is not shard.whole and not left[shard.name]:
                        shard.whole.data = without_values(shard.whole_shape, self.dtype)

    def give_back(self, weights: Callable[[str], torch.Tensor] | None) -> None:
        """Give the model its weights.

        Args:
            weights: returns a parameter's weights, or the bytes of a quantized one, in the memory that is to hold them.
                ``None``: they are not those of one step, or only all ranks together have them. Parameters become NaN.
        """
        for name, shard in self.shards().items():
            if weights is None or name in self.absent:
                if not shard.stored.is_wrapper:  # a wrapper's class does not take other values
                    dtype = self.dtype if name in self.by_parameter else shard.whole.dtype
                    shard.whole.data = without_weights(shard, dtype)
            elif shard.stored.is_quantized:
                shard.stored.live_in(weights(name))
                shard.stored.own_tables()
            elif shard.leaf is shard.whole or not shard.whole.is_contiguous():  # else it still has its values
                shard.whole.data = shard.in_model(with_own_storage(weights(name)))

    def give_back_last(self, *, in_iteration: bool = False) -> None:
        """Give the model the weights of the last step if a session cannot begin, or ends during an iteration.

        Weights stay in the memory that holds them, with two exceptions that take new memory: weights on NVMe, and all
        weights in the middle of an iteration. During an iteration, gradients may have overwritten weights (see [Note:
        In place] in :mod:`planner.decisions`) and uploads may be due, but master copies are those of the last step.

        Args:
            in_iteration: whether an iteration is under way. Updates of the last step have ended, and none of this
                iteration has begun.
        """

        def weights(name: str) -> torch.Tensor:
            trained, frozen = self.by_parameter.get(name, ()), self.frozen_by_parameter.get(name, ())
            parts = [(p.shard, self._weights(unit, p, from_masters=in_iteration)) for unit, p in trained]
            parts += [(p.shard, p.of(unit.frozen.own_bytes(p))) for unit, p in frozen if unit.frozen is not None]
            return unshard(parts, None)

        self.give_back(weights if self._ranks is None else None)

    def _weights(self, unit: UnitState, parameter: ParameterState, *, from_masters: bool) -> torch.Tensor:
        if not from_masters and not unit.on_nvme:
            return unit.weight_of(parameter)
        return self._masters(unit, parameter, self.dtype).view(parameter.shard.shape)

    def _masters(self, unit: UnitState, parameter: ParameterState, dtype: torch.dtype) -> torch.Tensor:
        """Return the master copy of a parameter's shard, flat, in another type."""
        values = torch.empty(parameter.stop - parameter.start, dtype=dtype, device="cpu")
        for part in parameter.parts:
            with self.state_of(unit, part.piece) as (master, *_):
                parameter.values_of(part, values).copy_(master[part.within])
        return values

    @property
    def nvme(self) -> StoredState:
        """State on NVMe. The plan must keep some there."""
        assert self.stored is not None
        return self.stored

    @contextlib.contextmanager
    def state_of(
        self, unit: UnitState, piece: Piece, *, reads: bool = True, writes: bool = False
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Return a context with the state of a piece, master copy first, for use between iterations.

        Args:
            unit: the piece's unit.
            piece: the piece.
            reads: whether the current values are needed. If not, values on NVMe are zero.
            writes: whether the values change. If so, values on NVMe are written back, and split master copies are split
                again. Without, these are a copy.
        """
        with self._at_rest(unit, piece, reads=reads, writes=writes) as (master, *buffers):
            if isinstance(master, SplitMaster) and not writes:
                yield master.joined(), *buffers
            else:
                with opened(master) as values:
                    yield values, *buffers

    def _at_rest(
        self, unit: UnitState, piece: Piece, *, reads: bool, writes: bool
    ) -> contextlib.AbstractContextManager[State]:
        """Return the same with split master copies as they are kept."""
        if piece.place is Place.NVME:
            return self.nvme.at_rest((unit.name, piece.index), reads=reads, writes=writes)
        return contextlib.nullcontext(unit.state(piece))

    def shards(self) -> dict[str, ParameterShard]:
        """Return one of this rank's shards of each parameter, trained or frozen, by the name in the model."""
        held = self.by_parameter | self.frozen_by_parameter
        return {name: parts[0][1].shard for name, parts in held.items()}

    def check_frozen(self) -> None:
        """Check that no parameter trains that was planned as frozen.

        Raises:
            ValueError: one trains. There is no memory for its gradient and state.
        """
        frozen = {name: parts[0][1].shard.whole for name, parts in self.frozen_by_parameter.items()}
        for name, parameter in (frozen | self.as_buffers).items():
            if parameter.requires_grad:
                raise ValueError(
                    f"{name} was frozen when the plan was made, so the plan has no memory for its gradient and state; "
                    "let what is ever trained require gradients in prepare(), and freeze it after that "
                    "(requires_grad_(False)) as long as it is not; here, close the session and prepare the model again"
                )

    def set_weights(self, unit: UnitState, values_of: Values, *, reads: bool = True) -> None:
        """Set all weights of a unit and their master copies, in all places that hold them.

        At any time, at most one part from ``values_of`` is in memory, and one piece that is on NVMe.

        Args:
            unit: the unit.
            values_of: yields the values of a parameter, or nothing if it does not change.
            reads: whether other state on NVMe stays the same. Otherwise it becomes 0.
        """
        current: Piece | None = None
        master: torch.Tensor | SplitMaster = unit.own_weights
        with contextlib.ExitStack() as at_rest:
            for parameter in unit.parameters:
                start = parameter.start
                for values in values_of(parameter):
                    stop = start + len(values)
                    if unit.is_resident:
                        unit.device_weights[start:stop].copy_(values)
                    for part in parameter.parts:
                        piece, first, last = part.piece, max(part.start, start), min(part.stop, stop)
                        if first >= last:
                            continue
                        if piece is not current:
                            at_rest.close()
                            current = piece
                            master = at_rest.enter_context(self._at_rest(unit, piece, reads=reads, writes=True))[0]
                        within = slice(first - piece.start, last - piece.start)
                        for target in (master, *unit.weights_of(piece)):
                            target[within].copy_(values[first - start : last - start])
                    start = stop
                    del values  # else they would be in memory until the next ones are

    def write(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter's weights, in all places that hold them.

        Its master copies change only where the weights do. So elsewhere they keep what the weights have rounded off.
        """
        for unit, parameter in self.by_parameter.get(name, ()):
            own = parameter.shard.part(values).reshape(-1)
            if not self._decisions.precision.master_is_weight:
                masters, own = self._masters(unit, parameter, torch.float32), own.to("cpu")
                own = torch.where(masters.to(own.dtype) == own, masters, own.float())
            self.set_weights(unit, _only(parameter, own))
            if unit.fp8 is not None:
                unit.fp8.is_due = True
        for unit, frozen in self.frozen_by_parameter.get(name, ()):
            assert unit.frozen is not None
            unit.frozen.set_values(_only(frozen, frozen.shard.part(values).reshape(-1)))

    def _move_in(self, unit: UnitState) -> None:
        """Copy the model's values into a unit's memory, and make its parameters views of the slot or block."""

        def values_of(parameter: ParameterState) -> Iterator[torch.Tensor]:
            shard = parameter.shard
            if shard.name not in self.absent:
                of_all = shard.on_all_ranks(as_real(shard.whole.detach()))
                yield shard.on_this_rank(self._ranks.all.broadcast(of_all) if self._ranks else of_all).reshape(-1)
            self.by_name[parameter.name] = unit, parameter
            self.by_parameter.setdefault(shard.name, []).append((unit, parameter))
            shard.leaf.data = shard.in_model(unit.shown(parameter))

        self.set_weights(unit, values_of, reads=False)

    def _take(self, unit: Unit, slot: int, shards: Mapping[str, ParameterShard]) -> UnitState:
        name, dtype = unit.name, self.dtype
        holding = _HOLDING[self._decisions.units[name].params]
        if holding is Holding.RESIDENT and self._decisions.gathers(unit):
            holding = Holding.SHARDED
        on_device, on_nvme = holding in {Holding.RESIDENT, Holding.SHARDED}, holding is Holding.ON_NVME
        shard, padded = self._decisions.shard_params(unit), self._decisions.padded_params(unit)
        group = self._ranks.replicas(unit) if self._ranks else ALONE
        start = group.rank * shard if padded > shard else 0
        pieces = pieces_of(unit, self._decisions, start)
        on_host, stored, on_gpu = (
            [p for p in pieces if p.place in places]
            for places in ({Place.CPU, Place.STREAM}, {Place.NVME}, {Place.GPU})
        )
        num_stored = sum(p.num_params for p in stored)
        num_leaving = sum(p.num_params for p in pieces if p.leaves and not (p.in_place or p.spilled))
        num_served = 0 if on_nvme else sum(p.num_params for p in pieces if p.place.by_host) if on_device else shard
        resident = None
        if on_device:
            num_resident = padded if holding is Holding.RESIDENT else shard
            resident = self._gpu.take(f"{name} weights", MemoryClass.PARAMETERS, num_resident, dtype)
        weights = self._slots[slot][:padded] if resident is None or holding is Holding.SHARDED else resident
        parameters = _parameters(unit, self._decisions, pieces, shards)
        fp8 = None
        if (sizes := self._decisions.fp8_of(unit)) is not None:
            count, ranges = 0 if on_device else sizes.host_bytes, parameters[-sizes.num_scales :]
            held = self._host.take(f"{name} weights in fp8", MemoryClass.PARAMETERS, count, torch.uint8)
            casting = (
                group if on_device else self._ranks.casting(unit) if self._ranks and sizes.num_ranks > 1 else ALONE
            )
            fp8 = Fp8Copy(sizes, casting, tuple(slice(p.start, p.stop) for p in ranges), self._slots[slot], held)
            weights = without_values(torch.Size([padded]), dtype, weights.device)
        own = resident if resident is not None and holding is Holding.SHARDED else weights[start : start + shard]
        served = None
        if not (self._decisions.weight_in_state or on_nvme):
            served = self._host.take(f"{name} weights", MemoryClass.PARAMETERS, num_served, dtype)
        landing = self.stored.landing.get(name, ()) if self.stored else ()
        rooms = self.stored.rooms if self.stored else {}
        return UnitState(
            name=name,
            parameters=parameters,
            pieces=pieces,
            group=group,
            start=start,
            holding=holding,
            slot=slot,
            device_weights=weights,
            own_weights=own,
            host_weights=served,
            landing=tuple(self._typed(buffer, p) for buffer, p in zip(landing, pieces, strict=False)),
            host=self._take_slabs(self._host, name, on_host, num_stored if served is None and not on_nvme else 0),
            device=self._take_slabs(self._gpu, name, on_gpu, own=own),
            host_gradients=self._host.take(f"{name} gradients", MemoryClass.GRADIENTS, num_leaving, dtype),
            spilled={p.index: self._typed(rooms[name, p.index], p) for p in pieces if p.spilled},
            frozen=self._frozen.get(name),
            fp8=fp8,
        )

    def _typed(self, buffer: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return a piece's values at the beginning of a buffer, in the weights' type."""
        return buffer[: self.dtype.itemsize * piece.num_params].view(self.dtype)

    def _take_state_slots(self, units: tuple[Unit, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        streamed = [
            (piece, self._decisions.weights_pass(unit.name))
            for unit in units
            for piece in pieces_of(unit, self._decisions, 0)
            if piece.place is Place.STREAM
        ]
        num_weights = max((piece.num_params for piece, passes in streamed if passes), default=0)
        result = []
        for i in range(min(self._decisions.num_state_slots, len(streamed))):
            name, num_bytes = f"state slot {i}", max(piece.state_bytes for piece, _ in streamed)
            state = self._gpu.take(name, MemoryClass.OPTIMIZER, num_bytes, torch.uint8)
            weights = self._gpu.take(f"{name} weights", MemoryClass.OPTIMIZER, num_weights, self.dtype)
            result.append((state, weights))
        return result

    def _take_slabs(
        self, arena: Arena, unit: str, pieces: Sequence[Piece], num_weights: int = 0, own: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Take slabs for pieces, see :attr:`UnitState.host`.

        Args:
            arena: their tier.
            unit: the unit's name.
            pieces: those of the tier.
            num_weights: so many weights have room in the first slab, too.
            own: the rank's weights on the device, if that is the tier.
        """
        on_device = own is not None
        form, splits = self._forms[not on_device], self._decisions.split_masters is not None and not on_device
        slabs = []
        for i, buffer in enumerate(form):
            held = [p for p in pieces if buffer is TIES or i < len(p.form) - splits]
            num_bytes_of = {MemoryClass.OPTIMIZER: sum(buffer.num_bytes(p.num_params) for p in held)}
            if not i and own is not None and self._decisions.precision.master_is_weight:
                slabs.append(own)
            elif not i or num_bytes_of[MemoryClass.OPTIMIZER]:
                num_bytes_of[MemoryClass.PARAMETERS] = 0 if i else buffer.num_bytes(num_weights)
                shift_bytes = self._shifts[buffer][unit] if buffer in self._shifts else 0
                aligned = (ALIGNMENT_BYTES, 0) if on_device else (_SECTOR_BYTES, shift_bytes)
                name = f"{unit} state {i}" if i else f"{unit} master"
                taken = arena.take_blocks(name, num_bytes_of, aligned[0], shift_bytes=aligned[1])
                slabs.append(taken[: sum(num_bytes_of.values())].view(buffer.dtype))
                if i:
                    slabs[-1].zero_()
        return tuple(slabs)


def _only(parameter: object, values: torch.Tensor) -> Callable[[object], list[torch.Tensor]]:
    """Return a function that returns the values of one parameter, and nothing of others."""
    return lambda other: [values] if other is parameter else []


def _shifts(units: Iterable[Unit], written: Iterable[str], buffer: StateBuffer) -> Mapping[str, int]:
    """Return the offset from a sector boundary at which each unit's slabs of state on the host begin.

    A checkpoint file holds one kind of state, unit after unit, beginning at a block. If a slab has the same offset from
    a sector boundary as its values have in that file, they can be written straight from the slab. This works with one
    rank. With several ranks, ranges lie anywhere in their files ([Note: Boxes] in
    :mod:`executor.checkpoint.format.layout`). Offsets must be multiples of a cache line, because kernels would be
    slower otherwise.
    """
    num_params = {unit.name: unit.num_params for unit in units}
    shifts, end_bytes = dict.fromkeys(num_params, 0), 0
    for name in dict.fromkeys(written):
        shift_bytes = end_bytes % _SECTOR_BYTES
        shifts[name] = 0 if shift_bytes % ALIGNMENT_BYTES else shift_bytes
        end_bytes += buffer.num_bytes(num_params[name])
    return shifts


def _parameters(
    unit: Unit, decisions: Decisions, pieces: tuple[Piece, ...], shards: Mapping[str, ParameterShard]
) -> tuple[ParameterState, ...]:
    """Return the parameters of a unit in the order of its flat range."""
    result = []
    kinds = OPTIMIZERS[decisions.optimizer]
    for spec, (num_params, matrix), start in zip(
        unit.parameters, unit.extents, decisions.layout(unit).starts, strict=True
    ):
        stop = start + num_params
        kind = decisions.optimizer if matrix or kinds.others is None else kinds.others
        parts = tuple(
            Part(piece, max(piece.start, start), min(piece.stop, stop))
            for piece in pieces
            if max(piece.start, start) < min(piece.stop, stop)
        )
        result.append(ParameterState(spec.name, shards[spec.name], start, stop, parts, kind))
    return tuple(sorted(result, key=lambda parameter: parameter.start))


def _clear_pads(unit: UnitState) -> None:
    """Set a unit's padding to zero, see [Note: Shards] in :mod:`executor.memory.pieces`."""
    for start, stop in unit.pads():
        if unit.is_resident:
            unit.device_weights[start:stop].zero_()
        for piece in unit.pieces:
            beyond = slice(max(start - piece.start, 0), max(stop - piece.start, 0))
            for tensor in (*unit.weights_of(piece), *([unit.gradient(piece)] if piece.leaves else [])):
                tensor[beyond].zero_()
            if piece.place is not Place.NVME:
                unit.state(piece)[0][beyond].zero_()


def without_values(shape: torch.Size, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Return a tensor of NaN (zeros for integer types) that takes no memory."""
    nothing = torch.nan if dtype.is_floating_point else 0
    return torch.full((), nothing, dtype=dtype, device=device).expand(shape)


def without_weights(shard: ParameterShard, dtype: torch.dtype) -> torch.Tensor:
    """Return what a parameter is while it has no weights."""
    return without_values(shard.whole.shape, shard.whole.dtype if shard.whole.is_complex() else dtype)
