"""Reads from the optimizer's groups how each parameter is updated, when the updates of an iteration begin."""

import itertools
import zlib
from typing import Any, final

from executor.driver.runtime import Runtime
from executor.module.user_gradients import UserGradients
from executor.optimizer.table import OptimizerEntry
from executor.tasks.updates import ParameterUpdate


@final
class UpdateRules:
    """The rules of all parameters, as the user's ``groups`` have them at the moment.

    Args:
        entry: the optimizer.
        groups: its parameter groups.
    """

    def __init__(self, runtime: Runtime, entry: OptimizerEntry, groups: list[dict[str, Any]]) -> None:
        self._runtime, self._entry, self._groups = runtime, entry, groups
        shards = runtime.state.shards().values()
        self._of = {id(shard.whole): (shard.name, shard.whole_shape) for shard in shards}

    def check(self) -> None:
        """Check that all groups can be executed. Raises ValueError otherwise."""
        for group in self._groups:
            self._entry.rule(group)

    def begin(self, gradients: UserGradients) -> None:
        """Give the updates of this iteration their rules, and the factors of their gradients."""
        updates, rules = {}, []
        numbers = itertools.count()
        for group in self._groups:
            rule = self._entry.rule(group)
            rules.append(rule.params)
            for parameter, number in zip(group["params"], numbers, strict=False):
                name, shape = self._of[id(parameter)]
                updates[name] = ParameterUpdate(rule.of_parameter(number, shape), gradients.scale(name))
        self._runtime.actions.updates.begin(self._runtime.loop.iteration, updates)
        if (ranks := self._runtime.ranks) is not None:
            ranks.decision_hash = zlib.crc32(repr((rules, gradients.decided())).encode())
