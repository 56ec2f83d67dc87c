"""What our plans save by what other engines do otherwise: tricks whose opposite only these engines have."""

from collections.abc import Iterator
from typing import Final

from planner.decisions import Decisions
from planner.explain.bench import Bench
from planner.explain.tricks import TRICKS as OWN
from planner.explain.tricks import Off, Trick
from planner.plan.document import Plan
from ullage.rivals.decisions import GradientPath, HostUpdate, RivalDecisions
from ullage.rivals.lowering import lower


def bench_of(plan: Plan) -> Bench:
    """Return a bench on which a plan can also do as other engines."""
    return Bench(plan, lower)


def _as_others(**options: object) -> Off:
    def off(bench: Bench) -> Iterator[Decisions]:
        if bench.decisions.pipeline_parallel > 1:  # their stages keep everything on the devices
            return
        yield RivalDecisions.model_validate(dict(bench.decisions) | options)

    return off


def _early_reduction(bench: Bench) -> Iterator[Decisions]:
    if bench.decisions.data_parallel > 1 and bench.decisions.update_start == "step":
        yield from _as_others(reduce_start="step")(bench)


def _beside_computing(bench: Bench) -> Iterator[Decisions]:
    if bench.decisions.data_parallel > 1:
        yield from _as_others(max_prefetch_params=0)(bench)


TRICKS: Final[tuple[Trick, ...]] = (
    Trick(
        "gradients-once",
        "gradients leave once, in the weights' type",
        "out, back in, out in fp32",
        _as_others(gradient_path=GradientPath.ZERO3_ASYNC),
    ),
    *OWN,
    Trick(
        "collectives-beside",
        "gathers and reductions run beside computing",
        "when reached, waited for",
        _beside_computing,
    ),
    Trick("early-reduction", "ranks add up gradients during backward", "all at the step", _early_reduction),
    Trick(
        "one-pass",
        "one pass over host memory per CPU update",
        "scaling, update, casting copy",
        _as_others(host_update=HostUpdate.DEEPSPEED),
    ),
)
"""All tricks that ``ullage explain`` switches off."""
