"""Shows weights in the parameters of the computing unit only, and guards the others."""

from collections.abc import Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import Final, final

import torch
from torch import nn

from executor.callbacks import in_backward, is_within
from executor.distributed.shards import ParameterShard
from executor.memory.frozen import FrozenParameter
from executor.memory.state import ModelState, without_values
from executor.module.guarded_parameters import (
    HIDDEN,
    Computing,
    Guarded,
    WeightReader,
    guard,
    lift_guard,
    unguard,
    unguarded,
    version_of,
    was_written_as_data,
)
from executor.module.watched_parameters import Watched
from planner.graph import Unit


@final
class WeightVisibility:
    """Shows a unit's weights while it computes.

    At other times, it guards reads and writes, and hides the memory of weights.

    [Note: Out of sight] Fetched units share slots, and weights of resident units may be those of the previous step
    until they are uploaded, or half updated. So while its unit does not compute, a parameter is guarded: code that
    reads or writes it is given the current weights (see [Note: Guarded parameters] in
    :mod:`executor.module.guarded_parameters`). What reads its memory without PyTorch's knowledge finds NaN of the
    same shape, not another unit's weights nor old ones. Their version is another one meanwhile, so that autograd
    refuses to read what it has saved of them: backward would, at a node that runs before a hook says so. From a
    resident unit's forward until updates begin, its memory holds current weights, and is not hidden. The memory of
    weights does not change, so running kernels and autograd's saved tensors are not affected. While a model is
    evaluated, weights may be in memory of their own instead of a slot, see
    :meth:`executor.driver.runtime.Runtime.evaluate`. Quantized parameters of ``torchao`` are left alone, because
    reading them needs their class.

    Args:
        units: the model's. Some use the weights of others too, and in some forward may write to weights, see
            [Note: Written weights] in :mod:`planner.setup`.
        shards: the shards of all parameters.
        reader: gives current weights to code that reads a parameter while its unit does not compute.
        settled: resident units whose weights do not change before :meth:`unsettle`.
    """

    def __init__(
        self,
        state: ModelState,
        units: Iterable[Unit],
        shards: Iterable[ParameterShard],
        reader: WeightReader,
        settled: AbstractSet[str],
    ) -> None:
        self._settled, self._state = settled, state
        self._kept: dict[str, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        of_units = {
            unit.name: [(shard.leaf, shard.name) for shard in unit.shards() if not shard.stored.is_wrapper]
            for unit in state.units.values()
        }
        # Each parameter, its class while it is not guarded, and what its memory is in sight and out of sight.
        self._leaves = {
            name: [(p, _computing(p), p.data, without_values(p.shape, p.dtype, p.device)) for p, _ in leaves]
            for name, leaves in of_units.items()
        }
        # The units whose weights each unit uses; most units use only their own.
        self._used_by = {
            unit.name: frozenset(name for name in (unit.name, *unit.shared_units) if name in self._leaves)
            for unit in units
        }
        self._shown: frozenset[str] = frozenset(self._leaves)
        self._shown_for: str | None = None
        self._rests_after = ""  # the unit whose weights its slot still has, after a forward
        self._in_sight = set(self._leaves)  # units whose memory their parameters have
        self._all = {id(leaf): (leaf, name) for leaves in of_units.values() for leaf, name in leaves}
        self._written = {spec.name for unit in units if unit.writes for spec in unit.parameters}
        self._writing = {unit.name for unit in units if unit.writes}
        for leaf, name in self._all.values():  # until the first call of show(), they are ordinary
            guard(leaf, name, reader)
            lift_guard(leaf)
        for shard in shards:  # if a parameter's rows are leaves of their own, the parameter has no values
            if id(shard.whole) not in self._all and not shard.stored.is_wrapper:
                self._all[id(shard.whole)] = shard.whole, shard.name
                guard(shard.whole, shard.name, reader)
        self._versions = self._versions_now()

    @property
    def shown_for(self) -> str:
        """The unit whose weights are shown; empty if none are."""
        return self._shown_for or ""

    def show(self, unit: str) -> None:
        """Show only the weights that a unit uses. An empty name hides all."""
        if unit == self._shown_for:
            return
        # Unknown, also after an interruption: then every unit is hidden or shown again.
        unknown, self._shown_for, self._rests_after = self._shown_for is None, None, ""
        used = self._used_by.get(unit, frozenset())
        for name in (self._leaves.keys() if unknown else self._shown) - used:
            if name in self._writing & self._shown:
                self._take_over(name)
            for parameter, ordinary, _, _ in self._leaves[name]:
                parameter.__class__ = Guarded  # type: ignore[assignment]
                if ordinary in _COMPUTING and was_written_as_data(parameter) and name not in self._writing:
                    raise self._lost(parameter, "wrote to the data of")
            if name not in self._settled:
                self._hide_memory(name)
        for name in used if unknown else used - self._shown:
            for parameter, ordinary, _, _ in self._leaves[name]:
                parameter.__class__ = ordinary
            if name not in self._in_sight:
                self._show_memory(name)
        self._shown = used
        self._shown_for = unit

    def watch(self, parameter: nn.Parameter) -> None:
        """Let a parameter be :class:`Watched` while its unit computes."""
        for leaves in self._leaves.values():
            for number, (leaf, ordinary, shown, hidden) in enumerate(leaves):
                if leaf is parameter and ordinary is Computing:
                    leaves[number] = leaf, Watched, shown, hidden

    def is_in_sight(self, unit: str) -> bool:
        """Return whether parameters have the memory of all weights that a unit uses."""
        return self._used_by.get(unit, frozenset()) <= self._in_sight

    def rest(self, *, keeps_slot: bool) -> None:
        """Hide all weights at the end of a forward. Code of the loop that reads the last unit's gets copies.

        It may keep what it reads for backward, and another forward may come before that, which takes the slot.

        Args:
            keeps_slot: whether the slot has the weights of this unit until backward or another forward begins.
        """
        if any(map(self._packed, self._shown)):  # reading them needs their class
            return
        unit = self.shown_for
        self.show("")
        self._rests_after = unit if keeps_slot else ""

    def at_hand(self, name: str) -> torch.Tensor | None:
        """Return a parameter's weights if the forward that has ended last has left them in a slot."""
        for unit in self._used_by.get(self._rests_after, ()):
            for parameter, _, weights, _ in self._leaves[unit]:
                if self._all[id(parameter)][1] == name:
                    return weights
        return None

    def _take_over(self, unit: str) -> None:
        """Take over what forward has given parameters as other data (``weight.data = ...``)."""
        for parameter, _, weights, _ in self._leaves[unit]:
            if parameter.data_ptr() != weights.data_ptr():
                weights.copy_(parameter.data)
                parameter.data = weights

    def unsettle(self, units: AbstractSet[str]) -> None:
        """Hide the memory of those settled units whose updates are about to begin."""
        for name in (self._settled & units) - self._shown:
            self._hide_memory(name)

    def keep(self, unit: str) -> None:
        """Give weights that are in a unit's slot memory of their own, and show them there until :meth:`drop`."""
        for parameter, held in self._packed(unit):
            parameter.live_in(held.clone())
        packed = {id(parameter.shard.leaf) for parameter, _ in self._packed(unit)}
        with unguarded():
            self._kept[unit] = [
                (leaf, leaf.data if id(leaf) in packed else weights.clone())
                for leaf, _, weights, _ in self._leaves[unit]
            ]
        self._in_sight.discard(unit)
        if unit in self._shown:
            self._show_memory(unit)
        elif packed:
            self._shown_for = None

    def show_all(self, *, traced: bool = False) -> None:
        """Show the weights of all units, which must have memory, until :meth:`show`.

        Where they may be ``traced``, as ``torch.func.linearize`` does, parameters have the class that tracers know.
        """
        self._shown, self._shown_for = frozenset(self._leaves), None
        for name, leaves in self._leaves.items():
            for parameter, ordinary, _, _ in leaves:
                parameter.__class__ = nn.Parameter if traced and ordinary in _COMPUTING else ordinary
            if name not in self._in_sight:
                self._show_memory(name)

    def keep_all(self) -> None:
        """Show all weights that are kept, also while their units do not compute."""
        with unguarded():
            for unit in self._kept.keys() - self._in_sight:
                self._show_memory(unit)

    def is_in_slot(self, values: torch.Tensor) -> bool:
        """Return whether a tensor is a view of weights in a slot, or was one of what is kept."""
        return any(is_within(own, values) for unit in self._kept for _, _, own, _ in self._leaves[unit])

    def kept_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return what a view of the slot of the unit that computes is in memory of its own, if that is kept."""
        for unit in self._shown & self._kept.keys():
            for (_, _, weights, _), (_, own) in zip(self._leaves[unit], self._kept[unit], strict=True):
                if is_within(weights, values):
                    offset = (values.data_ptr() - weights.data_ptr()) // values.element_size()
                    return own.as_strided(values.shape, values.stride(), own.storage_offset() + offset)
        return values

    @property
    def kept(self) -> Collection[str]:
        """The units that have been kept."""
        return self._kept.keys()

    def drop(self) -> None:
        """Free the memory that :meth:`keep` has taken, and hide all weights."""
        if not self._kept:
            return
        self.show("")
        for unit in self._kept:
            for parameter, held in self._packed(unit):
                parameter.live_in(held)
                self._shown_for = None
            self._hide_memory(unit)
        self._kept.clear()
        self.show("")

    def _packed(self, unit: str) -> list[tuple[FrozenParameter, torch.Tensor]]:
        """Return a unit's quantized parameters, with their bytes in its slot or block."""
        if (frozen := self._state.units[unit].frozen) is None:
            return []
        return [(p, frozen.device[p.start : p.stop]) for p in frozen.parameters if p.shard.stored.is_quantized]

    def _show_memory(self, unit: str) -> None:
        for parameter, weights in self._kept.get(unit) or [(leaf, own) for leaf, _, own, _ in self._leaves[unit]]:
            parameter.data = weights
        self._in_sight.add(unit)
        self._set_versions(unit, hidden=False)

    def _set_versions(self, unit: str, *, hidden: bool) -> None:
        with unguarded():
            leaves = tuple(leaf for leaf, *_ in self._leaves[unit])
            versions = tuple(version_of(leaf) | (HIDDEN if hidden else 0) for leaf in leaves)
            torch._C._autograd._unsafe_set_version_counter(leaves, versions)

    def _hide_memory(self, unit: str) -> None:
        with unguarded():
            for parameter, _, weights, _ in self._leaves[unit] if unit in self._in_sight - self._kept.keys() else ():
                # Of another type they are those of before: a layer of bitsandbytes has its bias in its input's type.
                if parameter.data_ptr() != weights.data_ptr() and parameter.dtype is weights.dtype:
                    raise self._lost(parameter, "gave other data to")
            self._in_sight.discard(unit)
            for parameter, _, _, nothing in self._leaves[unit]:
                parameter.data = nothing
        self._set_versions(unit, hidden=True)

    def _lost(self, parameter: torch.Tensor, did: str) -> ValueError:
        what = f"{did} the parameter {self._all[id(parameter)][1]}"
        if in_backward():
            return ValueError(
                f"a hook on a gradient {what}, as optimizers that step in backward do (LOMO), or the loop did so "
                "before backward; remove the hook, give prepare() one optimizer, and call its step() after backward "
                "(gradients leave the device anyway), and let the loop write between steps"
            )
        return ValueError(
            f"forward, a hook, or the loop right after forward {what}, which was not so when the plan was made, so "
            "this would be lost; do it between backward and step(), between steps, or in the first forward too"
        )

    def check_unmodified(self) -> None:
        """Check that no parameter was written to while its unit computed, since the last check.

        Raises:
            ValueError: one was.
        """
        before, self._versions = self._versions, self._versions_now()
        for key, (leaf, name) in self._all.items():
            if before[key] != self._versions[key] and name not in self._written:
                raise self._lost(leaf, "wrote to")

    def check_hook(self, parameter: torch.Tensor) -> None:
        """Check that no hook of the user's on a gradient has written to the parameter. Raises ValueError if one has."""
        with unguarded():
            if version_of(parameter) != self._versions[id(parameter)] or was_written_as_data(parameter):
                raise self._lost(parameter, "wrote to")

    def accept_writes(self) -> None:
        """Note that what was written to parameters so far is known."""
        self._versions = self._versions_now()

    def has_written(self, name: str) -> None:
        """Note that the user has written to a parameter: autograd then refuses what it had saved, as in memory."""
        self.check_unmodified()
        with unguarded():
            for leaf, own in self._all.values():
                if own == name:
                    torch.autograd.graph.increment_version(leaf)
        self.accept_writes()

    def _versions_now(self) -> dict[int, int]:
        with unguarded():
            return {key: version_of(leaf) for key, (leaf, _) in self._all.items()}

    def release(self) -> None:
        """Make all parameters ordinary ones again, for good. What is kept is theirs until they get other data."""
        self._kept.clear()
        for leaf, _ in self._all.values():
            unguard(leaf)


_COMPUTING: Final = (Computing, Watched)


def _computing(parameter: nn.Parameter) -> type:
    return Computing if type(parameter) is nn.Parameter else type(parameter)
