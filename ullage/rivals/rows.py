"""Rows of other engines beside a plan."""

import dataclasses
from collections.abc import Iterator, Sequence

from planner.bounds.certificate import computing_s
from planner.choices.request import Request
from planner.choices.variants import Variant, variant, variants
from planner.decisions import Choice
from planner.models.choice import TILES
from planner.plan.competition import Found
from planner.plan.document import EngineRow, Plan, describe
from planner.plan.planning import make_plan as make_plan_alone
from planner.search import Candidate, Progress
from ullage.rivals.best import bests, bests_in_own_kernels
from ullage.rivals.decisions import OWN_KERNELS, RivalDecisions
from ullage.rivals.engines.catalogue import GRAPHS
from ullage.rivals.nearest import nearest_fit


def make_plan(
    request: Request,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    budget_s: float | None = None,
) -> Plan:
    """Find the best plan for a request, with a row for each other engine; see :func:`planner.plan.planning.make_plan`.

    Raises:
        InfeasibleError: no candidate fits in memory.
        ValueError: the request cannot be met; the message says why.
    """
    return make_plan_alone(request, max_simulations, progress, budget_s, _beside)


def _beside(found: Found) -> tuple[EngineRow, ...]:
    best = engines_beside(found)
    return tuple(_row(name, *best[name]) for name in best)


def engine_rows(request: Request) -> Iterator[EngineRow]:
    """Yield a row for every engine policy, each as soon as it is known, also where no plan fits."""
    rivals = variants(dataclasses.replace(request, segment_tile_sequences=None, split_masters=False))
    for name, found in _compared(_plainest(rivals)).items():
        yield _row(name, *found)


def engines_beside(found: Found) -> dict[str, tuple[Variant, Candidate]]:
    """Return by name the best candidate of every engine policy, and its variant.

    Each has the choices that were searched for the plan, and whole logits, because its user could tune degrees and
    batch sizes too; if these are pipelines, which engines that offload do not have, the one that most resembles their
    defaults.
    """
    known = {rival.choice: rival for rival in found.rivals}
    plain = [each.choice for each in found.searched if each.choice.pipeline_parallel == 1]
    chosen = [choice.model_copy(update={"split_masters": None}) for choice in plain]
    chosen += filter(known.get, [each.model_copy(update={"loss_tile_tokens": None}) for each in chosen])
    tuned = dict.fromkeys(choice for each in chosen for choice in _in_depth(each))
    searched = tuple(known.get(choice) or variant(found.own.request, choice) for choice in tuned)
    return _compared(searched or _plainest(found.rivals))


def _in_depth(choice: Choice) -> Iterator[Choice]:
    """Yield a choice without tiles of sequences: with its micro-batch, and with one for each tile."""
    yield (whole := choice.model_copy(update={"segment_tile_sequences": None}))
    if (size := choice.segment_tile_sequences) is not None:
        count = whole.num_micro_batches * whole.micro_batch // size
        yield whole.model_copy(update={"micro_batch": size, "num_micro_batches": count})


def _without_kernels(choice: Choice) -> Choice:
    """Return what of a choice concerns engines with kernels of their own."""
    return choice.model_copy(update=dict.fromkeys(("kernels", "fp8_weights", *TILES)))


def _compared(rivals: Sequence[Variant]) -> dict[str, tuple[Variant, Candidate]]:
    best: dict[str, tuple[Variant, Candidate]] = {}
    bare = {_without_kernels(rival.choice): rival for rival in rivals}.values()
    found = [pair for rival in rivals for pair in bests(rival).items()]
    for name, (chosen, candidate) in (
        *found,
        *(pair for rival in bare for pair in bests_in_own_kernels(rival).items()),
    ):
        if name not in best or candidate.order < best[name][1].order:
            best[name] = chosen, candidate
    return best


def _plainest(rivals: Sequence[Variant]) -> tuple[Variant, ...]:
    plain = [
        rival for rival in rivals if rival.choice.pipeline_parallel == 1 and rival.choice.segment_tile_sequences is None
    ]
    if not plain:
        return ()
    return (min(plain, key=lambda rival: (rival.choice.tensor_parallel, computing_s(rival))),)


def _row(name: str, rival: Variant, candidate: Candidate) -> EngineRow:
    simulated, decisions = candidate.iteration_s != float("inf"), candidate.decisions
    nearest = nearest_fit(rival, name, candidate) if candidate.missing_bytes else None
    return EngineRow(
        name=name,
        setting=", ".join([describe(decisions, rival.setup.units), *([OWN_KERNELS] if name in GRAPHS else [])]),
        fits=not candidate.missing_bytes,
        iteration_s=candidate.iteration_s if simulated else None,
        missing_bytes=candidate.missing_bytes,
        nearest=nearest[0] if nearest else None,
        nearest_iteration_s=nearest[1] if nearest else None,
        numerics=decisions.numerics if isinstance(decisions, RivalDecisions) else None,
    )
