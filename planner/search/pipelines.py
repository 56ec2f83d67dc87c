"""The search over pipelines.

Everything is on the devices if that fits, and only recomputation is open. Later stages have fewer micro-batches in
flight, so more of their layers can keep activations in the same memory. If it does not fit, every stage moves the same
share of its state to the host, and then of its weights: as little as fits, by bisection.
"""

from collections.abc import Iterator
from typing import NamedTuple

from planner.decisions import Decisions, Place, Sharding, UnitDecision
from planner.lowering.stages import deal, stage_of
from planner.placements import mixed
from planner.search import Candidate, Scorer, best_of
from planner.setup import Mix, Setup

_HALVINGS = 6


def search_pipeline(setup: Setup, scorer: Scorer) -> Candidate:
    """Find decisions for a pipeline, for every ZeRO stage: all on the devices, or else as little moved as fits."""
    stages = (0, 1) if setup.given.data_parallel > 1 else (0,)
    best = best_of(candidate for stage in stages for candidate in _halved(setup, scorer, stage))
    if best.missing_bytes:
        zero_stages = (0, *setup.zero_stages) if setup.given.data_parallel > 1 else (0,)
        best = best_of([best, *(found for stage in zero_stages for found in _offloaded(setup, scorer, stage))])
    return best


def _offloaded(setup: Setup, scorer: Scorer, zero_stage: int) -> Iterator[Candidate]:
    """Yield candidates that update some state on the host, or fetch some weights too; then keep activations again."""
    tried: dict[_Shares, Candidate] = {}

    def score(shares: _Shares) -> Candidate:
        if shares not in tried:
            tried[shares] = scorer.score(_shared_out(setup, zero_stage, shares))
        return tried[shares]

    may_fetch = zero_stage in {0, 3}
    least = _Shares(updated_there=0.0, fetched=1.0 if may_fetch else 0.0)
    yield score(least)
    if not score(least).missing_bytes:
        best = least
        for field, fits_at in (("fetched", 0.0), ("updated_there", 1.0), ("kept", 1.0)):
            if field == "updated_there" and best.fetched:
                continue
            low, high = getattr(best, field), fits_at  # the first fits
            for _ in range(_HALVINGS):
                middle = (low + high) / 2 if _ else high
                if score(best._replace(**{field: middle})).missing_bytes:
                    high = middle
                else:
                    low = middle
                    if middle == fits_at:
                        break
            best = best._replace(**{field: low})
    yield from tried.values()


class _Shares(NamedTuple):
    """Shares of a stage: subgroups updated on the device, units that are fetched, layers that keep activations."""

    updated_there: float
    fetched: float
    kept: float = 0.0


def _shared_out(setup: Setup, zero_stage: int, shares: _Shares) -> Decisions:
    """Return decisions in which every stage has these shares."""
    whole = staged(setup, 0, zero_stage)
    units: dict[str, UnitDecision] = {}
    for number in range(setup.given.pipeline_parallel):
        own, decided, _ = stage_of(setup.units, whole, number)
        stage = Setup(own, Sharding.model_validate({name: getattr(decided, name) for name in Sharding.model_fields}))
        num_layers = len(stage.swappable)
        mix = Mix(
            num_gpu=round(shares.updated_there * sum(stage.movable.values())),
            num_stream=0,
            num_keep=round(shares.kept * num_layers),
            num_host=round(shares.fetched * len(own)),
            zero_stage=zero_stage,
        )
        made = mixed(stage, mix)
        units |= made.units
    for unit in setup.units:  # a copy of shared weights is updated where the last subgroup of its unit is
        update = units[unit.name].update[: len(whole.units[unit.name].update)]
        units[unit.name] = units[unit.name].model_copy(update={"update": update})
    return whole.model_copy(update={"units": units})


def _halved(setup: Setup, scorer: Scorer, zero_stage: int) -> Iterator[Candidate]:
    """Yield candidates that keep all activations, none, and then bisect to the largest number that fits."""
    most = max(len(stage) for stage in deal(setup.units, setup.given.pipeline_parallel)) * setup.given.pipeline_parallel
    yield (everything := scorer.score(staged(setup, most, zero_stage)))
    if not everything.missing_bytes:
        return
    yield (nothing := scorer.score(staged(setup, 0, zero_stage)))
    low, high = 0, 0 if nothing.missing_bytes else most
    while high - low > 1:
        middle = (low + high) // 2
        yield (candidate := scorer.score(staged(setup, middle, zero_stage)))
        low, high = (low, middle) if candidate.missing_bytes else (middle, high)


def staged(setup: Setup, num_layers: int, zero_stage: int) -> Decisions:
    """Return decisions in which each stage keeps as many activations as ``num_layers`` layers have in one micro-batch.

    A stage with several micro-batches in flight keeps those of fewer layers: its last ones.
    """
    num_stages = setup.given.pipeline_parallel
    keep: set[str] = set()
    for number, stage in enumerate(deal(setup.units, num_stages)):
        layers = [segment[0].segment for segment in stage if segment[0].can_swap]
        count = min(num_layers // min(num_stages - number, setup.given.num_micro_batches), len(layers))
        keep |= set(layers[len(layers) - count :])
    given = setup.given.model_copy(update={"zero_stage": zero_stage})
    units = {
        unit.name: UnitDecision(
            params="gpu",
            activations="keep" if not unit.can_swap or unit.segment in keep else "recompute",
            update=(Place.GPU,) * len(given.piece_params(unit)),
        )
        for unit in setup.units
    }
    return Decisions(**dict(given), policy="ullage", units=units)
