"""The search: local search over our own family of plans, scored by the simulator.

It starts from everything on the device, from optimal mixtures under necessary conditions, and with NVMe from everything
there. A candidate is accepted only if the simulator scores it better, so the result is never worse than the best start.
The budget is a number of simulations, unless the user gives seconds. So the same inputs give the same plan on any
machine.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from planner.bounds.program import NEVER_S
from planner.decisions import Decisions
from planner.placements import resident, swapping
from planner.schedule.tasks import Tier
from planner.search.descent import SMALL_STEP, descend
from planner.search.mixtures import first_look, smallest, starting_points
from planner.search.moves import polished
from planner.search.scoring import (
    ENDLESS,
    MANY,
    Candidate,
    Key,
    Progress,
    Scorer,
    best_of,
    no_garbage_collection,
    traffic_bytes,
)
from planner.search.walk import walk
from planner.setup import Mix, Setup
from planner.simulate.prediction import capacities
from planner.terms import Storage

# A plan that moves fewer bytes may be this much slower than the fastest; so many simulations look for such a plan.
_TIDY_SLOWER = 5e-3
_TIDY_SIMULATIONS = 40
# The look ends after so many simulations in a row without success.
_TIDY_PATIENCE = 15
# A plan within this fraction of the lower bound is good enough.
_CLOSE = 1e-2
# The default budget: so many simulations, or, of small schedules, so many that they have this number of tasks. Of large
# schedules, as those of pipelines are, at most so many that they have the last number.
_SIMULATIONS, _TASKS, _MOST_TASKS = 240, 400_000, 1_500_000
# The share of the budget for moving single units.
_POLISH = 0.25
# The length of a walk, as a share of the default budget.
_WALK = 0.5
# With the default budget, the search ends after this share of it in a row without a gain.
_PATIENCE = 0.125
# With the default budget, a descent ends within the first fraction of the lower bound. The patience is doubled as long
# as the best plan is further from the bound than the second fraction. Only then is more storage tried.
_NEAR, _FAR = 3e-3, 4e-2
# Seeds swap the activations of so many tenths of all segments.
_SWAPPED_TENTHS = (0, 3, 6, 10)
# The share of the budget that each descent leaves to later ones.
_LATER, _LATER_WITH_STORAGE = 0.3, 0.5

End = tuple[Mix | None, Candidate]
"""What a descent has found; or a seed, which may be no mix."""


def search(
    setup: Setup,
    scorer: Scorer,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    seeds: Iterable[Decisions] = (),
) -> Candidate:
    """Return the best decisions found for a setup, which may not fit if none do.

    Args:
        setup: the model, the machine and what the user has fixed.
        scorer: scores candidates.
        max_simulations: stop the local search after so many; starts are always scored. By default as many as take a few
            seconds: schedules of small models have few tasks. For each kind of storage, as many again. Then it
            also stops where an eighth of them in a row have gained next to nothing, a quarter while nothing is found
            within a few percent of what is possible at best.
        progress: called with the best so far and the number of simulations.
        seeds: further decisions for the setup to start from.
    """
    return refined(setup, scorer, descents(setup, scorer, max_simulations, progress, seeds), max_simulations, progress)


def descents(
    setup: Setup,
    scorer: Scorer,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    seeds: Iterable[Decisions] = (),
) -> list[End]:
    """Return what changing counts alone finds, the best first; see :func:`search`."""
    report = _reporting(scorer, progress)
    found = [*_all_resident(setup, scorer), *map(scorer.score, seeds)]
    enough_s, kinds = NEVER_S, get_args(Storage)
    for kind in kinds[: kinds.index(setup.storage) + 1]:  # first plans that need less storage
        last, budget = kind == setup.storage, max_simulations
        if kind != "never":
            budget = None if budget is None else scorer.num_simulations + budget
        if kind == "nvme":
            found += map(scorer.score, _swapping(setup))
        allowed = dataclasses.replace(setup, storage=kind)
        ends = _improve(allowed, scorer, found, budget, report, last=last, enough_s=enough_s)
        _, best = ends[0]
        enough_s = NEVER_S if best.missing_bytes else best.iteration_s * (1 - _FAR)
        found.append(best)
    return ends


def _improve(
    setup: Setup,
    scorer: Scorer,
    seeds: Iterable[Candidate],
    max_simulations: int | None,
    report: Callable[[Candidate], None],
    *,
    last: bool = True,
    enough_s: float = NEVER_S,
) -> list[End]:
    """Return the best plan found from seeds and mixtures, then the best one of each.

    Args:
        setup: the model, the machine and what the user has fixed.
        scorer: scores candidates.
        seeds: candidates to start from, scored.
        max_simulations: see :func:`search`.
        report: called with the best so far.
        last: whether no later search may use more storage, so that plans that hardly fit are worth looking for.
        enough_s: if the lower bound is not below this, the best seed is returned.
    """
    given, storage = list(seeds), setup.storage != "never"
    best, limit_s = best_of(given), _fastest_s(given)
    ends: list[End] = [(None, seed) for seed in given]
    report(best)
    starts, bound_s = starting_points(setup, scorer, enough_s)
    if bound_s >= enough_s or (bound_s == math.inf and not last):
        if last and best.missing_bytes:  # a solver says that nothing fits, which is no proof
            best = best_of([best, *map(scorer.score, smallest(setup))])
        return [(None, best)]
    before = scorer.num_simulations
    if max_simulations is None:
        num_default = _default_simulations(scorer, best)
        num_default *= 2 if storage and enough_s == NEVER_S else 1  # no search with less storage found anything
        far_s = bound_s * (1 + _FAR)
        scorer.set_patience(
            int(max(num_default, _SIMULATIONS) * _PATIENCE),
            bound_s * (1 + _NEAR),
            far_s if best.order > (0.0, far_s) else math.inf,
        )
        max_simulations = before + num_default
    room = max(max_simulations - before, 0)
    mix: Mix | None = None
    later = _LATER_WITH_STORAGE if storage else _LATER
    for number, (first_step, stage_s, start) in enumerate(starts):
        # The most promising start gets most of the budget. A part is always left for moving single units.
        limit = before + int(room * (1 - _POLISH) * (1 - later ** (number + 1)))
        if not best.missing_bytes and best.iteration_s <= max(stage_s, bound_s * (1 + _CLOSE)):
            continue  # a descent from there cannot gain enough
        trial, found = descend(setup, scorer, start, lambda c: c.order, limit, report, first_step)
        ends.append((trial, found))
        if found.order < best.order:
            mix, best = trial, found
            report(best)
    scorer.set_patience()
    if mix is not None:
        # A plan that moves fewer bytes may be slower for now: from there, descents reach what was beyond a ridge. Of
        # equally fast plans it is the better one: hidden traffic may show if the prediction is off.
        limit_s = max(best.iteration_s, min(best.iteration_s * (1 + _TIDY_SLOWER), limit_s))
        tidy = scorer.num_simulations + _TIDY_SIMULATIONS
        mix, quiet = descend(setup, scorer, mix, _quieter(limit_s), tidy, patience=_TIDY_PATIENCE)
        tidy = scorer.num_simulations + _TIDY_SIMULATIONS
        ends += [
            (mix, quiet),
            descend(setup, scorer, mix, lambda c: c.order, tidy, report, SMALL_STEP, _TIDY_PATIENCE),
        ]
    ends.sort(key=lambda end: (end[1].order, end[1].traffic_bytes))
    report(ends[0][1])
    return ends


def refined(
    setup: Setup,
    scorer: Scorer,
    ends: Sequence[End],
    max_simulations: int | None = None,
    progress: Progress | None = None,
    enough_s: float = 0.0,
) -> Candidate:
    """Return the best plan after a walk, and after moves of single units, from what descents have found.

    It uses no other storage than the best of these.

    Single moves do not reach everything, so they start from others too, the best first, within the budget.

    Args:
        setup: see :func:`search`.
        scorer: likewise.
        ends: what descents have found.
        max_simulations: see :func:`search`.
        progress: see :func:`search`.
        enough_s: a plan as fast as this is good enough.
    """
    report, (mix, best) = _reporting(scorer, progress), ends[0]
    num_default = _default_simulations(scorer, best)
    allowed = setup if best.decisions.uses_storage else dataclasses.replace(setup, storage="never")
    num_walked = int(num_default * _WALK)
    if max_simulations is not None:
        num_walked = min(num_walked, int((max_simulations - scorer.num_simulations) * (1 - _POLISH)))
    if mix is not None and num_walked > 0 and not best.missing_bytes and best.iteration_s > enough_s:
        best = best_of([best, walk(allowed, scorer, mix, num_walked, report)])
    if max_simulations is None:
        scorer.set_patience(int(max(num_default, _SIMULATIONS) * _PATIENCE))
        max_simulations = scorer.num_simulations + num_default
    # Of all ends together. To lower a pipeline takes as long as a simulation.
    num_trials = max_simulations - (scorer.num_simulations if setup.given.pipeline_parallel > 1 else 0)
    trials = iter(range(num_trials))
    for end in (best, *(found for _, found in ends)):
        if best.order <= (0.0, enough_s):
            break
        for found in polished(allowed, scorer, end, enough_s, max_simulations, trials):
            best = best_of([best, found])
            report(best)
    scorer.set_patience()
    return best


def _reporting(scorer: Scorer, progress: Progress | None) -> Callable[[Candidate], None]:
    """Return what reports a candidate, with the number of simulations."""
    return lambda candidate: progress(candidate, scorer.num_simulations) if progress else None


def _default_simulations(scorer: Scorer, example: Candidate) -> int:
    num_tasks = scorer.schedule(example.decisions).num_tasks
    return max(min(_SIMULATIONS, _MOST_TASKS // num_tasks), _TASKS // num_tasks)


def _all_resident(setup: Setup, scorer: Scorer) -> Iterator[Candidate]:
    """Yield everything on the device, in every ZeRO stage: recomputed only where keeping activations does not fit."""
    placements = list(resident(setup))
    # When forward ends, all kept activations are on the device.
    may_fit = sum(unit.num_tiles * unit.saved_bytes for unit in setup.units) <= capacities(scorer.cost)[Tier.GPU]
    for kept, recomputed in zip(placements[::2], placements[1::2], strict=True):
        ways = (kept, recomputed) if may_fit else (recomputed,)
        for way in ways:
            yield (candidate := scorer.score(way))
            if not candidate.missing_bytes:
                break


def _swapping(setup: Setup) -> Iterator[Decisions]:
    """Yield placements that swap all state, and the activations of more or fewer segments."""
    num_segments = len(setup.swappable)
    counts = sorted({round(num_segments * tenths / 10) for tenths in _SWAPPED_TENTHS})
    for evicts in (False, True):
        for count in counts:
            yield swapping(setup, count, count if evicts else 0)


def _fastest_s(candidates: Iterable[Candidate]) -> float:
    return min((candidate.iteration_s for candidate in candidates if not candidate.missing_bytes), default=math.inf)


def _quieter(limit_s: float) -> Key:
    """Return a sort key: candidates that fit and are fast enough first, then by the bytes that they move."""
    return lambda candidate: (candidate.overload, max(candidate.iteration_s - limit_s, 0.0), candidate.traffic_bytes)


__all__ = [
    "ENDLESS",
    "MANY",
    "Candidate",
    "End",
    "Progress",
    "Scorer",
    "best_of",
    "descents",
    "first_look",
    "no_garbage_collection",
    "refined",
    "search",
    "smallest",
    "traffic_bytes",
]
