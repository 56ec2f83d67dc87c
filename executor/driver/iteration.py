"""One training iteration: from the first forward to ``optimizer.step()``, as the hooks on the model report it."""

import contextlib
import dataclasses
import functools
import itertools
import warnings
import zlib
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Final, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from executor.audit.audit import Audit
from executor.callbacks import fused_attention, in_backward, is_captured, is_transformed
from executor.driver.auditing import end_audit
from executor.driver.collecting import Collector
from executor.driver.on_demand import OnDemand, check_second_order, hook_saved_weights, why_not
from executor.driver.progress import Progress
from executor.driver.runtime import Runtime
from executor.driver.speculation import Speculation
from executor.driver.unbroken import Unbroken
from executor.gradients import GradientError
from executor.module import own_checkpoints
from executor.module.guards import LEFT_HALF_WAY, ON_DEMAND, unplanned_autocast
from executor.module.user_gradients import UserGradients
from executor.module.visibility import WeightVisibility
from executor.module.watched_parameters import watch
from executor.optimizer.table import OptimizerEntry, Params, Rule
from planner.decisions import Decisions
from planner.graph import Unit
from planner.schedule.loop import OutOfOrderError
from planner.schedule.tasks import Op

_MOST_KEPT_BYTES: Final = 1 << 26
"""Adapters' weights are at most so large, beside frozen ones: copies of their gradients are nearly free."""


@final
class IterationDriver:
    """Issues the tasks of an iteration when forward, backward and the step reach them.

    It implements :class:`executor.callbacks.ModuleCallbacks`.

    Attributes:
        collector: takes gradients from autograd.
        entry: the optimizer's kernels and state.
        attention: the fused kernels of attention, see :func:`executor.callbacks.fused_attention`; ``None``
            before the first forward.
        gradients: sets ``parameter.grad`` between backward and step.
        num_left: number of iterations that have left the plan, see [Note: On demand] in
            :mod:`executor.driver.on_demand`.
        num_calls: number of calls of the model and its parts in a step, see [Note: Steps] in
            :mod:`ullage.capture.partitioning`.
        visibility: shows and hides weights in parameters.
        progress: tracks where the model is in the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        runtime: Runtime,
        units: tuple[Unit, ...],
        decisions: Decisions,
        entry: OptimizerEntry,
        groups: list[dict[str, Any]],
        audit: Audit,
        report: Callable[[str], None],
    ) -> None:
        self._model = model
        self._audit = audit
        self._report = report
        self._on_demand: OnDemand | None = None
        self._reached, self._run_again = "", set[str]()  # where backward is, and what has run again since it came there
        self.attention: tuple[str, ...] | None = None
        self.num_left, self.num_calls = 0, 1
        self._said_left = self._said_autocast = False
        self._begun: list[Params] = []  # what updates in backward have begun with
        self._sets_late = False  # the loop sets learning rates between backward and step, for which updates wait
        self._last_left = -1
        self._runtime = runtime
        self._decisions = decisions
        self.entry, self._groups = entry, groups
        self._of_parameter = {id(s.whole): (s.name, s.whole_shape) for s in runtime.state.shards().values()}
        self._last_short = -2  # the latest iteration that ended before all its micro-batches had run
        self._model_trains = False  # a training forward is under way
        self._depth = 0  # of calls of the model and its parts, each inside the other
        self._is_followed = True  # the outermost one
        self._has_run_back = False  # a backward has ended in this iteration
        self._hooked = set[Any]()  # autograd nodes of it whose saved weights have hooks
        self._stays = any(unit.stays for unit in units)
        names = [unit.name for unit in units if not unit.is_unused]
        self._whole = names[0] if self._stays and len(names) == 1 else ""  # the only unit: all weights are there
        self._evaluated = {unit.name for unit in units if unit.evaluates}
        self._last = next((unit.name for unit in reversed(units) if unit.backward or unit.num_params), units[-1].name)
        self._loop, self._units = runtime.loop, runtime.state.units
        # See [Note: Interrupted] in executor.driver.unbroken.
        self._forward = Unbroken(runtime, "forward", keeps=True, expected=(GradientError,))
        self._backward = Unbroken(runtime, "backward()", keeps=True, expected=(GradientError,))
        self._clipping = Unbroken(runtime, "clipping, or optimizer.step()", keeps=True, expected=(GradientError,))
        self._updating = Unbroken(runtime, "optimizer.step()")
        self._leaving = Unbroken(runtime, "leaving the plan", keeps=True, expected=(GradientError,))
        self.progress = Progress(
            runtime,
            units,
            decisions,
            backward_begins=self._backward_begins,
            backward_ended=self._backward_ended,
            unbroken=self._backward,
        )
        runtime.come_to_rest = self.come_to_rest
        self.visibility = WeightVisibility(
            runtime.state, units, runtime.state.shards().values(), runtime, runtime.settled
        )
        self.collector = Collector(
            runtime,
            self.progress,
            audit,
            self._backward,
            off_plan=self._off_plan,
            on_demand=lambda: self._on_demand,
            enter_backward=self._enter_backward,
            see=self._see,
            begin_backward=self._begin_backward,
        )
        parameters = (parameter for _, parameter in runtime.state.by_name.values())
        shards = runtime.state.shards().values()
        trained_bytes = sum(shard.whole.nbytes for shard in shards if shard.trains)
        has_adapters = trained_bytes <= _MOST_KEPT_BYTES and not all(shard.trains for shard in shards)
        used = {id(parameter) for group in groups for parameter in group["params"]}
        is_alone = (ranks := runtime.ranks) is None
        divides = runtime.divides or decisions.context_parallel > 1
        own = shards if ranks is None or (ranks.all is ranks.everybody and not divides) else ()
        # Another optimizer may have what this one does not have.
        self.gradients = UserGradients(
            decisions,
            parameters,
            used,
            self._norms,
            self._end_early,
            lambda name: self.collector.edited().gradient(name),
            lambda name, values: self.collector.edited().replace(name, values),
            keeps=[s.name for s in own if has_adapters or id(s.whole) not in used],
            average=None if is_alone else runtime.average,
        )
        self.speculation = Speculation(runtime, self.gradients, report)
        runtime.has_written, runtime.at_hand = self.visibility.has_written, self.visibility.at_hand
        runtime.check_hook = self.visibility.check_hook

    def _see(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients.see(name, gradient)

    @property
    def last_was_whole(self) -> bool:
        """Whether the latest iteration had all of the plan's micro-batches, each in the planned shape."""
        return self._loop.iteration - 1 not in {self._last_short, self.progress.latest_other_shape}

    def on_forward(self, unit: str) -> None:
        """Forward, or recomputation, has reached a unit.

        Raises:
            OutOfOrderError: the plan does not expect it here, and the iteration cannot leave the plan.
            LaneError: a task failed on some lane.
        """
        evaluates = self._model.training and unit in self._evaluated  # in a planned call without gradients
        if in_backward():
            if not self._runtime.inside_iteration:  # a hook of the user's on a gradient runs the model
                self._check_begin()
                self._begin()
            self._run_again.add(unit)
            with self._backward:
                self._follow(self.progress.recompute, unit)
        elif not (self.trains or self._runtime.inside_iteration or (evaluates and self.progress.meets(unit))):
            self._runtime.evaluate(unit, self.visibility)
            if self._stays:  # a gradient inside forward reads weights of all units
                self.visibility.show_all()
            else:
                self.visibility.show(unit)
        elif self.progress.has_left or not self.progress.is_at(Op.FORWARD, unit):
            self._check_begin()
            with self._forward:
                self._follow(self._reach_forward, unit)
        else:
            if self._runtime.machine.failed:
                self._runtime.machine.check()
            self.visibility.show(unit)  # after a call of a part of the model

    def _reach_forward(self, unit: str) -> None:
        if not self.trains and not (self._model.training and unit in self._evaluated):
            raise OutOfOrderError(
                "the model ran without gradients, or in evaluation mode, in the middle of an iteration; evaluate after "
                "optimizer.step() and before the next forward"
            )
        if not self._runtime.inside_iteration:
            self._begin()
        if self.trains and unit in self._evaluated:
            raise OutOfOrderError(f"the model reached {unit} with gradients, but the plan expects it without them")
        self.progress.reach(Op.FORWARD, unit)
        if (state := self._units.get(unit)) is not None:
            state.spent.clear()  # in this stream's order, its updates have ended: see [Note: Spent]
            if state.is_resident:
                self._runtime.settled.add(unit)

    def on_transformed(self, reads: bool) -> None:
        """A transform of ``torch.func`` runs a module: weights of the model's own are there until the step.

        In a plan for such a step, they always are.

        Raises:
            OutOfOrderError: the iteration cannot leave the plan, or the device has no room for all weights.
        """
        if is_captured():  # another model is: shapes are enough
            self.visibility.show_all()
            return
        if not self._stays:
            check_second_order(self._decisions)
        if self._whole and self.trains:
            if not self.progress.is_at(Op.FORWARD, self._whole):
                self._check_begin()
                self.progress.begin_call()
                with self._forward:
                    self._follow(self._reach_forward, self._whole)
        elif reads or self._runtime.inside_iteration:
            with self._forward:
                self._off_plan(OutOfOrderError("a transform of torch.func ran the model"), False)
        if reads:
            self._runtime.keep_all(self.visibility)
            self.visibility.show_all(traced=True)

    def on_unplanned(self, why: str) -> None:
        """A forward that trains does what the plan does not have. Raises as on_forward."""
        with self._forward:
            self._off_plan(OutOfOrderError(why), False)

    def on_backward(self, unit: str) -> None:
        """Backward has reached a unit. Raises as :meth:`on_forward`."""
        if self._stays and torch.is_grad_enabled() and self._runtime.is_evaluating:
            return  # as forces are computed; all weights are there
        self._reached = unit
        self._run_again.clear()
        with self._backward:
            if not self._runtime.inside_iteration:
                error = OutOfOrderError(
                    "backward came for a forward that was an evaluation; call model.train() before the forward"
                )
                self._check_backward()
                self._check_begin()
                self._begin()
                self._leave(error)
            if torch.is_grad_enabled():
                if not self._stays:
                    check_second_order(self._decisions)
                expected = self._loop.expected()
                is_late = expected is None or expected.op is Op.CLIP
                changes = is_late or self.gradients.dropped(self._loop.iteration)
                if self._on_demand is None and (changes or not self._stays):
                    self._leave(OutOfOrderError("backward makes a graph of its own (create_graph=True)"))
                if self._on_demand is not None and self._has_run_back:
                    self._enter_backward()  # its end shows the gradients so far again
                else:
                    self._reopen()  # gradients may come before the next backward reaches a module
                if self._on_demand is not None:
                    self._runtime.keep_all(self.visibility)
                    # A forward that takes a gradient inside has run again before: what that has saved is in slots.
                    self._on_demand.bring(unit)
                    self.visibility.show(unit)
                    hook_saved_weights(self.visibility, self._hooked)
            elif self.progress.has_left or not self.progress.is_at(Op.BACKWARD, unit):
                self._follow(self.progress.backward, unit)
            else:
                self.visibility.show(unit)

    def watch(self, parameter: nn.Parameter, unit: Callable[[], str]) -> None:
        """See :class:`executor.callbacks.ModuleCallbacks`."""

        def reading() -> Callable[[bool], None] | None:
            return functools.partial(self._read_back, name) if (name := unit()) else None

        watch(parameter, reading)
        self.visibility.watch(parameter)

    def _read_back(self, unit: str, may_not: bool) -> None:
        if not (self.visibility.is_in_sight(unit) or (may_not and self._on_demand is None)):
            self.on_backward(unit)

    def on_recomputed(self, unit: str) -> None:
        """Recomputation of the segment that ends with this unit has ended. Raises as :meth:`on_forward`."""
        if self._on_demand is not None and self._reached in self._run_again:
            unit = self._reached  # its block has run inside of the segment's, and backward goes on there
        with self._backward:
            self._follow(self.progress.recomputed, unit)

    def _follow(self, reach: Callable[[str], None], unit: str) -> None:
        """Do what the plan has up to this unit, or bring its weights on demand. Show them."""
        if self._on_demand is None:
            try:
                reach(unit)
            except OutOfOrderError as error:
                self._leave(error)
        if self._on_demand is not None:
            self._check_backward()
            if in_backward():
                self._enter_backward()
            self._on_demand.bring(unit)
        elif in_backward() and self.progress.task is not None and self._updates_in(self.progress.task.micro_batch):
            # Until then, its weights are as forward had them, for nodes that the plan does not know.
            self._unsettle(self.progress.passed_over)
        # Where several units are recomputed together, backward reaches the last before its weights are there.
        self.visibility.show(unit if self._on_demand is not None or self.progress.unit == unit else "")

    def _enter_backward(self) -> None:
        begins = self.progress.enter_backward()
        if begins:
            self._reopen()
        self.gradients.clear()  # also where a backward goes on that another one, inside it, has seemed to end
        if begins and self._on_demand is not None and (hooked := self._hooked_sums()):
            self.gradients.show_sums({name: self._on_demand.gradient(name) for name in hooked})
            self._on_demand.drop(hooked)

    def _hooked_sums(self) -> list[str]:
        """Return the parameters whose hooks see what another backward of this iteration is added to."""
        hooked = self.collector.hooked()
        return sorted(self.gradients.arrived(self._loop.iteration).intersection(hooked)) if hooked else []

    def _check_backward(self) -> None:
        if in_backward():
            return
        if self.progress.is_broken_off:
            raise OutOfOrderError(
                "an exception has ended backward(), and some of its gradients have arrived; drop them "
                "(optimizer.zero_grad()), and go on with the next batch"
            )
        self.progress.forget_backward()

    def _reopen(self) -> frozenset[str]:
        """Let more gradients be added to this iteration's; return the parameters whose gradients were dropped."""
        dropped = self.gradients.dropped(self._loop.iteration)
        if self._on_demand is not None:
            self._on_demand.drop(dropped)
            self.gradients.absorb()
        self.gradients.reopen(dropped)
        return dropped

    def _leave(self, error: OutOfOrderError, *, is_read: bool = False) -> None:
        """Leave the plan until the next step, see [Note: On demand].

        Args:
            error: says what the plan expected.
            is_read: no gradient is to be added, so those so far may have been scaled.

        Raises:
            OutOfOrderError: the iteration cannot leave the plan; the text is that of ``error``, and why.
        """
        self._check_backward()
        if reason := why_not(self._runtime, self._decisions):
            raise OutOfOrderError(f"{error}. {reason}") from None
        with self._leaving:
            dropped = self.gradients.dropped(self._loop.iteration)
            self._on_demand = OnDemand(self._runtime, self._decisions, dropped)
            self.progress.leave()
            if not is_read:
                self._reopen()
        self._audit.abandon()
        self._runtime.machine.exclude(self._loop.iteration)
        self.num_left += self._last_left != self._loop.iteration  # it may come back, for norms, and leave again
        self._last_short = self._last_left = self._loop.iteration
        if not self._said_left:
            self._said_left = True
            what = str(error).partition(";")[0].partition(". ")[0]
            self._report(f"iteration {self._loop.iteration + 1} left the plan: {what}. {ON_DEMAND}")

    def _off_plan(self, error: OutOfOrderError, is_read: bool) -> OnDemand:
        """Leave the plan, if the iteration has not left it; raises as :meth:`_leave`."""
        if not self._runtime.inside_iteration:
            self._check_begin()
            self._begin()
        if self._on_demand is None:
            self._leave(error, is_read=is_read)
        assert self._on_demand is not None
        return self._on_demand

    def on_logits(self, unit: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        made_in = self._loop.iteration

        @contextlib.contextmanager
        def reading() -> Iterator[None]:
            shown = self.visibility.shown_for
            moves = self._runtime.inside_iteration and self._on_demand is None
            if made_in != self._loop.iteration or (moves and self.progress.unit != unit):
                raise OutOfOrderError(
                    "the plan computes logits in tiles when they are read, but the weights for that are gone once "
                    "backward or a step has begun; read the logits before, or plan with --tiles loss as large as the "
                    "micro-batch"
                )
            if self._on_demand is not None:
                self._on_demand.bring(unit)
            elif not moves:
                self._runtime.evaluate(unit, self.visibility)
            self.visibility.show(unit)
            try:
                yield
            finally:
                self.visibility.show(shown)

        return reading

    @property
    def call(self) -> int:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        return self.progress.call

    @property
    def follows(self) -> bool:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        if in_backward():  # a block is computed again, with its own transforms
            return True
        return self._is_followed if self._depth else not is_transformed()

    @property
    def micro_batch(self) -> int:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        return self.progress.micro_batch

    @property
    def tile(self) -> int:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        return self.progress.tile

    def on_tile(self, tile: int) -> None:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        self.progress.tile = tile

    def on_call(self, *, is_followed: bool) -> None:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        self._depth += 1
        own_checkpoints.enter(1)
        if self._depth == 1:
            self._is_followed = is_followed
        if self._depth > 1 or in_backward() or not is_followed:
            return
        begins = self._model.training and (torch.is_grad_enabled() or self.progress.first.evaluates)
        if begins and self._runtime.inside_iteration:
            self._end_unused()
        if begins and not self._runtime.inside_iteration:
            self._audit.begin_iteration(self._loop.iteration, self._runtime.weights)
        self.progress.begin_call()

    def on_call_end(self, *, failed: bool) -> None:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        own_checkpoints.enter(-1)
        self._depth = max(self._depth - 1, 0)  # it may have failed before it was reported
        if is_captured():
            with _disable_current_modes():
                self.visibility.show("")
            return
        if not failed:
            self.after_forward()

    @property
    def unit(self) -> str:
        """The unit that computes now; empty if none does."""
        return self.visibility.shown_for if self.progress.has_left else self.progress.unit

    @property
    def on_demand(self) -> bool:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        return self.progress.has_left

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is one of the plan's."""
        trains = self._model_trains or (torch.is_grad_enabled() and self._model.training)
        return trains and not self.progress.has_left

    @property
    def begins(self) -> bool:
        """Whether a forward that begins now is the plan's first one of a micro-batch."""
        trains = self.trains or (self.progress.first.evaluates and self._model.training)
        return trains and self.progress.begins

    def on_model_begin(self) -> None:
        """The model's own forward begins. If it trains, parts of it without gradients count as training too."""
        if not self.follows:
            return
        self._model_trains = not in_backward() and torch.is_grad_enabled() and self._model.training
        is_late = self.progress.num_called >= self.num_calls and not self.progress.is_between
        # Leave before a segment begins to offload, see its forward.
        if self.trains and self._runtime.inside_iteration and is_late:
            with self._forward:
                self._leave(self.progress.unexpected(Op.FORWARD))

    def on_model_end(self, output: Any) -> None:
        """The model's own forward has ended, or failed: then without ``output``. After the first, look at attention."""
        if self.attention is None and self._model_trains and output is not None:
            self.attention = fused_attention(output)
            if self.attention and self._runtime.backend.device.type == "cuda":
                self._report(f"attention: {', '.join(self.attention)}")
        self._model_trains = self._model_trains and self._depth > 1

    def _begin_backward(self, unit: str) -> None:
        """Backward has reached a gradient of a unit: before any module's, if the loop has used its weight."""
        if not self.progress.is_in_backward and (self._stays or (unit == self._last and self.progress.comes_back)):
            self.on_backward(self._last)

    def after_forward(self) -> None:
        """See :class:`executor.callbacks.ModuleCallbacks`."""
        if self._depth:
            return
        if self._runtime.is_evaluating:
            self.visibility.show("")
        elif self._runtime.inside_iteration and not (in_backward() or self._runtime.divides):
            expected = self._loop.expected()
            comes_next = expected is not None and (expected.op, expected.unit) == (Op.BACKWARD, self.unit)
            self.visibility.rest(keeps_slot=comes_next or self.on_demand)

    def zero_grad(self) -> None:
        """The user drops all gradients.

        Raises:
            GradientError: some micro-batches of the iteration have run, but not all, and it cannot leave the plan.
        """
        if self.progress.is_broken_off:
            self.gradients.drop_arrived(self._loop.iteration)
            self.progress.forget_backward()
        self.gradients.drop_all()
        expected = self._loop.expected()
        if expected is None or expected.op is Op.CLIP or not expected.micro_batch or self._on_demand is not None:
            return
        if reason := why_not(self._runtime, self._decisions):
            raise GradientError(
                f"zero_grad() was called when the plan expects {expected.name}, but gradients of earlier "
                f"micro-batches are summed already; call it after optimizer.step(). {reason}"
            )

    def step(self) -> None:
        """Issue the rest of the iteration (mainly updates), and return while it runs.

        Micro-batches that have not run by then are skipped, as at the end of a user's data. Without gradients a step
        does nothing.

        Raises:
            GradientError: a gradient was used up by a step before, and was not dropped since.
            OutOfOrderError: a micro-batch is under way.
            LaneError: a task failed on some lane.
        """
        self._runtime.machine.check()
        own_checkpoints.enter(-self._depth)  # a signal may have ended a forward without its hooks
        self._depth = 0
        self.visibility.check_unmodified()
        self.gradients.check_fresh(self._loop.iteration)
        self.gradients.set_zeros()
        self._end()

    def _end(self) -> None:
        """See :meth:`step`."""
        if not (self._runtime.inside_iteration or self.gradients.replaced()):
            return
        rules = [self.entry.rule(group).params for group in self._groups]  # ValueError for one that cannot be executed
        self.gradients.absorb()
        with self._clipping:
            self._end_early()
            expected = self._loop.expected()
            if self._runtime.inside_iteration and expected is not None and expected.op is not Op.CLIP:
                self._leave(OutOfOrderError(f"optimizer.step() was called when the plan expects {expected.name}"))
                self._end_early()
                expected = self._loop.expected()
            if expected is not None and expected.op is not Op.CLIP:
                raise OutOfOrderError(
                    f"optimizer.step() was called when the plan expects {expected.name}; the plan has "
                    f"{self._decisions.num_micro_batches} forward and backward for every step. {LEFT_HALF_WAY}"
                )
            self._reach_clip()
            if self._audit.is_active:
                self.visibility.show("")
                end_audit(self._audit, self._runtime)
            begins = self._decisions.update_start == "step"
            if self._decisions.takes_back:
                begins = self.speculation.end(self._rules(self.gradients.scale)[0])
            elif not begins:
                begins = self._begins_again(rules)
            self.gradients.begin_step(self._loop.iteration)
            with self._updating:
                if begins:
                    self._begin_updates()
                self._runtime.machine.end_open()
                self._runtime.actions.perform_deferred(self._loop.iteration)
                self._loop.finish()
                self.visibility.show("")
                self._runtime.inside_iteration = False

    def _begins_again(self, rules: list[Params]) -> bool:
        """Return whether updates, which were to begin in backward, have waited, and now have other hyper-parameters.

        Raises:
            ValueError: they have other ones, and have not waited.
        """
        if self._runtime.actions.defers and not self._audit.is_active:
            self._runtime.machine.exclude(self._loop.iteration)
            self._runtime.issue_gradients()
            self._runtime.synchronize()
        if rules == self._begun:
            return False
        if not self._runtime.actions.defers:
            raise ValueError(
                "hyper-parameters of the optimizer (as the learning rate) were changed between backward and step(), "
                "but the plan does not clip, so its updates have begun in backward, with those of before; change them "
                "before forward or after step(), or give prepare() clip=True. The weights of this step are lost: "
                "continue from a checkpoint"
            )
        if not self._sets_late:
            self._sets_late = True
            self._report(
                "this loop sets hyper-parameters of the optimizer (as the learning rate) between backward and step(), "
                "so updates wait for the step, which is slower than planned; set them before forward, or give "
                "prepare() clip=True"
            )
        return True

    def come_to_rest(self) -> bool:
        """After a forward, or in or after backward, end the iteration or leave the plan, so that weights can be read.

        Return whether they can be.
        """
        if not self._depth and self._end_unused():
            return True
        is_under_way = self.progress.task is not None
        has_run_back = self._has_run_back and self.progress.rests
        may_leave = self._on_demand is None and (has_run_back or is_under_way)
        if may_leave and not why_not(self._runtime, self._decisions):
            computing = self.visibility.shown_for
            self._leave(OutOfOrderError("weights were read in the middle of a step"), is_read=has_run_back)
            if self._depth and computing and self._on_demand is not None:  # its forward goes on
                self._on_demand.bring(computing)
        return self._on_demand is not None

    def _end_unused(self) -> bool:
        """End an iteration without an update, if no gradient has come or all were dropped. Return whether it has ended.

        So a model is ready for a planned iteration after backward has passed through it for the sake of another model,
        as for a GAN's generator through its discriminator.
        """
        iteration, expected = self._loop.iteration, self._loop.expected()
        if not (self._has_run_back and self.progress.rests):
            return False
        # By a forward without backward so far, or by a graph that backward has made.
        if self._on_demand is not None and (self._runtime.offloaded.is_in_use or self._hooked):
            return False
        if self._runtime.ranks is not None and expected is not None and expected.op is not Op.CLIP:
            return False  # ranks may have different gradients until the last micro-batch
        if not self.gradients.are_gone(iteration):
            return False
        self._audit.abandon()
        before = self._runtime.version
        self._end()
        self._runtime.keep_version(before)
        self._runtime.machine.exclude(iteration)
        self._last_short = iteration
        return True

    def _check_begin(self) -> None:
        """Check that an iteration can begin, if none is under way."""
        self._runtime.machine.check()
        if self._runtime.inside_iteration:
            return
        self._runtime.settle_state()
        self._runtime.state.check_frozen()
        self._runtime.check_has_weights()
        self._runtime.check_unparked()
        self.visibility.check_unmodified()
        words = unplanned_autocast(self._runtime.backend.device, self._runtime.state.dtype)
        if words and not self._said_autocast:
            self._said_autocast = True
            self._report(words)

    def begin(self) -> bool:
        """Begin an iteration before its first forward reaches a module, if it is to train; return whether it began.

        Raises as :meth:`on_forward`.
        """
        begins = self.trains and not self._runtime.inside_iteration
        if begins:
            self._check_begin()
            with self._forward:
                self._begin()
        return begins

    def _begin(self) -> None:
        self._runtime.doing = f"iteration {self._loop.iteration + 1}"
        self._runtime.end_evaluation()
        self._runtime.end_others()
        self._runtime.cast_due()
        self._runtime.inside_iteration = True
        self._has_run_back = False
        self.gradients.begin_iteration()

    def _backward_begins(self, micro_batch: int) -> None:
        changed = self.gradients.dropped(self._loop.iteration) | self.gradients.replaced().keys()
        if hooked := self._hooked_sums():
            raise OutOfOrderError(f"a hook sees the gradient of {hooked[0]}, to which this backward adds")
        if changed:
            raise OutOfOrderError(
                f"the gradient of {min(changed)} was dropped or replaced before the plan's last micro-batch; call "
                "zero_grad() after optimizer.step()"
            )
        zeros = self.gradients.zeros()
        self.gradients.clear()
        if self._updates_in(micro_batch):
            try:
                self.gradients.check_fresh(self._loop.iteration)
            except GradientError as error:  # the loop may drop them before its step, as a GAN's after the generator's
                raise OutOfOrderError(str(error)) from None
            if zeros:
                units = {unit.name for unit, own in self._runtime.state.by_name.values() if own.shard.name in zeros}
                if passed := units & self.progress.passed_over:
                    raise OutOfOrderError(
                        f"forward passed over {min(passed)}, whose gradients the loop has set to zero"
                    )
            self._begin_updates(is_early=True)

    def _backward_ended(self, micro_batch: int, turn: int) -> None:
        if self._on_demand is None:  # else more may come for other forwards
            self._runtime.offloaded.drop(micro_batch, turn)
        self._has_run_back = True
        self._audit.end_micro_batch()
        self.visibility.show("")
        if self._on_demand is None and self._updates_in(micro_batch):
            self._unsettle(self._runtime.settled)
        is_last = micro_batch == self._decisions.num_micro_batches - 1 and not self.progress.comes_back
        # The loop may clip now, and step. Which gradients there are must be the same on all ranks.
        if is_last or (self.progress.num_complete and self._decisions.update_start == "step"):
            self._sync_arrivals()
        self.gradients.expose(self._loop.iteration, micro_batch)

    def make_later_gradients(self, turn: int, micro_batch: int) -> None:
        """Make the gradients of a micro-batch that its backward in a round has left, see [Note: Zero bubble]."""
        with self._backward:
            for unit in self.progress.left_in(turn):
                self.progress.reach_weights(unit)
                self.collector.collect_later(self._units[unit], micro_batch)
            self.progress.reach_weights()
            if micro_batch == self._decisions.num_micro_batches - 1 and not self.progress.comes_back:
                self._sync_arrivals()
            self.gradients.expose(self._loop.iteration, micro_batch)

    def _sync_arrivals(self) -> None:
        if (collectives := self._runtime.collectives) is not None:
            parameters = [parameter for _, parameter in self._runtime.state.by_name.values()]
            collectives.sync_arrivals(parameters, self._loop.iteration, self._runtime.doing)

    def _end_early(self) -> None:
        """End the iteration if only some of its micro-batches have run, or if it has left the plan.

        See [Note: Short groups] and [Note: On demand].
        """
        with self._clipping:
            if self.progress.has_left:
                self._end_on_demand()
            elif num_complete := self.progress.num_complete:
                self._end_after(num_complete)

    def _end_on_demand(self) -> None:
        assert self._on_demand is not None
        self.visibility.show("")
        self._on_demand.skip_rest()
        self._sync_arrivals()
        if self._decisions.update_start == "backward":
            self._begin_updates(is_early=True, waits=True)
        self.progress.end_early()
        self._on_demand.flush_rest()
        self._on_demand = None
        self._hooked.clear()
        self._runtime.end_on_demand()
        self._runtime.offloaded.drop_all()

    def _end_after(self, num_complete: int) -> None:
        iteration = self._loop.iteration
        self._runtime.doing = f"iteration {iteration + 1}, which ended after micro-batch {num_complete}"
        self._sync_arrivals()
        self._runtime.actions.skip(iteration, num_complete, self._loop.num_issued)
        if self._decisions.update_start == "backward":
            self._begin_updates(is_early=True, waits=True)
        self.progress.end_early()
        self._runtime.machine.exclude(iteration)
        if iteration == 1 and self._last_short == 0:
            warnings.warn(
                f"the first two steps had fewer micro-batches than the plan's {self._decisions.num_micro_batches}, "
                f"the second had {num_complete}; training continues, but is slower than planned: plan with "
                f"--accumulate {num_complete}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._last_short = iteration

    def _reach_clip(self) -> None:
        if self.progress.task is not None:
            raise OutOfOrderError(f"backward() did not complete, so that gradients are missing. {LEFT_HALF_WAY}")
        expected = self._loop.expected()
        if expected is not None and expected.op is Op.CLIP:
            self._loop.reach(Op.CLIP)

    def _norms(self) -> dict[str, torch.Tensor]:
        with self._clipping:
            self._reach_clip()
            self._runtime.doing = f"clipping, or reading norms, in iteration {self._loop.iteration + 1}"
            return self._runtime.actions.gradients.norms(self._loop.iteration)

    def _begin_updates(self, *, is_early: bool = False, waits: bool = False) -> None:
        if waits or not is_early:  # else each unit is unsettled when backward has left it
            self._unsettle(self._runtime.settled)
        speculates = is_early and self._decisions.takes_back
        updates, rules = self._rules(self.speculation.scale if speculates else self.gradients.scale)
        self._begun = rules
        if speculates:
            self.speculation.begin(updates, waits=waits or self._audit.is_active)
        else:
            self._runtime.actions.updates.begin(self._loop.iteration, updates)
        if (ranks := self._runtime.ranks) is not None:
            ranks.decision_hash = zlib.crc32(repr((rules, self.gradients.decided())).encode())
        if self._audit.is_active or (is_early and self._sets_late and not waits):
            # In backward: they wait for the audit's verdict, see `end_audit`, or for the loop.
            self._runtime.actions.defer_updates(self._loop.iteration, self._loop.num_issued)

    def _updates_in(self, micro_batch: int) -> bool:
        """Return whether updates begin in the backward of a micro-batch."""
        is_last = micro_batch == self._decisions.num_micro_batches - 1
        return is_last and self._decisions.update_start == "backward"

    def _unsettle(self, units: AbstractSet[str]) -> None:
        """Hide the memory of weights that are about to be updated, those of settled units among these."""
        self.visibility.unsettle(units)
        self._runtime.settled -= units

    def _rules(self, scale: Callable[[str], float]) -> tuple[dict[str, Rule], list[Params]]:
        """Return the rule of each parameter, given the factors of gradients; and of each of the optimizer's groups."""
        updates, rules = dict[str, Rule](), list[Params]()
        numbers = itertools.count()
        for group in self._groups:  # as the user has them now
            rule = self.entry.rule(group)
            rules.append(rule.params)
            for parameter, number in zip(group["params"], numbers, strict=False):
                if id(parameter) not in self._of_parameter:  # of another module
                    continue
                name, shape = self._of_parameter[id(parameter)]
                of_parameter = rule.of_parameter(number, shape)
                updates[name] = dataclasses.replace(of_parameter, scale=scale(name))
        return updates, rules
