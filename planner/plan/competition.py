"""Find the best choice of degrees and batch sizes.

Choices are bounded first. A choice whose bound is no better than the best plan found so far is skipped. The others get
a short search, the most promising first, and only the best of them a full search. The plan's certificate covers all
choices, skipped ones too.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from planner.bounds.certificate import certify, computing_s
from planner.bounds.conditions import conditions
from planner.bounds.program import NEVER_S
from planner.bounds.proof import Certificate, Proof
from planner.bounds.solver import solve
from planner.choices.variants import Variant
from planner.decisions import Choice, Decisions, Place
from planner.placements import resident
from planner.search import (
    ENDLESS,
    MANY,
    Candidate,
    End,
    Progress,
    Scorer,
    best_of,
    descents,
    first_look,
    no_garbage_collection,
    refined,
    search,
    smallest,
)
from planner.simulate.prediction import Prediction

# The most choices that get a short search, and a bound.
_MOST_LOOKS, _MOST_BOUNDS = 12, 32
# The most that get a full search: of one with other tiles or fetches, and of the best with other batches or degrees.
_MOST_ALIKE, _MOST_OTHERS = 2, 2
# Choices that differ in these alone have nearly the same plans.
_ALIKE: Final = {
    "loss_tile_tokens": None,
    "layer_tile_tokens": None,
    "segment_tile_sequences": None,
    "fp8_weights": None,
    "split_masters": None,
}
# A choice is skipped, and moves of single units are not tried, if the bound is less than this much faster.
_WORTH = 1e-2
# Stages whose search takes long are not searched in full either if they would have to gain more than so many times what
# the first choice gained.
_MOST_GAIN = 2.0
# A plan is searched for again if its whole iteration takes so much more or less than it was scored.
_EXACT = 1e-2


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan found for a request, without its certificate.

    Attributes:
        own: its variant.
        best: the best candidate.
        rivals: all variants.
        searched: the variants that got a full search.
        num_simulations: number of simulated schedules, for all variants.
        misfits: proofs for choices and ZeRO stages that do not fit, if they were begun beside the search.
    """

    own: Variant
    best: Candidate
    rivals: Sequence[Variant]
    searched: tuple[Variant, ...]
    num_simulations: int
    misfits: Future[dict[tuple[Choice, int], Proof]] | None = None

    @property
    def decisions(self) -> Decisions:
        """Its decisions."""
        return self.best.decisions

    @functools.cached_property
    def prediction(self) -> Prediction:
        """Its predicted time and memory."""
        return Scorer.of(self.own).predict(self.decisions)

    @property
    def is_as_scored(self) -> bool:
        """Whether it takes as long and as much memory as it was scored; see [Note: Few micro-batches]."""
        if self.best.missing_bytes or self.decisions.num_micro_batches < MANY:
            return True
        seen = self.prediction
        off = abs(seen.iteration_s / self.best.iteration_s - 1)
        return off < _EXACT and not any(use.missing_bytes for use in seen.memory.values())

    def certificate(self) -> Certificate:
        """Prove a lower bound on the time of any schedule. This takes about as long as the search."""
        misfits = self.misfits.result() if self.misfits else {}
        return certify(self.rivals, self.own, self.decisions, self.prediction.iteration_s, misfits)


@dataclasses.dataclass(frozen=True)
class _Look:
    variant: Variant
    scorer: Scorer
    bound_s: float
    found: Candidate

    @property
    def num_tiled(self) -> int:
        return sum(tokens is not None for tokens in self.variant.choice.tiles.values())


@no_garbage_collection()
def compete(
    rivals: Sequence[Variant],
    max_simulations: int | None = None,
    progress: Progress | None = None,
    deadline_s: float | None = None,
) -> Found:
    """Return the best of several choices."""
    found = _compete(rivals, max_simulations, progress, deadline_s, whole=False)
    return found if found.is_as_scored else _compete(rivals, max_simulations, progress, deadline_s, whole=True)


def _compete(
    rivals: Sequence[Variant],
    max_simulations: int | None,
    progress: Progress | None,
    deadline_s: float | None,
    *,
    whole: bool,
) -> Found:
    if len(rivals) == 1:
        scorer = Scorer.of(rivals[0], deadline_s, whole=whole)
        ends = descents(rivals[0].setup, scorer, max_simulations, progress)
        best = _finished(rivals[0], scorer, ends, max_simulations, progress, computing_s(rivals[0]))
        return Found(rivals[0], best, rivals, (rivals[0],), scorer.num_simulations)
    looks: list[_Look] = []
    looking_until_s = _share(deadline_s, 2)
    for bound_s, variant in _promising(rivals):
        so_far = min((look.found for look in looks), key=lambda found: found.order, default=None)
        hopeless = so_far and not so_far.missing_bytes and bound_s >= so_far.iteration_s * (1 - _WORTH)
        if looks and (hopeless or len(looks) == _MOST_LOOKS or looks[0].scorer.spent()):
            break
        scorer = Scorer.of(variant, looking_until_s, whole=whole)
        looks.append(_Look(variant, scorer, bound_s, first_look(variant.setup, scorer)))
        if progress:
            progress(looks[-1].found, sum(look.scorer.num_simulations for look in looks))
    looks.sort(key=lambda look: look.found.order)
    found: list[tuple[_Look, list[End]]] = []
    # A search begins with the plans of those before it. Tiles need less memory, so any plan without tiles fits there.
    finalists = sorted(_finalists(looks), key=lambda look: (look.found.overload, look.num_tiled))
    for number, look in enumerate(finalists):
        look.scorer.deadline_s = _share(deadline_s, len(finalists) - number)
        if not found or (look.bound_s < _fastest_s(found) * (1 - _WORTH) and not _lags(look, found)):
            ends = descents(look.variant.setup, look.scorer, max_simulations, progress, _handed_on(look, found))
            found.append((look, ends))
    best_look, ends = min(found, key=lambda item: item[1][0][1].order)
    best_look.scorer.deadline_s = deadline_s
    best = _finished(best_look.variant, best_look.scorer, ends, max_simulations, progress, best_look.bound_s)
    searched = tuple(look.variant for look, _ in found)
    num_simulations = sum(look.scorer.num_simulations for look in looks)
    return Found(*_plainest(rivals, best_look.variant, best), rivals, searched, num_simulations)


def _share(deadline_s: float | None, parts: int) -> float | None:
    """Return the end of the first of so many equal parts of the time that is left."""
    if deadline_s is None:
        return None
    now_s = time.monotonic()
    return now_s + max(deadline_s - now_s, 0.0) / parts


def _finished(
    variant: Variant,
    scorer: Scorer,
    ends: Sequence[End],
    max_simulations: int | None,
    progress: Progress | None,
    bound_s: float,
) -> Candidate:
    """Return the best plan after moves of single units; if there is a deadline, after a search from it until then."""
    if scorer.deadline_s is None or scorer.spent():
        return refined(variant.setup, scorer, ends, max_simulations, progress, bound_s * (1 + _WORTH))
    return search(variant.setup, scorer, ENDLESS, progress, [ends[0][1].decisions])


def _fastest_s(found: Sequence[tuple[_Look, list[End]]]) -> float:
    best = min((ends[0][1] for _, ends in found), key=lambda end: end.order)
    return math.inf if best.missing_bytes else best.iteration_s


def _lags(look: _Look, found: Sequence[tuple[_Look, list[End]]]) -> bool:
    """Return whether stages are so much slower after their look that a search of them is not likely to win.

    Searches of stages gain a few percent on looks, and those of other choices for the same request gain about as much.
    """
    (first, ends), best_s = found[0], _fastest_s(found)
    gained = first.found.iteration_s / ends[0][1].iteration_s - 1
    compared = (look.found, first.found, ends[0][1])
    fit = not any(candidate.missing_bytes for candidate in compared)
    return (
        look.variant.choice.pipeline_parallel > 1
        and fit
        and look.found.iteration_s / best_s - 1 > _MOST_GAIN * max(gained, _WORTH)
    )


def _finalists(looks: Sequence[_Look]) -> list[_Look]:
    """Return what gets a full search of choices in order: of the first kind, and the best of the next kinds.

    Of the first kind, this is the best one and those with the lowest bounds: looks are too short to compare the others.
    """
    alike: dict[Choice, list[_Look]] = {}
    for look in looks:
        alike.setdefault(look.variant.choice.model_copy(update=_ALIKE), []).append(look)
    ((best, *next_best), *others) = alike.values()
    hopeful = sorted(next_best, key=lambda look: look.bound_s)[: _MOST_ALIKE - 1]
    return [best, *hopeful, *(other[0] for other in others[:_MOST_OTHERS])]


def _plainest(rivals: Sequence[Variant], winner: Variant, best: Candidate) -> tuple[Variant, Candidate]:
    """Return the same plan without fetches in fp8 or split master copies if it has none: a plan of another choice."""
    decisions = best.decisions
    in_use = {
        "fp8_weights": any(map(decisions.moves_fp8, winner.setup.units)),
        "split_masters": any(set(unit.update) - {Place.GPU} for unit in decisions.units.values()),
    }
    without = {field: None for field, is_in_use in in_use.items() if not is_in_use}
    for rival in rivals:
        if rival.choice == winner.choice.model_copy(update=without):
            return rival, dataclasses.replace(best, decisions=decisions.model_copy(update=without))
    return winner, best


def closest(rival: Variant, scorer: Scorer) -> Candidate:
    """Return the candidate of a choice that lacks least memory, if nothing fits."""
    tried = list(smallest(rival.setup))
    if rival.cost.profile.one_memory:  # it is the device's
        tried += resident(rival.setup)
    return best_of(map(scorer.score, tried))


@no_garbage_collection()
def first_fit(rivals: Sequence[Variant]) -> Candidate | None:
    """Return a candidate that fits, from short searches of the first choices; ``None`` if there is none."""
    for rival in sorted(rivals, key=computing_s)[:_MOST_LOOKS]:
        found = first_look(rival.setup, Scorer.of(rival, whole=False))
        if not found.missing_bytes:
            return found
    return None


def _handed_on(look: _Look, found: Sequence[tuple[_Look, list[End]]]) -> list[Decisions]:
    """Return the best decisions of choices that are alike but for tiles, fetches, or the form of master copies."""
    own = {field: getattr(look.variant.choice, field) for field in _ALIKE}
    return [
        ends[0][1].decisions.model_copy(update=own)
        for other, ends in found
        if other.variant.choice.model_copy(update=own) == look.variant.choice
    ]


def _promising(rivals: Sequence[Variant]) -> list[tuple[float, Variant]]:
    """Return the bound of each choice in seconds, the fastest first; infinite if nothing fits."""
    bounds: list[tuple[float, Variant]] = []
    least_s = float("inf")
    for variant in sorted(rivals, key=computing_s):
        # Choices that compute for longer than the bounds of others come later, if at all.
        bound_s = computing_s(variant)
        if len(bounds) < _MOST_BOUNDS and bound_s < least_s * 2:
            stages = variant.setup.stages()[-2:]
            solutions = [solve(conditions(stage, variant.cost, NEVER_S)) for stage in stages]
            bound_s = min((s.value for s in solutions if s), default=float("inf"))
            least_s = min(least_s, bound_s)
        bounds.append((bound_s, variant))
    return sorted(bounds, key=lambda item: item[0])
