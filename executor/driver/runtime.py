"""The objects that execute a schedule: memory, threads and tasks; and the weights and state in that memory."""

import contextlib
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, final

import torch

from executor.devices.backend import Backend
from executor.devices.cores import Cores
from executor.devices.lanes import LaneError, LaneMachine
from executor.distributed.ranks import ALONE, Ranks
from executor.distributed.shards import ParameterShard, unshard
from executor.driver.reading import where_readable
from executor.driver.unbroken import Unbroken
from executor.memory.activations import OffloadedActivations
from executor.memory.arenas import Arena, Moved
from executor.memory.frozen import FrozenParameter
from executor.memory.nvme_files import Storage
from executor.memory.state import ModelState
from executor.memory.units import ParameterState, UnitState
from executor.module.guarded_parameters import INSTEAD, refusal, take_memory
from executor.module.visibility import WeightVisibility
from executor.optimizer.table import OptimizerEntry
from executor.optimizer.workers import WorkerTeam
from executor.options import Options
from executor.packed import as_real, with_own_storage
from executor.tasks.actions import Actions
from executor.tasks.collectives import ScheduleCollectives
from executor.tasks.links import check_same_order
from executor.tasks.snapshots import Snapshots
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering import agreed, exchanges, lower
from planner.schedule.loop import Loop, OutOfOrderError
from planner.schedule.tasks import Lane, Op, Tier

OF_GRADIENTS: Final = frozenset({Op.SCATTER, Op.FLUSH, Op.SEND, Op.SPILL})
"""Tasks that bring gradients to where updates read them, or to another stage."""
_NEVER = -1
_SHARE_KEPT: Final = 0.75


@final
class Runtime:
    """Memory, threads and tasks of one session, and its weights and state outside of tasks.

    The constructor moves the model's parameters into its memory, and starts the threads. Between iterations, weights
    and state can be read, evaluated and changed. That all-gathers shards, so all ranks make the same calls then.

    Args:
        ranks: all ranks; ``None`` if there is only one.
        failing: gets callbacks that undo the constructor if the session cannot begin.

    Attributes:
        of_stage: the ranks of this process's stage over host memory; used between iterations.
        gpu, host, storage: memory of each tier, counted by class.
        state: weights, optimizer state and gradients.
        offloaded: activations that are offloaded.
        collectives: collectives of the schedule; ``None`` if there is only one rank.
        snapshots: takes state for checkpoints; ``None`` without checkpoints.
        actions: does the work of tasks.
        machine: runs the tasks on lanes.
        loop: issues the tasks in order.
        inside_iteration: whether an iteration is under way.
        unpark: takes freed device memory again, see :mod:`executor.driver.parking`; ``None`` unless
            the session is parked.
        parking_memory: uint8, on the host, what is parked; kept for the next time.
        doing: the call that this rank is in, in words. All ranks must be in the same call when a collective begins.
        gathers, gathers_resident: whether ranks must bring a unit's weights together; whether those of resident ones.
        is_evaluating: whether an evaluation has begun since the last iteration.
        is_closed: whether the session is closed.
        settle_state: takes over what the user has changed in ``optimizer.state``.
        settled: resident units whose weights are those of this iteration until its updates begin.
    """

    def __init__(
        self,
        units: tuple[Unit, ...],
        decisions: Decisions,
        shards: Mapping[str, ParameterShard],
        entry: OptimizerEntry,
        *,
        backend: Backend,
        ranks: Ranks | None,
        cores: Cores,
        options: Options,
        failing: contextlib.ExitStack,
    ) -> None:
        self.backend = backend
        self.ranks = ranks
        self.of_stage = ALONE if ranks is None else ranks.all
        self._updates_at_step = decisions.update_start == "step"
        self.inside_iteration = False
        self.unpark: Callable[[], Moved] | None = None
        self.parking_memory = torch.empty(0, dtype=torch.uint8)
        self.doing = "iteration 1"
        takes_snapshots = options.checkpoint_buffer_bytes > 0
        schedule = lower(units, decisions, asynchronous=options.device == "cuda", takes_snapshots=takes_snapshots)
        self.gpu = Arena(Tier.GPU, options.gpu_capacity_bytes, backend)
        self.host = Arena(Tier.HOST, options.host_capacity_bytes, backend)
        if ranks is not None:
            names = "".join(name + "?" * shard.is_absent for name, shard in shards.items())
            common = repr(agreed(schedule, decisions)) if decisions.shares else schedule.to_json()
            ranks.all.check_same("plan or model", (common + names).encode())
            if decisions.cuts:
                check_same_order(schedule, ranks)
        rank = 0 if ranks is None else ranks.process
        written = (task.unit for task in schedule.tasks if task.op is Op.SNAPSHOT)
        self.storage = Storage(options.storage_dir, rank)
        failing.callback(self.storage.close)
        self.state = state = ModelState(units, decisions, shards, self.gpu, self.host, self.storage, ranks, written)
        failing.callback(state.give_back_last)
        self.collectives = None
        if ranks is not None:
            self.collectives = ScheduleCollectives(units, state, decisions, schedule, backend, ranks, self.host)
        self.snapshots = None
        if takes_snapshots:
            self.snapshots = Snapshots(state, schedule, entry, backend, self.host, options, rank)
        self._team = WorkerTeam(cores.num_updating, cores.of_updates)
        failing.callback(self._team.close)
        self.offloaded = OffloadedActivations(units, decisions, self.host, self.storage, backend)
        self.actions = Actions(
            state, decisions, backend, self._team, self.collectives, self.offloaded, self.snapshots, ranks
        )
        self.machine = LaneMachine(
            schedule,
            self.actions.perform,
            backend,
            # Gradients of several micro-batches are added up on the host, and ranks wait for each other.
            submitted=backend.submits
            - ({Lane.D2H} if decisions.num_micro_batches > 1 else set())
            - ({Lane.D2H, Lane.GPU_UPDATE} if ranks is not None else set()),
            in_order=lambda task: options.device == "cuda" and exchanges(task, decisions),
            capacity_bytes=None if options.device == "cuda" else options.gpu_capacity_bytes,
            record=options.record,
            on_stop=self._has_stopped,
            closes_when_interrupted=ranks is not None,
        )
        failing.callback(self.machine.close)
        self.loop = Loop(schedule, self.machine.issue)
        if ranks is not None:
            ranks.num_values = len(state.by_name)
            ranks.watch(self.machine.fail, self._waits_for)
        self.is_evaluating = self.is_closed = False
        self.settled: set[str] = set()
        # See executor.driver.iteration.
        self.come_to_rest: Callable[[], bool] = lambda: False
        self.has_written: Callable[[str], None] = lambda _name: None
        self.at_hand: Callable[[str], torch.Tensor | None] = lambda _name: None
        self.settle_state: Callable[[], None] = lambda: None
        self.check_hook: Callable[[torch.Tensor], None] = lambda _parameter: None
        # Whether each evaluation and each read of weights needs collectives.
        self.gathers = any(not unit.is_resident and unit.is_sharded for unit in state.units.values()) or (
            ranks is not None and ranks.size > ranks.mesh.degrees.data_parallel
        )
        # Whether ranks compute with parts of weights, so that no rank's parameters have the shapes of the whole.
        self.divides = decisions.divides_weights
        self.gathers_resident = any(unit.is_resident and unit.is_sharded for unit in state.units.values())
        self._shared = {unit.name: unit.shared_units for unit in units}
        self._current_in = _NEVER  # the next iteration when resident weights were last made current
        self._in_slot: dict[int, str] = {}
        self._gathered = "", torch.empty(0)  # a unit and a type, and its weights that ranks gathered on the host
        self._is_changing = False
        self._num_changes = 0  # how often weights or their memory changed, other than by iterations
        self._on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()  # weights that were returned
        self._report, self._has_told = options.report, False
        self._visibility: WeightVisibility | None = None  # during evaluation
        self._evaluated: set[str] = set()  # units whose weights this evaluation has brought to their slots

    @property
    def parked(self) -> bool:
        """Whether device memory has been freed."""
        return self.unpark is not None

    @property
    def has_last_step(self) -> bool:
        """Whether master copies are those of the last step once all issued tasks have ended."""
        return self._updates_at_step or not self.inside_iteration or self.actions.defers

    @property
    def version(self) -> int:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        return self.loop.iteration + self._num_changes

    def keep_version(self, version: int) -> None:
        """Note that an iteration has ended that changed no weights, so that views of them can still be read."""
        self._num_changes = version - self.loop.iteration

    def fail(self, call: str, error: BaseException, *, keeps: bool = False) -> None:
        """Mark the session as failed, because a call did not complete; see [Note: Interrupted]."""
        keeps = keeps and self.ranks is None and self.has_last_step and not self.machine.stopped
        reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        left = (
            "which gives the model the weights of the last step"
            if keeps
            else "whose weights are NaN then, because those of one step no longer exist"
        )
        failure = LaneError(
            f"{call} did not complete ({reason}), and the session cannot go on: close it (optimizer.session.close()), "
            f"{left}, and resume from a checkpoint in a new session"
        )
        self.machine.fail(failure, stops=not keeps)
        if self.ranks is not None:
            self.ranks.watchdog.report_failure(error)

    def check_has_weights(self) -> None:
        """Check that all weights have values.

        Raises:
            ValueError: some weights have no values.
        """
        if absent := self.state.absent:
            more = f" and {len(absent) - 1} more have" if len(absent) > 1 else " has"
            raise ValueError(
                f"{min(absent)}{more} no values, because the model was made on the meta device; load them first, for "
                "example with ullage.load(optimizer, FOLDER)"
            )

    def check_unparked(self) -> None:
        """Check that the session is not parked.

        Raises:
            OutOfOrderError: the session is parked.
        """
        if self.parked:
            raise OutOfOrderError(
                "the session is parked, and has no device memory; call session.unpark() first, or read weights with "
                "session.stream_weights()"
            )

    def check_idle(self) -> None:
        """Check that no iteration is under way.

        Raises:
            OutOfOrderError: one is under way.
            LaneError: the session has failed.
        """
        self.check_at_rest()
        if self.inside_iteration:
            raise OutOfOrderError(
                "a step is under way; save, load and park after optimizer.step() or optimizer.zero_grad(), and before "
                "the next forward"
            )

    def check_at_rest(self) -> None:
        """Check that weights do not move: no iteration is under way, or it has left the plan. Raises as check_idle."""
        self.machine.check()
        if self.inside_iteration and not self.come_to_rest():
            raise OutOfOrderError(
                "weights move in the middle of an iteration; evaluate and save after optimizer.step() and before the "
                "next forward"
            )

    def check_same_call(self, *, needed: bool = True) -> None:
        """Check, if ``needed``, that all ranks are in the same call.

        Raises:
            RankError: the calls differ, or a rank has failed.
        """
        if needed and self.ranks is not None:
            self.ranks.check_same_call(self.doing)

    def enter(self, call: str) -> None:
        """Say which call this rank is in, and check that all ranks are. For errors, see :meth:`check_same_call`."""
        self.doing = call
        self.check_same_call()

    def average(self, of: str, values: torch.Tensor) -> None:
        """Set what each rank has of its own, in host memory, to the mean over ranks, which call this together.

        Raises:
            RankError: another rank is in another call, or has failed.
        """
        assert self.ranks is not None
        self.enter(f"a read of {of}")
        total = as_real(values).float().clone()
        self.ranks.all.all_reduce(total)
        as_real(values).copy_(total / self.ranks.size)

    def check_same_values(self, of: str, *values: torch.Tensor) -> None:
        """Check that all ranks set something to the same values. They call this together.

        Raises:
            RankError: another rank sets something else, or is in another call, or has failed.
            ValueError: another rank has other values.
        """
        if self.ranks is not None:
            self.enter(f"a write to {of}")
            own = 0
            for each in values:
                flat = each.detach().to("cpu").contiguous()
                flat = flat.as_strided((flat.numel(),), (1,))  # a dimension of one value may have another stride
                own = zlib.crc32(flat.view(torch.uint8).numpy().data, own)
            # So ranks stay one model: a random write needs the same seed, and what each rank has alone an all-reduce.
            self.ranks.all.check_same(f"new value of {of}", own.to_bytes(4))

    def issue_gradients(self) -> None:
        """Issue what brings gradients to where updates read them, and wait. Forward and backward have ended."""
        of_gradients = (task.index for task in self.loop.schedule.tasks if task.op in OF_GRADIENTS)
        self.loop.issue_up_to(1 + max(of_gradients, default=-1))
        self.machine.wait()

    def synchronize(self, *, left_running: bool = False) -> None:
        """Wait until all updates have ended.

        Args:
            left_running: whether a failure has left the lanes running. They go on then.

        Raises:
            LaneError: a task failed on some lane.
        """
        if left_running:
            self.machine.drain()
        else:
            self.machine.wait()
        self.actions.synchronize()
        for unit in self.state.units.values():
            unit.spent.clear()

    def parameter_states(self) -> dict[str, tuple[UnitState, ParameterState]]:
        """Return each parameter's unit and state, after all updates have ended.

        Raises:
            OutOfOrderError: in the middle of an iteration.
            LaneError: a task failed on some lane.
            RankError: another rank has failed.
        """
        self.check_idle()
        self.settle_state()
        self.make_current("reading of state")
        return self.state.by_name

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
            with Unbroken(self, call, expected=expected):
                yield
        finally:  # after an error, too, some values may have changed
            self._is_changing = False
            self._num_changes += 1
            for unit in self.state.units.values():
                if unit.fp8 is not None:
                    unit.fp8.is_due = True
            self._current_in = _NEVER
            self._drop_kept()
            self.is_evaluating = False  # make_current() has waited for its tasks

    def take_remaining(self) -> None:
        """Take the rest of checkpoints that have begun, which need the weights and state that are to change."""
        if self.snapshots is not None and self.snapshots.engine is not None:
            self.snapshots.engine.take_remaining()

    def weights(self, name: str, doing: str = "state_dict()") -> torch.Tensor:
        """Return one parameter's current weights. See :meth:`executor.session.Session.full_parameters`.

        Args:
            name: the parameter.
            doing: the call that reads them, in words.
        """
        self.check_has_weights()
        self.make_current(doing, uses=True)
        in_slot = dict(self._in_slot)
        weights = self._view(name)
        if self.is_evaluating or self.inside_iteration:  # the unit that computes still needs its slot
            for slot, unit in in_slot.items():
                if self._in_slot[slot] != unit:
                    self._fill_slot(self.state.units[unit])
        return weights

    def _view(self, name: str) -> torch.Tensor:
        weights = self.state.shards()[name].in_model(with_own_storage(self.stored_weights(name)))
        if weights.is_cuda:
            self._on_device.add(weights)
        return weights

    def check_readable(self, name: str, *, alone: bool = False, is_held: bool = False) -> None:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        where_readable(self, name, alone=alone, is_held=is_held)

    def current(self, name: str) -> torch.Tensor:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        where = where_readable(self, name)
        if where == "settled":
            if self.gathers and self.ranks is not None:
                self.ranks.check_same_call(f"a read of {name}")
            return self._view(name)
        if where == "at hand" and (at_hand := self.at_hand(name)) is not None:
            return at_hand.clone()
        return self.weights(name, f"a read of {name}")

    def leaves(self, name: str) -> list[torch.Tensor]:
        """See :class:`executor.module.guarded_parameters.WeightReader`."""
        return [parameter.shard.leaf for _, parameter in self.state.by_parameter.get(name, ())]

    def gradients(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """See :class:`executor.module.guarded_parameters.WeightReader`.

        Raises:
            ValueError: ranks share layers or experts.
        """
        if self.divides:
            raise ValueError(
                f"{name} was read outside its module, as by a penalty in the loss, and its gradient from there would "
                "be lost, because ranks share layers or experts; use the optimizer's weight_decay, or read under "
                "torch.no_grad() or from session.full_parameters()"
            )
        shards = (parameter.shard for _, parameter in self.state.by_parameter.get(name, ()))
        return [shard.in_model(shard.part(as_real(gradient))) for shard in shards]

    def write(self, name: str, values: torch.Tensor) -> None:
        """See :class:`executor.module.guarded_parameters.WeightReader`. Each rank keeps its share of the values.

        Raises:
            ValueError: weights move, or another rank writes other values.
            RankError: another rank writes to another parameter, or does something else, or has failed.
        """
        if self.divides:
            raise ValueError(
                f"{name} is a parameter of a model whose ranks share layers or experts, so a write to it would be "
                f"lost; change a clone(), or {INSTEAD}"
            )
        if self.inside_iteration and not self.come_to_rest():
            raise ValueError(refusal(name))
        self.check_has_weights()
        self.make_current(f"a write to {name}", uses=True)
        self.check_same_values(name, values)
        self.has_written(name)
        self.take_remaining()
        with Unbroken(self, "a write to weights"):
            self.state.write(name, as_real(values))
            self.actions.synchronize()
        self._num_changes += 1
        self._in_slot.clear()
        self._gathered = "", torch.empty(0)
        self._drop_kept()
        self.is_evaluating = False

    def is_settled(self, name: str) -> bool:
        """Return whether a parameter's weights stay on the device, as they are, until updates begin."""
        parts = (*self.state.by_parameter.get(name, ()), *self.state.frozen_by_parameter.get(name, ()))
        return all(unit.name in self.settled for unit, _ in parts)

    def stored_weights(self, name: str) -> torch.Tensor:
        """Return a parameter's weights, which must be current, as a view of the memory that holds them.

        If several ranks or units hold parts of them, or if they are on NVMe, the result is new host memory. If the
        parameter is quantized, the result is its bytes.
        """
        parts = [(p.shard, self._shard_weights(unit, p)) for unit, p in self.state.by_parameter.get(name, ())]
        parts += [
            (p.shard, p.of(self._frozen_bytes(unit, p))) for unit, p in self.state.frozen_by_parameter.get(name, ())
        ]
        return unshard(parts, self.ranks)

    def make_current(self, doing: str, *, uses: bool = False, unparks: bool = False) -> None:
        """Wait for all updates, and copy to the device the weights that the next iteration would copy there.

        Args:
            doing: the call that needs it, in words.
            uses: whether the caller is going to use all weights, or read them whole.
            unparks: whether the session is being unparked.
        """
        self.check_at_rest()
        if not unparks:
            self.check_unparked()
        self.doing = doing
        self.synchronize()
        is_current = self._current_in == self.loop.iteration
        gathers = self.gathers_resident and not is_current
        self.check_same_call(needed=gathers or (uses and self.gathers))
        if is_current:
            return
        self._current_in = _NEVER
        self._in_slot.clear()
        self._gathered = "", torch.empty(0)
        for unit in self.state.units.values():
            for piece in unit.pieces:
                if unit.on_device and piece.place.by_host:
                    self.actions.upload(unit, piece)
            if unit.is_resident and unit.is_sharded:  # ZeRO-1 and 2: ranks have updated shards of resident weights
                self.actions.all_gather(unit)
        self._current_in = self.loop.iteration

    def forget_current(self) -> None:
        """Note that the device has lost its weights, so that they are copied there before their next use."""
        self._current_in = _NEVER
        self._gathered = "", torch.empty(0)
        self._num_changes += 1

    def take_device_memory(self) -> None:
        """Take the memory of tensors that were returned as views of device memory, before that memory is freed."""
        for weights in self._on_device:
            take_memory(weights)
        self._on_device.clear()

    def evaluate(self, unit: str, visibility: WeightVisibility) -> None:
        """Bring all weights that a unit uses to the device, for a forward without training.

        Forwards may follow each other, as when a text is generated or an image is sampled. So what would be brought for
        the second time is kept in memory of its own, where it fits beside what stays on the device, until an iteration
        begins, of this model or of another prepared one. A quarter of the room is left to what the forwards compute.

        Raises as :meth:`parameter_states`.
        """
        if not self.is_evaluating:
            self.check_has_weights()
            self.check_unparked()
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
        for unit in self.state.units.values():
            for number in sorted(unit.changed) if unit.on_device else ():
                self.actions.upload(unit, unit.pieces[number])
                unit.changed.discard(number)
            if unit.is_resident and unit.is_sharded:
                self.actions.all_gather(unit)
        self.settled.update(unit.name for unit in self.state.units.values() if unit.is_resident)

    def fill_slots(self, unit: str) -> None:
        """Bring all weights that a unit uses to the device, if they are not there."""
        for state in self._slots_of(unit):
            self._fill_slot(state)

    def keep_all(self, visibility: WeightVisibility) -> None:
        """Bring all weights to the device off the plan, in memory of their own, until the iteration ends.

        Raises:
            OutOfOrderError: the device has no room for them.
        """
        moving = [u for u in self.state.units.values() if not u.is_resident and u.name not in visibility.kept]
        if not moving:
            return
        num_bytes, free_bytes = sum(map(_slot_bytes, moving)), _free_bytes(self.backend)
        if self.of_stage.any(num_bytes > free_bytes):
            raise OutOfOrderError(
                "gradients of gradients (create_graph=True) and transforms of torch.func need all weights on the "
                f"device until optimizer.step(): {num_bytes / 1e6:,.0f} MB more, but {free_bytes / 1e6:,.0f} MB are "
                "free; give prepare() the step that makes them (step=...), or less device_memory"
            )
        self.doing = f"iteration {self.loop.iteration + 1}, which keeps all weights"
        self.check_same_call(needed=self.gathers)
        for unit in moving:
            self._fill_slot(unit)
            visibility.keep(unit.name)
        self._visibility = visibility
        self.settled.update(unit.name for unit in moving)
        visibility.keep_all()

    def _slots_of(self, unit: str) -> list[UnitState]:
        """Return the units whose weights a unit uses and that are in slots, not resident."""
        used = (self.state.units.get(name) for name in (unit, *self._shared[unit]))
        return [state for state in used if state is not None and not state.is_resident]

    def _keep(self, unit: UnitState, visibility: WeightVisibility) -> None:
        """Let a unit keep what is in its slot, if there is room; all ranks do, or none if they gather it."""
        kept_bytes = sum(_slot_bytes(self.state.units[name]) for name in visibility.kept)
        fits = kept_bytes + _slot_bytes(unit) <= _room_bytes(self.gpu, self.backend, kept_bytes)
        if unit.is_sharded:
            self.doing = f"an evaluation, at {unit.name}"
            fits = not self.of_stage.any(not fits)
        if fits:
            self._visibility = visibility
            _evaluating.add(self)
            visibility.keep(unit.name)
        elif not self._has_told:
            self._has_told = True
            whole = sum(_slot_bytes(other) for other in self.state.units.values() if not other.is_resident)
            self._report(
                f"an evaluation has room on the device to keep {kept_bytes / 1e6:,.0f} of the {whole / 1e6:,.0f} MB of "
                "weights that are not resident: the others come anew for each forward, and for each token of a "
                "generation, which is slower. This is said once"
            )

    def end_on_demand(self) -> None:
        """Free what an iteration off the plan has kept, when nothing computes with it any more."""
        if self._visibility is not None:
            self.actions.synchronize()
            self._drop_kept()

    def end_evaluation(self) -> None:
        """Wait for the work of evaluations, which may still read slots, before training continues."""
        if self.is_evaluating:
            self.actions.synchronize()
            self._drop_kept()
            self.is_evaluating = False
            self.check_same_call(needed=self.gathers)

    def end_others(self) -> None:
        """Free what evaluations of other models keep, before an iteration takes its memory."""
        for other in tuple(_evaluating):
            if other is not self:
                other.actions.synchronize()
                other._drop_kept()

    def _drop_kept(self) -> None:
        if self._visibility is not None:
            self.settled.difference_update(self._visibility.kept)
            self._visibility.drop()
            self._visibility = None
            self._evaluated.clear()
        _evaluating.discard(self)

    def cast_due(self) -> None:
        """Cast weights that were set since their last cast, before an iteration fetches them in fp8."""
        due = [unit for unit in self.state.units.values() if unit.fp8 is not None and unit.fp8.must_cast]
        self.check_same_call(needed=bool(due))
        for unit in due:
            self.actions.cast(unit)

    def _shard_weights(self, unit: UnitState, parameter: ParameterState) -> torch.Tensor:
        if not unit.on_nvme and (unit.is_resident or not unit.is_sharded):
            return unit.weight_of(parameter)
        if unit.fp8 is not None:
            own = unit.own_weights if unit.on_device else unit.served()
            return unit.weight_of(parameter, self._gathered_on_host(unit, own))
        self._fill_slot(unit)
        return unit.weight_of(parameter, unit.device_weights).to("cpu", copy=True)

    def _frozen_bytes(self, unit: UnitState, parameter: FrozenParameter) -> torch.Tensor:
        frozen, own = unit.frozen, slice(parameter.start, parameter.stop)
        assert frozen is not None
        if frozen.is_sharded and not self.parked:
            self._fill_slot(unit)
            return frozen.device[own].to("cpu", copy=True)
        if not frozen.is_sharded:
            return frozen.own_bytes(parameter)
        frozen.read()
        return self._gathered_on_host(unit, frozen.stored)[own]

    def _gathered_on_host(self, unit: UnitState, own: torch.Tensor) -> torch.Tensor:
        if self._gathered[0] != (what := f"{unit.name} {own.dtype}"):  # trained or frozen, which are bytes
            self._gathered = what, unit.unsharded(own)
        return self._gathered[1]

    def _fill_slot(self, unit: UnitState) -> None:
        if self._in_slot.get(unit.slot) != unit.name:
            actions = self.actions
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

    def close(self) -> None:
        """End the threads and remove files. Closing twice is allowed."""
        try:
            self.machine.close()
        finally:
            self._team.close()
            self.storage.close()

    def _waits_for(self) -> tuple[str, int]:
        assert self.ranks is not None
        waits = self.machine.is_waiting or self.ranks.is_waiting
        return self.doing if waits else "", self.machine.num_ended + self.ranks.num_ended

    def _has_stopped(self, failure: BaseException | None) -> None:
        if self.ranks is not None:
            if failure is not None:
                self.ranks.watchdog.report_failure(failure)
            self.ranks.stop()


def _room_bytes(gpu: Arena, backend: Backend, kept_bytes: int) -> float:
    """Return how much an evaluation may keep on the device."""
    room = math.inf if gpu.capacity_bytes is None else gpu.capacity_bytes - gpu.used_bytes
    return min(room, _free_bytes(backend) + kept_bytes) * _SHARE_KEPT


def _free_bytes(backend: Backend) -> float:
    """Return how much memory the device has beside what is taken; a stand-in is bounded by its plan alone."""
    if backend.device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _slot_bytes(unit: UnitState) -> int:
    return unit.device_weights.nbytes + (0 if unit.frozen is None else unit.frozen.device.nbytes)


_evaluating: Final = weakref.WeakSet[Runtime]()
"""Those of all sessions that may keep weights for an evaluation."""
