"""A session: a user's model and optimizer, driven by a schedule.

The user's own loop stays as it is. Hooks tell the session where forward and backward are
(:mod:`executor.module.binding`); it says so to the one loop, which issues what the schedule has up to there; the
machine runs it. ``optimizer.step()`` issues what is left of the iteration and returns while updates go on.
"""

import contextlib
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, final

import numpy as np
import torch
from torch import nn

from executor.agreement import Together
from executor.checks import check_decisions, check_groups, check_units
from executor.devices.backend import Meter
from executor.devices.cores import take
from executor.devices.lanes import LaneMachine
from executor.distributed.experts import split_experts
from executor.distributed.mesh import Mesh
from executor.distributed.ranks import Ranks
from executor.distributed.shards import Share, shares_of
from executor.distributed.tensor_parallel import share_layers
from executor.gradients import GradientError
from executor.listener import in_backward
from executor.memory.activations import OffloadedActivations
from executor.memory.arenas import Arena, MeasuredMemory
from executor.memory.pieces import Piece
from executor.memory.state import ModelState
from executor.memory.units import ParameterState, UnitState
from executor.memory.views import apart
from executor.module.accumulation import Accumulation
from executor.module.batches import bind_batches
from executor.module.binding import bind, bind_state_dict, outside
from executor.module.guards import LEFT_HALF_WAY, OWN_CHECKPOINTING, bind_guards
from executor.module.user_gradients import UserGradients
from executor.module.visibility import Sight
from executor.optimizer import WorkerTeam
from executor.optimizer.table import OptimizerEntry
from executor.options import SessionOptions, backend_of
from executor.progress import Progress
from executor.tasks.actions import Actions, ParameterUpdate
from executor.tasks.exchange import Exchange
from executor.tasks.snapshots import Snapshots
from executor.tasks.weights import Weights
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.lowering import lower
from planner.schedule.loop import Loop, OutOfOrderError
from planner.schedule.tasks import Op, Tier
from planner.schedule.timeline import Timeline


@final
class Session:
    """Executes decisions on a model. Made by :func:`executor.prepare_session`.

    Args:
        model: the user's; its parameters move into the session's memory.
        entry: the optimizer.
        groups: its parameter groups, read whenever the updates of an iteration begin.
        units: the model's units in forward order, for the decided micro-batch.
        decisions: what to execute.
        options: how.

    Attributes:
        decisions, schedule: what is executed.
        cores: which the threads run on.
        snapshots: what takes checkpoints; ``None`` if there are none.
        together: what ranks do together while no iteration is under way.

    Raises:
        ValueError: the decisions cannot be executed, or the model is not the one that was planned.
        DeviceMemoryError: a tier is too small.
    """

    def __init__(
        self,
        model: nn.Module,
        entry: OptimizerEntry,
        groups: list[dict[str, Any]],
        units: tuple[Unit, ...],
        decisions: Decisions,
        options: SessionOptions,
    ) -> None:
        check_decisions(decisions, entry)
        check_units(decisions, units)
        self.decisions = decisions
        takes_snapshots = options.checkpoint_buffer_bytes > 0
        self.schedule = lower(units, decisions, asynchronous=options.device == "cuda", takes_snapshots=takes_snapshots)
        self._model = model
        self._entry = entry
        self._groups = groups
        self._shared = {unit.name: unit.shared_units for unit in units}
        self._backend = backend_of(options)
        self._inside_iteration = False
        self._last_short = -2  # the latest iteration that ended before all micro-batches had come
        self._inferring = False
        self._model_trains = False  # now: its forward is under way
        self._changing = False
        self._doing = "iteration 1"
        self._accumulation = Accumulation(decisions.num_micro_batches)
        self._meter: Meter | None = None
        several = decisions.num_devices > 1
        self._ranks = ranks = Ranks(decisions.degrees, self._backend.device) if several else None
        self.together = Together(ranks)
        with contextlib.ExitStack() as failing, contextlib.nullcontext() if ranks is None else ranks.telling():
            shares = shares_of(model, units, Mesh(decisions.degrees, ranks.rank if ranks else 0))
            self._names = {id(share.whole): share.name for share in shares.values()}
            check_groups(entry, groups, self._names)
            # First, so that memory is near the cores that touch it.
            self.cores, self._give_cores_back = take(
                options.cores, options.num_threads, ranks, on_device=options.device == "cuda"
            )
            failing.callback(self._give_cores_back)
            self._undo: list[Callable[[], None]] = []
            failing.callback(self._undo_all)
            self._take_over(units, shares, options, failing)
            self._undo += self._hook_parameters()
            bind(model, units, decisions, self._offloaded, self, self._undo, options.compile_backend)
            self._undo += split_experts(model, units, shares, ranks and ranks.experts, self)
            if ranks is not None and decisions.tensor_parallel > 1:
                self._undo += share_layers(model, units, shares, ranks.tensor, outside(options.compile_backend))
                self.agree_on_chance()
            self._undo += [*bind_state_dict(model, self._names, self.full_parameter), self._accumulation.bind(model)]
            if options.batch:
                self._undo.append(bind_batches(model, options.batch, lambda: self.trains))
            self._move_buffers()
            self._sight = Sight(self._state, self._shared, shares.values())
            failing.callback(self._sight.release)
            self._sight.turn_to("")
            self.synchronize()  # what was copied in so far was on no lane
            # At the end: who fails before has no session that could be closed.
            self._undo += bind_guards(model, self._state.dtype, self._backend.device)
            self._undo.append(model.register_forward_hook(self._after_inference).remove)
            failing.pop_all()

    def _take_over(
        self,
        units: tuple[Unit, ...],
        shares: Mapping[str, Share],
        options: SessionOptions,
        failing: contextlib.ExitStack,
    ) -> None:
        """Move the parameters into the session's memory, and start the threads."""
        decisions, ranks = self.decisions, self._ranks
        self._gpu = Arena(Tier.GPU, options.gpu_capacity_bytes, self._backend)
        self._host = Arena(Tier.HOST, options.host_capacity_bytes, self._backend)
        if ranks is not None:
            ranks.agree("plan or model", self.schedule.to_json() + "".join(shares))
        written = (task.unit for task in self.schedule.tasks if task.op is Op.SNAPSHOT)
        self._state = ModelState(units, decisions, shares, self._gpu, self._host, ranks, options.storage_dir, written)
        if self._state.stored is not None:
            failing.callback(self._state.stored.close)
        failing.callback(self._state.give_back)
        exchange = None
        if ranks is not None:
            exchange = Exchange(self._state, decisions, self.schedule, self._backend, ranks)
        self._exchange = exchange
        self.snapshots = None
        rank = 0 if ranks is None else ranks.rank
        if options.checkpoint_buffer_bytes:
            self.snapshots = Snapshots(
                self._state, self.schedule, self._entry, self._backend, self._host, options, rank
            )
        self._parameters = {parameter.name: (unit, parameter) for unit, parameter in self._state.parameters()}
        self._gradients = UserGradients(
            decisions, (p for _, p in self._state.parameters()), self._norms, self._complete
        )
        self._team = WorkerTeam(self.cores.num_updating, self.cores.of_updates)
        failing.callback(self._team.close)
        bf16 = decisions.precision.weights == "bf16"
        for group in self._groups:  # or the first update would compile it
            self._entry.warm_up(np.uint16 if bf16 else np.float32, group, writes_bf16=bf16)
        self._offloaded = OffloadedActivations(units, decisions, options.storage_dir, rank, self._host, self._backend)
        self._actions = Actions(self._state, decisions, self._backend, self._team, exchange, self._offloaded)
        self._actions.snapshots = self.snapshots
        self._weights = Weights(self._state, self._actions, self._shared, ranks)
        self._machine = LaneMachine(
            self.schedule,
            self._actions.perform,
            self._backend,
            record=options.record,
            on_stop=self._has_stopped,
        )
        failing.callback(self._machine.close)
        self._loop = Loop(self.schedule, self._machine)
        self._progress = Progress(
            self._loop,
            self._machine,
            units,
            decisions,
            backward_begins=self._backward_begins,
            backward_ended=self._backward_ended,
        )
        if ranks is not None:
            ranks.num_values = len(self._parameters)
            ranks.watch(self._machine.fail, self._waits_for)

    def _waits_for(self) -> tuple[str, int]:
        assert self._ranks is not None
        waits = self._machine.waits or self._ranks.waits
        return self._doing if waits else "", self._machine.num_ended + self._ranks.num_ended

    def _has_stopped(self, failure: BaseException | None) -> None:
        if self._ranks is not None:
            if failure is not None:
                self._ranks.tell(failure)
            self._ranks.stop()

    @property
    def iteration(self) -> int:
        """Number of iterations that are complete, updates under way included."""
        return self._loop.iteration

    @property
    def last_was_short(self) -> bool:
        """Whether the latest iteration ended before all of the plan's micro-batches had come."""
        return self._last_short == self._loop.iteration - 1

    @property
    def record(self) -> bool:
        """Whether times are kept for :meth:`timeline`. May be changed between iterations."""
        return self._machine.record

    @record.setter
    def record(self, record: bool) -> None:
        self._machine.record = record

    # Where the model is: called by hooks, see [Note: Marks] in executor.module.binding.

    def at_forward(self, unit: str) -> None:
        """Forward, or recomputation, has come to a unit.

        Raises:
            OutOfOrderError: the plan does not expect it here.
            LaneError: a task failed on some lane.
        """
        if in_backward():
            self._progress.again(unit)
            self._sight.turn_to(unit)
        elif not self.trains:
            self._infer(unit)
        elif not self._progress.is_at(Op.FORWARD, unit):
            if not self.unit and (expected := self._loop.expected()) is not None:
                self._accumulation.begin_forward(expected.micro_batch)
                if expected.op is Op.FORWARD and expected.micro_batch:
                    self._gradients.go_on(self._loop.iteration)
            if not self._inside_iteration:
                self._begin_iteration()
            self._progress.forward(unit)
            if unit in self._state.units:  # its updates have ended in the order of this stream: see [Note: Spent]
                self._state.units[unit].spent.clear()
            self._sight.turn_to(unit)

    def at_backward(self, unit: str) -> None:
        """Backward has come to a unit. Raises as :meth:`at_forward`."""
        if not self._inside_iteration:
            raise OutOfOrderError(
                "backward through a forward that was made for evaluation; call model.train() before the forward"
            )
        if not self._progress.is_at(Op.BACKWARD, unit):
            self._progress.backward(unit)
        self._sight.turn_to(unit)

    def recomputed(self, unit: str) -> None:
        """Recomputation of the segment that ends with this unit has ended. Raises as :meth:`at_forward`."""
        self._progress.recomputed(unit)

    @property
    def unit(self) -> str:
        """The unit that computes now; empty if none does."""
        return self._progress.unit

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is one that the plan has."""
        return self._model_trains or (torch.is_grad_enabled() and self._model.training)

    def model_begins(self) -> None:
        """The model's own forward begins: parts of it may run without gradients, and are part of the plan then too."""
        self._model_trains = not in_backward() and torch.is_grad_enabled() and self._model.training

    def model_ends(self) -> None:
        """The model's own forward has ended, or failed."""
        self._model_trains = False

    def _backward_begins(self, micro_batch: int) -> None:
        self._accumulation.begin_backward(micro_batch)
        if micro_batch == self.decisions.num_micro_batches - 1 and self.decisions.update_start == "backward":
            self._begin_updates()

    def _backward_ended(self, micro_batch: int) -> None:
        self._offloaded.forget_all()
        self._sight.turn_to("")
        if micro_batch == self.decisions.num_micro_batches - 1:
            self._agree_on_arrivals()
        self._gradients.offer(self._loop.iteration, micro_batch)

    def _agree_on_arrivals(self) -> None:
        if self._exchange is not None:
            parameters = [parameter for _, parameter in self._parameters.values()]
            self._exchange.agree_on_arrivals(parameters, self._loop.iteration, self._doing)

    def _complete(self) -> None:
        """End an iteration of which not all micro-batches have come, if it is one; see [Note: Short groups]."""
        if not (num_complete := self._progress.num_complete):
            return
        self._accumulation.check_step()
        iteration = self._loop.iteration
        self._doing = f"iteration {iteration + 1}, which ended after micro-batch {num_complete}"
        self._agree_on_arrivals()
        self._actions.end_early(iteration, num_complete, self._loop.num_issued)
        if self.decisions.update_start == "backward":
            self._begin_updates()
        self._progress.end_early()
        self._machine.leave_out(iteration)
        if iteration == 1 and self.last_was_short:
            warnings.warn(
                f"the first two steps came after fewer micro-batches than the plan's "
                f"{self.decisions.num_micro_batches}, the second after {num_complete}; training goes on as the loop "
                f"has it, but is slower than planned: plan with --accumulate {num_complete}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._last_short = iteration

    def _begin_iteration(self) -> None:
        self._doing = f"iteration {self._loop.iteration + 1}"
        if self._inferring:  # what was issued for it may still read slots
            self._actions.settle()
            self._inferring = False
            self._meet(needed=self._weights.gather_at_each_use)
        self._sight.check_untouched()
        self._check_autocast()
        self._inside_iteration = True
        self._gradients.begin_iteration()

    def _check_autocast(self) -> None:
        kind = self._backend.device.type
        if torch.is_autocast_enabled(kind) and (dtype := torch.get_autocast_dtype(kind)) != self._state.dtype:
            raise ValueError(
                f"autocast to {dtype} is on, but the plan computes with {self._state.dtype} weights and counts their "
                "memory; leave autocast, or plan with another --precision"
            )

    # Gradients and updates.

    def check_zero_grad(self) -> None:
        """Check that gradients may be set to zero here.

        Raises:
            GradientError: those of some micro-batches of the iteration have been taken, and others are to come.
        """
        expected = self._loop.expected()
        if expected is not None and expected.op is not Op.CLIP and expected.micro_batch > 0:
            raise GradientError(
                f"zero_grad() came when the plan expects {expected.name}, and cannot take back what micro-batches "
                "before it have added up; call it after optimizer.step()"
            )

    def step(self) -> None:
        """Begin what is left of the iteration, updates above all, and return while it goes on.

        Micro-batches that have not come by then are left out, as at the end of a user's data.

        Raises:
            OutOfOrderError: no micro-batch has been there, or one is under way.
            LaneError: a task failed on some lane.
        """
        self._sight.check_untouched()
        self._accumulation.check_step()
        self._complete()
        expected = self._loop.expected()
        if expected is not None and expected.op is not Op.CLIP:
            raise OutOfOrderError(
                f"optimizer.step() came when the plan expects {expected.name}; the plan has "
                f"{self.decisions.num_micro_batches} forward and backward for every step. {LEFT_HALF_WAY}"
            )
        self._reach_clip()
        self._gradients.take_back(self._loop.iteration)
        if self.decisions.update_start == "step":
            self._begin_updates()
        self._machine.end_open()
        self._loop.finish()
        self._sight.turn_to("")
        self._inside_iteration = False

    def _reach_clip(self) -> None:
        expected = self._loop.expected()
        if expected is not None and expected.op is Op.CLIP:
            self._loop.reach(Op.CLIP)

    def _norms(self) -> dict[str, torch.Tensor]:
        self._reach_clip()
        self._doing = f"clipping, or reading norms, in iteration {self._loop.iteration + 1}"
        return self._actions.norms(self._loop.iteration)

    def _begin_updates(self) -> None:
        updates = {}
        for group in self._groups:
            rule = self._entry.rule(group)
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                updates[name] = ParameterUpdate(rule, self._gradients.scale(name))
        self._actions.begin_updates(self._loop.iteration, updates)
        if self._ranks is not None:
            rules = [self._entry.rule(group).params for group in self._groups]
            self._ranks.mark = zlib.crc32(repr((rules, self._gradients.decided())).encode())

    def _hook_parameters(self) -> Iterator[Callable[[], None]]:
        for unit, parameter in self._state.parameters():
            leaf = parameter.share.leaf
            leaf.grad, trains = None, leaf.requires_grad
            leaf.requires_grad_(True)  # what is frozen now may be thawed later, and takes no hook while it is frozen
            handle = leaf.register_post_accumulate_grad_hook(self._collector(unit, parameter))  # type: ignore[no-untyped-call]
            leaf.requires_grad_(trains)
            yield handle.remove

    def _collector(self, unit: UnitState, parameter: ParameterState) -> Callable[[torch.Tensor], None]:
        def collect(leaf: torch.Tensor) -> None:
            task = self._progress.task
            if task is None or not self._progress.awaits_gradient(unit.name):
                raise OutOfOrderError(
                    f"the gradient of {parameter.name} came after backward had left {unit.name}; run the model as it "
                    "was planned, or plan again"
                )
            gradient, leaf.grad = leaf.grad, None
            assert gradient is not None
            self._actions.collect(unit, parameter, gradient, task.micro_batch, self._loop.iteration)

        return collect

    # Weights outside training.

    def synchronize(self) -> None:
        """Wait until all updates have ended.

        Raises:
            LaneError: a task failed on some lane.
        """
        self._machine.wait()
        self._actions.settle()
        for unit in self._state.units.values():
            unit.spent.clear()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return all weights as they are after the last step, wherever the plan keeps them; all ranks do so together.

        Tensors are views of the session's memory, on the host or the device: clone what is to outlast the next step.
        Weights of which ranks hold shards or shares, or that are on NVMe, are brought to new host memory.

        Raises:
            OutOfOrderError: in the middle of an iteration.
            LaneError: a task failed on some lane.
            RankError: another rank has failed.
        """
        return {name: self.full_parameter(name) for name in self._weights.names()}

    def full_parameter(self, name: str) -> torch.Tensor:
        """Return the weights of one parameter. See :meth:`full_parameters`."""
        self._make_current("state_dict()", uses=True)
        return self._weights.of(name)

    def agree_on_chance(self) -> None:
        """Let ranks that share layers go on with the same random numbers: what they drop out must be the same."""
        if self._ranks is not None and self.decisions.tensor_parallel > 1:
            self._ranks.agree_on_chance()

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name that the plan has for one of the model's parameters."""
        return self._names[id(parameter)]

    def parameters(self) -> Iterator[tuple[UnitState, ParameterState]]:
        """Yield every parameter's state with its unit's, as it is just now."""
        return self._state.parameters()

    def check_between_iterations(self) -> None:
        """Check that no iteration is under way.

        Raises:
            OutOfOrderError: one is.
        """
        if self._inside_iteration:
            raise OutOfOrderError(
                "weights are on their way in the middle of an iteration; evaluate and save after optimizer.step() and "
                "before the next forward"
            )

    def parameter_states(self) -> dict[str, tuple[UnitState, ParameterState]]:
        """Return every parameter's state and its unit's, at rest. Raises as :meth:`full_parameters`."""
        self._make_current("reading of state")
        return self._parameters

    @contextlib.contextmanager
    def changing_at_rest(self) -> Iterator[None]:
        """Change weights and state inside it, while nothing is under way; evaluating and reading then bring them anew.

        Ranks begin together; what is inside an outer one changes with that. Raises as :meth:`full_parameters`.
        """
        if self._changing:
            yield
            return
        self._make_current("load_state_dict()")
        self._changing = True
        try:
            yield
        finally:  # some may have been changed
            self._changing = False
            self._weights.forget()
            self._inferring = False  # what was issued for it has been waited for

    def state_of(
        self, unit: UnitState, piece: Piece, *, reads: bool = True, writes: bool = False
    ) -> contextlib.AbstractContextManager[tuple[torch.Tensor, ...]]:
        """Have the state of a piece at rest, master copy first, to be read or, all of it if not both, to be changed."""
        if piece.place is Place.NVME:
            assert self._state.stored is not None
            return self._state.stored.at_rest((unit.name, piece.index), reads=reads, writes=writes)
        return contextlib.nullcontext(unit.state(piece))

    def collected(self, shard: torch.Tensor, unit: UnitState) -> torch.Tensor:
        """Return all of what ranks hold shards of, flat, on the host; all ranks do so together."""
        return shard if unit.group is None or len(shard) == len(unit.device_weights) else unit.group.collected(shard)

    @property
    def failed(self) -> bool:
        """Whether it has stopped, or is in the middle of an iteration: its state is not that of a step."""
        return self._machine.stopped or self._inside_iteration

    @property
    def closed(self) -> bool:
        """Whether the model has been given back."""
        return not self._undo

    def _make_current(self, doing: str, *, uses: bool = False) -> None:
        """Wait for all updates, and bring to the device what the next iteration would.

        Args:
            doing: what it is for, in words.
            uses: whether it is to use all weights, or to read them whole.
        """
        self.check_between_iterations()
        self._doing = doing
        self.synchronize()
        gathers = uses and self._weights.gather_at_each_use
        self._meet(needed=gathers or self._weights.gather_now(self._loop.iteration))
        self._weights.make_current(self._loop.iteration)

    def _meet(self, *, needed: bool) -> None:
        """Check that all ranks do the same, where what follows needs all of them."""
        if needed and self._ranks is not None:
            self._ranks.call(self._doing)

    def _infer(self, unit: str) -> None:
        if not self._inferring:
            try:
                self._make_current("an evaluation", uses=True)
            except OutOfOrderError as error:
                if not self._model.training:
                    raise
                raise OutOfOrderError(f"{error}; if this is no evaluation, {OWN_CHECKPOINTING}") from None
            self._inferring = True
        self._weights.use(unit)
        self._sight.turn_to(unit)

    def _after_inference(self, *_args: object) -> None:
        if self._inferring:
            self._sight.turn_to("")

    def _move_buffers(self) -> None:
        """Bring buffers to the device, as rank 0 has them on all; what a model writes to them is a rank's own."""
        for module in self._model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                values = buffer if self._ranks is None else self._ranks.of_first(buffer)
                setattr(module, name, values.to(self._backend.device))

    # Seeing it.

    def timeline(self, first: int = 0, last: int | None = None) -> Timeline:
        """Return what was recorded of iterations ``first`` to ``last`` (inclusive), after waiting for their ends."""
        self.synchronize()
        return self._machine.timeline(first, last)

    def mean_timeline(self) -> Timeline:
        """Return :meth:`timeline`, with the mean over ranks of every time; all ranks do so together."""
        own = self.timeline()
        start_s, end_s = self.together.means(np.stack((own.start_s, own.end_s)))
        return Timeline(own.schedule, start_s, end_s)

    @contextlib.contextmanager
    def metered(self) -> Iterator[None]:
        """Measure, inside it, the device memory that comes and goes. On the host it slows computing down.

        Updates are waited for first: until they have ended, gradients are there that will have gone.
        """
        self.synchronize()
        with self._backend.meter() as self._meter:
            self._machine.on_caller = self._meter.turn_to
            try:
                yield
            finally:
                self._meter.turn_to(None)
                self._machine.on_caller = lambda _task: None

    def memory(self) -> dict[Tier, MeasuredMemory]:
        """Return what each tier has held: by class what is taken once, and the peak of the rest if it was metered.

        On NVMe these are both versions of all state, see [Note: Two versions] in :mod:`executor.memory.nvme_files`.
        """
        metered = () if self._meter is None else (self._meter.peak_bytes, dict(self._meter.peak_bytes_of))
        used = {
            Tier.GPU: MeasuredMemory(self._gpu.by_class(), *metered),
            Tier.HOST: MeasuredMemory(self._host.by_class()),
        }
        on_nvme = (self._state.stored.by_class if self._state.stored else {}) | self._offloaded.by_class
        return used | ({Tier.NVME: MeasuredMemory(on_nvme)} if on_nvme else {})

    @property
    def storage(self) -> str:
        """Where what is on NVMe is, and how it is read and written, in words; empty if nothing is."""
        file = self._state.stored.file if self._state.stored else self._offloaded.file
        return "" if file is None else file.words

    def close(self, *, give_back: bool = True) -> None:
        """Wait for all updates and give the model back with its weights, as an ordinary one. Closing twice is allowed.

        Weights that the plan keeps on the host are then there. All ranks close together, and each has all weights in
        the end. In the middle of an iteration, which an exception may have ended, the model gets the weights of the
        last step. It gets none, and its parameters are no numbers, where these are not to be had: after a failure of
        the session itself, where updates begin during backward, and on one of several ranks; go on from a checkpoint.

        Args:
            give_back: whether the model is wanted; if not, its parameters have no values afterwards.
        """
        if self.closed:
            return
        together = found = False
        self._sight.release()
        try:
            if not self._machine.stopped and not self._inside_iteration:
                self._doing = f"close(), after {self._loop.iteration} iterations"
                self._meet(needed=True)
                self._make_current(self._doing)
                if give_back:
                    shares = {parameter.share.name: parameter.share for _, parameter in self._parameters.values()}
                    for name, share in shares.items():
                        share.whole.data = apart(self._weights.of(name))
                if self._ranks is not None:
                    self._ranks.meet()
                together = found = True
            elif not self._machine.stopped and self.decisions.update_start == "step":
                self.synchronize()
                self._state.give_back(in_iteration=True)
                found = True
        finally:
            if not found:
                self._state.give_back(lost=True)
            self._machine.close()
            self._team.close()
            self._offloaded.close()
            self._give_cores_back()
            if self._state.stored is not None:
                self._state.stored.close()
            self._undo_all()
            self._gradients.clear()
            if self._ranks is not None:
                self._ranks.close(together=together)

    def _undo_all(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self._ranks is not None:  # the others are not here to close together
            self._machine.fail(error)
        self.close()
