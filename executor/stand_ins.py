"""What the user sees of gradients between backward and the step, and does to them."""

from collections.abc import Callable, Iterable, Mapping
from typing import final

import torch

from executor.gradients import GradientError, OffloadedGradient
from executor.state import ParameterState
from planner.decisions import Decisions


@final
class StandIns:
    """The gradients of the user's parameters, as the user sees them from the end of backward to the step.

    Args:
        parameters: what the rank has of them.
        decisions: whether gradients may still be changed then.
        norms: waits until all gradients are there, and returns their norms by the names of the whole parameters.
    """

    def __init__(
        self,
        parameters: Iterable[ParameterState],
        decisions: Decisions,
        norms: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._parts: dict[str, list[ParameterState]] = {}
        for parameter in parameters:
            self._parts.setdefault(parameter.share.name, []).append(parameter)
        self._decisions = decisions
        self._make_norms = norms
        self._norms: Mapping[str, torch.Tensor] | None = None
        self._scales: dict[str, float] = {}

    def begin(self) -> None:
        """Begin an iteration."""
        self._norms = None
        self._scales.clear()

    def show(self, iteration: int) -> None:
        """Put stand-ins where gradients have arrived in an iteration."""
        for name, parts in self._parts.items():
            if any(part.arrived == iteration for part in parts):
                whole = parts[0].share.whole
                whole.grad = OffloadedGradient(whole, name, self)

    def take_back(self, iteration: int) -> None:
        """Take the stand-ins away at the step, and see which gradients the user has dropped.

        Raises:
            GradientError: one was replaced, or dropped too late.
        """
        for name, parts in self._parts.items():
            whole = parts[0].share.whole
            gradient = whole.grad
            for part in parts:
                if part.arrived == iteration and gradient is None:
                    self._drop(part)
            if gradient is not None and not isinstance(gradient, OffloadedGradient):
                raise GradientError(
                    f"the gradient of {name} was replaced after backward, which its update would not see; "
                    "change it in a hook on the parameter (parameter.register_hook)"
                )
            whole.grad = None

    def scale(self, name: str) -> float:
        """Return what a parameter's gradient is multiplied by."""
        return self._scales.get(name, 1.0)

    def gradient_norm(self, name: str) -> torch.Tensor:
        """Return the 2-norm of a parameter's gradient, a float32 scalar; waits until all gradients are there.

        Raises:
            GradientError: the plan does not wait for the norm.
        """
        self._check_clips()
        if self._norms is None:
            self._norms = self._make_norms()
        scale = self.scale(name)
        return self._norms[name] if scale == 1 else self._norms[name] * scale

    def scale_gradient(self, name: str, factor: float) -> None:
        """Multiply a parameter's gradient by a factor, when its update reads it. Raises as :meth:`gradient_norm`."""
        self._check_clips()
        self._scales[name] = self.scale(name) * factor

    def _drop(self, parameter: ParameterState) -> None:
        """The user has set a gradient to ``None``: there is no update, as in torch."""
        if self._decisions.update_start == "backward":
            raise GradientError(
                f"the gradient of {parameter.name} was dropped, but its update began during backward; call zero_grad() "
                "after step(), or plan with update_start 'step'"
            )
        parameter.arrived = -1
        parameter.step -= 1

    def _check_clips(self) -> None:
        if not self._decisions.clip:
            raise GradientError(
                "this plan does not wait for the norm of all gradients before it updates; plan with clip=True, or do "
                "not clip"
            )
