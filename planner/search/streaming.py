"""The search for the decisions of an engine that streams layers."""

import itertools

from planner.engines.setup import Setup
from planner.engines.streaming import streaming
from planner.search.scoring import Candidate, Scorer

# The search moves so many layers at a time, from one way to save activations to another.
_STEPS = (8, 4, 2, 1)

Counts = tuple[int, int, int]
"""Layers whose activations are kept, layers whose activations are offloaded, layers that are resident."""


def best_streaming(setup: Setup, scorer: Scorer) -> Candidate:
    """Return the best candidate of such an engine: from the one that needs least memory, uphill in steps."""
    num_layers, num_units = len(setup.swappable), len(setup.units)

    def score(counts: Counts) -> Candidate:
        keep, offload, resident = counts
        return scorer.score(streaming(setup, keep, offload, min(2 * resident, num_units)))

    def inside(counts: Counts) -> bool:
        keep, offload, resident = counts
        return min(counts) >= 0 and keep + offload <= num_layers and resident <= -(-num_units // 2)

    counts: Counts = (0, 0, 0)
    best = score(counts)
    for step in _STEPS:
        while True:
            moves = itertools.product((-step, 0, step), repeat=3)
            near = filter(inside, ((counts[0] + a, counts[1] + b, counts[2] + c) for a, b, c in moves))
            top = min(near, key=lambda each: score(each).order)
            if score(top).order >= best.order:
                break
            counts, best = top, score(top)
    return best
