"""Weights and optimizer state outside training: for evaluating, saving and loading."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Final, final

import torch

from executor.distributed.host_collectives import HostCollectives
from executor.distributed.shards import unshard
from executor.memory.frozen import FrozenParameter
from executor.memory.stream import whole_state
from executor.memory.units import ParameterState, UnitState
from executor.module.visibility import WeightVisibility
from executor.packed import with_own_storage
from executor.runtime import Runtime, Unbroken
from planner.graph import Unit
from planner.schedule.loop import OutOfOrderError

_NEVER = -1
_SHARE_KEPT: Final = 0.75


@final
class StateAccess:
    """Makes weights and state available for reading, evaluation and changes between iterations.

    It all-gathers shards, so all ranks must make the same calls at the same point.

    Attributes:
        is_evaluating: whether an evaluation has begun since the last iteration.
        is_closed: whether the session is closed.
        settled: resident units whose weights are those of this iteration until its updates begin.
    """

    def __init__(
        self, runtime: Runtime, units: tuple[Unit, ...], report: Callable[[str], None] = lambda _line: None
    ) -> None:
        self._runtime = runtime
        self._state = state = runtime.state
        self._shared = {unit.name: unit.shared_units for unit in units}
        self._gather_resident = any(unit.slot < 0 and unit.is_sharded for unit in state.units.values())
        # Whether each evaluation and each read of weights needs collectives.
        self._gather_at_each_use = any(unit.slot >= 0 and unit.is_sharded for unit in state.units.values()) or (
            runtime.ranks is not None and runtime.ranks.size > runtime.ranks.mesh.degrees.data_parallel
        )
        self._current_in = _NEVER  # the next iteration when resident weights were last made current
        self._in_slot: dict[int, str] = {}
        self._gathered = "", torch.empty(0)  # a unit and a type, and its weights that ranks gathered on the host
        self._is_changing = False
        self._num_changes = 0  # how often weights or their memory changed, other than by iterations
        self._on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()  # weights that were returned
        self.is_evaluating = False
        self.is_closed = False
        self.settled: set[str] = set()
        self.come_to_rest: Callable[[], bool] = lambda: False  # see executor.driver.iteration
        self._report = report
        self._visibility: WeightVisibility | None = None  # during evaluation
        self._evaluated: set[str] = set()  # units whose weights this evaluation has brought to their slots

        self._has_told = False

    def check_idle(self) -> None:
        """Check that no iteration is under way.

        Raises:
            OutOfOrderError: one is under way.
            LaneError: the session has failed.
        """
        self.check_at_rest()
        if self._runtime.inside_iteration:
            raise OutOfOrderError(
                "a step is under way; save, load and park after optimizer.step() or optimizer.zero_grad(), and before "
                "the next forward"
            )

    def check_at_rest(self) -> None:
        """Check that weights do not move: no iteration is under way, or it has left the plan. Raises as check_idle."""
        self._runtime.machine.check()
        if self._runtime.inside_iteration and not self.come_to_rest():
            raise OutOfOrderError(
                "weights move in the middle of an iteration; evaluate and save after optimizer.step() and before the "
                "next forward"
            )

    def parameter_states(self) -> dict[str, tuple[UnitState, ParameterState]]:
        """Return each parameter's unit and state, after all updates have ended.

        Raises:
            OutOfOrderError: in the middle of an iteration.
            LaneError: a task failed on some lane.
            RankError: another rank has failed.
        """
        self.check_idle()
        self.make_current("reading of state")
        return self._state.by_name

    @contextlib.contextmanager
    def changing(self, call: str, *expected: type[BaseException]) -> Iterator[None]:
        """Return a context in which to change weights and state. Later evaluations and reads get the new values.

        Ranks enter it together. It may be nested. Raises as :meth:`parameter_states`.

        Args:
            call: the call that changes them, in words.
            expected: errors after which the caller sets all of it again. After others, the session has failed.
        """
        if self._is_changing:
            yield
            return
        self.check_idle()
        self.make_current(call)
        self._is_changing = True
        try:
            with Unbroken(self._runtime, call, expected=expected):
                yield
        finally:  # after an error, too, some values may have changed
            self._is_changing = False
            self._num_changes += 1
            for unit in self._state.units.values():
                if unit.fp8 is not None:
                    unit.fp8.is_due = True
            self._current_in = _NEVER
            self._drop_kept()
            self.is_evaluating = False  # make_current() has waited for its tasks

    def weights(self, name: str) -> torch.Tensor:
        """Return one parameter's current weights. See :meth:`executor.session.Session.full_parameters`."""
        self._runtime.check_has_weights()
        self.make_current("state_dict()", uses=True)
        in_slot = dict(self._in_slot)
        weights = self._view(name)
        if self.is_evaluating or self._runtime.inside_iteration:  # the unit that computes still needs its slot
            for slot, unit in in_slot.items():
                if self._in_slot[slot] != unit:
                    self._fill_slot(self._state.units[unit])
        return weights

    def _view(self, name: str) -> torch.Tensor:
        weights = with_own_storage(self.stored_weights(name))
        if weights.is_cuda:
            self._on_device.add(weights)
        return weights

    @property
    def gathers(self) -> bool:
        """Whether ranks must bring a unit's weights together."""
        return self._gather_at_each_use

    @property
    def version(self) -> int:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        return self._runtime.loop.iteration + self._num_changes

    def check_readable(self, name: str) -> None:
        """Check that code which reads a parameter itself can be given its current weights, without other ranks.

        Raises:
            ValueError: it cannot; says why, and what to do.
        """
        if (parts := self._state.frozen_by_parameter.get(name)) is not None and parts[0][1].shard.stored.is_quantized:
            why = "it is quantized; take it from model.state_dict() or session.full_parameters()"
        elif self.is_closed:
            why = "its session is closed; take it from the model again, whose parameters are ordinary ones now"
        elif self._gather_resident or self._gather_at_each_use:
            why = "ranks hold parts of it; let all ranks call session.full_parameters() together, between two steps"
        elif self._runtime.parked:
            why = (
                "its session is parked; call session.unpark() before you read it or session.full_parameters(), or use "
                "session.stream_weights()"
            )
        elif self._runtime.machine.stopped:
            why = "its session has failed, and session.full_parameters() too; continue from a checkpoint"
        elif self._runtime.inside_iteration and not self._is_settled(name) and not self.come_to_rest():
            why = (
                "weights move during an iteration; read it, or session.full_parameters(), after optimizer.step() and "
                "before the next forward"
            )
        else:
            return
        raise ValueError(f"{name} is a parameter of a prepared model, and cannot be read here, because {why}")

    def current(self, name: str) -> torch.Tensor:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        self.check_readable(name)
        if self._runtime.inside_iteration and self._is_settled(name):
            return self._view(name)
        return self.weights(name)

    def _is_settled(self, name: str) -> bool:
        parts = (*self._state.by_parameter.get(name, ()), *self._state.frozen_by_parameter.get(name, ()))
        return all(unit.name in self.settled for unit, _ in parts)

    def masters(self) -> Callable[[str], torch.Tensor]:
        """Return a function that returns a parameter's whole master copy, float32, on the host.

        Its result may be a view of memory that the next call reuses. All ranks make the same calls in the same order.
        """
        read = whole_state(self._state, self._runtime.ranks, only_masters=True)

        def master(name: str) -> torch.Tensor:
            self._runtime.check_has_weights()
            if not self._runtime.parked:
                self.make_current("state_dict()", uses=True)
            if name in self._state.frozen_by_parameter:  # they have no master copy
                return self.stored_weights(name)
            return read(name)[0]

        return master

    def stored_weights(self, name: str) -> torch.Tensor:
        """Return a parameter's weights, which must be current, as a view of the memory that holds them.

        If several ranks or units hold parts of them, or if they are on NVMe, the result is new host memory. If the
        parameter is quantized, the result is its bytes.
        """
        parts = [(p.shard, self._shard_weights(unit, p)) for unit, p in self._state.by_parameter.get(name, ())]
        parts += [
            (p.shard, p.of(self._frozen_bytes(unit, p))) for unit, p in self._state.frozen_by_parameter.get(name, ())
        ]
        return unshard(parts, self._runtime.ranks)

    def make_current(self, doing: str, *, uses: bool = False, unparks: bool = False) -> None:
        """Wait for all updates, and copy to the device the weights that the next iteration would copy there.

        Args:
            doing: the call that needs it, in words.
            uses: whether the caller is going to use all weights, or read them whole.
            unparks: whether the session is being unparked.
        """
        self.check_at_rest()
        runtime = self._runtime
        if not unparks:
            runtime.check_unparked()
        runtime.doing = doing
        runtime.synchronize()
        is_current = self._current_in == runtime.loop.iteration
        gathers = self._gather_resident and not is_current
        runtime.check_same_call(needed=gathers or (uses and self._gather_at_each_use))
        if is_current:
            return
        self._current_in = _NEVER
        self._in_slot.clear()
        self._gathered = "", torch.empty(0)
        for unit in self._state.units.values():
            for piece in unit.pieces:
                if unit.on_device and piece.by_host:
                    runtime.actions.upload(unit, piece)
            if unit.slot < 0 and unit.is_sharded:  # ZeRO-1 and 2: ranks have updated shards of resident weights
                runtime.actions.all_gather(unit)
        self._current_in = runtime.loop.iteration

    def forget_current(self) -> None:
        """Note that the device has lost its weights, so that they are copied there before their next use."""
        self._current_in = _NEVER
        self._gathered = "", torch.empty(0)
        self._num_changes += 1

    def take_device_memory(self) -> None:
        """Make tensors empty that were returned as views of device memory, before that memory is freed."""
        for weights in self._on_device:
            weights.set_()  # type: ignore[call-overload]
        self._on_device.clear()

    def evaluate(self, unit: str, visibility: WeightVisibility) -> None:
        """Bring all weights that a unit uses to the device, for a forward without training.

        Forwards may follow each other, as when a text is generated or an image is sampled. So what would be brought for
        the second time is kept in memory of its own, where it fits beside what stays on the device, until an iteration
        begins, of this model or of another prepared one. A quarter of the room is left to what the forwards compute.

        Raises as :meth:`parameter_states`.
        """
        if not self.is_evaluating:
            self._runtime.check_has_weights()
            self._runtime.check_unparked()
            self.make_current("an evaluation", uses=True)
            self.is_evaluating = True
        for state in self._slots_of(unit):
            if state.name not in visibility.kept and self._in_slot.get(state.slot) != state.name:
                self._fill_slot(state)
                if state.name in self._evaluated and state.fp8 is None:
                    self._keep(state, visibility)
                self._evaluated.add(state.name)

    def begin_on_demand(self) -> None:
        """Begin to bring weights unit by unit in the middle of an iteration, when no task of the plan runs.

        Resident weights are made current, because their copies to the device may not have been issued yet.
        """
        self._in_slot.clear()
        self._gathered = "", torch.empty(0)
        for unit in self._state.units.values():
            for number in sorted(unit.changed) if unit.on_device else ():
                self._runtime.actions.upload(unit, unit.pieces[number])
                unit.changed.discard(number)
            if unit.slot < 0 and unit.is_sharded:
                self._runtime.actions.all_gather(unit)
        self.settled.update(unit.name for unit in self._state.units.values() if unit.slot < 0)

    def fill_slots(self, unit: str) -> None:
        """Bring all weights that a unit uses to the device, if they are not there."""
        for state in self._slots_of(unit):
            self._fill_slot(state)

    def _slots_of(self, unit: str) -> list[UnitState]:
        """Return the units whose weights a unit uses and that are in slots, not resident."""
        used = (self._state.units.get(name) for name in (unit, *self._shared[unit]))
        return [state for state in used if state is not None and state.slot >= 0]

    def _keep(self, unit: UnitState, visibility: WeightVisibility) -> None:
        """Let a unit keep what is in its slot, if there is room; all ranks do, or none if they gather it."""
        kept_bytes = sum(_slot_bytes(self._state.units[name]) for name in visibility.kept)
        fits = kept_bytes + _slot_bytes(unit) <= self._room_bytes(kept_bytes)
        if unit.is_sharded:
            self._runtime.doing = f"an evaluation, at {unit.name}"
            fits = not HostCollectives(self._runtime.ranks).any(not fits)
        if fits:
            self._visibility = visibility
            _evaluating.add(self)
            visibility.keep(unit.name)
        elif not self._has_told:
            self._has_told = True
            whole = sum(_slot_bytes(other) for other in self._state.units.values() if other.slot >= 0)
            self._report(
                f"an evaluation has room on the device to keep {kept_bytes / 1e6:,.0f} of the {whole / 1e6:,.0f} MB of "
                "weights that are not resident: the others come anew for each forward, and for each token of a "
                "generation, which is slower. This is said once"
            )

    def _room_bytes(self, kept_bytes: int) -> float:
        """Return how much an evaluation may keep on the device."""
        gpu = self._runtime.gpu
        room = math.inf if gpu.capacity_bytes is None else gpu.capacity_bytes - gpu.used_bytes
        if self._runtime.backend.device.type == "cuda":
            cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            room = min(room, torch.cuda.mem_get_info()[0] + cached + kept_bytes)
        return room * _SHARE_KEPT

    def end_evaluation(self) -> None:
        """Wait for the work of evaluations, which may still read slots, before training continues."""
        if self.is_evaluating:
            self._runtime.actions.synchronize()
            self._drop_kept()
            self.is_evaluating = False
            self._runtime.check_same_call(needed=self._gather_at_each_use)

    def end_others(self) -> None:
        """Free what evaluations of other models keep, before an iteration takes its memory."""
        for other in tuple(_evaluating):
            if other is not self:
                other._runtime.actions.synchronize()
                other._drop_kept()

    def _drop_kept(self) -> None:
        if self._visibility is not None:
            self._visibility.drop()
            self._visibility = None
            self._evaluated.clear()
        _evaluating.discard(self)

    def cast_due(self) -> None:
        """Cast weights that were set since their last cast, before an iteration fetches them in fp8."""
        due = [unit for unit in self._state.units.values() if unit.fp8 is not None and unit.fp8.must_cast]
        self._runtime.check_same_call(needed=bool(due))
        for unit in due:
            self._runtime.actions.cast(unit)

    def _shard_weights(self, unit: UnitState, parameter: ParameterState) -> torch.Tensor:
        if not unit.on_nvme and (unit.slot < 0 or not unit.is_sharded):
            return unit.weight_of(parameter)
        if unit.fp8 is not None:
            own = unit.own_weights if unit.on_device else unit.served()
            return unit.weight_of(parameter, self._gathered_on_host(unit, own))
        self._fill_slot(unit)
        return unit.weight_of(parameter, unit.device_weights).to("cpu", copy=True)

    def _frozen_bytes(self, unit: UnitState, parameter: FrozenParameter) -> torch.Tensor:
        frozen, own = unit.frozen, slice(parameter.start, parameter.stop)
        assert frozen is not None
        if frozen.is_sharded and not self._runtime.parked:
            self._fill_slot(unit)
            return frozen.device[own].to("cpu", copy=True)
        frozen.read()
        stored = frozen.stored
        if not frozen.is_sharded:
            return stored[own] if frozen.file is None else stored[own].clone()
        return self._gathered_on_host(unit, stored)[own]

    def _gathered_on_host(self, unit: UnitState, own: torch.Tensor) -> torch.Tensor:
        if self._gathered[0] != (what := f"{unit.name} {own.dtype}"):  # trained or frozen, which are bytes
            self._gathered = what, unit.unsharded(own)
        return self._gathered[1]

    def _fill_slot(self, unit: UnitState) -> None:
        if self._in_slot.get(unit.slot) != unit.name:
            actions = self._runtime.actions
            self._in_slot.pop(unit.slot, None)  # set when all of it is there
            if unit.on_nvme:
                actions.synchronize()  # the last unit may still be copied from the same buffer
                actions.read(unit)
            if unit.fp8 is not None and unit.fp8.must_cast:
                actions.cast(unit)
            if not unit.on_device:
                actions.fetch(unit)
            if unit.is_sharded:
                actions.all_gather(unit)
            self._in_slot[unit.slot] = unit.name


def _slot_bytes(unit: UnitState) -> int:
    return unit.device_weights.nbytes + (0 if unit.frozen is None else unit.frozen.device.nbytes)


_evaluating: Final = weakref.WeakSet[StateAccess]()
"""Those of all sessions that may keep weights for an evaluation."""
