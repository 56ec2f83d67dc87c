"""Sizes of a unit's data on one rank, by place: all that follows from the unit and its decision alone.

Most units of a model have equal sizes and equal decisions. They share one object, which is computed once.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Literal

from planner.decisions import Decisions, Fp8Weights, Place, UnitDecision
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS
from planner.schedule.tasks import Tier
from planner.subgroups import Subgroup

HeldBytes = tuple[tuple[Tier, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Amounts:
    """Sizes of a unit's data on one rank, by place.

    Attributes:
        params: where its parameters are.
        fetched: whether its parameters are copied from the host for every use.
        replicas: the number of ranks with the same part of it at the same time.
        shard_params: parameters that one rank updates.
        padded_params: all trained parameters, padded to equal shards.
        fp8: how its weights move where they are fetched or gathered in fp8; ``None`` where they are not.
        frozen_bytes: bytes of frozen weights that one rank keeps.
        padded_frozen_bytes: bytes of all frozen weights, padded to equal shards.
        gathered: whether its parameters are all-gathered for every use.
        regathered: whether updated shards are all-gathered after the step.
        exchanged_params: values in a collective over all trained parameters.
        pieces: size and place of each subgroup.
        subgroups: the same subgroups.
        state_bytes: bytes of optimizer state of each subgroup.
        streamed, from_nvme: sizes of the subgroups that are streamed, and of those whose state is on NVMe.
        flushes: the update places whose gradients are copied to the host.
        flushed_params: the number of parameters whose gradients are copied to the host.
        resident_params: the number of parameters whose gradients stay on the device.
        parameters, optimizer, gradients: bytes that are always held under the unit's name.
    """

    params: Literal["gpu", "host", "nvme"]
    fetched: bool
    replicas: int
    shard_params: int
    padded_params: int
    fp8: Fp8Weights | None
    frozen_bytes: int
    padded_frozen_bytes: int
    gathered: bool
    regathered: bool
    exchanged_params: int
    pieces: tuple[tuple[int, Place], ...]
    subgroups: tuple[Subgroup, ...]
    state_bytes: tuple[int, ...]
    streamed: tuple[int, ...]
    from_nvme: tuple[int, ...]
    flushes: frozenset[Place]
    flushed_params: int
    resident_params: int
    parameters: HeldBytes
    optimizer: HeldBytes
    gradients: HeldBytes


def amounts_by(decisions: Decisions) -> Callable[[Unit, UnitDecision], Amounts]:
    """Return a function for the units of one schedule: it returns the amounts of a unit under a decision.

    It raises a ``ValueError`` if the decision does not fit the unit.
    """
    by_layout = OPTIMIZERS[decisions.optimizer].lays_out
    known: dict[tuple[object, ...], Amounts] = {}

    def amounts_of(unit: Unit, decided: UnitDecision) -> Amounts:
        frozen_bytes = unit.frozen_bytes(decisions.precision.weight_bytes)
        parts, where = unit.parts(decisions), (decided.params, decided.update, decided.streamed_gradients)
        fp8 = decisions.fp8_of(unit)
        kind = (unit.num_params, frozen_bytes, parts, *where, fp8, unit.extents if by_layout else ())
        if (amounts := known.get(kind)) is None:
            _check(decisions, unit, decided)
            amounts = known[kind] = _amounts(decisions, unit, decided)
        return amounts

    return amounts_of


def _check(decisions: Decisions, unit: Unit, decided: UnitDecision) -> None:
    if decided.fetched and decisions.regathers(unit):
        raise ValueError(
            f"unit {unit.name}: with zero_stage {decisions.zero_stage} every rank's host has only the weights that "
            "it updates, and cannot serve the rest; set params to 'gpu' or zero_stage to 3"
        )
    if (want := len(decisions.piece_params(unit))) != len(decided.update):
        raise ValueError(
            f"unit {unit.name} has {want} subgroups of at most {decisions.subgroup_params} parameters, but "
            f"{len(decided.update)} places; give one place per subgroup"
        )


def _amounts(decisions: Decisions, unit: Unit, decided: UnitDecision) -> Amounts:
    name, pieces = unit.name, decisions.placed_pieces(unit)
    placed = Counter[Place]()
    for num_params, place in pieces:
        placed[place] += num_params
    flushes = frozenset(place for place in placed if decisions.flushes(name, place))
    flushed = sum(placed[place] for place in flushes)
    shard, padded, gathered = decisions.shard_params(unit), decisions.padded_params(unit), decisions.gathers(unit)
    frozen_bytes = decisions.frozen_shard_bytes(unit)
    return Amounts(
        params=decided.params,
        fetched=decided.fetched,
        replicas=decisions.replicas(unit),
        shard_params=shard,
        padded_params=padded,
        fp8=(fp8 := decisions.fp8_of(unit)),
        frozen_bytes=frozen_bytes,
        padded_frozen_bytes=decisions.frozen_padded_bytes(unit),
        gathered=gathered,
        regathered=decisions.regathers(unit),
        exchanged_params=decisions.exchanged_params(unit),
        pieces=pieces,
        subgroups=decisions.subgroups(unit),
        state_bytes=tuple(map(decisions.state_bytes, decisions.subgroups(unit), decided.update)),
        streamed=tuple(n for n, place in pieces if place is Place.STREAM),
        from_nvme=tuple(n for n, place in pieces if place is Place.NVME),
        flushes=flushes,
        flushed_params=flushed,
        resident_params=shard - flushed,
        parameters=_parameters(decisions, name, placed, shard, shard if gathered else padded, frozen_bytes, fp8),
        optimizer=_optimizer(decisions, unit, placed),
        gradients=_gradients(decisions, name, placed, flushed),
    )


def _parameters(
    decisions: Decisions,
    name: str,
    placed: Counter[Place],
    shard: int,
    resident: int,
    frozen_bytes: int,
    fp8: Fp8Weights | None,
) -> HeldBytes:
    params, weight_bytes = decisions.units[name].params, decisions.precision.weight_bytes
    on_device = weight_bytes * resident + frozen_bytes if params == "gpu" else 0
    if params == "nvme":  # frozen weights are never written again, so they have one version
        on_nvme = decisions.num_state_versions * decisions.stored_weight_bytes(name) * shard
        return _held((Tier.GPU, on_device), (Tier.NVME, on_nvme + frozen_bytes))
    served = sum(n for place, n in placed.items() if decisions.serves(name, place))
    on_host = weight_bytes * served + (frozen_bytes if params == "host" else 0)
    return _held((Tier.GPU, on_device), (Tier.HOST, on_host + (fp8.host_bytes if fp8 and params == "host" else 0)))


def _optimizer(decisions: Decisions, unit: Unit, placed: Counter[Place]) -> HeldBytes:
    held = Counter[Place]()
    for subgroup, place in zip(decisions.subgroups(unit), decisions.units[unit.name].update, strict=True):
        held[place] += decisions.state_bytes(subgroup, place)
    return _held(
        (Tier.HOST, held[Place.CPU] + held[Place.STREAM]),
        (Tier.NVME, decisions.num_state_versions * held[Place.NVME]),
        (Tier.GPU, held[Place.GPU] - decisions.resident_weight_bytes_per_param * placed[Place.GPU]),
    )


def _gradients(decisions: Decisions, name: str, placed: Counter[Place], flushed: int) -> HeldBytes:
    """Return the memory that gradients on the host or on NVMe hold all the time, without buffers for spilling.

    On the host they have the type that they would be spilled in. Gradients that overwrite weights need no memory of
    their own: see [Note: In place] in :mod:`planner.decisions`.
    """
    spilled = placed[Place.NVME] if decisions.spill_gradients else 0
    in_place = sum(n for place, n in placed.items() if decisions.arrives_in_place(name, place))
    return _held(
        (Tier.NVME, decisions.spilled_bytes_per_param * spilled),
        (Tier.HOST, decisions.spilled_bytes_per_param * (flushed - spilled - in_place)),
    )


def _held(*amounts: tuple[Tier, int]) -> HeldBytes:
    return tuple((tier, num_bytes) for tier, num_bytes in amounts if num_bytes)
