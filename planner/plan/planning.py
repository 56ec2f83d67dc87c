"""Planning: from a request to a plan. The entry point of this package."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from hwprofiles import __version__
from hwprofiles.profile import Device
from planner.bounds.certificate import infeasible, prove_misfits
from planner.bounds.proof import Proof
from planner.choices.request import Request
from planner.choices.variants import Variant, variants
from planner.decisions import BF16, FP32, Choice, Decisions, Precision
from planner.graph import Batch
from planner.models.captured import CapturedModel, Model
from planner.plan.competition import Found, closest, compete
from planner.plan.document import EngineRow, Plan, describe, gigabytes
from planner.schedule.tasks import Tier
from planner.search import Progress, Scorer, no_garbage_collection
from planner.simulate.prediction import capacities
from planner.simulate.uncertainty import with_interval

# Of more variants, most need no proof that they do not fit.
_MOST_MISFITS = 4
# Remedies for a tier that is too small, cheapest first.
_REMEDIES = {
    Tier.GPU: "use a smaller --micro-batch or --seq-len (of a captured model, --input-shape), more --gpus, or a device "
    "with more memory",
    Tier.HOST: "use more --gpus (or nodes), or a host with more memory",
    Tier.NVME: "use more nodes, or place less there",
}


class InfeasibleError(ValueError):
    """No plan fits in memory: names the tier, the missing bytes and remedies.

    Attributes:
        missing_bytes: missing memory of the best candidate, by tier.
        proven: whether it is proven that no schedule fits.
    """

    def __init__(self, message: str, missing_bytes: Mapping[Tier, int], remedies: str, *, proven: bool) -> None:
        super().__init__(f"{message}; {remedies}")
        self._message = message
        self.missing_bytes = dict(missing_bytes)
        self.proven = proven

    def with_remedies(self, remedies: Mapping[Tier, str]) -> "InfeasibleError":
        """Return the error with other remedies, by tier, for callers that do not use the command line."""
        own = "; ".join(dict.fromkeys(remedies[tier] for tier in self.missing_bytes))
        return InfeasibleError(self._message, self.missing_bytes, own, proven=self.proven)


def default_precision(device: Device) -> Precision:
    """Return bf16, or fp32 if the device's fp32 products are more than twice as fast.

    Half the bytes make everything else at most twice as fast. A processor without instructions for bf16 may be twenty
    times slower with it.
    """
    rate_flop_per_s = {
        dtype: device.gemm[dtype].best_rate_per_s() for dtype in ("bf16", "fp32") if dtype in device.gemm
    }
    prefers_fp32 = rate_flop_per_s.get("fp32", 0.0) > 2 * rate_flop_per_s.get("bf16", 0.0)
    return FP32 if prefers_fp32 else BF16


def find(
    request: Request,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    budget_s: float | None = None,
    pool: Executor | None = None,
) -> Found:
    """Search for the best plan; arguments and errors are those of :func:`make_plan`.

    With a ``pool``, proofs for the certificate that need no plan are made there during the search.
    """
    rivals = variants(request)
    if proofs := infeasible(rivals):  # a proof saves the search
        raise _infeasible(*_closest(rivals, proofs), proofs)
    # New variants, because a cost model caches prices, and threads must not share the cache.
    misfits = pool.submit(prove_misfits, variants(request)) if pool and len(rivals) <= _MOST_MISFITS else None
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    found = compete(rivals, max_simulations, progress, deadline_s)
    if missing_bytes := found.best.missing_bytes:
        best, own = found.decisions, found.own
        if math.isinf(found.best.iteration_s):
            best, missing_bytes = _lacking_least(best, own, Scorer.of(own))
        raise _infeasible(best, missing_bytes, own)
    return dataclasses.replace(found, misfits=misfits)


Compare = Callable[[Found], tuple[EngineRow, ...]]
"""Predicts other engines beside a plan."""


@no_garbage_collection()
def make_plan(
    request: Request,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    budget_s: float | None = None,
    compare: Compare | None = None,
) -> Plan:
    """Find the best plan for a request.

    Args:
        request: the request.
        max_simulations: end the search after so many; by default after a few seconds' worth.
        progress: called with the best so far and the number of simulations.
        budget_s: search for so many seconds instead, or until no gain is in sight. The result then depends on the speed
            of this machine.
        compare: predicts other engines for the request, given what was found.

    Raises:
        InfeasibleError: no candidate fits in memory.
        ValueError: the request cannot be met; the message says why.
    """
    with ThreadPoolExecutor(1) as pool:
        found = find(request, max_simulations, progress, budget_s, pool)
        return as_plan(request, found, compare(found) if compare else ())


def as_plan(request: Request, found: Found, engines: tuple[EngineRow, ...] = (), beside: Sequence[Found] = ()) -> Plan:
    """Return what was found as a plan, with its certificate.

    Args:
        request: the request.
        found: what was found for it.
        engines: predictions of other engines.
        beside: what was found for other shares of the batch, which run with the same model.
    """
    certificate = found.certificate()
    return Plan(
        program_version=__version__,
        model=_alone(request.model, found, beside),
        seq_len=request.seq_len,
        expert_load=request.expert_load,
        constraints=request.constraints,
        hardware=request.hardware,
        decisions=found.decisions,
        prediction=with_interval(found.prediction, found.own.setup.units, found.decisions, found.own.cost),
        engines=engines,
        certificate=certificate,
        num_simulations=found.num_simulations,
    ).sealed()


def _alone(model: Model, found: Found, beside: Sequence[Found]) -> Model:
    """Return a model as a plan holds it: a captured one at every size that was compared."""
    if not isinstance(model, CapturedModel):
        return model

    def size(decided: Choice) -> Batch:
        return Batch(
            decided.micro_batch,
            model.seq_len,
            loss_tile_tokens=decided.loss_tile_tokens,
            layer_tile_tokens=decided.layer_tile_tokens,
            in_stages=decided.pipeline_parallel > 1,
        )

    own = [rival.choice for each in (found, *beside) for rival in each.rivals]
    own += [each.model_copy(update={"micro_batch": tile}) for each in own if (tile := each.segment_tile_sequences)]
    compared = [size(choice) for choice in own]
    without = [dataclasses.replace(each, loss_tile_tokens=None) for each in compared]  # from which tiles were chosen
    without += [dataclasses.replace(each, layer_tile_tokens=None) for each in without]
    return model.covering(size(found.decisions), (*compared, *without))


def _closest(rivals: Sequence[Variant], proofs: Sequence[Proof]) -> tuple[Decisions, dict[Tier, int], Variant]:
    """Return the smallest decisions, their missing bytes and the variant that is proven to overrun memory least."""
    least = min(proofs, key=lambda proof: proof.overrun or 0.0)
    own = next(rival for rival in rivals if rival.choice == least.choice)
    scorer = Scorer.of(own)
    best = closest(own, scorer)
    if math.isinf(best.iteration_s):
        return *_lacking_least(best.decisions, own, scorer), own
    return best.decisions, best.missing_bytes, own


def _lacking_least(rejected: Decisions, variant: Variant, scorer: Scorer) -> tuple[Decisions, dict[Tier, int]]:
    """Return the better of rejected decisions and the same with recomputation, and its missing bytes.

    Decisions are rejected without a simulation if permanent buffers alone do not fit. This does not show whether
    recomputation helps, so both are simulated here.
    """
    again = {
        unit.name: rejected.units[unit.name].model_copy(update={"activations": "recompute"})
        for unit in variant.setup.units
        if unit.can_swap and rejected.units[unit.name].activations == "keep"
    }
    capacity_bytes = capacities(variant.cost)
    tried = (rejected, rejected.model_copy(update={"units": {**rejected.units, **again}}))
    missing_bytes = [(decisions, scorer.predict(decisions).missing_bytes) for decisions in tried]
    return min(missing_bytes, key=lambda item: sum(n / capacity_bytes[tier] for tier, n in item[1].items()))


def _infeasible(
    best: Decisions, missing_bytes: Mapping[Tier, int], variant: Variant, proofs: tuple[Proof, ...] = ()
) -> InfeasibleError:
    request, cost, units = variant.request, variant.cost, variant.setup.units
    capacity_bytes = capacities(cost)
    shares = {tier: num_bytes / capacity_bytes[tier] for tier, num_bytes in missing_bytes.items()}
    tiers = sorted(shares, key=shares.__getitem__, reverse=True)
    names = {tier: f"{tier.value} ({cost.ranks_per_node} device(s) per node)" for tier in tiers}
    names[Tier.GPU] = request.hardware.device.name
    lacks = " and ".join(
        f"the {names[tier]} lacks {gigabytes(missing_bytes[tier])} beyond its {gigabytes(capacity_bytes[tier])} "
        f"({100 * shares[tier]:.1f} % of that)"
        for tier in tiers
    )
    tried = f"the {'smallest' if proofs else 'best'} plan found ({describe(best, units)})"
    # If there is one memory, it is the device's.
    remedies = dict.fromkeys(_REMEDIES[Tier.GPU if request.hardware.one_memory else tier] for tier in tiers)
    stays = "; it makes gradients of gradients, for which all weights and activations stay on the device"
    message = (
        f"{request.model.name} does not fit on {request.num_devices} device(s) of {request.hardware.name}: {lacks} "
        f"even with {tried}, and {_proven(proofs)}{stays if any(unit.stays for unit in units) else ''}"
    )
    return InfeasibleError(message, missing_bytes, "; ".join(remedies), proven=bool(proofs))


def _proven(proofs: tuple[Proof, ...]) -> str:
    """Return the proven overrun in words; a proof is about the fraction of a tier, whichever tier it is."""
    if not proofs:
        return "there is no proof that no other fits"
    least = math.floor(1000 * min(proof.overrun or 0.0 for proof in proofs)) / 10  # rounded down: it must be proven
    lacking = f"every schedule lacks at least {least:.1f} % of some memory" if least else "no schedule fits"
    return f"it is proven that {lacking}"
