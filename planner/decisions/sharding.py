"""How ranks share a model, and the sizes of shards and subgroups that follow."""

from typing import Annotated, Literal

from pydantic import Field

from planner.decisions.fp8 import ALIGNMENT_BYTES, Fp8Weights
from planner.decisions.places import Place
from planner.decisions.precision import BF16, TIE_PARAMS, Precision
from planner.graph import Unit
from planner.models.choice import Choice, Count
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.subgroups import Subgroup, UnitLayout, unit_layout


class Sharding(Choice):
    """How ranks share a model and its batch, and how its state is cut: all that is decided before placement.

    Attributes:
        optimizer: the optimizer; with the precision it determines the size of the state.
        zero_stage: what data-parallel ranks shard: 1 and 2 optimizer state and gradients, 3 parameters too.
        subgroup_params: the most parameters of one subgroup, the grain of the optimizer step.
        clip: whether gradients are clipped by their global norm; every update then waits for the norm.
        speculate: updates do not wait for it, but are taken back where gradients are clipped; see [Note: Speculation]
            in :mod:`executor.driver.speculation`. ``None``: they wait.
    """

    precision: Precision = BF16
    optimizer: Optimizer = "adamw"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    subgroup_params: Count = 100_000_000
    clip: bool = True
    speculate: Literal[True] | None = None

    @property
    def waits_for_norm(self) -> bool:
        """Whether no update begins before the norm of all gradients is known."""
        return self.clip and not self.speculate

    @property
    def state_bytes_per_param(self) -> float:
        """Bytes of optimizer state per parameter, the master copy included; for Muon, of its matrices."""
        return self.precision.state_bytes_per_param(self.optimizer)

    @property
    def resident_weight_bytes_per_param(self) -> int:
        """Bytes of state per parameter that a resident weight saves, because it may be the master copy itself."""
        return self.precision.weight_bytes if self.precision.master_is_weight else 0

    @property
    def weight_in_state(self) -> bool:
        """Whether the weight is a part of state that is not resident on the device."""
        return self.precision.master_is_weight or self.split_masters is not None

    def replicas(self, unit: Unit) -> int:
        """Return the number of ranks with the same part of a unit. They reduce its gradient, and shard it in ZeRO."""
        return self.data_parallel // unit.parts(self) if self.data_parallel > 1 else 1

    def regathers(self, unit: Unit) -> bool:
        """Return whether ranks all-gather a unit's shards after the update (ZeRO-1 and 2)."""
        return self.zero_stage in {1, 2} and unit.num_params > 0 and self.replicas(unit) > 1

    @property
    def piles_up(self) -> bool:
        """Whether whole gradients that stay on the device add up there until the last micro-batch."""
        return self.zero_stage < 2

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
        return self.split_masters is not None and place is not Place.GPU

    def state_bytes(self, subgroup: Subgroup, place: Place) -> int:
        """Return the bytes of a subgroup's optimizer state where it is updated, the master copy included."""
        num_ties = -(-subgroup.num_params // TIE_PARAMS) if self.splits(place) else 0
        return round(self.precision.state_bytes_per_param(subgroup.kind) * subgroup.num_params) + 2 * num_ties

    def piece_params(self, unit: Unit) -> tuple[int, ...]:
        """Return the sizes of a unit's subgroups on one rank, in order."""
        return self.layout(unit).sizes

    @property
    def num_state_versions(self) -> Literal[1, 2]:
        """Versions of state and weights on NVMe: the new one is written beside the old one."""
        return 2

    @property
    def spilled_bytes_per_param(self) -> int:
        """Bytes per parameter of a gradient that waits on the host or on NVMe: in the weights' type."""
        return self.precision.weight_bytes

    def gathers(self, unit: Unit) -> bool:
        """Return whether a unit's parameters are sharded over ranks (ZeRO-3) and gathered for every use."""
        return self.zero_stage == 3 and self.replicas(unit) > 1

    def fp8_if_moved(self, unit: Unit) -> Fp8Weights | None:
        """Return how a unit's weights move in fp8, if they move; ``None`` if they cannot, or nothing is saved."""
        if not self.fp8_weights or not unit.fp8_parameters or self.regathers(unit):
            return None
        layout, num_scales = self.layout(unit), len(unit.fp8_parameters)
        num_ranks = self.replicas(unit) if self.gathers(unit) else 1
        num_others = layout.starts[-num_scales]
        fp8 = Fp8Weights(layout.shard_params, num_others, num_scales, num_ranks, self.precision.weight_bytes)
        return fp8 if fp8.saves and num_others % ALIGNMENT_BYTES == 0 else None

    def exchanged_at_once_bytes(self, unit: Unit) -> int:
        """Return what a rank writes at a time to memory that ranks share, for collectives of a unit; 0 without them.

        See [Note: Through the host] in :mod:`executor.devices.host_exchange`. It is a multiple of what aligns every
        rank's part.
        """
        if not self.collectives or (count := self.replicas(unit)) == 1:
            return 0
        values = -(-self.padded_params(unit) // count) * count
        num_bytes = max(
            values * self.precision.weight_bytes, self.frozen_shard_bytes(unit) if self.gathers(unit) else 0
        )
        grain_bytes = count * FROZEN_ALIGNMENT_BYTES
        return -(-min(num_bytes, MOST_EXCHANGED_BYTES) // grain_bytes) * grain_bytes

    def frozen_shard_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's frozen weights that one rank keeps: all, or in ZeRO-3 a padded shard."""
        num_bytes = unit.frozen_bytes(self.precision.weight_bytes)
        if not num_bytes or not self.gathers(unit):
            return num_bytes
        return -(-num_bytes // (self.replicas(unit) * FROZEN_ALIGNMENT_BYTES)) * FROZEN_ALIGNMENT_BYTES

    def frozen_padded_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's frozen weights, padded to equal shards."""
        return self.frozen_shard_bytes(unit) * (self.replicas(unit) if self.gathers(unit) else 1)


MOST_EXCHANGED_BYTES = 32 << 20
"""Of a collective through host memory, what a rank writes at a time: a millisecond of a link's time, so that what ranks
tell each other takes little of it."""
FROZEN_ALIGNMENT_BYTES = 16
"""Shards of frozen weights begin at a multiple of it, so that values of every type do."""
