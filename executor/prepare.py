"""The entry point: puts a user's model and optimizer under a plan. The returned optimizer has the same interface."""

import collections
import contextlib
import dataclasses
import functools
import gc
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, cast, final

import torch
import torch.distributed as dist
from torch import nn

from executor.checks import check_decisions, check_saved_group, check_saved_state
from executor.distributed.meeting import join, missed
from executor.driver.pipeline import Pipeline, own_loss
from executor.driver.whole_steps import WholeSteps
from executor.memory.nvme_files import shared_file
from executor.memory.pieces import state_buffers
from executor.memory.stream import (
    Source,
    by_value,
    converted,
    in_room,
    room_bytes,
    tensor_name,
    whole_state,
    write_state,
)
from executor.memory.units import ParameterState
from executor.module.guards import check_kinds, check_memory, check_plain, check_unprepared
from executor.module.stages import Stage
from executor.optimizer.beside import Beside
from executor.optimizer.held_state import HeldState
from executor.optimizer.reference import ROUNDS
from executor.optimizer.table import OptimizerEntry, entry_of
from executor.options import Options
from executor.packed import StoredParameter, as_real
from executor.session import Session
from planner.decisions import DEGREES, Decisions
from planner.graph import Unit
from planner.lowering.stages import deal, sharing_stages, stage_of
from planner.optimizers import Optimizer
from planner.plan.document import Plan
from planner.schedule.loop import OutOfOrderError

_ON_CPU = Options()


_Entry = tuple[Mapping[str, Any], Mapping[str, Any]]
"""A parameter's entry in a saved state, and its group's."""


def prepare_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: tuple[Unit, ...],
    decisions: Decisions,
    options: Options = _ON_CPU,
) -> tuple[nn.Module, "OffloadedOptimizer"]:
    """Put a model and its optimizer under a plan's decisions.

    The model is changed in place: its parameters move to where the plan keeps them. The training loop stays as it is,
    but uses the returned optimizer instead of the given one. If the given optimizer has state, it is taken over.

    A plan for several ranks needs as many processes (``torchrun``), all of which run the same loop, each with its own
    part of every batch. They begin with rank 0's weights and buffers, but each keeps its optimizer's state. Gradient
    norms cover all ranks. All ranks evaluate, save, load and close together. On GPUs, first set each rank's device
    (``torch.cuda.set_device``). If a rank fails, others raise :class:`executor.distributed.watchdog.RankError`.

    Every rank passes the whole model and optimizer, also with tensor or expert parallelism. Tensor-parallel ranks
    (ranks 0 and 1, 2 and 3, ... if ``tensor_parallel`` is 2) get the same batches and draw the same random numbers.
    While the model trains with ``labels``, the logits in its output are the rank's shard. Context-parallel ranks
    (neighbours too) get the same batches. Expert-parallel ranks have their own part of every batch. Parameters of
    experts that are divided over several units have a shape but no values until the session is closed.

    Args:
        model: an unmodified module with the planned parameters.
        optimizer: one listed in :data:`executor.optimizer.table.ENTRIES`, one that can take its own step in parts, or
            one that steps on whole parameters ([Note: Whole steps] in :mod:`executor.driver.whole_steps`), over all or
            some of the model's parameters, and perhaps others, in any groups. Learning-rate schedulers may be built on
            it or on the result.
        units: the model's units in forward order, for the decided micro-batch.
        decisions: what to execute.
        options: how to execute it.

    Returns:
        The model, and the optimizer to use from now on. The model has ``no_sync()``, as ``DistributedDataParallel``
        does, which changes nothing.

    Raises:
        TypeError: the model is not a module, or the optimizer is not an optimizer.
        ValueError: the optimizer is unknown or does not match the plan, the decisions cannot be executed, or the model
            does not match the plan, is prepared already, has no values, or has two parameters over the same memory.
        DeviceMemoryError: a tier is too small.
        StorageError: NVMe cannot hold the state that the plan keeps there.
        RankError: another rank has failed.
    """
    with missed() if decisions.num_devices > 1 else contextlib.nullcontext():
        check_kinds(model, optimizer)
        check_unprepared(model)
        check_plain(model)
        check_memory(model, optimizer)
        if decisions.pipeline_parallel == 1:
            return model, OffloadedOptimizer(optimizer, model, units, decisions, options)
        return model, _of_stage(model, optimizer, units, decisions, options)


def _of_stage(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    units: tuple[Unit, ...],
    decisions: Decisions,
    options: Options,
) -> "OffloadedOptimizer":
    """Put this process's stage of a pipeline under the plan; see [Note: Pipelines] in executor.driver.pipeline."""
    num_stages = decisions.pipeline_parallel
    if len(options.calls) > 1:
        raise ValueError(
            "several calls of the model in a step (step=) cannot be executed beside pipeline stages; leave it out, or "
            "plan --parallel pipeline=1"
        )
    join(decisions.num_devices)
    number = dist.get_rank() // (decisions.num_devices // num_stages)
    own, decided, tied = stage_of(units, decisions, number)
    every = dict(model.named_parameters(remove_duplicate=False))
    with contextlib.ExitStack() as failing:
        chunks = deal(units, num_stages, decisions.pipeline_rounds)
        stage = Stage(
            model,
            chunks,
            number,
            num_stages,
            num_sharing=decisions.context_parallel,
            shares_evaluation=decisions.context_exchange is None,
            operators=options.operators,
        )
        failing.callback(stage.undo)
        named = _named_here(own, every, model)
        own = tuple(unit.renamed(named) for unit in own)
        tied = {there: named.get(here, here) for there, here in tied.items()}
        names = (named.get(here, here) for here in decided.tied_weights)
        decided = decided.model_copy(update={"tied_weights": tuple(names)})
        there = {id(parameter) for parameter in model.parameters()}
        groups = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            failing.callback(group.update, params=group["params"])
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in there]
        copies = {here: there for there, here in tied.items() if here != there}
        sharing = sharing_stages(units, decisions)
        options = dataclasses.replace(options, num_stages=num_stages, sharing=sharing, copies=copies, audit="off")
        made = OffloadedOptimizer(optimizer, model, own, decided, options)
        failing.pop_all()
    stage.drop()
    made.pipeline = made.session.add_pipeline(stage, groups)
    return made


def _named_here(own: Iterable[Unit], every: Mapping[str, nn.Parameter], model: nn.Module) -> dict[str, str]:
    """Return the names of weights whose names in the plan are those of modules of other stages, which share them.

    Args:
        own: the stage's units.
        every: the parameters of the whole model.
        model: with the parameters of the stage alone.

    Returns:
        For each such name in the plan, the name of the stage's own module.

    Raises:
        ValueError: no module of the stage has a weight.
    """
    listed = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    first, found = {key: name for name, key in reversed(listed.items())}, dict[str, str]()
    for spec in (spec for unit in own for spec in (*unit.parameters, *unit.frozen)):
        name, bracket, rest = spec.name.partition("[")
        if name in listed:
            continue
        if (here := first.get(id(every.get(name)))) is None:
            raise ValueError(f"no module of this stage has {name}, which its plan has; leave the pipeline out")
        found[spec.name] = here + bracket + rest
    return found


def check_prepared(optimizer: object) -> None:
    """Check that an optimizer is one that ``prepare`` returned.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(optimizer, OffloadedOptimizer):
        raise TypeError(f"the optimizer is {type(optimizer).__name__}; give the one that ullage.prepare returned")


@final
class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose updates run where a plan says. It shares the parameter groups of the given one.

    Attributes:
        entry: the optimizer's kernels and state.
        session: executes the plan.
        config: what the session executes.
        plan: the plan that is executed. Not set if decisions alone were given.
        pipeline: what runs micro-batches through stages; ``None`` without stages.
        weights_folder: the folder from which weights were last loaded; ``None`` if none were.
    """

    plan: Plan
    pipeline: Pipeline | None = None

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        units: tuple[Unit, ...],
        decisions: Decisions,
        options: Options,
    ) -> None:
        entry = entry_of(optimizer)
        session = Session(model, entry, optimizer.param_groups, units, decisions, options)
        with contextlib.ExitStack() as failing:
            failing.push(session)  # nobody else could close it, and the model could not be prepared again
            super().__init__(optimizer.param_groups, optimizer.defaults)  # shares these dicts; does not copy them
            hooks = {name: hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")}
            # One that steps by itself calls those on its step.
            vars(self).update({name: of for name, of in hooks.items() if not (entry.whole and "_step_" in name)})
            self.entry = entry
            self.session = session
            self.weights_folder: Path | None = None
            self._given = optimizer
            self._groups = [(group, tuple(map(id, group["params"]))) for group in self.param_groups]
            self._beside = Beside(optimizer, self.param_groups, self._is_planned)
            name = type(optimizer).__name__
            reasons = {
                f"{name} steps by itself": entry.whole,
                f"{name} has parameters that are not the model's": not self._beside.is_empty,
                f"forward writes to the frozen parameter {min(options.as_buffers, default='')}": options.as_buffers,
            }
            why = next((why for why, is_so in reasons.items() if is_so), None)
            if options.checkpoint_buffer_bytes and why is not None:
                raise ValueError(
                    f"{why}, but checkpoints hold the state of a plan's own updates alone; leave "
                    "checkpoint_buffer_bytes out, and save model.state_dict() and optimizer.state_dict()"
                )
            given = {
                name: (_as_real(state), group)
                for name, parameter, group in self._planned()
                if (state := dict.get(optimizer.state, parameter))
            }
            self._check_same_groups()
            if not entry.whole:
                self._check_entries(given)
                self._check_same(given)
                self.write_states(given)
            failing.pop_all()
        if entry.whole:
            vars(self)["param_groups"] = optimizer.param_groups
            options.report(
                f"{type(optimizer).__name__} steps by itself, on whole weights and gradients in host memory, because "
                f"its step cannot be taken in parts: {entry.whole}. That is slower than updates of a plan, which does "
                "not count the memory of its state"
            )
        else:
            optimizer.state.clear()
        self._hold_state()

    def _planned(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        """Yield the parameters of the prepared model, each with its name in the plan and its group."""
        for group in self.param_groups:
            yield from ((self.session.name_of(p), p, group) for p in group["params"] if self.session.has(p))

    def _is_planned(self, parameter: torch.Tensor) -> bool:
        """Ask the session of the moment: an old one would keep its memory while another plan begins."""
        return self.session.has(parameter)

    def _hold_state(self) -> None:
        """Let the given optimizer's own methods, which find no state in it, say where it is, until the session ends."""
        if self.entry.whole:
            self._whole = WholeSteps(
                self._given, self.session.runtime, self.session.driver, self.session.name_of, self.session.has
            )
            return
        self._given.state = held = HeldState(
            self._parameters_with_state, self._state_of_parameters, self._set_state_of_parameters
        )
        self.session.runtime.settle_state = held.settle
        self.session.at_end(lambda: setattr(self._given, "state", collections.defaultdict(dict)))

    def __getattr__(self, name: str) -> Any:
        """Return what the given optimizer has beside ``torch.optim.Optimizer``: methods and attributes of its class."""
        if name in {"_given", "_whole"}:
            raise AttributeError(name)
        found = getattr(self._given, name)
        if self.entry.whole and inspect.ismethod(found):
            return functools.partial(self._by_itself, found)
        return found

    def _by_itself(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the given optimizer, which steps by itself; it may get other groups, as by loading."""
        try:
            return self._whole.call(method, *args, **kwargs)
        finally:
            vars(self)["param_groups"] = self._given.param_groups

    def __setattr__(self, name: str, value: Any) -> None:
        """Set attributes of the given optimizer's own there, where its step reads them.

        Raises:
            ValueError: parameter groups are replaced, which the session would not notice.
        """
        own = vars(self)
        if name == "param_groups" and "session" in own and value is not self.param_groups:
            raise ValueError(_GROUPS)
        if "_given" in own and name not in own and hasattr(self._given, name) and not hasattr(type(self), name):
            setattr(self._given, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def state(self) -> "collections.defaultdict[torch.Tensor, Any]":
        """See :class:`HeldState`; the given optimizer's own, if it steps by itself."""
        return self._given.state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "session"):
            self.state.clear()
            self.state.update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See ``torch.optim.Optimizer``.

        Raises:
            ValueError: a parameter of the prepared model was frozen when it was planned.
        """
        if vars(self).get("_whole"):
            self._by_itself(self._given.add_param_group, param_group)
            return
        super().add_param_group(param_group)
        if not hasattr(self, "session"):
            return
        group = self.param_groups[-1]
        try:
            self.session.add_group(self.param_groups, group["params"])
        except ValueError:
            self.param_groups.pop()
            raise
        self._given.param_groups.append(group)
        self._groups.append((group, tuple(map(id, group["params"]))))

    def __reduce_ex__(self, _protocol: object) -> str:
        """Refuse to be pickled or copied (``torch.save``, ``copy.deepcopy``), because the state is in the session.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "the optimizer of a prepared model cannot be pickled or copied: its state is in its session; save "
            "optimizer.state_dict(), and load it into another optimizer with load_state_dict()"
        )

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Begin the updates and return while they run. Each update ends before its parameter is used next.

        Args:
            closure: runs forward and backward before the updates; its result is returned.

        Raises:
            OutOfOrderError: no micro-batch has run, or one is under way, or the session is closed.
        """
        self._check_open("step()")
        if self.entry.whole:
            return self._by_itself(self._given.step, *([] if closure is None else [closure]))  # type: ignore[no-any-return]
        for given, (group, params) in itertools.zip_longest(self.param_groups, self._groups, fillvalue=(None, ())):
            if given is not group or tuple(map(id, given["params"])) != params:
                raise ValueError(_GROUPS)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.session.runtime.settle_state()
        self.session.driver.step()
        if not self._beside.is_empty:
            self._beside.step()
        self._given._opt_called = True  # type: ignore[attr-defined]  # schedulers built on it check whether it has stepped
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients after backward, so that no update reads them. After a step there are no gradients to drop.

        Raises:
            GradientError: some micro-batches of the iteration have run, and others are to come.
        """
        if not self.session.closed:
            self.session.driver.zero_grad()
        if self.entry.whole:  # its own may take no argument
            self._given.zero_grad(*([] if set_to_none else [False]))
        else:
            super().zero_grad(set_to_none)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their common 2-norm is at most ``max_norm``; return the norm before that.

        It is the same as ``torch.nn.utils.clip_grad_norm_`` on all parameters, which works too.

        Raises:
            GradientError: the plan has no clipping.
        """
        self.session.runtime.machine.check()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.pipeline is not None:
            return self.pipeline.clip_grad_norm_(parameters, max_norm)
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def forward_backward(
        self,
        batches: Sequence[Mapping[str, Any]],
        loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] = own_loss,
    ) -> list[float]:
        """Run forward and backward of all micro-batches of a step; return the loss of each.

        It is the same as a loop over them with ``(loss(model(**batch), batch) / len(batches)).backward()``. Under a
        plan with pipeline stages it is the only way: all stages pass the same batches.

        Args:
            batches: keyword arguments of the model, one mapping for each micro-batch.
            loss: returns the loss of the model's output and its batch, a scalar.

        Raises:
            ValueError: a pipeline is given more or fewer micro-batches than planned.
            RankError: another rank has failed.
        """
        self._check_open("forward_backward()")
        if self.pipeline is not None:
            return self.pipeline.run(batches, loss)
        found = []
        for batch in batches:
            value = loss(self.session.model(**batch), batch)
            (value / len(batches)).backward()  # type: ignore[no-untyped-call]
            found.append(value.detach())
        return [float(value) for value in found]

    def evaluate(
        self,
        batches: Sequence[Mapping[str, Any]],
        loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] = own_loss,
    ) -> list[float]:
        """Run forward of batches without gradients, in the model's own mode; return the loss of each.

        Under a plan with pipeline stages it is the only way: all stages pass the same batches. See
        :meth:`forward_backward`.
        """
        self._check_open("evaluate()")
        with torch.no_grad():
            if self.pipeline is not None:
                return self.pipeline.evaluate(batches, loss)
            return [float(loss(self.session.model(**batch), batch)) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        """Return the state on the host, in the given optimizer's format and data types.

        If master copies are not weights, each parameter has its float32 ``master`` too. The call waits for updates. All
        ranks call it together, and each gets the whole state.

        Raises:
            OutOfOrderError: in a forward or backward, or the session is closed.
        """
        self._check_open("state_dict()")
        if self.entry.whole:
            return self._given.state_dict()
        self.session.runtime.settle_state()
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        states = self._read_states()
        state: dict[int, dict[str, Any]] = {}
        groups, index = [], 0
        for group, parameters in zip(self.param_groups, self._parameters(), strict=True):
            numbers = range(index, index + len(parameters))
            index = numbers.stop
            groups.append({k: v for k, v in group.items() if k != "params"} | {"params": list(numbers)})
            for number, parameter in zip(numbers, parameters, strict=True):
                is_planned = self.session.has(parameter)
                entry = states.get(self.session.name_of(parameter)) if is_planned else self._beside.state.get(parameter)
                if entry is not None:
                    state[number] = entry
        if self.pipeline is not None:
            state = self.pipeline.of_all_stages(state)
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for change in self._optimizer_state_dict_post_hooks.values():
            found = change(self, found) or found
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that was returned by :meth:`state_dict` of this class or of the given optimizer's class.

        All of the state is checked before anything changes. If there is no ``master``, weights become the master copy,
        as planned. Every rank passes the whole state. A warning names a parameter for which it has no entry.

        Raises:
            ValueError: the groups differ from this optimizer's in number or size, or the state is not whole, or that of
                another model or optimizer; nothing has changed.
            OutOfOrderError: in the middle of an iteration, or the session is closed.
        """
        self._check_open("load_state_dict()")
        if self.entry.whole:
            self._by_itself(self._given.load_state_dict, state_dict)
            return
        self.session.runtime.check_idle()
        state_dict = dict(state_dict)
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = change(self, state_dict) or state_dict
        otherwise = ValueError("another rank cannot load its state; see the error of that rank")
        with self.session.collectives.together(otherwise):
            entries = self._entries_of(state_dict)
        self._check_same(entries)
        with self.session.runtime.changing("load_state_dict()"):
            self.write_states(entries)
            if not self._beside.is_empty:
                self._beside.load(state_dict["state"], state_dict["param_groups"])
            for group, their in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group.update({k: v for k, v in their.items() if k not in {"params", ROUNDS}})
        for end in self._optimizer_load_state_dict_post_hooks.values():
            end(self)

    def _parameters(self) -> Sequence[Sequence[nn.Parameter]]:
        """Return the parameters of each group, those of other stages too."""
        return [group["params"] for group in self.param_groups] if self.pipeline is None else self.pipeline.groups

    def _entries_of(self, state_dict: dict[str, Any]) -> dict[str, _Entry]:
        """Return the entry of each parameter in a saved state, all of which is checked.

        Raises:
            ValueError: something is missing, or belongs to another model or optimizer.
        """
        if lacking := {"state", "param_groups"} - {*state_dict}:
            raise ValueError(f"the state has no {min(lacking)!r}; load what optimizer.state_dict() returned")
        states, theirs = state_dict["state"], state_dict["param_groups"]
        sizes = [len(parameters) for parameters in self._parameters()]
        if [len(g.get("params", ())) for g in theirs] != sizes:
            raise ValueError(
                f"the state has groups of {[len(g.get('params', ())) for g in theirs]} parameters, this optimizer has "
                f"{sizes}; make the optimizer with the saved groups"
            )
        numbers = collections.Counter(number for their in theirs for number in their["params"])
        wrong = [*(states.keys() - numbers.keys()), *(number for number, count in numbers.items() if count > 1)]
        if wrong:
            raise ValueError(f"entry {wrong[0]} of the state is in no group, or in several; load a whole state")
        entries: dict[str, _Entry] = {
            self.session.name_of(parameter): (_as_real(states.get(number, {})), their)
            for parameters, their in zip(self._parameters(), theirs, strict=True)
            for number, parameter in zip(their["params"], parameters, strict=True)
            if self.session.has(parameter)
        }
        self._check_entries(entries)
        for index, (group, their) in enumerate(zip(self.param_groups, theirs, strict=True)):
            check_saved_group(self.entry, index, group, their)
        missing = [name for name in self.session.runtime.state.by_parameter if name in entries and not entries[name][0]]
        if self._keeps_state and 0 < len(missing) < len(entries):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            warnings.warn(
                f"the state has no entry for {missing[0]}{more}: as in torch, steps and moments begin at 0 there",
                RuntimeWarning,
                stacklevel=3,
            )
        return entries

    def _check_entries(self, entries: Mapping[str, _Entry]) -> None:
        held = self.session.runtime.state.by_parameter
        for name, (state, _) in entries.items():
            for _, parameter in held.get(name, ())[:1]:  # frozen parameters have no state
                check_saved_state(self.entry.of(parameter.kind), name, parameter.shard.whole_shape, state)

    def _check_same_groups(self) -> None:
        """Check that all ranks train the same parameters, with the same settings. They call this together."""
        if (ranks := self.session.runtime.ranks) is None:
            return
        plain = (int, float, str, tuple, type(None))
        found = [
            (name, parameter.requires_grad, sorted((k, v) for k, v in group.items() if isinstance(v, plain)))
            for name, parameter, group in self._planned()
        ]
        ranks.all.check_same("optimizer (its groups, their settings, or what is frozen)", repr(found).encode())

    def _check_same(self, entries: Mapping[str, _Entry]) -> None:
        """Check that all ranks set the same state. They call this together, also if one has none."""
        states = ((name, sorted(entries[name][0].items())) for name in sorted(entries))
        values = [torch.as_tensor(value) for _, state in states for _, value in state if value is not None]
        self.session.runtime.check_same_values("the optimizer's state", *values)

    def switch_plan(self, units: tuple[Unit, ...], decisions: Decisions, options: Options, folder: Path) -> int:
        """Switch to another plan between two iterations, and keep weights and state.

        The state passes through a file (:func:`executor.memory.nvme_files.shared_file`) in ``folder``. The old session
        frees its memory before the new session takes its own. If the new session cannot begin, training continues under
        the old plan. All ranks switch together. The number of ranks and the parallel degrees stay the same.

        Returns:
            The bytes of the file.

        Raises:
            ValueError: decisions cannot be executed or have other degrees. See also :func:`prepare_session`.
            RankError: another rank cannot begin.
            OutOfOrderError: in the middle of an iteration.
            StorageError: there is no room for the file.
        """
        check_decisions(decisions, self.entry, self.param_groups)
        session = self.session
        model, ways = session.model, ((units, decisions, options), (session.units, session.decisions, session.options))
        ours = session.decisions
        if different := next((name for name in DEGREES if getattr(ours, name) != getattr(decisions, name)), None):
            own, other = getattr(ours, different), getattr(decisions, different)
            raise ValueError(
                f"the other plan has {different} {other}, but training runs with {own}; plan with {own}, or save "
                "a checkpoint and resume from it under the other plan"
            )
        session.runtime.check_has_weights()
        steps = {
            entry.shard.name: _steps_of(self.entry, entry, entry.step)
            for _, entry in session.runtime.parameter_states().values()
        }
        stored = {name: shard.stored for name, shard in session.runtime.state.shards().items()}
        transfer, num_bytes = self._written_to(folder)
        session.close(give_back=False)
        del session  # else it would keep its memory
        failures: list[Exception] = []
        for way in (*ways, None):  # if the other plan cannot begin, the old one goes on, unless a rank is gone
            for name, parameter in stored.items():
                _give(parameter, transfer[name])
            failure = None if way is None else self._start_session(model, way, transfer, steps)
            if failure is None:
                break
            failures.append(failure)
        if failures:
            raise failures[-1]
        return num_bytes

    def _check_open(self, call: str) -> None:
        if self.session.closed:
            raise OutOfOrderError(
                f"optimizer.{call} was called after optimizer.session.close(), which ended the plan and its state; "
                "take state_dict() before closing, and prepare() the model with another optimizer to train on"
            )

    def _written_to(self, folder: Path) -> tuple[dict[str, torch.Tensor], int]:
        """Write all weights and state into a file; return its tensors, and its bytes.

        Weights have the names of their parameters, and other tensors their keys after these, and a slash.
        """
        state, runtime = self.session.runtime.state, self.session.runtime
        likes = {
            name: torch.empty(shard.stored.num_bytes, dtype=torch.uint8, device="meta")
            if shard.stored.is_quantized
            else torch.empty(shard.whole_shape, dtype=shard.whole.dtype.to_real(), device="meta")
            for name, shard in state.shards().items()
        }
        for name, held in state.by_parameter.items():
            whole = torch.empty(held[0][1].shard.whole_shape, device="meta")
            likes |= {f"{name}/{key}": whole for key in self._keys(held[0][1].kind)}
        num_bytes = max(room_bytes(likes.values()), 1)
        room, share = shared_file(folder, num_bytes, runtime.ranks)
        transfer = dict(zip(likes, in_room(likes.values(), room), strict=True))
        of_state = ((f"{name}/{key}", values) for name, held in self._states() for key, values in held.items())
        weights = ((name, as_real(runtime.weights(name))) for name in state.shards())
        written_here = {*list(likes)[share]}
        for name, values in itertools.chain(of_state, weights):
            if name in written_here:
                transfer[name].copy_(values)
        return transfer, num_bytes

    def _start_session(
        self,
        model: nn.Module,
        way: tuple[tuple[Unit, ...], Decisions, Options],
        transfer: Mapping[str, torch.Tensor],
        steps: Mapping[str, Mapping[str, float]],
    ) -> Exception | None:
        """Begin a session with the transferred state; return the error if it cannot begin."""
        self.session = _BETWEEN_PLANS
        gc.collect()  # reference cycles hold the old session's memory
        torch.cuda.empty_cache()  # cached blocks have the old sizes; does nothing without a GPU
        try:
            self.session = Session(model, self.entry, self.param_groups, *way)
            self._hold_state()
        except (ValueError, MemoryError, OSError) as error:
            return error.with_traceback(None)  # its frames would hold memory
        groups = {name: group for name, _, group in self._planned()}
        entries: dict[str, _Entry] = {}
        for name, held in self.session.runtime.state.by_parameter.items():
            has_state = steps[name]["step"] or self.entry.starts_at
            keys = [key for key in self._keys(held[0][1].kind) if has_state or key == "master"]
            values = {key: transfer[f"{name}/{key}"] for key in keys}
            entries[name] = {**steps[name], **values}, groups.get(name, self.defaults)
        with self.session.runtime.changing("the change of plan"):
            self.write_states(entries)
        return None

    @property
    def _keeps_master(self) -> bool:
        """Whether there are master copies beside the weights."""
        return not self.session.decisions.precision.master_is_weight

    @property
    def _keeps_state(self) -> bool:
        """Whether any parameter has state beside its weight: SGD without momentum has none."""
        return self.entry.own is not None or any(group.get("momentum", True) for group in self.param_groups)

    def _keys(self, kind: Optimizer) -> tuple[str, ...]:
        """Return the names of a parameter's saved state: the master copy (if any), then the optimizer's buffers."""
        return (*(["master"] if self._keeps_master else []), *self.buffers_of(kind))

    def buffers_of(self, kind: Optimizer) -> tuple[str, ...]:
        """Return the names of the buffers of parameters that ``kind`` updates."""
        return self.entry.of(kind).buffers

    def _states(self) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """Yield each parameter's name and whole state on the host, in float32. All ranks call this together.

        Tensors may be views of memory that is reused for the next unit.
        """
        self.session.runtime.make_current("reading of state")
        state = self.session.runtime.state
        read = whole_state(state, self.session.runtime.ranks)
        for name, held in state.by_parameter.items():
            master, *buffers = read(name)
            keys = self._keys(held[0][1].kind)
            yield name, dict(zip(keys, (master, *buffers) if self._keeps_master else buffers, strict=True))

    def _read_states(self) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {}
        for name, state in self._states():
            parameter = self.session.runtime.state.by_parameter[name][0][1]
            own = self.entry.of(parameter.kind)
            step = self._steps_taken(parameter)
            if step or own.starts_at:
                counted = _steps_of(own, parameter, step)
                numbers = {key: torch.tensor(float(value), device="cpu") for key, value in counted.items()}
                if not own.counts_steps:
                    del numbers["step"]
                buffers = dict(zip(("master", *own.buffers), state_buffers(parameter.kind), strict=True))
                shard = parameter.shard
                flat = converted({key: values.reshape(-1) for key, values in state.items()}, own.buffers)
                found = {key: values.to(buffers[key].dtype, copy=True) for key, values in flat.items()}
                states[name] = numbers | {
                    key: shard.in_model(values.view(shard.whole_shape)) if buffers[key].params == 1 else values
                    for key, values in found.items()
                }
        return states

    def _steps_taken(self, parameter: ParameterState) -> int:
        """Return a parameter's updates. In the middle of an iteration, a step is counted whose gradient has come."""
        return parameter.step - (parameter.arrived == self.session.iteration)

    def _parameters_with_state(self) -> list[torch.Tensor]:
        """Return the parameters of which :meth:`_state_of_parameters` has the state, in the order of that."""
        found: dict[torch.Tensor, None] = dict.fromkeys(self._beside.state)
        held = self.session.runtime.state.by_parameter
        for name, parameter, _ in self._planned():
            parts = held.get(name, ())[:1]  # frozen ones have none
            if any(self._steps_taken(part) or self.entry.of(part.kind).starts_at for _, part in parts):
                found[parameter] = None
        return [*found]

    def _state_of_parameters(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of each parameter that has some, without master copies."""
        states = self._read_states()
        found = dict(self._beside.state)
        for name, parameter, _ in self._planned():
            if entry := states.get(name):
                found[parameter] = {key: value for key, value in entry.items() if key != "master"}
        return found

    def _set_state_of_parameters(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Set the state of some parameters, whose master copies stay. Raises ValueError if it is not whole."""
        masters = self._read_states() if self._keeps_master else {}
        entries: dict[str, _Entry] = {}
        for name, parameter, group in self._planned():
            if parameter in states:
                master = {key: value for key, value in masters.get(name, {}).items() if key == "master"}
                entries[name] = _as_real(states[parameter]) | master, group
        others = (p for group in self.param_groups for p in group["params"] if not self.session.has(p))
        self._beside.state.update({parameter: states[parameter] for parameter in others if parameter in states})
        self._check_entries(entries)
        self._check_same(entries)
        self.write_states(entries)

    def write_states(self, entries: Mapping[str, _Entry]) -> None:
        """Set the state of parameters, by name. Read and write each piece once."""
        if not entries:
            return
        found = [(u, p) for u, p in self.session.runtime.parameter_states().values() if p.shard.name in entries]
        self.session.runtime.take_remaining()
        with self.session.runtime.changing("load_state_dict()"):
            for _, parameter in found:
                # If an optimizer does not count steps, having state means that it has taken one.
                entry, _ = entries[parameter.shard.name]
                there = any(entry.get(key) is not None for key in self.entry.of(parameter.kind).buffers)
                parameter.step = int(entry.get("step", there))
                numbers = self.entry.of(parameter.kind).numbers
                parameter.numbers = {parameter.step: tuple(float(entry[key]) for key in numbers if key in entry)}
            for unit in {id(unit): unit for unit, _ in found}.values():
                tensors: dict[str, torch.Tensor] = {}
                for parameter in unit.parameters:
                    if parameter.shard.name in entries:
                        tensors |= self._tensors_of(parameter, entries[parameter.shard.name])
                write_state(self.session.runtime.state, [unit], Source.of(tensors), self.buffers_of)

    def _tensors_of(self, parameter: ParameterState, entry: _Entry) -> dict[str, torch.Tensor]:
        """Return this rank's shard of a parameter's saved state, flat, by the names of a source."""
        values_of, group = entry
        own, forms = self.entry.of(parameter.kind), state_buffers(parameter.kind)[1:]
        counted = ("step", *own.numbers)
        held = {key: values.cpu() for key, values in values_of.items() if key not in counted and values is not None}
        shares = {key: parameter.shard.part(values).reshape(-1) for key, values in by_value(held).items()}
        found = converted(shares, own.buffers)
        first = 0.0
        if self.entry.starts_at and not parameter.step:  # the saved state has the model's type
            first = group[self.entry.starts_at]
            found = {key: values for key, values in found.items() if key == "master"}
        for key, form in zip(own.buffers, forms, strict=True):
            if key not in found:
                length = form.length(parameter.stop - parameter.start)
                found[key] = torch.full((1,), first, dtype=form.dtype, device="cpu").expand(length)
        return {tensor_name(parameter.shard.shard_name, key): values for key, values in found.items()}


def _as_real(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's saved state in real numbers."""
    return {key: as_real(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def _steps_of(entry: OptimizerEntry, parameter: ParameterState, step: int) -> dict[str, float]:
    """Return the count of a parameter's updates, and other numbers of its state after these, by their keys."""
    return {"step": step, **dict(zip(entry.numbers, parameter.numbers.get(step, ()), strict=False))}


def _give(stored: StoredParameter, values: torch.Tensor) -> None:
    """Make a parameter a view of its whole values, or of its bytes if it is quantized."""
    if stored.is_quantized:
        stored.live_in(values)
    else:
        stored.parameter.data = torch.view_as_complex(values) if stored.parameter.is_complex() else values


_GROUPS: Final = (
    "the optimizer's param_groups, or the parameters in them, are others than at prepare(), of which the plan knows "
    "nothing; set values of the groups that are there (group['lr'] = ...), and freeze parameters that are not to be "
    "updated (requires_grad_(False)) or drop their gradients"
)


class _NoSession:
    """Stands in for the session while the plan changes. If an interruption leaves it there, every call says so."""

    closed = failed = True

    def close(self, **_options: object) -> None:
        """Do nothing: the old session is closed already."""

    def __getattr__(self, name: str) -> NoReturn:
        raise OutOfOrderError(
            f"the change of plan did not complete, so there is no session with {name}; make the model again, prepare() "
            "it and resume from a checkpoint"
        )


_BETWEEN_PLANS: Final = cast("Session", _NoSession())
