"""Gradients of weights that backward leaves for later, see [Note: Zero bubble] in :mod:`planner.models.zero_bubble`.

In the units that the plan takes apart, linear layers make the gradient of their input alone in backward, and keep what
that of their weight needs. All other gradients of these units wait beside it. So the unit's gradients come together,
when the plan has them. The products are those that autograd would run, on the same operands.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from executor.callbacks import replace_attribute
from executor.distributed.products import Multiply, summed_product
from executor.memory.units import ParameterState, UnitState
from executor.module.binding import no_compile
from planner.graph import Unit

_Product = tuple[Tensor, Tensor]  # whose product is a gradient


@final
class LaterGradients:
    """What waits, by unit and micro-batch.

    Args:
        units: of the stage.
        states: of its trained parameters, by name.
        micro_batch: returns that whose backward runs; ``None`` where nothing can wait.

    Attributes:
        units: names of those that the plan takes apart, in the order of backward.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        states: Mapping[str, tuple[UnitState, ParameterState]],
        micro_batch: Callable[[], int | None],
    ) -> None:
        self.units = [unit.name for unit in units if unit.weight_gradients][::-1]
        self._micro_batch = micro_batch
        self._state = {id(p.shard.leaf): (unit, p) for unit, p in states.values() if unit.name in self.units}
        self._waiting: dict[tuple[str, int], dict[str, tuple[ParameterState, list[Tensor | _Product]]]]
        self._waiting = defaultdict(dict)

    def bind(self, model: nn.Module, compile_backend: str | None) -> Iterator[Callable[[], None]]:
        """Let linear layers leave the gradients of their weights; yield functions that undo this.

        They are kept out of compiled graphs, which would keep nothing when they run again.
        """
        for module in model.modules():
            # Not the attribute: that of a parametrization (spectral norm) would compute, and advance buffers.
            kind, weight = type(module).__name__, module._parameters.get("weight")
            if kind in {"Linear", "Conv1D"} and type(module).__module__ in _OWNERS and id(weight) in self._state:
                yield replace_attribute(module, "forward", no_compile(compile_backend)(self._forward(module)))

    def multiply_of(self, weight: nn.Parameter) -> Multiply | None:
        """Return what keeps the factors of a weight's gradient; ``None`` if autograd is to make it."""
        hooked = weight._backward_hooks or len(getattr(weight, "_post_accumulate_grad_hooks", None) or ()) > 1
        is_plain = torch.is_grad_enabled() and weight.requires_grad and not hooked
        return functools.partial(self._product, id(weight)) if is_plain and id(weight) in self._state else None

    def _forward(self, module: Any) -> Callable[[Tensor], Tensor]:
        plain: Callable[[Tensor], Tensor] = module.forward
        is_transposed = type(module).__name__ == "Conv1D"

        def forward(inputs: Tensor) -> Tensor:
            weight = module.weight
            multiply = self.multiply_of(weight)
            if multiply is None or torch.is_autocast_enabled(inputs.device.type):
                return plain(inputs)
            return summed_product(inputs, weight if is_transposed else weight.t(), module.bias, multiply=multiply)

        return forward

    def keep(self, unit: UnitState, parameter: ParameterState, gradient: Tensor | _Product) -> bool:
        """Keep a gradient, or two matrices whose product it is. Return whether it waits."""
        micro_batch = self._micro_batch() if unit.name in self.units else None
        if micro_batch is None:
            return False
        self._waiting[unit.name, micro_batch].setdefault(parameter.name, (parameter, []))[1].append(gradient)
        return True

    def _product(self, weight: int, left: Tensor, right: Tensor) -> Tensor | None:
        unit, parameter = self._state[weight]
        return None if self.keep(unit, parameter, (left.detach(), right.detach())) else left.mm(right)

    def make(self, unit: str, micro_batch: int, collect: Callable[[ParameterState, Tensor], None]) -> None:
        """Make and collect what waits of a unit, one gradient at a time, in the order of backward."""
        waiting = self._waiting.pop((unit, micro_batch), {})
        while waiting:
            parameter, given = waiting.pop(next(iter(waiting)))
            collect(parameter, functools.reduce(torch.add, map(_made, given)))


def _made(given: Tensor | _Product) -> Tensor:
    return given[0].mm(given[1]) if isinstance(given, tuple) else given


_OWNERS = frozenset({"torch.nn.modules.linear", "transformers.pytorch_utils"})
