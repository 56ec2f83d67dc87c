"""Moves of single subgroups, units and segments, and of two at a time."""

import itertools
import math
from collections.abc import Iterator
from typing import get_args

from planner.decisions import Activations, Decisions, Place, UnitDecision
from planner.search.scoring import Candidate, Scorer
from planner.setup import Setup


def polish(setup: Setup, scorer: Scorer, best: Candidate, enough_s: float, max_simulations: int) -> Candidate:
    """Change one decision at a time, as long as that helps and the budget lasts."""
    moved, num_trials = not best.missing_bytes, 0
    while moved:
        moved = False
        singles = neighbours(setup, best.decisions)
        pairs = (pair for one in neighbours(setup, best.decisions) for pair in neighbours(setup, one))
        for trial in itertools.chain(singles, pairs):  # of small models, the budget lasts for pairs too
            num_trials += 1  # a candidate that is rejected without a simulation takes time too
            if num_trials >= max_simulations or scorer.spent(max_simulations) or best.iteration_s <= enough_s:
                return best
            candidate = scorer.score(trial)
            if candidate.order < best.order:
                best, moved = candidate, True
                break
    return best


def neighbours(setup: Setup, decisions: Decisions) -> Iterator[Decisions]:
    """Yield decisions that differ in one subgroup, one unit's parameters, one segment's activations, or an exchange.

    Neighbours are in scattered order, so that a small budget still covers the whole model.
    """
    resident, storage, places, activations = setup.tied, setup.storage, list(Place), list(get_args(Activations))
    if storage != "nvme":
        places.remove(Place.NVME)
        activations = ["keep", "recompute", *(["offload"] if storage == "activations" else [])]
    segments = {segment: [u for u in setup.units if u.segment == segment] for segment in setup.swappable}
    movable = [unit for unit in setup.units if not unit.writes]
    for _, unit in sorted(enumerate(movable), key=lambda numbered: _scattered(numbered[0])):
        old = decisions.units[unit.name]
        changed: list[UnitDecision] = []
        for piece, place in itertools.product(range(len(old.update)), places):
            update = (*old.update[:piece], place, *old.update[piece + 1 :])
            params = "host" if old.params == "nvme" and place is not Place.NVME else old.params
            changed.append(old.model_copy(update={"update": update, "params": params}))
        changed.append(old.model_copy(update={"params": "host" if old.params == "gpu" else "gpu"}))
        if Place.STREAM in old.update:
            other = "host" if old.streamed_gradients == "gpu" else "gpu"
            changed.append(old.model_copy(update={"streamed_gradients": other}))
        if storage == "nvme":
            whole = {"params": "nvme", "update": (Place.NVME,) * len(old.update)}
            changed.append(old.model_copy(update=whole))
        for new in changed:
            fetched = new.fetched and (Place.GPU in new.update or unit.name in resident or decisions.regathers(unit))
            if new != old and unit.num_weights and not fetched:
                yield decisions.model_copy(update={"units": decisions.units | {unit.name: new}})
        if unit.can_swap and segments[unit.segment][0] is unit:
            for way in (way for way in activations if way != old.activations):
                whole_segment = {
                    other.name: decisions.units[other.name].model_copy(update={"activations": way})
                    for other in segments[unit.segment]
                }
                yield decisions.model_copy(update={"units": decisions.units | whole_segment})
    yield from _exchanges(setup, decisions)


def _exchanges(setup: Setup, decisions: Decisions) -> Iterator[Decisions]:
    """Yield decisions in which two units exchange their update places.

    Memory stays about the same on every tier. The places of their parameters are exchanged too, or all parameters
    become resident.
    """
    resident = setup.tied
    for one, other in itertools.combinations((unit for unit in setup.units if unit.num_params and not unit.writes), 2):
        old = (decisions.units[one.name], decisions.units[other.name])
        if old[0].update[0] is old[1].update[0]:
            continue
        for exchange_params in (True, False):
            changed = {} if exchange_params else _all_resident(decisions)
            for unit, own, there in ((one, *old), (other, *old[::-1])):
                place = there.update[0]
                fixed = unit.name in resident or decisions.regathers(unit)
                stays = place is Place.GPU or fixed or not exchange_params
                params = "gpu" if stays else there.params
                changed[unit.name] = own.model_copy(update={"update": (place,) * len(own.update), "params": params})
            yield decisions.model_copy(update={"units": decisions.units | changed})


def _all_resident(decisions: Decisions) -> dict[str, UnitDecision]:
    return {name: unit.model_copy(update={"params": "gpu"}) for name, unit in decisions.units.items()}


def _scattered(position: int) -> float:
    """Return a sort key that moves neighbours far apart (multiples of the golden ratio)."""
    return position * (math.sqrt(5) - 1) / 2 % 1
