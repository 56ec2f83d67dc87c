"""A random walk through mixes, which also goes on from slower ones: simulated annealing.

A descent changes one count at a time, and ends where no change helps. Often several counts have to change together:
more state is streamed, so fewer units are fetched, and more activations are kept. From the end of a descent, a walk
finds such changes. Its numbers are the same each time, so plans are too.
"""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence

from planner.placements import mixed
from planner.search.descent import filled, limits_of, repaired
from planner.search.scoring import Candidate, Scorer
from planner.setup import Mix, Setup

# A mix that is slower by this fraction of the first one's time is accepted once in e times at first, then less often.
_HEAT = 1e-2
# The most counts that change at a time, and by which fractions of their ranges; by one at least.
_MOST_COUNTS, _STEPS = 3, (0.0, 0.02, 0.05, 0.1)
# How often mixes that are rejected without a simulation may be tried, for each simulation.
_MOST_TRIES = 4


def walk(
    setup: Setup,
    scorer: Scorer,
    start: Mix,
    max_simulations: int,
    report: Callable[[Candidate], None] = lambda _: None,
) -> Candidate:
    """Return the best candidate on a walk of so many simulations from a mix that fits."""
    chance = random.Random(0)  # noqa: S311
    limits = limits_of(setup, start)
    changing = [name for name, limit in limits.items() if limit]
    mix, here = start, scorer.score(mixed(setup, start))
    best, first_s, begun = here, here.iteration_s, scorer.num_simulations
    for _ in range(_MOST_TRIES * max_simulations):
        left = 1 - (scorer.num_simulations - begun) / max_simulations
        if left <= 0 or scorer.spent():
            break
        names = chance.sample(changing, chance.randint(1, _MOST_COUNTS))
        trial = _stepped(mix, names, limits, chance)
        candidate = scorer.score(mixed(setup, trial))
        if candidate.missing_bytes:
            trial, candidate = repaired(setup, scorer, trial, candidate, names[0])
        elif chance.random() < 1 / 2:
            trial, candidate = filled(setup, scorer, trial, candidate)
        slower = candidate.iteration_s / first_s - here.iteration_s / first_s
        if not candidate.missing_bytes and chance.random() < math.exp(-max(slower, 0.0) / (_HEAT * left**2)):
            mix, here = trial, candidate
            if here.order < best.order:
                best = here
                report(best)
    return best


def _stepped(mix: Mix, names: Sequence[str], limits: Mapping[str, int], chance: random.Random) -> Mix:
    changed = {}
    for name in names:
        step = max(int(limits[name] * chance.choice(_STEPS)), 1) * chance.choice((-1, 1))
        changed[name] = min(max(getattr(mix, name) + step, int(name.endswith("_slots"))), limits[name])
    moved = dataclasses.replace(mix, **changed)
    return dataclasses.replace(moved, num_stream=min(moved.num_stream, limits["num_gpu"] - moved.num_gpu))
