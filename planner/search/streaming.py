"""The search for the decisions of an engine that streams layers."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Final

from planner.decisions import Decisions
from planner.engines.setup import Setup
from planner.engines.streaming import streaming, with_own_head
from planner.search.scoring import ENDLESS, Candidate, Scorer

# The search moves so many layers at a time, from one way to save activations to another.
_STEPS = (8, 4, 2, 1)

Counts = tuple[int, int, int]
"""Layers whose activations are kept, layers whose activations are offloaded, layers that are resident."""

_STEP = (-1, 0, 1)
_NEIGHBOURS: Final[tuple[Counts, ...]] = tuple((a, b, c) for a in _STEP for b in _STEP for c in _STEP)

# The same in little time: parts of all layers, one kind of count at a time, and so many simulations at most.
_PARTS = (1, 2, 4, 8)
_AXES: Final[tuple[Counts, ...]] = ((1, 0, 0), (0, 0, 1), (0, 1, 0), (-1, 0, 0), (0, 0, -1), (0, -1, 0))
_MOST_SIMULATIONS = 10
_FEW_MICRO_BATCHES = 2


def best_streaming(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best candidate of such an engine: from the one that needs least memory, uphill in steps."""
    return _uphill(setup, scorer, streaming, _STEPS, _NEIGHBOURS)


def good_streaming(setup: Setup, scorer: Scorer) -> Candidate:
    """Return a candidate that is nearly as good, after a dozen simulations: what ``ullage plan`` has time for.

    They are of few micro-batches. Further ones change all candidates alike.
    """
    num_layers = len(setup.swappable)
    steps = dict.fromkeys(max(num_layers // parts, 1) for parts in _PARTS)
    few = dataclasses.replace(setup, num_micro_batches=min(setup.num_micro_batches, _FEW_MICRO_BATCHES))

    def place(setup: Setup, num_keep: int, num_offload: int, num_resident: int) -> Decisions:
        return with_own_head(streaming(setup, num_keep, num_offload, num_resident))

    found = _uphill(few, scorer, place, tuple(steps), _AXES, scorer.num_simulations + _MOST_SIMULATIONS)
    return scorer.score(found.decisions.model_copy(update={"num_micro_batches": setup.num_micro_batches}))


def _uphill(
    setup: Setup,
    scorer: Scorer,
    place: Callable[[Setup, int, int, int], Decisions],
    steps: Sequence[int],
    directions: Sequence[Counts],
    most_simulations: int = ENDLESS,
) -> Candidate:
    """Go from the candidate that needs least memory to the best neighbour, in ever smaller steps."""
    num_layers, num_units = len(setup.swappable), len(setup.units)

    def score(counts: Counts) -> Candidate:
        keep, offload, resident = counts
        return scorer.score(place(setup, keep, offload, min(2 * resident, num_units)))

    def inside(counts: Counts) -> bool:
        keep, offload, resident = counts
        return min(counts) >= 0 and keep + offload <= num_layers and resident <= -(-num_units // 2)

    counts: Counts = (0, 0, 0)
    best = score(counts)
    for step in steps:
        while True:
            moves = ((counts[0] + step * a, counts[1] + step * b, counts[2] + step * c) for a, b, c in directions)
            near = [each for each in moves if inside(each)]
            near = list(itertools.takewhile(lambda _: scorer.num_simulations < most_simulations, near))
            top = min(near, key=lambda each: score(each).order, default=counts)
            if score(top).order >= best.order:
                break
            counts, best = top, score(top)
    return best
