"""A session: a user's model and optimizer, driven by a schedule.

The user's own loop stays as it is. Hooks report where forward and backward are (:mod:`executor.module.binding`). The
session then issues the schedule's tasks up to that point (:mod:`executor.driver.iteration`), and lanes run them
(:mod:`executor.driver.runtime`). ``optimizer.step()`` issues the rest of the iteration, and returns while updates run.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from executor.audit.audit import Audit
from executor.callbacks import replace_attribute
from executor.checks import check_decisions, check_groups, check_units
from executor.devices.backend import Backend, Meter, beside
from executor.devices.cores import take_cores
from executor.devices.cuda import fused
from executor.distributed.adapters import bind_adapted_parameters
from executor.distributed.context_parallel import bind_context_parallel
from executor.distributed.experts import split_experts
from executor.distributed.mesh import Mesh
from executor.distributed.ranks import ALONE, Ranks
from executor.distributed.shards import shards_of
from executor.distributed.tensor_parallel import bind_tensor_parallel
from executor.driver.iteration import IterationDriver
from executor.driver.parking import park
from executor.driver.pipeline import Pipeline
from executor.driver.runtime import Runtime
from executor.driver.unbroken import Unbroken
from executor.memory.arenas import MeasuredMemory, Moved
from executor.memory.pieces import DTYPES, as_state, state_buffers, state_tensors
from executor.memory.stream import whole_state
from executor.module.batches import bind_batches
from executor.module.binding import bind, bind_state_dict, no_compile, watch_calls
from executor.module.empty import take_off_meta
from executor.module.guarded_parameters import has_session, join, rejoin
from executor.module.guards import Sharing, bind_guards, sharing_memory
from executor.module.naming import PROMPT, Naming, prompts_of
from executor.module.own_checkpoints import uncompiled
from executor.module.quantized import bind_quantized, check_products
from executor.module.stages import Stage
from executor.optimizer.passes import BLOCK
from executor.optimizer.table import OptimizerEntry, Rule
from executor.options import Options, backend_of
from planner.decisions import Decisions, Precision
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Lane, Tier
from planner.schedule.timeline import Timeline


@final
class Session(contextlib.AbstractContextManager["Session"]):
    """Executes decisions on a model. :func:`executor.prepare.prepare_session` makes it.

    Args:
        groups: the optimizer's parameter groups, read whenever the updates of an iteration begin.

    Attributes:
        model: the user's model.
        units, decisions, options, schedule: what is executed, and how.
        cores: the cores that the threads run on.
        collectives: all processes over host memory; used between iterations.
        runtime: memory, threads and tasks, and weights and state while no iteration is under way.
        driver: follows the model through an iteration.
        audit: compares the first iterations with plain PyTorch.

    Raises:
        ValueError: the decisions cannot be executed, or the model does not match the plan.
        DeviceMemoryError: a tier is too small.
    """

    def __init__(
        self,
        model: nn.Module,
        entry: OptimizerEntry,
        groups: list[dict[str, Any]],
        units: tuple[Unit, ...],
        decisions: Decisions,
        options: Options,
    ) -> None:
        check_decisions(decisions, entry, groups)
        check_units(decisions, units)
        check_products(model, units)
        self.model = model
        sharing = [*sharing_memory(model, {id(parameter) for group in groups for parameter in group["params"]})]
        self.units, self.decisions, self.options = units, decisions, options
        self._meter: Meter | None = None
        self._undo: list[Callable[[], None]] = []
        self._pipeline: Pipeline | None = None
        self._has_left = self._on_all_ranks = False  # whether parameters are what they are to be after close()
        backend = backend_of(options)
        self._ranks = ranks = Ranks.of(decisions, backend.device, options.num_stages, options.sharing)
        self.collectives = ALONE if ranks is None else ranks.everybody
        with (
            contextlib.ExitStack() as failing,
            contextlib.nullcontext() if ranks is None else ranks.reporting_failures(),
        ):
            absent, absent_buffers = take_off_meta(model, failing)
            mesh = Mesh(decisions, ranks.rank if ranks else 0)
            shards = shards_of(model, units, mesh, absent, options.as_buffers)
            self._names = {id(shard.whole): shard.name for shard in shards.values()}
            check_groups(entry, groups, self._names, is_alone=ranks is None)
            self.audit = Audit(
                # It runs modules alone, and compares real numbers.
                "off"
                if options.as_buffers
                or any(unit.stays or unit.writes for unit in units)
                or any(p.is_complex() for p in model.parameters())
                else options.audit,
                model,
                units,
                decisions,
                shards,
                compiles=bool(options.compile_blocks),
                report=options.report,
            )
            # Bind threads first, so that memory is near the cores that touch it.
            self.cores, self._give_cores_back = take_cores(
                options.cores, options.num_threads, ranks, on_device=options.device == "cuda"
            )
            failing.callback(self._give_cores_back)
            failing.callback(self._undo_all)
            self.runtime = Runtime(
                units,
                decisions,
                shards,
                entry,
                backend=backend,
                ranks=ranks,
                cores=self.cores,
                options=options,
                failing=failing,
            )
            self.runtime.state.absent |= absent_buffers
            self.runtime.state.as_buffers |= {name: model.get_parameter(name) for name in options.as_buffers}
            self.schedule = self.runtime.loop.schedule
            _warm_up(entry, groups, decisions, backend if options.device == "cuda" else None)
            self.driver = driver = IterationDriver(
                model, self.runtime, units, decisions, entry, groups, self.audit, options.report
            )
            failing.callback(driver.visibility.release)
            self._undo += driver.collector.hook_parameters(one_thread=any(unit.stays for unit in units))
            self._undo += driver.progress.later.bind(model, options.compile_backend)
            self._undo += [*bind_quantized(model), *bind_adapted_parameters(model)]
            if decisions.fp8_weights:
                from executor.module.float8 import bind_fp8_weights  # noqa: PLC0415 - needs torchao

                self._undo += bind_fp8_weights(model, self.runtime.state.units.values())
            bind(model, units, decisions, self.runtime.offloaded, driver, self._undo, options.compile_backend)
            self._undo += split_experts(model, units, shards, ranks and ranks.experts, driver)
            if ranks is not None and decisions.context_parallel > 1:
                self._undo += bind_context_parallel(
                    model,
                    units,
                    ranks.contexts,
                    no_compile(options.compile_backend),
                    functools.partial(beside, backend, Lane.RING) if decisions.context_exchange else None,
                )
            if ranks is not None and decisions.tensor_parallel > 1:
                self._undo += bind_tensor_parallel(
                    model,
                    units,
                    shards,
                    ranks.tensor,
                    no_compile(options.compile_backend),
                    backend.device,
                    driver.progress.later.multiply_of,
                )
                self.sync_rng_state()
            self._undo += bind_state_dict(model, self._names, self.runtime.weights, divides=self.runtime.divides)
            # no_sync as DistributedDataParallel has it, unless it has its own; the plan decides when ranks add up.
            # Without the mark, accelerate would wrap the model in DistributedDataParallel.
            self._undo += [
                replace_attribute(model, name, mark)
                for name, mark in (("no_sync", contextlib.nullcontext), ("_is_accelerate_prepared", ranks is not None))
                if not hasattr(model, name)
            ]
            if options.batch:
                self._undo.append(backend.forget_shapes)
                called = model.get_submodule(options.calls[0] if options.calls else "")
                self._undo.append(
                    bind_batches(called, options.batch, lambda: driver.begins, driver.progress.note_other_shape)
                )
            driver.num_calls = len(options.calls) or 1
            self._undo += _run_uncompiled(options, decisions)
            self._undo += watch_calls(model, options.calls, driver)  # its hooks run before all others
            _move_buffers(model, backend.device, ranks, self.runtime.state.as_buffers.values())
            driver.visibility.show("")
            self.synchronize()  # the copies so far were on no lane
            # Guards come last: before them, a failure leaves no session that could be closed.
            self._undo += bind_guards(model, self.runtime.state.dtype, backend.device, self._values)
            self.audit.bound(_ids_of_hooks(self._undo), lambda: (driver.call, driver.tile))
            self._undo.append(self.audit.close)
            _join(sharing, options.report)
            failing.pop_all()

    @property
    def iteration(self) -> int:
        """Number of complete iterations. Updates of the last one may still run."""
        return self.runtime.loop.iteration

    @property
    def attention(self) -> tuple[str, ...]:
        """The fused kernels that compute attention, such as ``cudnn`` or ``flash``; empty before the first forward."""
        return self.driver.attention or ()

    @property
    def num_left(self) -> int:
        """Number of iterations that have left the plan, see [Note: On demand] in :mod:`executor.driver.on_demand`."""
        return self.driver.num_left

    @property
    def num_unexpected(self) -> int:
        """Number of iterations that used gradients otherwise than ``speculate`` expected; see [Note: Speculation]."""
        return self.driver.speculation.num_unexpected

    @property
    def record(self) -> bool:
        """Whether times are recorded for :meth:`timeline`. May be changed between iterations."""
        return self.runtime.machine.record

    @record.setter
    def record(self, record: bool) -> None:
        self.runtime.machine.record = record

    @property
    def failed(self) -> bool:
        """Whether its state is not that after a step: the session has stopped, or is in the middle of an iteration."""
        return self.runtime.machine.failed or self.runtime.inside_iteration

    @property
    def closed(self) -> bool:
        """Whether the model has been given back. If Ctrl-C interrupted that, :meth:`close` goes on with it."""
        return self._has_left or not self._undo

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the plan's name of one of the model's parameters."""
        return self._names[id(parameter)]

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether a parameter is one of the model."""
        return id(parameter) in self._names

    def add_group(self, groups: list[dict[str, Any]], added: Iterable[torch.Tensor]) -> None:
        """Let the optimizer update more parameters; those of the model have had no update so far.

        Args:
            groups: all groups.
            added: parameters of the last one.

        Raises:
            ValueError: the plan has no state for one of them, or see :func:`executor.checks.check_groups`.
        """
        names = [self.name_of(parameter) for parameter in added if self.has(parameter)]
        if frozen := [name for name in names if name not in self.runtime.state.by_parameter]:
            raise ValueError(
                f"{frozen[0]} was frozen at prepare(), so the plan has no optimizer state for it; give the optimizer "
                "all that is ever trained, let it require gradients in prepare(), and freeze it after that "
                "(requires_grad_(False)) as long as it is not"
            )
        check_groups(self.driver.entry, groups, self._names, is_alone=self._ranks is None)
        for parameter in [part for name in names for _, part in self.runtime.state.by_parameter[name]]:
            parameter.step = int(parameter.arrived == self.iteration)
        self.driver.gradients.use(names)

    def synchronize(self) -> None:
        """Wait until all updates have ended.

        Raises:
            LaneError: a task failed on some lane.
        """
        self.runtime.synchronize()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """Return all weights after the last step, wherever the plan keeps them; in a pipeline, those of this stage.

        All ranks call this together.

        Tensors are views of the session's memory, on the host or the device. Clone a tensor that must outlast the next
        step. If ranks hold shards of a weight, or it is on NVMe, the result is a copy in new host memory.

        Raises:
            OutOfOrderError: in the middle of an iteration.
            LaneError: a task failed on some lane.
            RankError: another rank has failed.
        """
        as_buffers = {name: parameter.data for name, parameter in self.runtime.state.as_buffers.items()}
        return {name: self.runtime.weights(name) for name in self.runtime.state.shards()} | as_buffers

    def _values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the current values of one of the model's parameters, for a copy of it.

        Raises:
            TypeError: there are no such values, or none as a tensor.
        """
        name = self._names.get(id(parameter))
        if name is None:
            return parameter.data
        is_quantized = self.runtime.state.shards()[name].stored.is_quantized
        if self.runtime.divides or self._pipeline is not None or is_quantized:
            reason = "its weights are quantized" if is_quantized else "ranks share its layers"
            raise TypeError(
                f"a prepared model cannot be pickled or copied if {reason}; save model.state_dict(), and load it into "
                "a model that is made anew"
            )
        return self.runtime.weights(name)

    def naming(self) -> Naming:
        """Return the names of the model's tensors in files of weights."""
        shards = self.runtime.state.shards().values()
        shapes = {id(shard.whole): shard.whole_shape for shard in shards}
        return Naming(self.model, shapes) if self._pipeline is None else self._pipeline.stage.naming()

    def stream_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all weights, one at a time, with the names and layout that ``transformers`` writes to files.

        If the model has adapters of ``peft``, only their weights are yielded, as ``peft`` writes them. Call this
        between two iterations; the session may be parked. Use each tensor before taking the next: it may be a view of
        memory that is reused. A tensor that is whole in memory is not copied. All ranks iterate together, to the end.

        Args:
            dtype: data type of the weights (default: the plan's). Any other type is made from the float32 master
                copies.

        Raises:
            OutOfOrderError: in the middle of an iteration; or the session is parked, but a prompt must be computed from
                other weights.
            ValueError: the model has no weights yet, or has complex weights, or quantized ones but no adapters.
        """
        self.runtime.check_at_rest()
        naming = self.naming()
        if own := next((name for name, shard in self.runtime.state.shards().items() if shard.whole.is_complex()), None):
            raise ValueError(f"{own} is complex, and cannot be streamed to files of weights; save model.state_dict()")
        weights = self.reader(dtype)
        if not naming.adapters:
            saved_names = naming.saved_names()
            for own in (self._names.get(id(naming.tensors[name])) for name in saved_names.values()):
                if own is not None and self.runtime.state.shards()[own].stored.is_quantized:
                    raise ValueError(
                        f"{own} is quantized, and cannot be saved or streamed by itself; train adapters, which can be "
                        "saved, or call model.save_pretrained() after session.close()"
                    )
            for conversion in naming.to_files(saved_names):
                yield from conversion.apply(lambda plain: weights(naming.tensors[saved_names[plain]])).items()
            return
        encoded = [adapter for adapter in naming.adapters if naming.is_encoded(adapter)]
        if encoded and self.runtime.parked:
            raise OutOfOrderError(
                f"the prompt of adapter {encoded[0]} is computed on the device from other weights; take it before "
                "session.park() or after session.unpark()"
            )
        prompts = prompts_of(self.model, encoded)
        for adapter, theirs, name in naming.in_adapter_files():
            is_prompt = adapter in prompts and naming.adapters[adapter].get(PROMPT) == name
            yield theirs, prompts[adapter] if is_prompt else weights(naming.tensors[name])

    def reader(self, dtype: torch.dtype | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a function that returns the whole weights of one of the model's tensors.

        See :meth:`stream_weights`.
        """
        runtime, state = self.runtime, self.runtime.state
        wanted = dtype or state.dtype
        masters = whole_state(state, runtime.ranks, only_masters=True)

        def read(tensor: torch.Tensor) -> torch.Tensor:
            if self._pipeline is not None and self._pipeline.stage.has(tensor):
                return self._pipeline.shared(tensor, wanted, own)
            return own(tensor)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            if (name := self._names.get(id(tensor))) is None:
                return tensor
            if not runtime.parked and wanted == state.dtype:
                return runtime.weights(name)
            runtime.check_has_weights()
            if not runtime.parked:
                runtime.make_current("state_dict()", uses=True)
            is_frozen = name in state.frozen_by_parameter  # without a master copy
            return (runtime.stored_weights(name) if is_frozen else masters(name)[0]).to(wanted)

        return read

    def park(self, *, keep_weights: bool = False) -> Moved:
        """Free all device memory of the session, between two steps. All ranks call this together.

        Weights and state that exist only on the device move to pinned host memory, which is taken the first time and
        kept. Until :meth:`unpark`, training, evaluation and reading raise an error; only :meth:`stream_weights` works.

        Args:
            keep_weights: leave resident weights on the device, where tensors of :meth:`full_parameters` view them.

        Raises:
            OutOfOrderError: in the middle of an iteration, or the session is parked already.
            DeviceMemoryError: the host has too little memory; nothing has changed.
        """
        self.runtime.check_idle()
        self.runtime.check_has_weights()
        return park(self.runtime, self.model, self.options.link_bytes_per_s, keep_weights=keep_weights)

    def unpark(self) -> Moved:
        """Take device memory again, and restore what was there before :meth:`park`. All ranks call this together.

        Raises:
            OutOfOrderError: the session is not parked.
            DeviceMemoryError: another program holds the memory; the session stays parked.
        """
        self.runtime.check_idle()
        if self.runtime.unpark is None:
            raise OutOfOrderError("the session is not parked; call session.park() before session.unpark()")
        return self.runtime.unpark()

    def sync_rng_state(self) -> None:
        """Give tensor-parallel ranks the same RNG state, so that dropout is the same on them."""
        if self._ranks is not None and self.decisions.tensor_parallel > 1:
            self._ranks.sync_rng_state()

    def timeline(self, first: int = 0, last: int | None = None) -> Timeline:
        """Wait for all updates, and return the recorded times of iterations ``first`` to ``last`` (inclusive)."""
        self.synchronize()
        return self.runtime.machine.timeline(first, last)

    def mean_timeline(self) -> Timeline:
        """Return :meth:`timeline` with every time averaged over ranks. All ranks call this together.

        If one rank leaves an iteration out, all do: ranks have different batches.
        """
        self.runtime.enter("the mean of all timelines")
        machine, means = self.runtime.machine, self.runtime.of_stage.means
        shares = means(np.array([float(i in machine.left_out) for i in machine.recorded]))
        for iteration in np.array(machine.recorded)[shares > 0]:
            machine.exclude(int(iteration))
        own = self.timeline()
        start_s, end_s = means(np.stack((own.start_s, own.end_s)))
        return Timeline(own.schedule, start_s, end_s)

    @contextlib.contextmanager
    def metered(self) -> Iterator[None]:
        """Return a context that measures dynamic device memory. If the host is the device, it slows computing down.

        It first waits for updates, so that no gradient of the last iteration is counted. When a task begins, it waits
        for all activations that may have come back by then, because measuring may slow down the threads that copy them.
        So it measures the most that the schedule can hold.
        """
        self.synchronize()
        machine = self.runtime.machine
        self.audit.paused = True  # it takes memory of its own
        with self.runtime.backend.meter() as meter:
            self._meter = meter

            def begin(task: int) -> None:
                meter.set_task(task)
                machine.settle(Lane.ACTIVATION_IN)

            machine.on_caller = begin
            try:
                yield
            finally:
                meter.set_task(None)
                machine.on_caller = lambda _task: None
                self.audit.paused = False

    def memory(self) -> dict[Tier, MeasuredMemory]:
        """Return each tier's memory: static memory by class and, after :meth:`metered`, the peak of dynamic memory.

        On NVMe, both versions of all state count, see [Note: Two versions] in :mod:`executor.memory.nvme_files`.
        """
        runtime = self.runtime
        used = {
            Tier.GPU: MeasuredMemory(
                runtime.gpu.by_class(),
                None if self._meter is None else self._meter.peak_bytes,
                {} if self._meter is None else dict(self._meter.peak_bytes_of),
                runtime.backend.allocator_counts(),
            ),
            Tier.HOST: MeasuredMemory(runtime.host.by_class()),
        }
        on_nvme = runtime.storage.by_class
        return used | ({Tier.NVME: MeasuredMemory(dict(on_nvme))} if on_nvme else {})

    @property
    def storage(self) -> str:
        """Where state on NVMe is stored, and how it is read and written, in words; empty if nothing is on NVMe."""
        return self.runtime.storage.description

    def close(self, *, give_back: bool = True) -> None:
        """Wait for all updates and make the model an ordinary one again, with its weights. Closing twice is allowed.

        Afterwards, weights that the plan keeps on the host are on the host. All ranks close together, and each gets all
        weights. If an iteration is under way (an exception may have ended it), the model gets the weights of the last
        step. In three cases it gets none, and its parameters are NaN: if the session itself failed, if updates begin
        during backward, and if there are several ranks. Then continue from a checkpoint.

        Args:
            give_back: whether the model gets its weights. If not, its parameters have no values afterwards.
        """
        if not self._undo:
            return
        if self.runtime.parked and not self.failed and not self._has_left:
            self.unpark()
        if not self._has_left:
            try:
                with Unbroken(self.runtime, "session.close()", keeps=True):
                    self._leave(give_back=give_back)
            except Exception:
                self._end()
                raise
            except BaseException:  # Ctrl-C: if the weights are still there, the caller may close again
                if self.runtime.machine.stopped:
                    self._end()
                raise
        self._end()

    def _leave(self, *, give_back: bool) -> None:
        """Wait for all updates, and give the model its weights if they exist."""
        runtime = self.runtime
        if not self.failed:
            runtime.enter(f"close(), after {self.iteration} iterations")
            self.runtime.make_current(runtime.doing)
            self.driver.visibility.release()
            if give_back:
                runtime.state.give_back(runtime.stored_weights)
                if self._pipeline is not None:
                    self._pipeline.give_back()
            if self._ranks is not None:
                self._ranks.all.barrier()
            self._on_all_ranks = self._has_left = True
        elif not runtime.machine.stopped and runtime.has_last_step:
            was_left = runtime.machine.failed
            runtime.synchronize(left_running=True)
            if runtime.machine.stopped:  # a task has failed or hangs
                if not was_left:
                    runtime.machine.check()
                return
            self.driver.visibility.release()
            runtime.state.give_back_last(in_iteration=True)
            self._has_left = True

    def _end(self) -> None:
        """End threads and remove everything from the model. If it has no weights by now, its parameters become NaN."""
        self.driver.visibility.release()
        try:
            if not self._has_left:
                self.runtime.state.give_back(None)
                self._has_left = True
            for shard in self.runtime.state.shards().values():
                rejoin(shard.whole)
        finally:
            self.runtime.is_closed = True
            with contextlib.ExitStack() as last_first:  # if one raises, the others still happen
                if self._ranks is not None:
                    last_first.callback(self._ranks.close, on_all_ranks=self._on_all_ranks)
                last_first.callback(self._undo_all)
                last_first.callback(self.driver.gradients.clear)
                last_first.callback(self._give_cores_back)
                last_first.callback(self.runtime.close)

    def add_pipeline(self, stage: Stage, groups: Sequence[Sequence[torch.nn.Parameter]]) -> Pipeline:
        """Return what runs micro-batches through the stages of a pipeline, of which this session executes one."""
        assert self._ranks is not None
        self._pipeline = Pipeline(
            self.model,
            stage,
            self.units,
            self.decisions,
            groups,
            self.driver,
            self._ranks,
            self.runtime,
        )
        self._undo.insert(0, self._pipeline.close)  # after all else
        stage.bind()
        return self._pipeline

    def at_end(self, undo: Callable[[], None]) -> None:
        """Call a function when the session ends; perhaps twice."""
        self._undo.append(undo)

    def _undo_all(self) -> None:
        while self._undo:
            self._undo[-1]()  # each may be called twice
            self._undo.pop()

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None and self._ranks is not None:  # the other ranks do not close now
            self.runtime.machine.fail(error)
        self.close()


def _ids_of_hooks(undo: Iterable[Callable[[], None]]) -> frozenset[int]:
    hooks = (getattr(each, "__self__", None) for each in undo)
    return frozenset(hook.id for hook in hooks if isinstance(hook, RemovableHandle))


def _join(sharing: Iterable[Sharing], report: Callable[[str], None]) -> None:
    """Let what shares memory with parameters follow their weights, or say that it does not; once for each tensor."""
    apart = dict[int, str]()
    for tensor, name, parameter, before, is_within in sharing:
        if is_within and has_session(parameter) and parameter.dtype is before.dtype:
            join(tensor, parameter, before)
        else:
            apart.setdefault(id(tensor), name)
    if apart:
        report(
            f"{len(apart)} tensors that this process holds share memory with parameters, as with "
            f"{next(iter(apart.values()))}, but with other memory too, or in another type. From now on they keep the "
            "weights of now: read the parameters instead, or drop these tensors before prepare()"
        )


def _run_uncompiled(options: Options, decisions: Decisions) -> Iterator[Callable[[], None]]:
    """Let functions that the user has compiled run as they are, if the plan cannot see into them; yield what undoes it.

    Activations are offloaded operator by operator.
    """
    if options.uncompiled or any(choice.offloads for choice in decisions.units.values()):
        uncompiling = contextlib.ExitStack()
        uncompiling.enter_context(uncompiled())
        yield uncompiling.close


def _move_buffers(
    model: nn.Module, device: torch.device, ranks: Ranks | None, as_buffers: Iterable[nn.Parameter]
) -> None:
    """Move buffers to the device, with rank 0's values on all ranks. Later writes to them are not exchanged."""
    for parameter in as_buffers:  # of one rank
        parameter.data = parameter.data.to(device)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            values = buffer if ranks is None else ranks.all.broadcast(buffer)
            setattr(module, name, values.to(device))


def _warm_up(
    entry: OptimizerEntry, groups: Sequence[dict[str, Any]], decisions: Decisions, device: Backend | None
) -> None:
    """Compile the kernels of updates, on the host and on a GPU, if there is one; else the first update would."""
    precision, kinds = decisions.precision, {2: np.uint16, 4: np.float32}
    places = {place for unit in decisions.units.values() for place in unit.update}
    for group, splits in itertools.product(groups, {decisions.splits(place) for place in places}):
        entry.warm_up(
            kinds[precision.gradient_bytes],
            group,
            writes_bf16=not precision.master_is_weight,
            master_dtype=kinds[precision.master_bytes],
            splits=splits,
            speculates=decisions.takes_back,
        )
        rule = entry.rule(group)
        for each in (rule, rule.limited()) if decisions.takes_back else (rule,):
            if device is not None:
                _warm_up_on_device(each, precision, device, splits=splits)


def _warm_up_on_device(rule: Rule, precision: Precision, backend: Backend, *, splits: bool) -> None:
    """Update a block of zeros, with and without bf16 weights, if one kernel does it [Note: Fused updates].

    Otherwise the first update of an iteration would compile the kernel.
    """
    kind = rule.entry.planned_as
    if not OPTIMIZERS[kind].fuses or fused() is None:
        return
    form = state_buffers(kind, precision.master_bytes, splits=splits)
    memory = torch.zeros(sum(b.num_bytes(BLOCK) for b in form), dtype=torch.uint8, device=backend.device)
    state = as_state(state_tensors(memory, BLOCK, form), splits=splits)
    gradient = torch.zeros(BLOCK, dtype=DTYPES[precision.gradient_bytes], device=backend.device)
    has_weights = not (precision.master_is_weight or splits)
    for weights in ((), (torch.zeros_like(gradient),)) if has_weights else ((),):
        backend.update((*state, *weights), [gradient], rule, 1)
