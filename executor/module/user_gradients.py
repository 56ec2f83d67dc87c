"""Gradients between backward and step: reading norms, scaling and dropping.

Loops over all parameters run unguarded ([Note: Guarded parameters]), because they touch only ``.grad``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import final

import torch

from executor.gradients import UPDATES_AT_STEP, GradientError, OffloadedGradient, forget_factor
from executor.memory.units import ParameterState
from executor.module.guarded_parameters import unguarded
from executor.packed import as_real
from planner.decisions import Decisions


@final
class UserGradients:
    """The user's view of all gradients between backward and step.

    Args:
        used: the ``id`` of each parameter that the optimizer has.
        norms: waits for all gradients of the iteration, and returns their norms by name of the whole parameter.
        complete: ends the iteration's micro-batches. It is called when gradients are read or scaled.
        read: leaves the plan, and returns a copy of a parameter's gradient on the device; zeros if none has come.
        replace: leaves the plan, and sets a parameter's gradient.
        keeps: the parameters of whose gradients copies may be kept; see :meth:`see`.
        average: sets copies in host memory that each rank has of its own to their mean; ``None`` without ranks.

    Attributes:
        refusal: why norms cannot be read; empty: they can.
    """

    def __init__(
        self,
        decisions: Decisions,
        parameters: Iterable[ParameterState],
        used: Collection[int],
        norms: Callable[[], dict[str, torch.Tensor]],
        complete: Callable[[], None],
        read: Callable[[str], torch.Tensor],
        replace: Callable[[str, torch.Tensor], None],
        *,
        keeps: Collection[str] = (),
        average: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        self._clips = decisions.clip
        self.refusal = ""
        self._waits = decisions.update_start == "step" or decisions.takes_back
        self._parts: dict[str, list[ParameterState]] = {}
        for parameter in parameters:
            self._parts.setdefault(parameter.shard.name, []).append(parameter)
        self._wholes = {name: parts[0].shard.whole for name, parts in self._parts.items()}
        self._of_optimizer = {name for name, whole in self._wholes.items() if id(whole) in used}
        self._find_norms = norms
        self._complete, self._read, self._set = complete, read, replace
        self._open: dict[str, torch.Tensor] = {}  # values that operations use, or views of which may be written to
        self._graphs: dict[str, torch.Tensor] = {}  # sums that have a graph of their own, as create_graph=True makes
        self._keeps, self._is_kept_read = frozenset(keeps), False
        # Copies of this iteration's gradients. Of parameters that the optimizer does not have, these are the gradients.
        self._kept: dict[str, torch.Tensor] = {}
        self._average, self._of_rank = average, set[str]()  # those to which this rank has added its own
        self._norms: dict[str, torch.Tensor] | None = None
        self._scales: dict[str, float] = {}
        self._dropped = False
        self._dropped_early: set[str] = set()  # since the last backward that has not ended
        # Number of micro-batches in the sum that the stand-ins represent; 0 if a step has used it up.
        self._num_added = 0
        self._stale: set[str] = set()  # parameters that still had a used gradient when this iteration's backward began
        self._shows = False  # whether the loop sees these, as between two backwards
        self._zeroed: set[str] = set()  # parameters whose used gradient the loop has set to zero: to it more is added
        self._own: dict[str, torch.Tensor] = {}  # gradients that the loop has set, to whose memory autograd adds
        self._stand_ins: dict[str, OffloadedGradient] = {}  # made once, because that is slow

    def use(self, names: Iterable[str]) -> None:
        """Note that the optimizer has more parameters. Gradients that they have count as set by the loop."""
        with unguarded():
            for name in names:
                if self._is_anothers(name) and self._wholes[name].grad is not None:
                    self._wholes[name].grad = self._mean(name).to(self._wholes[name].device)
                    del self._kept[name]
                self._of_optimizer.add(name)

    def begin_iteration(self) -> None:
        """Clear the last iteration's norms and scales."""
        self._norms = None
        self._scales.clear()
        self._open.clear()
        self._graphs.clear()
        if not self._is_kept_read and not self._of_optimizer.isdisjoint(self._kept):
            self._keeps -= self._of_optimizer
        self._stale.clear()
        self._dropped = False
        with unguarded():
            self._own = {name: own for name, own in self._own.items() if self._wholes[name].grad is not None}
            kept = {name: kept for name, kept in self._kept.items() if self._belongs_to_another(name)}
            self._kept = {name: values for name, values in kept.items() if self._wholes[name].grad is not None}

    def expose(self, iteration: int, micro_batch: int) -> None:
        """Set ``grad`` of every parameter that got a gradient to a stand-in, until the next micro-batch or the step."""
        with unguarded():
            self._num_added = micro_batch + 1
            self._zeroed -= (arrived := self.arrived(iteration))
            for name in arrived & self._keeps - self._kept.keys() if self._average is not None else ():
                self._keep(name, torch.zeros_like(self._wholes[name]))  # it has come on other ranks alone
                self._of_rank.add(name)
            for name in arrived | self._stale | self._zeroed:  # gradients may have passed through a frozen model
                if name in self._graphs and name not in self._stale:
                    self._wholes[name].grad = self._graphs[name]
                else:
                    self._stand_in(name)
            for name in arrived & self._own.keys():
                self._own[name].copy_(self._read(name))
                self._wholes[name].grad = self._own[name]
            self._shows = True

    def see(self, name: str, gradient: torch.Tensor) -> None:
        """Keep what autograd adds to a gradient, where the loop needs it later.

        If it or what it is added to has a graph, ``grad`` leads on to weights. If the loop reads gradients after its
        first step, as AdaLoRA does, copies are kept from then on. What the optimizer does not have keeps its gradients:
        another one may train it, which steps before or after this one, or in some iterations.
        """
        if name in self._keeps:
            values = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            if name in self._kept:
                values = self._kept[name] + values.to(self._kept[name].device)
            self._keep(name, values)
            if self._average is not None:
                self._of_rank.add(name)
        if gradient.requires_grad or name in self._graphs:
            with torch.enable_grad():  # as autograd adds in place, which keeps the graph of what is there
                self._graphs[name] = self._graphs[name] + gradient if name in self._graphs else gradient

    def _keep(self, name: str, values: torch.Tensor) -> None:
        # Those of adapters are small; another optimizer's may be too large for the device. Ranks add up on the host.
        on_host = self._belongs_to_another(name) or self._average is not None
        self._kept[name] = values.to("cpu" if on_host else values.device, copy=True)

    def _belongs_to_another(self, name: str) -> bool:
        return name not in self._of_optimizer

    def _is_anothers(self, name: str) -> bool:
        """Return whether a gradient is one that is kept for another optimizer."""
        return name in self._kept and self._belongs_to_another(name)

    def _mean(self, name: str) -> torch.Tensor:
        """Return a gradient that is kept. Ranks make its mean, when they first read it."""
        if name in self._of_rank:
            assert self._average is not None
            self._of_rank.discard(name)
            self._average(f"the gradient of {name}", self._kept[name])
        return self._kept[name]

    def gradient_norm(self, name: str) -> torch.Tensor:
        """Wait for all gradients, and return the 2-norm of a parameter's gradient, a float32 scalar.

        Norms that were read before a step can be read until the next iteration begins.

        Raises:
            GradientError: the plan updates before all norms are known.
        """
        if self.refusal:
            raise GradientError(self.refusal)
        if name in self._zeroed:
            return torch.zeros((), device=self._wholes[name].device)
        if self._is_anothers(name):
            values = as_real(self._mean(name).to(self._wholes[name].device))
            norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float32)
            return norm
        if self._norms is None or self._open or name in self._stale:
            self._check_clips(name)
            self.absorb()
            self._complete()
            self._norms = None
        norm, scale = self.norms()[name], self.scale(name)
        return norm if scale == 1 else norm * scale

    def norms(self) -> dict[str, torch.Tensor]:
        """Wait for all gradients, and return their 2-norms without factors, by name of the whole parameter."""
        self._norms = self._find_norms() if self._norms is None else self._norms
        return self._norms

    def scale_gradient(self, name: str, factor: float) -> None:
        """Record a factor for a parameter's gradient. Its update applies it. Raises as :meth:`gradient_norm`."""
        if name in self._zeroed:
            return
        if self._is_anothers(name):
            self._kept[name].mul_(factor)
            return
        self._check_clips(name)
        if name in self._open:
            self.absorb()
            self._open.clear()
        self._complete()
        self._scales[name] = self.scale(name) * factor

    def open_gradient(self, name: str) -> torch.Tensor:
        """Return the values of a parameter's gradient, see :class:`executor.gradients.GradientOwner`.

        Raises:
            GradientError: there are none now.
            OutOfOrderError: updates begin in backward.
        """
        if name in self._zeroed:
            return self._open.setdefault(name, torch.zeros_like(self._wholes[name]))
        if self._is_anothers(name):
            self._open[name] = self._mean(name).to(self._wholes[name].device)
            return self._open[name]
        if not self._num_added and name in self._kept:
            self._is_kept_read = True
            values = self._mean(name).to(self._wholes[name].device)
            self._open[name] = values if self.scale(name) == 1 else values * self.scale(name)
            return self._open[name]
        self._check_new(name)
        if name not in self._open:
            values = self._read(name)
            self._open[name] = values if self.scale(name) == 1 else values.mul_(self.scale(name))
        return self._open[name]

    def close_gradient(self, name: str, *, written: bool, held: bool) -> None:
        """End the use of :meth:`open_gradient`, see :class:`executor.gradients.GradientOwner`."""
        if name in self._zeroed and (written or held):  # an ordinary gradient, as one that the loop sets
            self._zeroed.discard(name)
            self._wholes[name].grad = self._open.pop(name)
            return
        if self._is_anothers(name):
            if held:
                self._kept[name] = self._open[name]  # whose memory the views share
            elif written:
                self._kept[name].copy_(self._open[name])
        elif written and not self._num_added:
            raise GradientError(
                f"the gradient of {name} was changed after optimizer.step(), which used it up; change gradients "
                "between backward and the step, and call optimizer.zero_grad() after it"
            )
        elif written:
            self._replace(name, self._open[name])
        if not held:
            del self._open[name]

    def _check_new(self, name: str) -> None:
        if not self._num_added or name in self._stale:
            raise GradientError(
                f"the gradient of {name} was used after optimizer.step(), which used it up; use gradients between "
                "backward and the step, and call optimizer.zero_grad() before the next backward"
            )

    def absorb(self) -> None:
        """Take over the gradients that the user has set, or has written to through views."""
        with unguarded():
            for name, values in self._open.items():
                if self._wholes[name].grad is not None and not self._is_anothers(name):
                    self._replace(name, values)
            for name, values in self.replaced().items():
                self._own[name] = values
                self._replace(name, values)
                self._stand_in(name)
                if name in self._graphs:
                    self._graphs[name] = values
                self._num_added = max(self._num_added, 1)

    def replaced(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the user has set, by parameter."""
        with unguarded():
            given = ((name, whole.grad) for name, whole in self._wholes.items())
            return {name: g for name, g in given if g is not None and not isinstance(g, OffloadedGradient)}

    def _replace(self, name: str, values: torch.Tensor) -> None:
        values = values.to_dense() if values.is_sparse else values
        self._set(name, values)
        if name in self._keeps:
            self._keep(name, values.detach())
            self._of_rank.discard(name)
        self._zeroed.discard(name)
        self._scales.pop(name, None)
        self._norms = None

    def _stand_in(self, name: str) -> None:
        if name not in self._stand_ins:
            self._stand_ins[name] = OffloadedGradient(self._wholes[name], name, self)
        self._wholes[name].grad = self._stand_ins[name]

    def scale(self, name: str) -> float:
        """Return the factor of a parameter's gradient."""
        return self._scales.get(name, 1.0)

    def decided(self) -> tuple[list[float], bool]:
        """Return the factors of the latest iteration's gradients, and whether any gradient was dropped."""
        return sorted(set(self._scales.values())), self._dropped

    def dropped(self, iteration: int) -> frozenset[str]:
        """Return the parameters whose gradients were dropped, as ``zero_grad()`` does."""
        with unguarded():
            now = (name for name in self.arrived(iteration) if self._num_added and self._wholes[name].grad is None)
            return frozenset(self._dropped_early.union(now))

    def are_gone(self, iteration: int) -> bool:
        """Return whether no gradient has come in an iteration, or all were dropped."""
        if self.replaced():
            return False
        arrived = self.arrived(iteration)
        return (not arrived or self._waits) and arrived <= self.dropped(iteration)

    def drop_all(self) -> None:
        """Note that ``zero_grad()`` drops the gradients that were used up, which no parameter shows any more."""
        self._stale.clear()

    def drop_arrived(self, iteration: int) -> None:
        """Drop the gradients of a backward that an exception has ended."""
        self._dropped_early |= self.arrived(iteration)

    def arrived(self, iteration: int) -> set[str]:
        """Return the parameters of which a gradient has come in an iteration."""
        return {name for name, parts in self._parts.items() if iteration in [part.arrived for part in parts]}

    def show_sums(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Set ``grad`` to what so far is the gradient of a parameter. Autograd adds to it, and hooks see that."""
        with unguarded():
            for name, values in sums.items():
                self._wholes[name].grad = self._mean(name).to(values.device) if self._is_anothers(name) else values
                self._kept.pop(name, None)

    def reopen(self, dropped: frozenset[str]) -> None:
        """Forget norms, because more is added to the gradients that were not dropped. Scale these before."""
        for name, scale in self._scales.items():
            if scale != 1 and name not in dropped:
                self._set(name, self._read(name).mul_(scale))
        self._stale -= dropped
        for held in (self._graphs, self._kept):
            for name in dropped & held.keys():
                del held[name]
        self._dropped_early.clear()
        self._open.clear()
        self._norms = None
        self._scales.clear()

    def clear(self) -> None:
        """Remove all stand-ins."""
        with unguarded():
            for name, whole in self._wholes.items():
                if isinstance(whole.grad, OffloadedGradient):
                    whole.grad = None
                    if not self._num_added and name not in self._zeroed:
                        self._stale.add(name)
                elif self._shows:
                    self._stale.discard(name)
                    self._zeroed.discard(name)
                    if whole.grad is None:
                        self._kept.pop(name, None)
            self._num_added, self._shows = 0, False

    def zero_used(self, name: str) -> bool:
        """See :class:`executor.gradients.GradientOwner`."""
        if self._num_added and name not in self._stale | self._zeroed:
            return False
        self._stale.discard(name)
        self._zeroed.add(name)
        self._kept.pop(name, None)
        return True

    def zeros(self) -> set[str]:
        """Return the parameters whose gradients the loop has set to zero, and no backward or loop has changed since."""
        with unguarded():
            found = ((name, self._wholes[name].grad) for name in self._zeroed & self._of_optimizer)
            return {name for name, gradient in found if isinstance(gradient, OffloadedGradient)}

    def set_zeros(self) -> None:
        """Before a step, set the gradients to zero that the loop has set to zero.

        As in torch, their parameters are updated: momentum moves them, and weight decay.
        """
        for name in sorted(self.zeros()):
            whole = self._wholes[name]
            self._replace(name, torch.zeros(whole.shape, dtype=whole.dtype, device=whole.device))
            self._zeroed.add(name)

    def begin_step(self, iteration: int) -> None:
        """Use the gradients up, because the step begins.

        As in torch, parameters with dropped gradients are not updated, and the others keep theirs until the loop drops
        it. Its values are gone, unless copies are kept: whoever reads it is told so.

        Raises:
            GradientError: a gradient was dropped after its update had begun.
        """
        with unguarded():
            for name in [name for name in self.arrived(iteration) if self._wholes[name].grad is None]:
                for part in self._parts[name]:
                    if part.arrived == iteration:
                        self._drop(part)
            for name, own in self._own.items():
                if isinstance(self._wholes[name].grad, OffloadedGradient):
                    self._wholes[name].grad = own
            self._num_added = 0
            self._open.clear()
            self._graphs.clear()
        forget_factor()

    def check_fresh(self, iteration: int) -> None:
        """Check that a step takes no gradient that a step before it has used up, because its values are gone.

        Raises:
            GradientError: plain PyTorch would add a new gradient to an old one, or use the old one again.
        """
        used = self._stale - self.dropped(iteration)
        with unguarded():
            if self._shows:
                used = {name for name in used if isinstance(self._wholes[name].grad, OffloadedGradient)}
        if self.are_gone(iteration):
            with unguarded():
                shown = () if self._num_added else self._wholes.items()
                used |= {name for name, whole in shown if whole.grad is not None} - self._zeroed
            how = "was used up by the last optimizer.step(), and there is no new one: plain PyTorch would use it again"
        else:
            how = (
                "was not dropped between optimizer.step() and the next backward(): plain PyTorch would add the new "
                "gradient to it, but here a step uses gradients up"
            )
        if used := used & self._of_optimizer:
            raise GradientError(f"the gradient of {min(used)} {how}; call optimizer.zero_grad() after each step()")

    def _drop(self, parameter: ParameterState) -> None:
        if not self._waits:
            raise GradientError(
                f"the gradient of {parameter.name} was dropped, but its update began during backward; call zero_grad() "
                f"after step(), or {UPDATES_AT_STEP}"
            )
        parameter.arrived = -1
        parameter.step -= 1
        self._dropped = True

    def _check_clips(self, name: str) -> None:
        self._check_new(name)
        if not self._clips:
            raise GradientError(
                "this plan does not wait for the norm of all gradients before it updates; plan with clip=True, or do "
                "not clip"
            )
