"""The search over pipelines: everything is on the devices, and only recomputation is open.

Later stages have fewer micro-batches in flight, so more of their layers can keep activations in the same memory.
"""

from collections.abc import Iterator

from planner.decisions import Decisions, Place, UnitDecision
from planner.lowering.stages import deal
from planner.search import Candidate, Scorer, best_of
from planner.setup import Setup


def search_pipeline(setup: Setup, scorer: Scorer) -> Candidate:
    """Find decisions for a pipeline: for every ZeRO stage, by bisection, the most activations that fit."""
    stages = (0, 1) if setup.given.data_parallel > 1 else (0,)
    return best_of(candidate for stage in stages for candidate in _halved(setup, scorer, stage))


def _halved(setup: Setup, scorer: Scorer, zero_stage: int) -> Iterator[Candidate]:
    """Yield candidates that keep all activations, none, and then bisect to the largest number that fits."""
    most = max(len(stage) for stage in deal(setup.units, setup.given.pipeline_parallel)) * setup.given.pipeline_parallel
    yield (everything := scorer.score(staged(setup, most, zero_stage)))
    if not everything.missing_bytes:
        return
    yield (nothing := scorer.score(staged(setup, 0, zero_stage)))
    low, high = 0, 0 if nothing.missing_bytes else most
    while high - low > 1:
        middle = (low + high) // 2
        yield (candidate := scorer.score(staged(setup, middle, zero_stage)))
        low, high = (low, middle) if candidate.missing_bytes else (middle, high)


def staged(setup: Setup, num_layers: int, zero_stage: int) -> Decisions:
    """Return decisions in which each stage keeps as many activations as ``num_layers`` layers have in one micro-batch.

    A stage with several micro-batches in flight keeps those of fewer layers: its last ones.
    """
    num_stages = setup.given.pipeline_parallel
    keep: set[str] = set()
    for number, stage in enumerate(deal(setup.units, num_stages)):
        layers = [segment[0].segment for segment in stage if segment[0].can_swap]
        count = min(num_layers // min(num_stages - number, setup.given.num_micro_batches), len(layers))
        keep |= set(layers[len(layers) - count :])
    given = setup.given.model_copy(update={"zero_stage": zero_stage})
    units = {
        unit.name: UnitDecision(
            params="gpu",
            activations="keep" if not unit.can_swap or unit.segment in keep else "recompute",
            update=(Place.GPU,) * len(given.piece_params(unit)),
        )
        for unit in setup.units
    }
    return Decisions(**dict(given), policy="ullage", units=units)
