"""What a placement starts from: a model, and the decisions that are fixed already.

[Note: Second order] A backward that makes a graph of its own (``create_graph=True``, as for a gradient penalty) saves
weights again, and a later backward reads them where no hook is: in the order of forward, before backward reaches any
module. So the weights of a model that does this in its step stay on the device, whole on every rank, and its
activations are kept, all tokens at a time. Its updates begin at the step, because gradients may come in any order.
Optimizer state may be anywhere.

[Note: Written weights] Some forwards write to a weight that they train, as ``nn.Embedding`` does with ``max_norm``. So
forward and updates need one copy of it: in fp32, with its unit and its state on the device, and on one device, such as
that of a pipeline's stage. Its segment is not computed again, since that would write again. A frozen weight that
forward writes to, such as that of a second encoder which follows the first one (MoCo), is in no unit: it counts as a
buffer, which stays on the device.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Self

from planner.decisions import Decisions, Sharding
from planner.graph import Unit
from planner.models.kernels import flop
from planner.subgroups import UnitLayout, unit_layout
from planner.terms import Storage

# A unit is very small if it has at most this share of the largest unit's weights.
_SMALL = 1e-2


@dataclasses.dataclass(frozen=True)
class Mix:
    """A point of the family of placements that the search goes through (all counts from 0).

    Attributes:
        num_gpu, num_stream: :attr:`Setup.movable` subgroups updated on the device, resident or streamed; the CPU
            updates the rest.
        num_nvme: subgroups of that rest whose state is on NVMe.
        num_keep: segments whose activations are kept, counted from the last.
        num_offload, num_evict: other segments whose activations are offloaded to the host, or on to NVMe.
        num_host: units whose parameters are fetched for every use.
        spread: 1 if fetched units are evenly spaced among those that may be fetched, 0 if they are the last ones.
        num_on_nvme: fetched units, counted from the last, whose parameters and state are on NVMe.
        num_slots: slots per ring of parameters.
        num_state_slots: slots for streamed state.
        num_gradient_slots: units by which backward may run ahead of gradient copies to the host.
        num_stay: units with streamed subgroups whose gradients stay on the device, counted from the first.
        num_nvme_slots: host buffers for state from NVMe.
        spill: 1 if gradients wait on NVMe when their state is there.
        zero_stage: the ZeRO stage.
    """

    num_gpu: int
    num_stream: int
    num_keep: int
    num_host: int = 0
    spread: int = 1
    num_slots: int = 2
    num_state_slots: int = 2
    num_gradient_slots: int = 2
    num_stay: int = 0
    zero_stage: int = 0
    num_nvme: int = 0
    num_on_nvme: int = 0
    num_offload: int = 0
    num_evict: int = 0
    num_nvme_slots: int = 3
    spill: int = 0


@dataclasses.dataclass(frozen=True)
class Setup:
    """What is fixed before anything is placed; bounds are about all placements of a setup.

    Attributes:
        units: the model's units for one micro-batch, in forward order.
        given: all that is decided: batch, degrees, precision, ZeRO stage, clipping, subgroups. The search tries every
            stage, whatever is given. Only our own placements fetch weights in fp8 and split master copies.
        storage: what our own placements may use in addition to device and host.
    """

    units: tuple[Unit, ...]
    given: Sharding = dataclasses.field(default_factory=Sharding)
    storage: Storage = "never"

    def changed(self, **given: Any) -> Self:
        """Return the setup with other values of what is given."""
        return dataclasses.replace(self, given=self.given.model_copy(update=given))

    def stages(self) -> tuple[Self, ...]:
        """Return the setups of all ZeRO stages that make sense for its degrees."""
        if self.given.data_parallel == 1:
            stages: tuple[int, ...] = (0,)
        else:
            stages = (0, *self.zero_stages)
        return tuple(self.changed(zero_stage=stage) for stage in stages)

    @functools.cached_property
    def known_mixes(self) -> "dict[Mix, Decisions]":
        """The decisions that :func:`planner.placements.mixed` has made so far."""
        return {}

    @functools.cached_property
    def known_stages(self) -> "list[Setup]":
        """The setups of a pipeline's stages, once :mod:`planner.placements` has made them."""
        return []

    @functools.cached_property
    def large(self) -> frozenset[str]:
        """The units that are not very small."""
        large = max(unit.num_weights for unit in self.units) * _SMALL
        return frozenset(unit.name for unit in self.units if unit.num_weights > large)

    @functools.cached_property
    def movable(self) -> Mapping[str, int]:
        """The number of subgroups that a mix places, by unit; very small units have none.

        Vectors beside the matrices of Muon are with the last matrix.
        """
        large = self.large
        return {u.name: _num_movable(self, u) if u.name in large and not u.writes else 0 for u in self.units}

    @functools.cached_property
    def tied(self) -> frozenset[str]:
        """The units that keep weights on the device: those that stay, write to them, or share one within a call."""
        calls = {unit.name: unit.call for unit in self.units}
        shared = [(unit.name, name) for unit in self.units for name in unit.shared_units if calls[name] == unit.call]
        alone = ((unit.name,) for unit in self.units if unit.stays or unit.writes)
        return frozenset(name for names in (*shared, *alone) for name in names)

    @functools.cached_property
    def swappable(self) -> tuple[str, ...]:
        """The segments whose activations can be recomputed or offloaded, in forward order."""
        return tuple(dict.fromkeys(unit.segment for unit in self.units if unit.can_swap))

    @functools.cached_property
    def zero_stages(self) -> tuple[int, ...]:
        """The ZeRO stages to search. Stage 3 gathers weights for each use, so units that stay exclude it."""
        if self.given.data_parallel == 1:
            return (0,)
        return (1, 2) if any(unit.stays for unit in self.units) else (1, 2, 3)

    @functools.cached_property
    def in_turn(self) -> tuple[Unit, ...]:
        """The units in forward order; the experts of a layer by how much they compute."""
        groups = itertools.groupby(self.units, key=lambda unit: (unit.segment, ".experts." in unit.name))
        return tuple(
            unit
            for _, group in groups
            for unit in sorted(group, key=lambda u: -flop(u.forward) * (".experts." in u.name))
        )


def pieces(setup: Setup, unit: Unit) -> tuple[int, ...]:
    """Return the subgroup sizes of a unit on one rank of a sharded optimizer."""
    return _layout(setup, unit).sizes


def _layout(setup: Setup, unit: Unit) -> UnitLayout:
    given = setup.given
    return unit_layout(unit.extents, given.optimizer, given.replicas(unit), given.subgroup_params)


def _num_movable(setup: Setup, unit: Unit) -> int:
    cut = _layout(setup, unit).subgroups
    return sum(bool(subgroup.matrices) for subgroup in cut) or len(cut)
