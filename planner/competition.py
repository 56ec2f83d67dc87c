"""Which choice of degrees and batch sizes is best: those that may be are searched, the most promising first.

A choice whose bound is no better than the best found so far needs no look, and of those that were looked at only the
best are searched. The certificate of the plan is one for all choices, also those that were passed over.
"""

import dataclasses
from collections.abc import Callable, Sequence

from planner.bounds.certificate import computing_s
from planner.bounds.conditions import conditions
from planner.bounds.solver import solve
from planner.bounds.space import NEVER_S
from planner.pipelining import search_pipeline
from planner.prediction import Workload
from planner.search import Candidate, Outcome, Scorer, first_look, search
from planner.variants import Variant

# How many choices are searched at most, looked at before that, and asked how fast they can be at best.
_MOST_SEARCHES, _MOST_LOOKS, _MOST_BOUNDS = 2, 10, 32
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
    if len(rivals) == 1:
        outcome = search(rivals[0].setup, _scorer(rivals[0], seq_len), max_simulations, progress)
        return rivals[0], outcome, {name: (rivals[0], candidate) for name, candidate in outcome.engines.items()}
    looks: list[tuple[Candidate, float, Variant, Scorer]] = []
    for bound_s, variant in _promising(rivals)[:_MOST_LOOKS]:
        best = min((look[0] for look in looks), key=lambda found: found.order, default=None)
        if best and not best.missing_bytes and bound_s >= best.iteration_s * (1 - _WORTH):
            break
        scorer = _scorer(variant, seq_len)
        looks.append((_look(variant, scorer), bound_s, variant, scorer))
    looks.sort(key=lambda look: look[0].order)
    found: list[tuple[Variant, Outcome]] = []
    for _, bound_s, variant, scorer in looks[:_MOST_SEARCHES]:
        if found and bound_s >= found[0][1].best.iteration_s * (1 - _WORTH):
            continue
        found.append((variant, _search(variant, scorer, max_simulations, progress)))
    num_simulations = sum(scorer.num_simulations for *_, scorer in looks)
    variant, outcome = min(found, key=lambda item: item[1].best.order)
    engines: dict[str, tuple[Variant, Candidate]] = {}
    for other, theirs in found:
        for name, candidate in theirs.engines.items():
            if name not in engines or candidate.order < engines[name][1].order:
                engines[name] = other, candidate
    return variant, dataclasses.replace(outcome, num_simulations=num_simulations), engines


def _scorer(variant: Variant, seq_len: int) -> Scorer:
    return Scorer(Workload(variant.setup.units, seq_len), variant.cost)


def _look(variant: Variant, scorer: Scorer) -> Candidate:
    if variant.choice.pipeline_parallel > 1:
        return search_pipeline(variant.setup, scorer).best
    return first_look(variant.setup, scorer)


def _search(
    variant: Variant, scorer: Scorer, max_simulations: int | None, progress: Callable[[Candidate, int], None] | None
) -> Outcome:
    if variant.choice.pipeline_parallel > 1:
        return search_pipeline(variant.setup, scorer, progress)
    return search(variant.setup, scorer, max_simulations, progress)


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
