"""Gradients between backward and step: reading norms, scaling and dropping.

Loops over all parameters run unguarded ([Note: Guarded parameters]), because they touch only ``.grad``.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import final

import torch

from executor.gradients import GradientError, OffloadedGradient
from executor.memory.units import ParameterState
from executor.module.guarded_parameters import unguarded
from planner.decisions import Decisions


@final
class UserGradients:
    """The user's view of all gradients between backward and step.

    Args:
        norms: waits for all gradients of the iteration, and returns their norms by name of the whole parameter.
        complete: ends the iteration's micro-batches. It is called when gradients are read or scaled.
    """

    def __init__(
        self,
        decisions: Decisions,
        parameters: Iterable[ParameterState],
        norms: Callable[[], dict[str, torch.Tensor]],
        complete: Callable[[], None],
    ) -> None:
        self._clips = decisions.clip
        self._waits = decisions.update_start == "step"
        self._parts: dict[str, list[ParameterState]] = {}
        for parameter in parameters:
            self._parts.setdefault(parameter.shard.name, []).append(parameter)
        self._find_norms = norms
        self._complete = complete
        self._num_micro_batches = decisions.num_micro_batches
        self._norms: dict[str, torch.Tensor] | None = None
        self._scales: dict[str, float] = {}
        self._dropped = False
        self._dropped_early: set[str] = set()  # since the last backward that has not ended
        self._num_added = 0  # number of micro-batches in the sum that the stand-ins represent
        self._stand_ins: dict[str, OffloadedGradient] = {}  # made once, because that is slow

    def begin_iteration(self) -> None:
        """Clear the last iteration's norms and scales."""
        self._norms = None
        self._scales.clear()
        self._dropped = False

    def expose(self, iteration: int, micro_batch: int) -> None:
        """Set ``grad`` of every parameter that got a gradient to a stand-in, until the next micro-batch or the step."""
        with unguarded():
            self._num_added = micro_batch + 1
            for name in self._arrived(iteration):
                whole = self._parts[name][0].shard.whole
                if name not in self._stand_ins:
                    self._stand_ins[name] = OffloadedGradient(
                        whole, name, partial(self.gradient_norm, name), partial(self.scale_gradient, name)
                    )
                whole.grad = self._stand_ins[name]

    def gradient_norm(self, name: str) -> torch.Tensor:
        """Wait for all gradients, and return the 2-norm of a parameter's gradient, a float32 scalar.

        Raises:
            GradientError: the plan updates before all norms are known.
        """
        self._check_clips()
        if self._norms is None:
            self._norms = self._find_norms()
        scale = self.scale(name)
        return self._norms[name] if scale == 1 else self._norms[name] * scale

    def scale_gradient(self, name: str, factor: float) -> None:
        """Record a factor for a parameter's gradient. Its update applies it. Raises as :meth:`gradient_norm`."""
        self._check_clips()
        self._scales[name] = self.scale(name) * factor

    def scale(self, name: str) -> float:
        """Return the factor of a parameter's gradient."""
        return self._scales.get(name, 1.0)

    def decided(self) -> tuple[list[float], bool]:
        """Return the factors of the latest iteration's gradients, and whether any gradient was dropped."""
        return sorted(set(self._scales.values())), self._dropped

    def dropped(self, iteration: int) -> frozenset[str]:
        """Return the parameters whose gradients were dropped, as ``zero_grad()`` does.

        Raises:
            GradientError: a gradient was replaced.
        """
        found = set(self._dropped_early)
        with unguarded():
            for name, parts in self._parts.items() if self._num_added else ():
                gradient = parts[0].shard.whole.grad
                if iteration not in [part.arrived for part in parts] or isinstance(gradient, OffloadedGradient):
                    continue
                if gradient is not None:
                    raise GradientError(
                        f"the gradient of {name} was replaced after micro-batch {self._num_added} of "
                        f"{self._num_micro_batches}, but has been added up already; leave gradients alone until the "
                        "last backward, or change them in a hook on the parameter (parameter.register_hook)"
                    )
                found.add(name)
        return frozenset(found)

    def are_gone(self, iteration: int) -> bool:
        """Return whether no gradient has come in an iteration, or all were dropped. Raises as :meth:`dropped`."""
        arrived = self._arrived(iteration)
        return (not arrived or self._waits) and arrived <= self.dropped(iteration)

    def drop_arrived(self, iteration: int) -> None:
        """Drop the gradients of a backward that an exception has ended."""
        self._dropped_early |= self._arrived(iteration)

    def _arrived(self, iteration: int) -> set[str]:
        return {name for name, parts in self._parts.items() if iteration in [part.arrived for part in parts]}

    def reopen(self, dropped: frozenset[str]) -> None:
        """Forget norms, because more is added to the gradients that were not dropped.

        Raises:
            GradientError: some of these have been scaled, as clipping does.
        """
        scaled = [name for name, scale in self._scales.items() if scale != 1 and name not in dropped]
        if scaled:
            raise GradientError(
                f"the gradient of {scaled[0]} was scaled (clipped), and then more came for this step; clip after the "
                "last backward, or drop the gradients before (optimizer.zero_grad())"
            )
        self._dropped_early.clear()
        self._norms = None
        self._scales.clear()

    def clear(self) -> None:
        """Remove all stand-ins."""
        with unguarded():
            for parts in self._parts.values() if self._num_added else ():
                whole = parts[0].shard.whole
                if isinstance(whole.grad, OffloadedGradient):
                    whole.grad = None
            self._num_added = 0

    def begin_step(self, iteration: int) -> None:
        """Remove the stand-ins, because the step begins.

        As in torch, parameters with dropped gradients are not updated.

        Raises:
            GradientError: a gradient was replaced, or dropped after its update had begun.
        """
        with unguarded():
            for name, parts in self._parts.items():
                whole = parts[0].shard.whole
                gradient = whole.grad
                for part in parts:
                    if part.arrived == iteration and gradient is None:
                        self._drop(part)
                if gradient is not None and not isinstance(gradient, OffloadedGradient):
                    raise GradientError(
                        f"the gradient of {name} was replaced after backward, but its update would not use the new "
                        "one; change it in a hook on the parameter (parameter.register_hook)"
                    )
                whole.grad = None
            self._num_added = 0

    def _drop(self, parameter: ParameterState) -> None:
        if not self._waits:
            raise GradientError(
                f"the gradient of {parameter.name} was dropped, but its update began during backward; call zero_grad() "
                "after step(), or plan with update_start 'step'"
            )
        parameter.arrived = -1
        parameter.step -= 1
        self._dropped = True

    def _check_clips(self) -> None:
        if not self._num_added:
            raise GradientError(
                "gradients were read or scaled, but there are none now; clip after the last backward, before "
                "optimizer.step()"
            )
        if not self._clips:
            raise GradientError(
                "this plan does not wait for the norm of all gradients before it updates; plan with clip=True, or do "
                "not clip"
            )
        self._complete()
