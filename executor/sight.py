"""Which parameters show weights: those of units that are resident, and of the one that computes."""

from collections.abc import Mapping
from typing import final

from executor.state import ModelState, without_values


@final
class Sight:
    """Keeps weights of fetched units out of sight while they are not there.

    [Note: Out of sight] Units that are fetched share slots, so that a parameter would show another unit's weights most
    of the time, and the last step's at others. Whoever reads parameters by themselves (norms, moving averages,
    penalties in the loss) would compute with those and never know. So a parameter has its shape, but is no number, from
    when another unit computes until its own does again, and cannot be written to. Its memory stays the same all the
    time, so that kernels under way and what autograd has saved of it do not notice.

    Args:
        state: where weights are.
        shared: units whose weights a unit uses besides its own, by its name.
    """

    def __init__(self, state: ModelState, shared: Mapping[str, tuple[str, ...]]) -> None:
        self._views = {
            unit.name: [
                (leaf, leaf.data, without_values(leaf.shape, leaf.dtype, leaf.device))
                for leaf in (parameter.share.leaf for parameter in unit.parameters)
            ]
            for unit in state.units.values()
            if unit.slot >= 0
        }
        # By what computes: most units have no weights but their own.
        self._used_by = {
            unit: frozenset(name for name in (unit, *others) if name in self._views) for unit, others in shared.items()
        }
        self._shown: frozenset[str] = frozenset(self._views)
        self._turned_to: str | None = None

    def turn_to(self, unit: str) -> None:
        """Show what a unit computes with, and nothing else; what no unit is called shows nothing."""
        if unit == self._turned_to:
            return
        self._turned_to = unit
        used = self._used_by.get(unit, frozenset())
        for name in self._shown - used:
            for leaf, _, nothing in self._views[name]:
                leaf.data = nothing
        for name in used - self._shown:
            for leaf, weights, _ in self._views[name]:
                leaf.data = weights
        self._shown = used
