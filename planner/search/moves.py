"""Moves of single subgroups, units and segments, and of two at a time."""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, get_args

from planner.decisions import Activations, Decisions, Place, UnitDecision
from planner.graph import Unit
from planner.search.scoring import Candidate, Scorer
from planner.setup import Setup

Move = tuple[dict[str, UnitDecision], dict[str, int]]
"""The decisions that it changes, by unit, and the numbers of slots, by attribute."""

_SLOTS: Final = ("num_param_slots", "num_state_slots", "num_gradient_slots")


def polished(
    setup: Setup, scorer: Scorer, best: Candidate, enough_s: float, max_simulations: int, trials: Iterator[int]
) -> Iterator[Candidate]:
    """Change one decision at a time, as long as that helps and the budget lasts; yield each that is better.

    ``trials`` ends the search too: a candidate that is rejected without a simulation takes time, of a pipeline as much.
    """
    helped = not best.missing_bytes
    while helped:
        begun, helped = best.decisions, False
        pairs = () if begun.pipeline_parallel > 1 else _pairs(setup, begun)  # for which no budget of a pipeline lasts
        for move in itertools.chain(moves(setup, begun), pairs):
            if any(best.decisions.units[name] is not begun.units[name] for name in move[0]):
                continue  # moved already
            is_over = next(trials, None) is None or scorer.spent(max_simulations)
            if is_over or best.iteration_s <= enough_s:
                return
            candidate = scorer.score(moved(best.decisions, move))
            if candidate.order < best.order:
                best, helped = candidate, True
                yield best


def moved(decisions: Decisions, move: Move) -> Decisions:
    """Return decisions that a move has changed."""
    units, slots = move
    return decisions.model_copy(update={"units": decisions.units | units, **slots})


def _pairs(setup: Setup, decisions: Decisions) -> Iterator[Move]:
    """Yield two moves at a time, but no slots more. Of small models, a budget lasts for these too."""
    for units, slots in _unit_moves(setup, decisions):
        changed = moved(decisions, (units, slots))
        others = itertools.chain(_slot_moves(decisions, -1), _unit_moves(setup, changed), _exchanges(setup, changed))
        yield from ((units | other_units, other_slots) for other_units, other_slots in others)


def moves(setup: Setup, decisions: Decisions) -> Iterator[Move]:
    """Yield moves of one number of slots, one subgroup, one unit's parameters or one segment's activations; exchanges.

    Layers are alike: what helps one helps others. So that a small budget covers every kind of move, those of one unit
    of each kind come first, then those of another one of each, which is far from the first.
    """
    yield from _slot_moves(decisions, -1, 1)
    yield from _unit_moves(setup, decisions)
    yield from _exchanges(setup, decisions)


def _slot_moves(decisions: Decisions, *changes: int) -> Iterator[Move]:
    for name, change in itertools.product(_SLOTS, changes):
        if number := getattr(decisions, name) + change:
            yield {}, {name: number}


def _unit_moves(setup: Setup, decisions: Decisions) -> Iterator[Move]:
    resident, storage, places, activations = setup.tied, setup.storage, list(Place), list(get_args(Activations))
    if storage != "nvme":
        places.remove(Place.NVME)
        activations = ["keep", "recompute", *(["offload"] if storage == "activations" else [])]
    segments = {segment: [u for u in setup.units if u.segment == segment] for segment in setup.swappable}
    movable = [unit for unit in setup.units if not unit.writes]
    for unit in _one_of_each_first(movable, decisions):
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
                yield {unit.name: new}, {}
        if unit.can_swap and segments[unit.segment][0] is unit:
            for way in (way for way in activations if way != old.activations):
                whole_segment = {
                    other.name: decisions.units[other.name].model_copy(update={"activations": way})
                    for other in segments[unit.segment]
                }
                yield whole_segment, {}


def _exchanges(setup: Setup, decisions: Decisions) -> Iterator[Move]:
    """Yield moves by which two units exchange their update places.

    Memory stays about the same on every tier. The places of their parameters are exchanged too, or all parameters
    become resident.
    """
    resident = setup.tied
    all_resident = {name: unit.model_copy(update={"params": "gpu"}) for name, unit in decisions.units.items()}
    for one, other in itertools.combinations((unit for unit in setup.units if unit.num_params and not unit.writes), 2):
        old = (decisions.units[one.name], decisions.units[other.name])
        if old[0].update[0] is old[1].update[0]:
            continue
        for exchange_params in (True, False):
            changed = {} if exchange_params else all_resident.copy()
            for unit, own, there in ((one, *old), (other, *old[::-1])):
                place = there.update[0]
                fixed = unit.name in resident or decisions.regathers(unit)
                stays = place is Place.GPU or fixed or not exchange_params
                params = "gpu" if stays else there.params
                changed[unit.name] = own.model_copy(update={"update": (place,) * len(own.update), "params": params})
            yield changed, {}


def _one_of_each_first(units: Iterable[Unit], decisions: Decisions) -> list[Unit]:
    """Return units, first one of each kind, that is, of one size and with one decision; then another one of each."""
    kinds = defaultdict[tuple[str, UnitDecision], list[Unit]](list)
    for _, unit in sorted(enumerate(units), key=lambda numbered: _scattered(numbered[0])):
        kinds[unit.size_name, decisions.units[unit.name]].append(unit)
    return [unit for those in itertools.zip_longest(*kinds.values()) for unit in those if unit is not None]


def _scattered(position: int) -> float:
    """Return a sort key that moves neighbours far apart (multiples of the golden ratio)."""
    return position * (math.sqrt(5) - 1) / 2 % 1
