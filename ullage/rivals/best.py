"""The best that each engine can do: what its users find among its placements."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from planner.choices.variants import Variant
from planner.costs.model import CostModel
from planner.decisions import Activations, Place
from planner.graph import units
from planner.models.captured import CapturedModel
from planner.models.config import ModelConfigError
from planner.optimizers import OPTIMIZERS
from planner.placements import ACTIVATIONS
from planner.schedule.tasks import Tier
from planner.search import Candidate, Scorer, best_of
from planner.setup import Setup
from planner.simulate.prediction import capacities
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.catalogue import (
    FIRST_IS_FASTEST,
    GRAPHS,
    HOST_PARAMETER_POLICIES,
    NVME_PARAMETER_POLICIES,
    POLICIES,
    STORAGE_POLICIES,
    UNPAIRED,
    can_run,
    policies_of,
)
from ullage.rivals.engines.deepspeed import with_host_parameters
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.engines.streaming import good_streaming
from ullage.rivals.lowering import lower

# Rows of engines that use drives stand before that of this one.
_AFTER_STORAGE = "fsdp2-offload"
# Engines that run all micro-batches through some layers before the next ones, so that each adds to what is held.
_IN_BREADTH = ("roundpipe", "roundpipe-sync")
# Ratel's users swap the activations of so many tenths of all segments.
_SWAPPED_TENTHS = (0, 3, 6, 10)


def scorer_of(variant: Variant) -> Scorer:
    """Return a scorer that knows other engines, and compares their placements as [Note: Few micro-batches] says."""
    return Scorer.of(variant, lower=lower, whole=False)


def bests(rival: Variant) -> dict[str, tuple[Variant, Candidate]]:
    """Return the best candidate of every engine that runs a variant's kernels, by name."""
    return {name: (rival, each) for name, each in engine_policies(rival.setup, scorer_of(rival)).items()}


def bests_in_own_kernels(rival: Variant) -> dict[str, tuple[Variant, Candidate]]:
    """Return the best candidate of every engine with kernels of its own, and the variant in these."""
    names = [name for name in policies_of(rival.request.optimizer) if name in GRAPHS]
    found = {name: best_with_own_kernels(rival, name) for name in names}
    return {name: each for name, each in found.items() if each}


def best_with_own_kernels(rival: Variant, name: str) -> tuple[Variant, Candidate] | None:
    """Return the best candidate of an engine with kernels of its own, if it has such a model; otherwise as asked."""
    if not can_run(name, rival.setup, len(rival.cost.layout.nodes())):
        return None
    found: list[tuple[Variant, Candidate]] = []
    for each in _in_own_kernels(rival, name) if name in GRAPHS else [rival]:
        found.append((each, candidate := best_of_engine(each.setup, scorer_of(each), name)))
        moves = any(
            unit.activations != "keep" or set(unit.update) - {Place.GPU} for unit in candidate.decisions.units.values()
        )
        if candidate.fits and not moves:  # the others keep less, and take longer
            break
    return min(found, key=lambda each: each[1].order, default=None)


def _in_own_kernels(rival: Variant, name: str) -> Iterator[Variant]:
    """Yield a variant in an engine's own kernels."""
    request, choice = rival.request, rival.choice
    if isinstance(request.model, CapturedModel):
        return
    try:
        for graph in GRAPHS[name](request.model, request.batch(choice)):
            setup = dataclasses.replace(rival.setup, units=units(graph))
            yield Variant(request, setup, CostModel(request.hardware, setup.units, setup.given))
    except ModelConfigError:
        return


def engine_policies(setup: Setup, scorer: Scorer) -> dict[str, Candidate]:
    """Return the best candidate of every engine policy that can do what the setup requires, by name.

    Those of engines with kernels of their own are not among them.
    """
    num_nodes = len(scorer.cost.layout.nodes())
    known = [name for name in policies_of(setup.given.optimizer) if name not in GRAPHS]
    names = [name for name in known if can_run(name, setup, num_nodes)]
    if setup.storage == "nvme" and OPTIMIZERS[setup.given.optimizer].others is None:
        at = names.index(_AFTER_STORAGE) if _AFTER_STORAGE in names else len(names)
        names[at:at] = ["zero-infinity", *(["ratel"] if not setup.given.clip else [])]  # it updates during backward
    return {name: best_of_engine(setup, scorer, name) for name in names}


def best_of_engine(setup: Setup, scorer: Scorer, name: str, activations: Activations | None = None) -> Candidate:
    """Return the best of an engine's placements, as its users find it.

    They recompute activations only where keeping them does not fit, or as ``activations`` says, and offload parameters
    only where nothing fits. The time is that of one iteration of the user's batch, also where a schedule stands for
    several.
    """
    scorer = scorer.whole() if name in _IN_BREADTH else scorer
    found = scorer.exact(_best_of_engine(setup, scorer, name, activations))
    assert isinstance(found.decisions, RivalDecisions)
    return dataclasses.replace(found, iteration_s=found.iteration_s / found.decisions.num_steps)


def _best_of_engine(setup: Setup, scorer: Scorer, name: str, activations: Activations | None) -> Candidate:
    if name == "ratel":
        return best_of(map(scorer.score, _swapping(setup)))
    if name == "streaming":
        return good_streaming(setup, scorer)
    if name in UNPAIRED:  # its defaults come first
        tried = map(scorer.score, POLICIES[name](setup))
        first = next(tried)
        return best_of([first, *tried]) if first.missing_bytes else first
    placements = list((POLICIES | STORAGE_POLICIES)[name](setup))
    best = _best_of_pairs(setup, scorer, placements, activations, ends=name in FIRST_IS_FASTEST)
    ways: tuple[tuple[Literal["host", "nvme"], tuple[str, ...]], ...] = (
        ("host", HOST_PARAMETER_POLICIES),
        ("nvme", NVME_PARAMETER_POLICIES),
    )
    for where, can in ways:
        if best.missing_bytes and name in can:
            away = [with_host_parameters(decisions, setup, where) for decisions in placements]
            best = best_of([best, _best_of_pairs(setup, scorer, away, activations)])
    return best


def _best_of_pairs(
    setup: Setup,
    scorer: Scorer,
    placements: Sequence[RivalDecisions],
    activations: Activations | None,
    *,
    ends: bool = False,
) -> Candidate:
    """Return the best placement.

    Args:
        setup: the model, the machine and what the user has fixed.
        scorer: scores candidates.
        placements: every placement twice: first with activations kept, then with activations recomputed.
        activations: which of the two the user wants; ``None``: the first that fits.
        ends: whether the first that fits of either kind is its fastest.
    """
    # When forward ends, all kept activations are on the device.
    may_fit = sum(unit.saved_bytes for unit in setup.units) <= capacities(scorer.cost)[Tier.GPU]
    ways: tuple[int, ...] = (0, 1) if may_fit else (1, 0)
    if activations:
        ways = (ACTIVATIONS.index(activations),)
    found: list[Candidate] = []
    for pair in zip(placements[::2], placements[1::2], strict=True):
        for rank, way in enumerate(ways):
            found.append(scorer.score(pair[way]))
            if not found[-1].missing_bytes:
                ways = ways[:rank] if ends else ways
                break
    return best_of(found)


def _swapping(setup: Setup) -> Iterator[RivalDecisions]:
    """Yield Ratel's placements: the activations of more or fewer segments swapped, to the host or on to NVMe."""
    num_segments = len(setup.swappable)
    counts = sorted({round(num_segments * tenths / 10) for tenths in _SWAPPED_TENTHS})
    for num_on_host in (None, 0):
        yield from ratel(setup, counts, num_on_host)
