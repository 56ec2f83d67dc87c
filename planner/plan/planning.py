"""Planning: from a request to a plan. The entry point of this package."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import get_args

from hwprofiles import __version__
from hwprofiles.profile import Device, Dtype, HardwareProfile
from planner.bounds.certificate import certify, infeasible, prove_misfits
from planner.bounds.proof import Certificate, Proof
from planner.choices.choice import MOST_MICRO_BATCHES, Constraints
from planner.choices.variants import Job, Variant, variants
from planner.costs.kernels import no_products
from planner.costs.model import CostModel
from planner.decisions import BF16, FP32, Choice, Decisions, Precision, check_fp8_weights
from planner.models.captured import CapturedModel, Model, Size
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.plan.competition import closest, compete
from planner.plan.document import EngineRow, Plan, describe, gigabytes
from planner.schedule.tasks import Tier
from planner.search import Progress, Scorer, no_garbage_collection
from planner.setup import Setup
from planner.simulate.prediction import Prediction, Workload, capacities
from planner.terms import Storage

# Remedies for a tier that is too small, cheapest first.
_REMEDIES = {
    Tier.GPU: "use a smaller --micro-batch or --seq-len (of a captured model, --input-shape), more --gpus, or a device "
    "with more memory",
    Tier.HOST: "use more --gpus (or nodes), or a host with more memory",
    Tier.NVME: "use more nodes, or place less there",
}
# Upper limits of a request. A larger number is a mistake, and planning would take very long.
_MOST = {
    "num_devices": 100_000,
    "seq_len": 100_000_000,
    "micro_batch": 1_000_000,
    "num_micro_batches": MOST_MICRO_BATCHES,
    "global_batch": 10_000_000,
    "expert_units": 10_000,
    "loss_tile_tokens": 100_000_000,
    "layer_tile_tokens": 100_000_000,
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


def _precision(given: Precision | Dtype) -> Precision:
    if isinstance(given, Precision):
        return given
    if given not in get_args(Dtype):
        raise ValueError(f"precision is {given!r}, which cannot be planned; give one of {', '.join(get_args(Dtype))}")
    return Precision(weights=given)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for a plan. Fields that are ``None`` are for the planner to choose.

    Attributes:
        model: sizes of the model, or a captured one.
        hardware: the machine.
        num_devices: devices to train on, over as many nodes as they fill.
        seq_len: tokens per sequence.
        micro_batch: sequences per forward on each device.
        num_micro_batches: forwards per iteration (gradient accumulation).
        precision: types of weights and gradients, or the name of one type for both.
        optimizer: the optimizer.
        clip: clip gradients by their global norm.
        subgroup_params: most parameters in one subgroup, the smallest part whose update can be placed.
        global_batch: sequences per iteration over all devices.
        tensor_parallel, pipeline_parallel, expert_parallel: how devices share the model.
        expert_units: units into which a rank's experts of a layer are divided.
        loss_tile_tokens: tokens whose logits exist at a time; as many as a micro-batch has, or more: all.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time; likewise.
        fp8_weights: whether weights of products in fp8 are fetched from the host, and gathered, in fp8.
        expert_load: shares of all visits that go to each expert; see :class:`planner.graph.Batch`.
        storage: storage that may be used beside device and host; see :data:`planner.terms.Storage`.
    """

    model: Model
    hardware: HardwareProfile
    num_devices: int = 1
    seq_len: int = 2048
    micro_batch: int | None = None
    num_micro_batches: int | None = None
    precision: Precision | Dtype = BF16
    optimizer: Optimizer = "adamw"
    clip: bool = True
    subgroup_params: int = 100_000_000
    global_batch: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    expert_units: int | None = None
    loss_tile_tokens: int | None = None
    layer_tile_tokens: int | None = None
    fp8_weights: bool | None = None
    expert_load: tuple[tuple[float, ...], ...] = ()
    storage: Storage = "never"

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", _precision(self.precision))
        self._check_numbers()
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {self.optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}; choose one")
        if self.storage not in get_args(Storage):
            raise ValueError(f"storage is {self.storage!r}, but must be one of {', '.join(get_args(Storage))}")
        self._check_precision(self.job.precision)
        if self.storage == "nvme" and self.hardware.nvme is None:
            raise ValueError(
                f"storage is 'nvme', but profile {self.hardware.name} has no nvme; ask for 'activations' or choose a "
                "profile with drives"
            )
        dtype, device = self.job.precision.weights, self.hardware.device
        if dtype not in device.gemm or dtype not in device.attention:
            raise ValueError(
                f"profile {self.hardware.name} says nothing about products and attention in {dtype}; choose another "
                "precision or machine, or measure it with `ullage calibrate`"
            )
        if (products := self.job.precision.products) and products not in device.gemm:
            raise ValueError(no_products(self.hardware, products))
        if products and (self.tensor_parallel or 1) > 1:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, but in {products} each part of a matrix would have a "
                f"scale of its own; choose 1, or leave out --products {products}"
            )
        if self.fp8_weights:
            check_fp8_weights(self.job.precision, self.optimizer)
        per_node = self.hardware.devices_per_node
        if self.num_devices > per_node and self.hardware.inter_node is None:
            raise ValueError(
                f"{self.hardware.name} has {per_node} device(s) and no network between nodes, but {self.num_devices} "
                f"are asked for; ask for at most {per_node}, or choose a larger machine with --hardware (`ullage "
                "hardware` lists them), or a profile with inter_node"
            )

    def _check_precision(self, precision: Precision) -> None:
        if precision.can_be_kept(self.optimizer):
            return
        if precision.without_fp8 == Precision(weights="bf16", master="bf16"):
            known = " or ".join(name for name, row in OPTIMIZERS.items() if row.rounded)
            raise ValueError(
                f"the master copy is bf16, but {self.optimizer} keeps only one in fp32; choose optimizer {known}, or "
                "leave master out"
            )
        raise ValueError(
            f"precision is {precision!r}, but types of state or gradients can only be simulated so far; give "
            "'bf16' or 'fp32'"
        )

    def _check_numbers(self) -> None:
        for field in (*Constraints.model_fields, "seq_len", "subgroup_params"):
            value = getattr(self, field)
            if field in {"storage", "fp8_weights"} or value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field} is {value!r}, but must be a whole number of at least 1")
        for field, most in _MOST.items():
            if (value := getattr(self, field)) is not None and value > most:
                raise ValueError(f"{field} is {value}, but no more than {most} can be planned; ask for less")

    @property
    def constraints(self) -> Constraints:
        """The degrees and batch sizes that the user gave."""
        return Constraints(**{field: getattr(self, field) for field in Constraints.model_fields})

    @property
    def job(self) -> Job:
        """The part of the request that all its variants share."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})

    def variants(self) -> tuple[Variant, ...]:
        """Return all variants of the request.

        Raises:
            ValueError: there is none; the message says why.
        """
        return variants(self.job, self.constraints)


@dataclasses.dataclass(frozen=True)
class Found:
    """The best plan found for a request, without its certificate.

    Attributes:
        decisions: its decisions.
        prediction: its predicted time and memory.
        own: its variant.
        rivals: all variants.
        searched: the variants of it that got a full search, but for pipelines.
        num_simulations: number of simulated schedules.
        misfits: proofs for ZeRO stages that do not fit, if they were begun beside the search.
    """

    decisions: Decisions
    prediction: Prediction
    own: Variant
    rivals: tuple[Variant, ...]
    searched: tuple[Variant, ...]
    num_simulations: int
    misfits: Future[dict[int, Proof]] | None = None

    def certificate(self) -> Certificate:
        """Prove a lower bound on the time of any schedule. This takes about as long as the search."""
        misfits = self.misfits.result() if self.misfits else {}
        return certify(self.rivals, self.own, self.decisions, self.prediction.iteration_s, misfits)


def find(
    request: Request,
    max_simulations: int | None = None,
    progress: Progress | None = None,
    budget_s: float | None = None,
    pool: Executor | None = None,
) -> Found:
    """Search for the best plan; arguments and errors are those of :func:`make_plan`.

    With a ``pool``, proofs for the certificate that need no plan are made there during the search. Master copies are
    split if nothing fits with whole ones: updates of split ones take longer where cores bind.
    """
    assert isinstance(request.precision, Precision)
    try:
        return _find(request, max_simulations, progress, budget_s, pool)
    except InfeasibleError:
        if (split := request.precision.split) == request.precision:
            raise
    return _find(dataclasses.replace(request, precision=split), max_simulations, progress, budget_s, pool)


def _find(
    request: Request,
    max_simulations: int | None,
    progress: Progress | None,
    budget_s: float | None,
    pool: Executor | None,
) -> Found:
    rivals = request.variants()
    if proofs := infeasible(rivals):  # a proof saves the search
        raise _infeasible(request, *_closest(request, rivals, proofs), proofs)
    # A new variant, because a cost model caches prices, and threads must not share the cache.
    misfits = pool.submit(prove_misfits, request.variants()[0]) if pool and len(rivals) == 1 else None
    deadline_s = None if budget_s is None else time.monotonic() + budget_s
    found = compete(rivals, request.seq_len, max_simulations, progress, deadline_s)
    best, own = found.best.decisions, found.winner
    scorer = Scorer(Workload(own.setup.units, request.seq_len), own.cost)
    if missing_bytes := found.best.missing_bytes:
        if math.isinf(found.best.iteration_s):
            best, missing_bytes = _lacking_least(best, own, scorer)
        raise _infeasible(request, best, missing_bytes, own)
    prediction = scorer.predict(best)
    return Found(best, prediction, own, rivals, found.searched, found.num_simulations, misfits)


Compare = Callable[[Request, Found], tuple[EngineRow, ...]]
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
        compare: predicts other engines for the request, given what was found for it.

    Raises:
        InfeasibleError: no candidate fits in memory.
        ValueError: the request cannot be met; the message says why.
    """
    with ThreadPoolExecutor(1) as pool:
        found = find(request, max_simulations, progress, budget_s, pool)
        engines = compare(request, found) if compare else ()
        certificate = found.certificate()
    return Plan(
        program_version=__version__,
        model=_alone(request.model, found),
        seq_len=request.seq_len,
        expert_load=request.expert_load,
        constraints=request.constraints,
        hardware=request.hardware,
        decisions=found.decisions,
        prediction=found.prediction,
        engines=engines,
        certificate=certificate,
        num_simulations=found.num_simulations,
    ).sealed()


def _alone(model: Model, found: Found) -> Model:
    """Return a model as a plan holds it: a captured one at every size that was compared."""
    if not isinstance(model, CapturedModel):
        return model

    def size(decided: Choice | Decisions) -> Size:
        return Size(decided.micro_batch, model.seq_len, *decided.tiles)

    compared = [size(rival.choice) for rival in found.rivals]
    without = [each._replace(loss_tile_tokens=None) for each in compared]  # from which tiles were chosen
    without += [each._replace(layer_tile_tokens=None) for each in without]
    return model.covering(size(found.decisions), (*compared, *without))


def prepare(request: Request) -> tuple[Setup, Workload, CostModel]:
    """Return setup, workload and prices for a request whose degrees and batch sizes are all given."""
    variant = request.variants()[0]
    return variant.setup, Workload(variant.setup.units, request.seq_len), variant.cost


def _closest(
    request: Request, rivals: Sequence[Variant], proofs: Sequence[Proof]
) -> tuple[Decisions, dict[Tier, int], Variant]:
    """Return the smallest decisions, their missing bytes and the variant that is proven to overrun memory least."""
    least = min(proofs, key=lambda proof: proof.overrun or 0.0)
    own = next(rival for rival in rivals if rival.choice == least.choice)
    scorer = Scorer(Workload(own.setup.units, request.seq_len), own.cost)
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
    request: Request,
    best: Decisions,
    missing_bytes: Mapping[Tier, int],
    variant: Variant,
    proofs: tuple[Proof, ...] = (),
) -> InfeasibleError:
    cost, units = variant.cost, variant.setup.units
    capacity_bytes = capacities(cost)
    shares = {tier: num_bytes / capacity_bytes[tier] for tier, num_bytes in missing_bytes.items()}
    tiers = sorted(shares, key=shares.__getitem__, reverse=True)
    names = {tier: f"{tier.value} ({cost.ranks_per_node} device(s) per node)" for tier in tiers}
    names[Tier.GPU] = request.hardware.device.name
    lacks = " and ".join(
        f"the {names[tier]} lacks {gigabytes(missing_bytes[tier])} beyond its {gigabytes(capacity_bytes[tier])} "
        f"({_percent(shares[tier])} of that)"
        for tier in tiers
    )
    tried = f"the {'smallest' if proofs else 'best'} plan found ({describe(best, units)})"
    # If there is one memory, it is the device's.
    remedies = dict.fromkeys(_REMEDIES[Tier.GPU if request.hardware.one_memory else tier] for tier in tiers)
    message = (
        f"{request.model.name} does not fit on {request.num_devices} device(s) of {request.hardware.name}: {lacks} "
        f"even with {tried}, and {_proven(proofs)}"
    )
    return InfeasibleError(message, missing_bytes, "; ".join(remedies), proven=bool(proofs))


def _proven(proofs: tuple[Proof, ...]) -> str:
    """Return the proven overrun in words; a proof is about the fraction of a tier, whichever tier it is."""
    if not proofs:
        return "there is no proof that no other fits"
    least = math.floor(1000 * min(proof.overrun or 0.0 for proof in proofs)) / 10  # rounded down: it must be proven
    lacking = f"every schedule lacks at least {least:.1f} % of some memory" if least else "no schedule fits"
    return f"it is proven that {lacking}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
