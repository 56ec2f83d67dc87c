"""Optimizers that step on whole parameters, because their step cannot be taken in parts.

[Note: Whole steps] Some steps look beyond a value (LAMB, Adafactor), run forward again (LBFGS), drive another optimizer
(SAM) or keep state elsewhere. Such an optimizer steps by itself, as it does in memory: for the time of a call of one of
its methods, all its parameters of the model are ordinary ones in host memory, with their weights and gradients. What
has changed then goes to where the plan keeps it. A closure runs with the parameters under the plan. The optimizer's
state is its own, beside the plan, in host memory. Every such iteration leaves the plan after backward, as any in which
a loop reads its gradients.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

from executor.driver.iteration import IterationDriver
from executor.driver.runtime import Runtime
from executor.gradients import OffloadedGradient
from executor.module.guarded_parameters import guard, lift_guard, unguarded


@final
class WholeSteps:
    """Runs methods of an optimizer on whole parameters, see [Note: Whole steps].

    Args:
        optimizer: the user's.
        name_of: returns the name of a parameter in the model.
        has: whether a parameter is one of the model.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        driver: IterationDriver,
        name_of: Callable[[torch.Tensor], str],
        has: Callable[[torch.Tensor], bool],
    ) -> None:
        self._optimizer, self._runtime, self._driver = optimizer, runtime, driver
        self._name_of, self._has = name_of, has
        # Parameters, with what they were before they were taken: their memory, and stand-ins for their gradients.
        self._taken: dict[nn.Parameter, tuple[torch.Tensor, OffloadedGradient | None]] | None = None

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the optimizer; functions among its arguments are closures."""
        if self._taken is not None:
            return method(*args, **kwargs)
        args = tuple(map(self._outside, args))
        with self.whole():
            return method(*args, **{key: self._outside(value) for key, value in kwargs.items()})

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which the optimizer's parameters are ordinary ones in host memory.

        Raises:
            ValueError: weights cannot be read now.
        """
        self._take()
        try:
            yield
        finally:
            self._give_back()

    def _outside(self, given: Any) -> Any:
        if not callable(given):
            return given

        @functools.wraps(given)
        def closure(*args: Any, **kwargs: Any) -> Any:
            self._give_back()
            try:
                return given(*args, **kwargs)
            finally:
                self._take()

        return closure

    def _take(self) -> None:
        found = {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        named = [(parameter, self._name_of(parameter)) for parameter in found.values() if self._has(parameter)]
        with torch.no_grad():
            weights = [_on_host(self._runtime.current(name)) for _, name in named]
            gradients = [None if parameter.grad is None else _on_host(parameter.grad) for parameter, _ in named]
        self._taken = {}
        for (parameter, _), values, gradient in zip(named, weights, gradients, strict=True):
            with unguarded():
                stand_in = parameter.grad if isinstance(parameter.grad, OffloadedGradient) else None
                self._taken[parameter] = parameter.data, stand_in
            lift_guard(parameter)
            parameter.grad, parameter.data = None, values
            parameter.grad = gradient

    def _give_back(self) -> None:
        assert self._taken is not None
        given, self._taken = self._taken, None
        found = {parameter: (parameter.data, parameter.grad) for parameter in given}
        for parameter, (memory, stand_in) in given.items():
            _, gradient = found[parameter]
            parameter.grad, parameter.data = None, memory
            parameter.grad = stand_in if gradient is not None else None
            guard(parameter, self._name_of(parameter), self._runtime)
        self._driver.visibility.accept_writes()
        with torch.no_grad():
            for parameter, (values, gradient) in found.items():
                memory, stand_in = given[parameter]
                if gradient is not None and (stand_in is None or not torch.equal(gradient, _on_host(stand_in))):
                    parameter.grad = gradient.to(memory.device)
                if not torch.equal(values, _on_host(self._runtime.current(self._name_of(parameter)))):
                    parameter.copy_(values)


def _on_host(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.shape, dtype=values.dtype, device="cpu").copy_(values)
