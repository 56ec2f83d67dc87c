"""A model's weights outside training: for evaluation, and for saving."""

from collections.abc import Iterable, Mapping
from typing import final

import torch

from executor.distributed.ranks import Ranks
from executor.distributed.shards import whole_of
from executor.memory.state import ModelState
from executor.memory.units import ParameterState, UnitState
from executor.tasks.actions import Actions

_NEVER = -1


@final
class Weights:
    """Brings weights to where they can be used or read while nothing is under way.

    Where ranks hold shards it gathers them, so all ranks must ask for the same at the same time.

    Args:
        state: where weights are.
        actions: moves them.
        shared: units whose weights a unit uses besides its own, by its name.
        ranks: all ranks; ``None`` if there is one.

    Attributes:
        gather_at_each_use: whether ranks exchange something whenever a model is evaluated, or its weights are read.
    """

    def __init__(
        self, state: ModelState, actions: Actions, shared: Mapping[str, tuple[str, ...]], ranks: Ranks | None
    ) -> None:
        self._state = state
        self._actions = actions
        self._shared = shared
        self._ranks = ranks
        self._parts: dict[str, list[tuple[UnitState, ParameterState]]] = {}
        for unit, parameter in state.parameters():
            self._parts.setdefault(parameter.share.name, []).append((unit, parameter))
        units = state.units.values()
        self._gather_resident = any(unit.slot < 0 and _is_sharded(unit) for unit in units)
        self.gather_at_each_use = any(unit.slot >= 0 and _is_sharded(unit) for unit in units) or (
            ranks is not None and ranks.size > ranks.mesh.degrees.data_parallel
        )
        self._current_in = _NEVER  # iteration before which resident weights were last made current
        self._in_slot: dict[int, str] = {}

    def gather_now(self, iteration: int) -> bool:
        """Return whether ranks exchange something in :meth:`make_current`."""
        return self._gather_resident and self._current_in != iteration

    def make_current(self, iteration: int) -> None:
        """Bring to the device what the next iteration would, once."""
        if self._current_in == iteration:
            return
        self._current_in = iteration
        self._in_slot.clear()
        for unit in self._state.units.values():
            for piece in unit.pieces:
                if unit.on_device and piece.by_host:
                    self._actions.upload(unit, piece)
            if unit.slot < 0 and _is_sharded(unit):  # ranks have updated shards of what is resident (ZeRO-1 and 2)
                self._actions.gather(unit)

    def forget(self) -> None:
        """Take it that state was changed at rest: what has been brought anywhere is old."""
        self._current_in = _NEVER

    def use(self, unit: str) -> None:
        """Have all weights on the device that a unit uses."""
        for name in (unit, *self._shared[unit]):
            state = self._state.units.get(name)
            if state is not None and state.slot >= 0:
                self._fill(state)

    def of(self, name: str) -> torch.Tensor:
        """Return a parameter's current weights: a view of where they are kept.

        It is new host memory if they are kept in shards or shares, or on NVMe.
        """
        return whole_of([(p.share, self._share(unit, p)) for unit, p in self._parts[name]], self._ranks)

    def names(self) -> Iterable[str]:
        """Return the names of all parameters."""
        return self._parts

    def _share(self, unit: UnitState, parameter: ParameterState) -> torch.Tensor:
        if not unit.on_nvme and (unit.slot < 0 or not _is_sharded(unit)):
            return unit.weight_of(parameter)
        self._fill(unit)
        return unit.weight_of(parameter, unit.device_weights).to("cpu", copy=True)

    def _fill(self, unit: UnitState) -> None:
        if self._in_slot.get(unit.slot) != unit.name:
            if unit.on_nvme:
                self._actions.settle()  # the last unit may still be on its way from the same buffer
                self._actions.read(unit)
            if not unit.on_device:
                self._actions.fetch(unit)
            if _is_sharded(unit):
                self._actions.gather(unit)
            self._in_slot[unit.slot] = unit.name


def _is_sharded(unit: UnitState) -> bool:
    """Return whether ranks keep, or update, only shards of a unit."""
    return len(unit.own_weights) < len(unit.device_weights)
