"""Parameters that an optimizer trains beside those of a prepared model: a temperature, weights of losses, a head."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from executor.optimizer.device import bare


@final
class Beside:
    """Lets an optimizer take its own step on its parameters that are not the prepared model's, where these are.

    Args:
        optimizer: the user's; its state of these parameters is taken over.
        groups: its parameter groups, with all parameters. Hyper-parameters are read at each step.
        is_planned: whether a parameter is the prepared model's.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[Mapping[str, Any]],
        is_planned: Callable[[torch.Tensor], bool],
    ) -> None:
        self._optimizer, self._groups, self._is_planned = optimizer, groups, is_planned
        others = [p for group in groups for p in group["params"] if not is_planned(p)]
        self.state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self.state.update({p: state for p in others if (state := dict.get(optimizer.state, p))})

    @property
    def is_empty(self) -> bool:
        """Whether there are none."""
        return all(self._is_planned(parameter) for group in self._groups for parameter in group["params"])

    def step(self) -> None:
        """Update them. Those without a gradient stay as they are."""
        own = self._own()
        type(own).step(own)

    def load(self, states: Mapping[int, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        """Set their state to that of a saved one, whose groups are like the optimizer's."""
        pairs = [
            list(zip(given["params"], saved["params"], strict=True))
            for given, saved in zip(self._groups, groups, strict=True)
        ]
        numbers = [[number for p, number in pair if not self._is_planned(p)] for pair in pairs]
        own = self._own()
        own.load_state_dict(
            {
                "state": {number: states[number] for of_group in numbers for number in of_group if number in states},
                "param_groups": [{**g, "params": n} for g, n in zip(groups, numbers, strict=True) if n],
            }
        )
        self.state = own.state

    def _own(self) -> torch.optim.Optimizer:
        groups = [
            {**group, "params": [p for p in group["params"] if not self._is_planned(p)]} for group in self._groups
        ]
        return bare(self._optimizer, [group for group in groups if group["params"]], self.state)
