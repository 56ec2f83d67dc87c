"""Planning: from what the user asks for to a plan. The front door of this package."""

import dataclasses
from collections.abc import Callable

from hwprofiles import __version__
from hwprofiles.profile import HardwareProfile
from planner.bounds.certificate import certify, infeasible
from planner.bounds.conditions import Space
from planner.bounds.proof import Proof
from planner.costs import CostModel
from planner.decisions import BF16, Decisions, Place, Precision
from planner.engines import Setup
from planner.graph import Batch, Unit, build_graph, units
from planner.models.captured import Model
from planner.plan import EngineRow, Plan
from planner.prediction import Workload, capacities
from planner.schedule import Tier
from planner.search import Candidate, Scorer, search

# What can be done when a tier is too small, cheapest first.
_REMEDIES = {
    Tier.GPU: "use a smaller --micro-batch or --seq-len (of a captured model, --input-shape), more --gpus, or a device "
    "with more memory",
    Tier.HOST: "use more --gpus (or nodes), or a host with more memory",
    Tier.NVME: "use more nodes, or place less there",
}


class InfeasibleError(ValueError):
    """No plan fits: which memory is short, by how much, and what would help."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        model: sizes of the model, or a captured one.
        hardware: the machine.
        num_devices: devices to train on; each is one data-parallel rank.
        seq_len: tokens per sequence.
        micro_batch: sequences per forward on each device.
        num_micro_batches: forwards per iteration (gradient accumulation).
        precision: types of weights and gradients.
        clip: clip gradients by their global norm.
        subgroup_params: parameters in one subgroup, the grain of optimizer placement.
    """

    model: Model
    hardware: HardwareProfile
    num_devices: int = 1
    seq_len: int = 2048
    micro_batch: int = 4
    num_micro_batches: int = 1
    precision: Precision = BF16
    clip: bool = True
    subgroup_params: int = 100_000_000

    def __post_init__(self) -> None:
        for name in ("num_devices", "seq_len", "micro_batch", "num_micro_batches", "subgroup_params"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        dtype, device = self.precision.weights, self.hardware.device
        if dtype not in device.gemm or dtype not in device.attention:
            raise ValueError(
                f"profile {self.hardware.name} says nothing about products and attention in {dtype}; choose another "
                "precision or machine, or measure it with `ullage calibrate`"
            )
        per_node = self.hardware.devices_per_node
        if self.num_devices > per_node and self.hardware.inter_node is None:
            raise ValueError(
                f"{self.hardware.name} has {per_node} device(s) and no network between nodes, but {self.num_devices} "
                f"are asked for; ask for at most {per_node}, or choose a profile with an inter_node fabric"
            )


def make_plan(
    request: Request, max_simulations: int | None = None, progress: Callable[[Candidate, int], None] | None = None
) -> Plan:
    """Find the best plan for a request.

    Raises:
        InfeasibleError: nothing that was tried fits in memory.
    """
    setup, workload, cost = prepare(request)
    scorer = Scorer(workload, cost)
    outcome = search(setup, scorer, max_simulations, progress)
    best = outcome.best.decisions
    space = Space.of(setup.units, best)
    if outcome.best.missing_bytes:
        proofs = infeasible(space, cost)
        raise InfeasibleError(_shortfall(request, outcome.best, cost, setup.units, proofs))
    prediction = scorer.predict(best)
    return Plan(
        program_version=__version__,
        model=request.model,
        seq_len=request.seq_len,
        hardware=request.hardware,
        decisions=best,
        prediction=prediction,
        engines=tuple(_row(name, candidate, setup.units) for name, candidate in outcome.engines.items()),
        certificate=certify(space, cost, best, prediction.iteration_s),
        num_simulations=outcome.num_simulations,
    ).sealed()


def prepare(request: Request) -> tuple[Setup, Workload, CostModel]:
    """Return what scoring decisions for a request needs."""
    batch = Batch(request.micro_batch, request.seq_len, request.precision.weight_bytes)
    model_units = units(build_graph(request.model, batch))
    setup = Setup(
        units=model_units,
        data_parallel=request.num_devices,
        micro_batch=request.micro_batch,
        num_micro_batches=request.num_micro_batches,
        precision=request.precision,
        clip=request.clip,
        subgroup_params=request.subgroup_params,
    )
    workload = Workload(model_units, request.seq_len)
    return setup, workload, CostModel(request.hardware, model_units, request.precision, request.num_devices)


def describe(decisions: Decisions, units: tuple[Unit, ...]) -> str:
    """Return the placement in one line: what is recomputed, what the host holds, who updates how much."""
    placed = dict.fromkeys(Place, 0)
    for unit in units:
        for num_params, place in decisions.placed_pieces(unit.name, unit.num_params):
            placed[place] += num_params
    total = sum(placed.values())
    parts = [f"{100 * n / total:.0f} % of updates {_VERBS[place]}" for place, n in placed.items() if n > total / 200]
    recomputed = sum(unit.activations == "recompute" for unit in decisions.units.values())
    offloaded = sum(unit.offloads for unit in decisions.units.values())
    if offloaded:
        parts.append(f"activations of {offloaded} of {len(decisions.units)} units offloaded")
    if recomputed or not offloaded:
        parts.append(f"{recomputed} of {len(decisions.units)} units recomputed" if recomputed else "activations kept")
    fetched = {where: sum(unit.params == where for unit in decisions.units.values()) for where in ("host", "nvme")}
    parts += [f"parameters of {count} units on the {where}" for where, count in fetched.items() if count]
    if decisions.data_parallel > 1:
        parts.append(f"ZeRO-{decisions.zero_stage}")
    return ", ".join(parts)


_VERBS = {
    Place.GPU: "on the device",
    Place.STREAM: "streamed through the device",
    Place.CPU: "on the CPU",
    Place.NVME: "on the CPU from NVMe",
}


def _row(name: str, candidate: Candidate, units: tuple[Unit, ...]) -> EngineRow:
    simulated = candidate.iteration_s != float("inf")
    return EngineRow(
        name=name,
        setting=describe(candidate.decisions, units),
        fits=not candidate.missing_bytes,
        iteration_s=candidate.iteration_s if simulated else None,
        missing_bytes=candidate.missing_bytes,
    )


def _shortfall(
    request: Request, best: Candidate, cost: CostModel, units: tuple[Unit, ...], proofs: tuple[Proof, ...]
) -> str:
    tier, missing = max(best.missing_bytes.items(), key=lambda item: item[1])
    shared = f"{tier.value} ({cost.ranks_per_node} device(s) per node)"
    where = request.hardware.device.name if tier is Tier.GPU else shared
    least = min((proof.overrun or 0.0 for proof in proofs), default=0.0)
    proven = f"it is proven that every schedule lacks at least {100 * least:.1f} % of some memory" if least else ""
    return (
        f"{request.model.name} does not fit on {request.num_devices} device(s) of {request.hardware.name}: the {where} "
        f"lacks {_gigabytes(missing)} beyond its {_gigabytes(capacities(cost)[tier])} even with the best plan found "
        f"({describe(best.decisions, units)}), and {proven or 'no proof that no other fits'}; "
        f"{_REMEDIES[tier]}"
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"
