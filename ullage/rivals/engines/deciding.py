"""Decisions that treat all units equally, from which those of most engines are made."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from planner.decisions import Activations, Place, UnitDecision
from planner.placements import ACTIVATIONS
from planner.setup import Setup, pieces
from ullage.rivals.decisions import RivalDecisions

AFTER_BACKWARD: Final[dict[str, Any]] = {"overlap_next_forward": False}
"""Options of engines whose next forward waits for all updates."""


def given(setup: Setup) -> dict[str, Any]:
    """Return what is given, as engines take it: with whole master copies, weights that move in their own type, NCCL."""
    return {**dict(setup.given), "split_masters": None, "fp8_weights": None, "collectives": None, "speculate": None}


def gpu_only(setup: Setup) -> Iterator[RivalDecisions]:
    """Plain training: everything on the device; over several devices as ZeRO-1, 2 or 3 (FSDP)."""
    if setup.given.data_parallel == 1:
        yield from unsharded(setup)
        return
    for stage in (1, 2, 3):
        for activations in ACTIVATIONS:
            yield decide(setup, "gpu-only", activations, lambda _: Place.GPU, zero_stage=stage, **AFTER_BACKWARD)


def unsharded(setup: Setup) -> Iterator[RivalDecisions]:
    """Everything on every device: each rank updates all parameters, so the pieces are those of one rank."""
    alone = setup.changed(data_parallel=1, expert_parallel=1)
    for activations in ACTIVATIONS:
        placed = decide(alone, "gpu-only", activations, lambda _: Place.GPU, zero_stage=0, **AFTER_BACKWARD)
        yield placed.model_copy(
            update={name: getattr(setup.given, name) for name in ("data_parallel", "expert_parallel")}
        )


def num_subgroups(setup: Setup) -> int:
    """Return the number of subgroups of one rank's parameters, if they are cut across units."""
    return -(-sum(sum(pieces(setup, unit)) for unit in setup.units) // setup.given.subgroup_params)


def decide(
    setup: Setup,
    policy: str,
    activations: Activations,
    place: Callable[[int], Place],
    *,
    params: Literal["gpu", "host"] = "gpu",
    **options: object,
) -> RivalDecisions:
    """Return decisions that treat all units equally; ``place`` maps a subgroup's number to its place.

    These engines cut subgroups across units, we cut them within units. Each of our pieces counts for the subgroup in
    which it begins.
    """
    units: dict[str, UnitDecision] = {}
    offset = 0
    for unit in setup.units:
        sizes = pieces(setup, unit)
        starts = itertools.accumulate(sizes, initial=offset)
        units[unit.name] = UnitDecision(
            params=params if unit.num_weights else "gpu",
            activations=activations if unit.can_swap else "keep",
            update=tuple(place(start // setup.given.subgroup_params) for start, _ in zip(starts, sizes, strict=False)),
            streamed_gradients="gpu",  # Deep Optimizer States leaves them where they are
        )
        offset += sum(sizes)
    return RivalDecisions.model_validate({**given(setup), "policy": policy, "units": units, **options})
