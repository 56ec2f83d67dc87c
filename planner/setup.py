"""What a placement starts from: a model, and the decisions that are fixed already.

[Note: Second order] A backward that makes a graph of its own (``create_graph=True``, as for a gradient penalty) saves
weights again, and a later backward reads them where no hook is: in the order of forward, before backward reaches any
module. So the weights of a model that does this in its step stay on the device, whole on every rank, and its
activations are kept, all tokens at a time. Its updates begin at the step, because gradients may come in any order.
Optimizer state may be anywhere.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, Literal

from planner.decisions import BF16, Decisions, Precision
from planner.graph import Degrees, Unit
from planner.models.kernels import flop
from planner.optimizers import Optimizer
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
    """The user's request: what is fixed before anything is placed.

    Attributes:
        units: the model's units for this micro-batch, in forward order.
        data_parallel: ranks that each work on tokens of their own.
        micro_batch: sequences per forward on each device.
        num_micro_batches: forwards per iteration.
        precision: types of weights and gradients. Only our own placements split master copies.
        optimizer: what updates the parameters.
        clip: clip gradients by their global norm.
        subgroup_params: parameters in one subgroup.
        tensor_parallel, pipeline_parallel, expert_parallel, expert_units, loss_tile_tokens,
            layer_tile_tokens: see :class:`planner.decisions.Decisions`.
        fp8_weights: whether our own placements fetch weights in fp8; see there.
        storage: what our own placements may use in addition to device and host.
    """

    units: tuple[Unit, ...]
    data_parallel: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 1
    precision: Precision = BF16
    optimizer: Optimizer = "adamw"
    clip: bool = True
    subgroup_params: int = 100_000_000
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    expert_units: int = 1
    loss_tile_tokens: int | None = None
    layer_tile_tokens: int | None = None
    fp8_weights: Literal[True] | None = None
    storage: Storage = "never"

    @property
    def given(self) -> dict[str, Any]:
        """The fields that all decisions for this setup have in common, with whole master copies."""
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del common["units"], common["fp8_weights"], common["storage"]
        return common | {"precision": self.precision.whole}

    @property
    def ours(self) -> dict[str, Any]:
        """The same of our own placements, which may fetch weights in fp8 and split master copies."""
        return {**self.given, "fp8_weights": self.fp8_weights, "precision": self.precision}

    @functools.cached_property
    def known_mixes(self) -> "dict[Mix, Decisions]":
        """The decisions that :func:`mixed` has made so far."""
        return {}

    @functools.cached_property
    def degrees(self) -> Degrees:
        """The degrees of parallelism."""
        return Degrees(self.data_parallel, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

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
        return {unit.name: _num_movable(self, unit) if unit.name in self.large else 0 for unit in self.units}

    @functools.cached_property
    def tied(self) -> frozenset[str]:
        """The units that keep their parameters on the device: those that stay, or share a weight within a call."""
        calls = {unit.name: unit.call for unit in self.units}
        shared = [(unit.name, name) for unit in self.units for name in unit.shared_units if calls[name] == unit.call]
        return frozenset(name for pair in (*shared, *((u.name,) for u in self.units if u.stays)) for name in pair)

    @functools.cached_property
    def swappable(self) -> tuple[str, ...]:
        """The segments whose activations can be recomputed or offloaded, in forward order."""
        return tuple(dict.fromkeys(unit.segment for unit in self.units if unit.can_swap))

    @functools.cached_property
    def stages(self) -> tuple[int, ...]:
        """The ZeRO stages to try. Stage 3 gathers weights for each use, so units that stay exclude it."""
        if self.data_parallel == 1:
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

    def replicas(self, unit: Unit) -> int:
        """Return the number of ranks with the same part of a unit."""
        return self.data_parallel // unit.parts(self.degrees)


def pieces(setup: Setup, unit: Unit) -> tuple[int, ...]:
    """Return the subgroup sizes of a unit on one rank of a sharded optimizer."""
    return _layout(setup, unit).sizes


def _layout(setup: Setup, unit: Unit) -> UnitLayout:
    return unit_layout(unit.extents, setup.optimizer, setup.replicas(unit), setup.subgroup_params)


def _num_movable(setup: Setup, unit: Unit) -> int:
    cut = _layout(setup, unit).subgroups
    return sum(bool(subgroup.matrices) for subgroup in cut) or len(cut)
