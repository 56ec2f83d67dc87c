"""The search over pipelines.

Everything is on the devices if that fits, and only recomputation is open. Later stages have fewer micro-batches in
flight, so more of their layers can keep activations in the same memory. If it does not fit, every stage moves the same
share of its state to the host, and then of its weights: as little as fits, by bisection. Gradients of what is streamed
stay on the device for all micro-batches where that is faster than to copy each of them. Where activations may leave
the devices, plans compete in which more or fewer layers offload theirs in place of recomputing them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from planner.decisions import Decisions, Place, Sharding, UnitDecision
from planner.graph import Unit
from planner.lowering.stages import of_stages, stage_of
from planner.placements import mixed
from planner.schedule.tasks import Tier
from planner.search import Candidate, Scorer, best_of
from planner.setup import Mix, Setup

_PARTS = 32
_STREAMED = (6, 10, 14, 18, 24, _PARTS)  # parts that are streamed, to be compared
_LEFT = (4, 8, 16, 24, _PARTS)  # parts of the layers whose activations leave, likewise
_STAYING = (4, 8, 16, 24, _PARTS)  # parts of the units whose gradients stay on the device if streamed, likewise
_COMPARED = {"streamed": _STREAMED, "left": _LEFT, "staying": _STAYING}
# What is raised after what: state that stays on a device takes the room that streamed state needs.
# Where gradients stay, more may be streamed: then fewer of them leave the device for each micro-batch.
_GROWING = ("streamed", "staying", "streamed")
_ORDERS = ("resident", "updated_there", *_GROWING, "kept"), (*_GROWING, "resident", "kept")


def search_pipeline(setup: Setup, scorer: Scorer) -> Candidate:
    """Find decisions for a pipeline, for every ZeRO stage: all on the devices, or else as little moved as fits."""
    stages = (0, 1) if setup.given.data_parallel > 1 else (0,)
    best = best_of(candidate for stage in stages for candidate in _halved(setup, scorer, stage))
    if best.missing_bytes:
        zero_stages = (0, *setup.zero_stages) if setup.given.data_parallel > 1 else (0,)
        best = best_of([best, *(found for stage in zero_stages for found in _offloaded(setup, scorer, stage))])
    elif setup.storage != "never":
        on_devices, seen = _Shares(_PARTS, updated_there=_PARTS), best.decisions.zero_stage
        least = scorer.score(_shared_out(setup, seen, on_devices))
        if not least.missing_bytes:
            found = _filled(on_devices, ("left", "kept"), lambda shares: scorer.score(_shared_out(setup, seen, shares)))
            best = best_of([best, least, *found])
    return best


def _offloaded(setup: Setup, scorer: Scorer, zero_stage: int) -> Iterator[Candidate]:
    """Yield candidates that fetch as few weights as fit, then update on devices, or stream, then keep activations."""

    def score(shares: _Shares) -> Candidate:
        return scorer.score(_shared_out(setup, zero_stage, shares))

    may_fetch = zero_stage in {0, 3}
    best = _Shares(resident=0 if may_fetch else _PARTS)
    yield (least := score(best))
    if least.missing_bytes:  # the host may lack what the devices have room for
        found, low, high = None, 1, _PARTS // 2 - 1
        while low <= high:  # the more stays on devices, the less the host lacks
            middle = (low + high) // 2
            shares = _Shares(resident=middle, updated_there=middle)
            if (missing := score(shares).missing_bytes).keys() - {Tier.GPU}:
                low = middle + 1
            else:
                found, high = found if missing else shares, middle - 1
        if found is None:
            return
        best = found
    for fields in _ORDERS:
        for leaving in ((), ("left",)) if setup.storage != "never" else ((),):
            yield from _filled(best, (*fields[:-1], *leaving, fields[-1]), score)


def _filled(best: "_Shares", fields: Sequence[str], score: Callable[["_Shares"], Candidate]) -> Iterator[Candidate]:
    """Yield candidates that raise one share after another, each as far as fits, or as is fastest."""
    for field in fields:
        if field == "updated_there" and best.resident < _PARTS:
            continue
        if field in _COMPARED:  # the host updates the others meanwhile, and links have other things to do
            ways = [best, *(best._replace(**{field: share}) for share in _COMPARED[field])]
            best = min((way for way in ways if not score(way).missing_bytes), key=lambda way: score(way).order)
        else:

            def fits(share: int, best: _Shares = best, field: str = field) -> bool:
                return not score(best._replace(**{field: share})).missing_bytes

            best = best._replace(**{field: _largest(fits, getattr(best, field), _PARTS)})
        yield score(best)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return the largest number that fits, from ``low``, which does, to ``high``, which is tried first."""
    if low == high or fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Shares(NamedTuple):
    """Parts of a stage, of :data:`_PARTS`.

    These are units with resident weights, subgroups streamed or resident, layers with activations kept or offloaded,
    and units whose gradients stay if their subgroups are streamed.
    """

    resident: int
    streamed: int = 0
    updated_there: int = 0
    kept: int = 0
    left: int = 0
    staying: int = 0


def _shared_out(setup: Setup, zero_stage: int, shares: _Shares) -> Decisions:
    """Return decisions in which every stage has these shares."""
    whole = staged(setup, 0, zero_stage)
    units: dict[str, UnitDecision] = {}
    for number in range(setup.given.pipeline_parallel):
        own, decided, _ = stage_of(setup.units, whole, number)
        stage = Setup(own, Sharding.model_validate({name: getattr(decided, name) for name in Sharding.model_fields}))
        mix = Mix(
            num_gpu=round(shares.updated_there * sum(stage.movable.values()) / _PARTS),
            num_stream=round(shares.streamed * sum(stage.movable.values()) / _PARTS),
            num_keep=round(shares.kept * len(stage.swappable) / _PARTS),
            num_offload=round(shares.left * len(stage.swappable) / _PARTS),
            num_host=round((_PARTS - shares.resident) * len(own) / _PARTS),
            num_stay=round(shares.staying * len(own) / _PARTS),
            zero_stage=zero_stage,
        )
        made = mixed(stage, mix)
        units |= made.units
    for unit in setup.units:  # a copy of shared weights is updated where the last subgroup of its unit is
        update = units[unit.name].update[: len(whole.units[unit.name].update)]
        units[unit.name] = units[unit.name].model_copy(update={"update": update})
    return whole.model_copy(update={"units": units})


def _halved(setup: Setup, scorer: Scorer, zero_stage: int) -> Iterator[Candidate]:
    """Yield candidates that keep all activations, none, and the most that fit."""

    def score(num_layers: int) -> Candidate:
        return scorer.score(staged(setup, num_layers, zero_stage))

    dealt = of_stages(setup.units, setup.given)
    most = max(len(_segments(stage)) for stage in dealt) * max(_num_in_flight(setup, 0), len(dealt))
    yield (everything := score(most))
    if everything.missing_bytes:
        yield (nothing := score(0))
        if not nothing.missing_bytes:
            yield score(_largest(lambda count: not score(count).missing_bytes, 0, most))


def _segments(chunks: list[list[list[Unit]]]) -> list[list[Unit]]:
    return [segment for chunk in chunks for segment in chunk]


def _num_in_flight(setup: Setup, stage: int) -> int:
    """Return the most micro-batches of which a stage holds the activations of a layer."""
    given = setup.given
    ahead = given.num_micro_batches if given.pipeline_rounds > 1 else given.pipeline_parallel - stage
    return min(ahead, given.num_micro_batches)


def staged(setup: Setup, num_layers: int, zero_stage: int) -> Decisions:
    """Return decisions in which each stage keeps as many activations as ``num_layers`` layers have in one micro-batch.

    A stage with several micro-batches in flight keeps those of fewer layers: its last ones.
    """
    keep: set[str] = set()
    for number, stage in enumerate(of_stages(setup.units, setup.given)):
        layers = [segment[0].segment for segment in _segments(stage) if segment[0].can_swap]
        count = min(num_layers // _num_in_flight(setup, number), len(layers))
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
