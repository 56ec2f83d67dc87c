"""How ranks share a model, and the sizes of shards and subgroups that follow."""

import functools
from typing import Annotated

from pydantic import Field

from hwprofiles.quantity import Frozen
from planner.decisions.places import Place
from planner.decisions.precision import BF16, TIE_PARAMS, Precision
from planner.graph import Degrees, Unit
from planner.models.captured import Tiles
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.subgroups import Subgroup, UnitLayout, unit_layout


class Sharding(Frozen):
    """How ranks share a model and its batch, and how its state is cut.

    Attributes:
        policy: the engine policy that these decisions follow or started from.
        optimizer: the optimizer; with the precision it determines the size of the state.
        micro_batch: sequences per forward, on each rank.
        num_micro_batches: forwards+backwards per iteration (gradient accumulation).
        data_parallel: ranks that share the model's data; each has one device.
        tensor_parallel: ranks that share every layer, per data-parallel rank; units are then one rank's share.
        pipeline_parallel: stages that share the layers, per data-parallel rank.
        expert_parallel: data-parallel ranks that share the experts of every layer.
        expert_units: units into which a rank's experts of a layer are divided.
        loss_tile_tokens: tokens whose logits exist at a time, see [Note: Tiled logits] in
            :mod:`executor.module.tiled_logits`; ``None``: all of the micro-batch.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time, see [Note: Tiled layers] in
            :mod:`executor.module.tiled_layers`; ``None``: all of the micro-batch.
        zero_stage: what data-parallel ranks shard: 1 and 2 optimizer state and gradients, 3 parameters too.
        subgroup_params: the most parameters of one subgroup, the grain of the optimizer step.
    """

    policy: str
    precision: Precision = BF16
    optimizer: Optimizer = "adamw"
    micro_batch: Annotated[int, Field(ge=1)] = 1
    num_micro_batches: Annotated[int, Field(ge=1)] = 1
    data_parallel: Annotated[int, Field(ge=1)] = 1
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    expert_parallel: Annotated[int, Field(ge=1)] = 1
    expert_units: Annotated[int, Field(ge=1)] = 1
    loss_tile_tokens: Annotated[int, Field(ge=1)] | None = None
    layer_tile_tokens: Annotated[int, Field(ge=1)] | None = None
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    subgroup_params: Annotated[int, Field(ge=1)] = 100_000_000

    @property
    def tiles(self) -> Tiles:
        """The tokens of tiles; the model's units depend on them."""
        return Tiles(self.loss_tile_tokens, self.layer_tile_tokens)

    @property
    def state_bytes_per_param(self) -> float:
        """Bytes of optimizer state per parameter, the master copy included; for Muon, of its matrices."""
        return self.precision.state_bytes_per_param(self.optimizer)

    @property
    def other_state_bytes_per_param(self) -> float:
        """The same of parameters that are no hidden matrices."""
        return self.precision.state_bytes_per_param(OPTIMIZERS[self.optimizer].others or self.optimizer)

    @property
    def resident_weight_bytes_per_param(self) -> int:
        """Bytes of state per parameter that a resident weight saves, because it may be the master copy itself."""
        return self.precision.weight_bytes if self.precision.master_is_weight else 0

    @property
    def degrees(self) -> Degrees:
        """How many ranks share what."""
        return _degrees(self.data_parallel, self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def num_devices(self) -> int:
        """All ranks, each with one device."""
        return self.degrees.num_devices

    def replicas(self, unit: Unit) -> int:
        """Return the number of ranks with the same part of a unit. They reduce its gradient, and shard it in ZeRO."""
        return self.data_parallel // unit.parts(self.degrees) if self.data_parallel > 1 else 1

    def regathers(self, unit: Unit) -> bool:
        """Return whether ranks all-gather a unit's shards after the update (ZeRO-1 and 2)."""
        return self.zero_stage in {1, 2} and unit.num_params > 0 and self.replicas(unit) > 1

    def shard_params(self, unit: Unit) -> int:
        """Return the number of a unit's trained parameters that one rank updates, padded to equal shards."""
        if OPTIMIZERS[self.optimizer].lays_out:
            return self.layout(unit).shard_params
        return -(-unit.num_params // self.replicas(unit)) if self.zero_stage >= 1 else unit.num_params

    def padded_params(self, unit: Unit) -> int:
        """Return the number of a unit's trained parameters, padded to equal shards."""
        return self.shard_params(unit) * (self.replicas(unit) if self.zero_stage >= 1 else 1)

    def exchanged_params(self, unit: Unit) -> int:
        """Return the number of values in a collective over a unit's trained parameters.

        Padding between parameters counts, see [Note: Whole matrices] in :mod:`planner.subgroups` and [Note: Blocks] in
        :mod:`planner.optimizers`.
        """
        return self.padded_params(unit) if self.layout(unit).has_gaps else unit.num_params

    def layout(self, unit: Unit) -> UnitLayout:
        """Return the layout of a unit's trained parameters."""
        num_shards = self.replicas(unit) if self.zero_stage >= 1 else 1
        return unit_layout(unit.extents, self.optimizer, num_shards, self.subgroup_params)

    def subgroups(self, unit: Unit) -> tuple[Subgroup, ...]:
        """Return a unit's subgroups on one rank, in order."""
        return self.layout(unit).subgroups

    def placed_subgroups(self, unit: Unit) -> tuple[Subgroup, ...]:
        """Return the subgroups whose places bounds weigh: not those of vectors beside the matrices of Muon.

        What these need comes on top of what bounds count.
        """
        cut = self.subgroups(unit)
        return tuple(subgroup for subgroup in cut if subgroup.matrices) or cut

    def placed_params(self, unit: Unit) -> int:
        """Return the parameters of :meth:`placed_subgroups`."""
        if OPTIMIZERS[self.optimizer].others:
            return sum(subgroup.num_params for subgroup in self.placed_subgroups(unit))
        return self.shard_params(unit)

    def placed_state_bytes_per_param(self, unit: Unit) -> float:
        """Return the bytes of state per parameter of :meth:`placed_subgroups`."""
        kinds = {subgroup.kind for subgroup in self.placed_subgroups(unit)} or {self.optimizer}
        return min(map(self.precision.state_bytes_per_param, kinds))

    def splits(self, place: Place) -> bool:
        """Return whether master copies that are updated in a place are split."""
        return self.precision.splits and place is not Place.GPU

    def state_bytes(self, subgroup: Subgroup, place: Place) -> int:
        """Return the bytes of a subgroup's optimizer state where it is updated, the master copy included."""
        num_ties = -(-subgroup.num_params // TIE_PARAMS) if self.splits(place) else 0
        return round(self.precision.state_bytes_per_param(subgroup.kind) * subgroup.num_params) + 2 * num_ties

    def piece_params(self, unit: Unit) -> tuple[int, ...]:
        """Return the sizes of a unit's subgroups on one rank, in order."""
        return self.layout(unit).sizes


_degrees = functools.lru_cache(64)(Degrees)  # a search needs them thousands of times
