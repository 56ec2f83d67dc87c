"""Which choice of degrees and batch sizes is best: those that may be are searched, the most promising first.

A choice whose bound is no better than the best plan found so far needs no search. What is pruned so is proven to be no
better, and the certificate of the plan says so for all choices.
"""

import dataclasses
from collections.abc import Callable, Sequence

from planner.bounds.certificate import computing_s
from planner.bounds.conditions import conditions
from planner.bounds.solver import solve
from planner.bounds.space import NEVER_S
from planner.pipelining import search_pipeline
from planner.prediction import Workload
from planner.search import Candidate, Outcome, Scorer, search
from planner.variants import Variant

# So many choices are searched at most, and of so many it is found out how fast they can be at best.
_MOST_SEARCHES, _MOST_BOUNDS = 6, 32
# A choice that can be no more than this much faster is not searched.
_WORTH = 1e-2


def compete(
    rivals: Sequence[Variant],
    seq_len: int,
    max_simulations: int | None = None,
    progress: Callable[[Candidate, int], None] | None = None,
) -> tuple[Variant, Outcome, dict[str, tuple[Variant, Candidate]]]:
    """Return the best of several choices, what the search found for it, and the best of every engine policy.

    Engine policies are the best of all choices that were searched, so that all that a user could tune is tuned.
    """
    promising = _promising(rivals) if len(rivals) > 1 else [(0.0, rivals[0])]
    found: list[tuple[Variant, Outcome]] = []
    num_simulations = 0
    for bound_s, variant in promising[:_MOST_SEARCHES]:
        best = min((outcome.best for _, outcome in found), key=lambda c: c.order, default=None)
        if best and not best.missing_bytes and bound_s >= best.iteration_s * (1 - _WORTH):
            break
        scorer = Scorer(Workload(variant.setup.units, seq_len), variant.cost)
        if variant.choice.pipeline_parallel > 1:
            outcome = search_pipeline(variant.setup, scorer, progress)
        else:
            outcome = search(variant.setup, scorer, max_simulations, progress)
        num_simulations += outcome.num_simulations
        found.append((variant, outcome))
    variant, outcome = min(found, key=lambda item: item[1].best.order)
    engines: dict[str, tuple[Variant, Candidate]] = {}
    for other, theirs in found:
        for name, candidate in theirs.engines.items():
            if name not in engines or candidate.order < engines[name][1].order:
                engines[name] = other, candidate
    return variant, dataclasses.replace(outcome, num_simulations=num_simulations), engines


def _promising(rivals: Sequence[Variant]) -> list[tuple[float, Variant]]:
    """Return how fast choices can be at best, in seconds, the fastest first; infinite where nothing fits."""
    bounds: list[tuple[float, Variant]] = []
    least_s = float("inf")
    for variant in sorted(rivals, key=computing_s):
        # What computes for longer than others take at best comes later, if at all.
        bound_s = computing_s(variant)
        if len(bounds) < _MOST_BOUNDS and bound_s < least_s * 2:
            stages = variant.space.stages()[-2:]
            solutions = [solve(conditions(space, variant.cost, NEVER_S)) for space in stages]
            bound_s = min((s.value for s in solutions if s), default=float("inf"))
            least_s = min(least_s, bound_s)
        bounds.append((bound_s, variant))
    return sorted(bounds, key=lambda item: item[0])
