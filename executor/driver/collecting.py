"""Takes gradients from autograd as soon as they are accumulated, and those that come by other ways."""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

import torch

from executor.audit.audit import Audit
from executor.callbacks import is_captured
from executor.driver.on_demand import OnDemand
from executor.driver.progress import Progress
from executor.driver.runtime import Runtime
from executor.gradients import GradientError, OffloadedGradient
from executor.memory.units import ParameterState, UnitState
from executor.module.guarded_parameters import LAST_HOOK
from executor.packed import as_real
from planner.schedule.loop import OutOfOrderError


@final
class Collector:
    """Collects each gradient as soon as it is accumulated.

    Args:
        backward: a context for what happens inside backward.
        off_plan: lets the iteration leave the plan, if it has not, and returns what collects gradients then; given
            whether no gradient is to be added. See [Note: On demand] in :mod:`executor.driver.on_demand`.
        on_demand: returns what collects gradients off the plan; ``None`` on it.
        enter_backward: notes that backward runs off the plan.
        see: gets what autograd adds to a parameter's gradient.
        begin_backward: called with its unit when a gradient comes, which may be before any module's backward.
    """

    def __init__(
        self,
        runtime: Runtime,
        progress: Progress,
        audit: Audit,
        backward: contextlib.AbstractContextManager[object],
        *,
        off_plan: Callable[[OutOfOrderError, bool], OnDemand],
        on_demand: Callable[[], OnDemand | None],
        enter_backward: Callable[[], None],
        see: Callable[[str, torch.Tensor], None],
        begin_backward: Callable[[str], None],
    ) -> None:
        self._runtime, self._progress, self._audit, self._backward = runtime, progress, audit, backward
        self._off_plan, self._on_demand, self._enter_backward = off_plan, on_demand, enter_backward
        self._see, self._begin_backward = see, begin_backward

    def hook_parameters(self, *, one_thread: bool) -> Iterator[Callable[[], None]]:
        """Collect each gradient as soon as it is accumulated; yield functions that undo this.

        Autograd orders nodes by numbers of their thread, and a device has a thread of its own. With ``one_thread``, it
        computes in that of the loop too, and keeps the order.
        """
        if one_thread:
            threads = torch.autograd.set_multithreading_enabled(False)
            yield lambda: threads.__exit__(None, None, None)
        for unit, parameter in self._runtime.state.by_name.values():
            leaf = parameter.shard.leaf
            leaf.grad, trains = None, leaf.requires_grad
            leaf.requires_grad_(True)  # a frozen parameter may be unfrozen later, but takes no hook while frozen
            handle = leaf.register_post_accumulate_grad_hook(self._hook(unit, parameter))  # type: ignore[no-untyped-call]
            vars(leaf)[LAST_HOOK] = handle.id
            leaf.requires_grad_(trains)
            yield handle.remove

    def edited(self) -> OnDemand:
        """Leave the plan, so that gradients can be read and replaced between backward and step; return what does so.

        Raises:
            GradientError: ranks share layers or experts.
            OutOfOrderError: updates of this plan begin in backward.
        """
        if self._runtime.divides:
            raise GradientError(
                "gradients have left the device, and ranks that share layers or experts hold parts of them; only their "
                "2-norms (torch.nn.utils.clip_grad_norm_) and scaling in place by a number (mul_, div_) are possible; "
                "use a hook on the parameter (parameter.register_hook) to see or change a rank's own gradient"
            )
        error = OutOfOrderError(
            "gradients were read or changed between backward and the step, or zero_grad(set_to_none=False) has left "
            "zeros in some that no backward has reached"
        )
        return self._off_plan(error, True)

    def collect_later(self, unit: UnitState, micro_batch: int) -> None:
        """Collect the gradients of a unit that backward has left, see [Note: Zero bubble]."""
        gradients, iteration = self._runtime.actions.gradients, self._runtime.loop.iteration
        on_demand = self._on_demand()

        def collect(parameter: ParameterState, gradient: torch.Tensor) -> None:
            if on_demand is not None:
                on_demand.collect(unit, parameter, gradient)
            else:
                gradients.collect(unit, parameter, gradient, micro_batch, iteration)

        self._progress.later.make(unit.name, micro_batch, collect)

    def _show(self, parameter: ParameterState, gradient: torch.Tensor) -> None:
        if gradient.requires_grad and self._runtime.ranks is not None:
            raise GradientError(
                f"backward(create_graph=True) makes a graph of the gradient of {parameter.name}, but its grad is a "
                "mean over ranks, which has none; use torch.autograd.grad(loss, parameters, create_graph=True)"
            )
        if parameter.shard.leaf is parameter.shard.whole:
            self._see(parameter.shard.name, gradient)

    def hooked(self) -> list[str]:
        """Return the parameters of one process whose gradients hooks of the user's see as soon as they are added up."""
        own = [] if self._runtime.ranks is not None else self._runtime.state.shards().values()
        hooks = ((shard, shard.leaf._post_accumulate_grad_hooks) for shard in own if shard.leaf is shard.whole)
        return [shard.name for shard, of_shard in hooks if of_shard is not None and len(of_shard) > 1]

    def _is_hooked(self, leaf: torch.Tensor) -> bool:
        """Return whether hooks of the user's have seen a gradient, and check what they have done to the parameter."""
        if is_hooked := len(leaf._post_accumulate_grad_hooks) > 1:
            self._runtime.check_hook(leaf)
        return is_hooked

    def _hook(self, unit: UnitState, parameter: ParameterState) -> Callable[[torch.Tensor], None]:
        gradients, progress, loop = self._runtime.actions.gradients, self._progress, self._runtime.loop

        def collect(leaf: torch.Tensor) -> None:
            gradient = _taken(leaf)
            if is_captured():  # another model is, and this gradient has no values
                return
            hooked = self._is_hooked(leaf)
            if gradient is None:  # a hook of the user's has dropped it
                return
            if hooked and parameter.arrived == loop.iteration:
                raise GradientError(
                    f"a hook on {parameter.name} (register_post_accumulate_grad_hook) has seen the latest gradient "
                    "alone, because the others of this step are added up elsewhere, as ranks do; use register_hook, or "
                    "one backward for each step"
                )
            shown, gradient = gradient, gradient.detach()
            # Of an embedding's sparse one, what it does not have is zero.
            gradient = as_real(gradient.to_dense() if gradient.is_sparse else gradient)
            if not torch.is_grad_enabled():
                self._begin_backward(unit.name)
            with self._backward:
                task = progress.task
                comes = progress.awaits_gradient(unit.name) and not torch.is_grad_enabled()
                if (on_demand := self._on_demand()) is None and (task is None or not comes):
                    error = (
                        f"the gradient of {parameter.name} came when backward was not at {unit.name}, as that of a "
                        "penalty on weights does"
                    )
                    on_demand = self._off_plan(OutOfOrderError(error), False)
                if on_demand is not None:
                    self._enter_backward()  # which forgets what was dropped
                    self._show(parameter, shown)
                    on_demand.collect(unit, parameter, gradient)
                    return
                assert task is not None
                self._show(parameter, shown)
                if progress.later.keep(unit, parameter, gradient):
                    return
                if self._audit.is_active and not hooked:
                    self._audit.collect(parameter.shard, gradient)
                gradients.collect(unit, parameter, gradient, task.micro_batch, loop.iteration)

        return collect


def _taken(leaf: torch.Tensor) -> torch.Tensor | None:
    """Take what autograd has added to a parameter's gradient, if no hook of the user's has dropped it."""
    gradient = so_far = leaf.grad
    if isinstance(so_far, OffloadedGradient):  # it comes before backward has reached any module
        gradient, so_far.added = so_far.added, None
    else:
        leaf.grad = None
    return gradient
