"""The search: every engine policy as a seed, then local search over our own family, scored by the simulator.

Nothing is ever accepted that the simulator does not score better, so the result is never worse than the best seed.
Unless seconds are asked for, the budget is a number of simulations: the same inputs give the same plan on any machine.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args

from planner.choices.space import NEVER_S
from planner.decisions import Decisions, GradientPath, HostUpdate
from planner.engines.policies import POLICIES, mixed, ratel, zero_infinity
from planner.engines.setup import Mix, Setup
from planner.search.descent import descend
from planner.search.mixtures import first_look, smallest, starting_points
from planner.search.moves import polish
from planner.search.scoring import (
    ENDLESS,
    Candidate,
    Key,
    Outcome,
    Progress,
    Scorer,
    best_of,
    no_garbage_collection,
    traffic_bytes,
)
from planner.terms import Storage

# A plan may be this much slower than the fastest found if it moves fewer bytes; how many simulations to look for one.
_TIDY_SLOWER = 5e-3
_TIDY_SIMULATIONS = 40
# How many of them in a row may find none that moves less.
_TIDY_PATIENCE = 15
# So near to what is possible at best, no further search is worth its time.
_CLOSE = 1e-2
# How much is simulated if nobody says: so many schedules, or more of them if they are small.
_SIMULATIONS, _TASKS = 240, 400_000
# The share of the budget that is kept for moving single units.
_POLISH = 0.25
# If nobody says how long to look: the share of the budget in which nothing worth the time was found.
_PATIENCE = 0.125
# Likewise: what is only so much slower than possible at best ends a descent; twice the patience is for what is slower
# than that by more.
_NEAR, _FAR = 3e-3, 4e-2
# Of how many tenths of all segments activations are swapped, in seeds.
_SWAPPED_TENTHS = (0, 3, 6, 10)
# What remains of the budget for descents after each of them.
_LATER, _LATER_WITH_STORAGE = 0.3, 0.5


def search(
    setup: Setup, scorer: Scorer, max_simulations: int | None = None, progress: Progress | None = None
) -> Outcome:
    """Find decisions for a setup.

    Args:
        setup: what is asked for.
        scorer: scores candidates.
        max_simulations: stop the local search after so many; the seeds are always scored. By default as many as take a
            few seconds: schedules of small models have few tasks. For each kind of storage, as many again. Then it
            also stops where an eighth of them in a row have gained next to nothing, a quarter while nothing is found
            within a few percent of what is possible at best.
        progress: called with the best so far and the number of simulations.
    """

    def tell(candidate: Candidate) -> None:
        if progress:
            progress(candidate, scorer.num_simulations)

    engines = engine_policies(setup, scorer)
    # A plan is what we can run: of another engine its placement, driven our way, which is never slower.
    driven = [scorer.score(_driven_by_us(setup, candidate.decisions)) for candidate in engines.values()]
    driven += [candidate for candidate in engines.values() if candidate.decisions.executable]
    enough_s, kinds = NEVER_S, get_args(Storage)
    for kind in kinds[: kinds.index(setup.storage) + 1]:  # what does with less is found as if no more was allowed
        last, budget = kind == setup.storage, max_simulations
        if kind != "never":
            budget = None if budget is None else scorer.num_simulations + budget
        if kind == "nvme":
            driven += [scorer.score(_driven_by_us(setup, placement)) for placement in _swapping(setup)]
        allowed = dataclasses.replace(setup, storage=kind)
        best, bound_s = _improve(allowed, scorer, driven, engines, budget, tell, last=last, enough_s=enough_s)
        enough_s = NEVER_S if best.missing_bytes else min(bound_s * (1 - _CLOSE), NEVER_S)
        driven.append(best)
    return Outcome(best, engines, scorer.num_simulations)


def _improve(
    setup: Setup,
    scorer: Scorer,
    seeds: Iterable[Candidate],
    engines: Mapping[str, Candidate],
    max_simulations: int | None,
    tell: Callable[[Candidate], None],
    *,
    last: bool = True,
    enough_s: float = NEVER_S,
) -> tuple[Candidate, float]:
    """Return the best that is found from seeds and mixtures, and how fast anything can be at best.

    Args:
        setup: what is asked for.
        scorer: scores candidates.
        seeds: candidates to start from.
        engines: the best of every engine policy.
        max_simulations: see :func:`search`.
        tell: called with the best so far.
        last: whether no more storage will be allowed later, so that it is worth looking for what hardly fits.
        enough_s: if nothing can be faster than this, the best of the seeds is.
    """
    driven, storage = list(seeds), setup.storage != "never"
    best = best_of(driven)
    tell(best)
    starts, bound_s = starting_points(setup, scorer, enough_s)
    if bound_s >= enough_s or (bound_s == math.inf and not last):
        return best, bound_s
    before = scorer.num_simulations
    if max_simulations is None:
        num_default = _default_simulations(scorer, best, endless=last)
        num_default *= 2 if storage and enough_s == NEVER_S else 1  # nothing was searched with less
        far_s = bound_s * (1 + _FAR)
        scorer.be_patient(
            int(num_default * _PATIENCE), bound_s * (1 + _NEAR), far_s if best.order > (0.0, far_s) else math.inf
        )
        max_simulations = before + num_default
    room = max(max_simulations - before, 0)
    mix: Mix | None = None
    later = _LATER_WITH_STORAGE if storage else _LATER
    for number, start in enumerate(starts):
        # The more promising a start, the more of the budget; a part is always left for moving single units.
        limit = before + int(room * (1 - _POLISH) * (1 - later ** (number + 1)))
        if not best.missing_bytes and best.iteration_s <= max(start.bound_s, bound_s * (1 + _CLOSE)):
            continue  # nothing that is worth the time can be found from there
        trial, found = descend(setup, scorer, start.mix, lambda c: c.order, limit, tell, start.first_step)
        driven.append(found)
        if found.order < best.order:
            mix, best = trial, found
            tell(best)
    # From other ends too, the best first, as far as the budget goes: single moves do not lead everywhere.
    enough_s, limit = bound_s * (1 + _CLOSE), max(max_simulations, before)
    for end in (best, *sorted(driven, key=lambda candidate: candidate.order)):
        if best.order > (0.0, enough_s):
            best = best_of([best, polish(setup, scorer, end, enough_s, limit)])
    tell(best)
    scorer.be_patient()
    if mix is not None and best.decisions == mixed(setup, mix):
        # Equally fast is not equally good: what is hidden now may show when the model is off.
        limit_s = _tolerance_s(best, engines.values())
        tidy = scorer.num_simulations + _TIDY_SIMULATIONS
        _, best = descend(setup, scorer, mix, _quieter(limit_s), tidy, patience=_TIDY_PATIENCE)
        tell(best)
    return best, bound_s


def _default_simulations(scorer: Scorer, example: Candidate, *, endless: bool) -> int:
    """Return how many schedules are simulated if nobody says, or until when."""
    if scorer.deadline_s is not None and endless:
        return ENDLESS
    return max(_SIMULATIONS, _TASKS // scorer.schedule(example.decisions).num_tasks)


def engine_policies(setup: Setup, scorer: Scorer) -> dict[str, Candidate]:
    """Return the best candidate of every engine policy that does what is asked, by name."""
    found = {name: best_of(map(scorer.score, policy(setup))) for name, policy in POLICIES.items()}
    if setup.storage == "nvme":
        found["zero-infinity"] = best_of(map(scorer.score, zero_infinity(setup)))
        if not setup.clip:  # it updates during backward
            found["ratel"] = best_of(map(scorer.score, _swapping(setup)))
    return found


def _swapping(setup: Setup) -> Iterator[Decisions]:
    """Yield the placements of an engine that swaps all state and more or fewer activations."""
    num_segments = len(setup.swappable)
    counts = sorted({round(num_segments * tenths / 10) for tenths in _SWAPPED_TENTHS})
    for num_on_host in (None, 0):
        yield from ratel(setup, counts, num_on_host)


def _tolerance_s(found: Candidate, engines: Iterable[Candidate]) -> float:
    """Return how slow a tidier plan may be: a little slower than what was found, never slower than an engine."""
    fastest_s = min((engine.iteration_s for engine in engines if not engine.missing_bytes), default=float("inf"))
    return max(found.iteration_s, min(found.iteration_s * (1 + _TIDY_SLOWER), fastest_s))


def _quieter(limit_s: float) -> Key:
    """Return a sort key: what fits and is fast enough first, then what moves fewer bytes."""
    return lambda candidate: (candidate.overload, max(candidate.iteration_s - limit_s, 0.0), candidate.traffic_bytes)


def _driven_by_us(setup: Setup, decisions: Decisions) -> Decisions:
    early = not setup.clip
    return decisions.model_copy(
        update={
            "policy": "ullage",
            "overlap_next_forward": True,
            "host_update": HostUpdate.FUSED,
            "gradient_path": GradientPath.ONCE,
            "max_prefetch_params": None,
            "max_reuse_params": None,
            "module_hooks": False,
            "device_buffer_bytes": 0,
            "spill_gradients": False,
            "pinned_reads": True,
            "num_nvme_slots": Mix(0, 0, 0).num_nvme_slots,
            "clip": setup.clip,
            "update_start": "backward" if early else "step",
            "update_order": "backward" if early else "forward",
        }
    )


__all__ = [
    "Candidate",
    "Outcome",
    "Progress",
    "Scorer",
    "best_of",
    "engine_policies",
    "first_look",
    "no_garbage_collection",
    "search",
    "smallest",
    "traffic_bytes",
]
