"""Updates that begin before the norm of all gradients is known.

[Note: Speculation] With clipping, every update needs the norm, so none can begin in backward, where the host's cores
and the links have time. But many runs seldom clip. With ``speculate``, updates begin in backward with the factors of
gradients that the step before had: mostly 1. The gradients are kept until the step. If it has other factors, or drops
gradients, all updates are taken back: AdamW's formulas are solved for the values before them. Then they are made as in
a plan that waits. SuperOffload speculates too (Lian et al., "SuperOffload: Unleashing the Power of Large-Scale LLM
Training on Superchips", arXiv:2509.21271, "speculation-then-validation").

Where nothing is taken back, bits are those of training in memory. Where it is, float32 rounds twice more. Values of a
gradient that are NaN or very large could not be taken back, so they count as 0 until the norm shows them.

After a step that was not as expected, the next updates wait for the norm. So a run that clips in most steps does little
twice; but its updates run neither beside backward nor beside the next forward, so it is faster without speculation.
"""

from collections.abc import Callable, Mapping
from typing import Final, final

import torch

from executor.driver.runtime import Runtime
from executor.module.user_gradients import UserGradients
from executor.optimizer.adamw import LIMIT
from executor.optimizer.table import Rule

_MANY: Final = 20
"""Unexpected iterations after which the user is told."""


@final
class Speculation:
    """Begins an iteration's updates before its norm is known, and takes them back; see [Note: Speculation].

    Attributes:
        num_unexpected: number of iterations that used gradients otherwise than expected.
    """

    def __init__(self, runtime: Runtime, gradients: UserGradients, report: Callable[[str], None]) -> None:
        self._runtime, self._gradients, self._report = runtime, gradients, report
        self._factors: dict[str, float] = {}  # of gradients in the latest step, by parameter, but 1
        self._is_likely = True  # that the next step has what its updates begin with
        self.num_unexpected = 0

    def scale(self, name: str) -> float:
        """Return the likely factor of a parameter's gradient."""
        return self._factors.get(name, 1.0)

    def begin(self, rules: Mapping[str, Rule], *, waits: bool) -> None:
        """Let the updates of this iteration begin by rules with likely factors; or if they are not, let them wait."""
        actions, loop = self._runtime.actions, self._runtime.loop
        actions.updates.begin(loop.iteration, _limited(rules))
        if self._is_likely and not waits:
            actions.speculate(loop.iteration)
        else:
            actions.defer_updates(loop.iteration, loop.num_issued)

    def end(self, rules: Mapping[str, Rule]) -> bool:
        """Compare with the rules of the step, all of whose gradients have come; take updates back if they were others.

        Return whether updates have to begin now.
        """
        actions, iteration = self._runtime.actions, self._runtime.loop.iteration
        self._factors = {name: rule.scale for name, rule in rules.items() if rule.scale != 1}
        is_same = actions.updates.has_begun(iteration, _limited(rules)) and not self._gradients.dropped(iteration)
        self._is_likely = is_same
        if not actions.defers and is_same and self._is_finite(rules):
            actions.confirm()
            return False
        self._runtime.machine.exclude(iteration)
        self._runtime.machine.wait()  # all updates are issued before the norm
        self.num_unexpected += not is_same
        if self.num_unexpected == _MANY and not is_same:
            self._report(
                f"in {_MANY} of {iteration + 1} iterations gradients were clipped, scaled otherwise than before or "
                "dropped, so updates waited for the norm; if this goes on, plan without speculate, which is faster then"
            )
        if not actions.defers:
            actions.take_back(iteration)
        return True

    def _is_finite(self, rules: Mapping[str, Rule]) -> bool:
        """Return whether no value of a gradient was left out of updates."""
        largest = max((rule.scale for rule in rules.values()), default=1.0)
        norms = [*self._gradients.norms().values()]
        return not norms or bool(torch.linalg.vector_norm(torch.stack(norms)) * max(largest, 1.0) < LIMIT)


def _limited(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    return {name: rule.limited() for name, rule in rules.items()}
