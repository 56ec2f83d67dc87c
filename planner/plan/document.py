"""The plan as ``plan.json``: the request, decisions, prediction and certificate."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from hwprofiles.complaints import read_document
from hwprofiles.files import write_whole
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Frozen
from planner.bounds.proof import Certificate
from planner.choices.constraints import Constraints
from planner.choices.request import Request, batch_of
from planner.decisions import Count, Decisions, Place
from planner.graph import Unit, build_graph, units
from planner.lowering import lower
from planner.models.captured import CapturedModel, ModelField
from planner.plan.checkpoints import CheckpointPlan
from planner.schedule.schedule import Schedule
from planner.schedule.tasks import Tier
from planner.simulate.prediction import Prediction, TierMemory

SCHEMA_VERSION: Final = 9


class PlanError(ValueError):
    """A plan file cannot be used; the message says why and what to do."""


class EngineRow(Frozen):
    """The prediction for an engine policy on the same machine.

    Attributes:
        name: of the policy.
        setting: its best settings.
        fits: whether it fits in memory with these.
        iteration_s: predicted; ``None`` if it was not simulated because it cannot fit.
        missing_bytes: missing memory by tier; empty if it fits.
        nearest: if it does not fit, the smallest change with which it would; ``None`` if none is known.
        nearest_iteration_s: predicted with that change.
        numerics: how the engine trains with other numbers than all others, in words; ``None`` if it does not.
    """

    name: str
    setting: str
    fits: bool
    iteration_s: float | None = None
    missing_bytes: dict[Tier, int]
    nearest: str | None = None
    nearest_iteration_s: float | None = None
    numerics: str | None = None


class DeviceKind(Frozen):
    """Ranks on devices of another kind than a plan's own; see [Note: Unlike devices] in :mod:`planner.plan.unlike`.

    Attributes:
        hardware: profile of their machine.
        first_rank, num_ranks: which ranks they are.
        decisions: what they do. Collectives are those of all ranks.
        prediction: as if all ranks were of this kind.
    """

    hardware: HardwareProfile
    first_rank: Annotated[int, Field(ge=0)]
    num_ranks: Count
    decisions: Decisions
    prediction: Prediction

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(self.first_rank, self.first_rank + self.num_ranks)


class Plan(Frozen):
    """A plan to train one model on one machine, or on devices of several kinds.

    Attributes:
        program_version: version of the program that made it.
        model: sizes of the model, or the operators of a captured one.
        seq_len: tokens per sequence.
        expert_load: shares of all visits that go to each expert; see :class:`planner.graph.Batch`.
        constraints: degrees and batch sizes that the user gave; the planner chose the others.
        hardware: the whole profile for which it was made, so that the plan needs no other file.
        decisions: all choices; with the model and the batch they determine the schedule.
        prediction: predicted time and memory.
        engines: predictions for engine policies.
        certificate: lower bound on the time of any schedule, with its proof.
        num_simulations: schedules that the search simulated.
        checkpoints: levels and intervals; ``None`` if not requested.
        others: kinds of devices beside that of ``hardware``, the slowest, which has the first ranks; ``None``: none.
        divisions_bound_s: if there are others, no division of the batch among them is faster, by what devices compute.
        model_digest, hardware_digest: SHA-256 of the model and of the profile, to compare plans.
        content_digest: SHA-256 of all other fields; shows whether the file was edited.
    """

    schema_version: Literal[9] = 9
    program_version: str
    model: ModelField
    seq_len: Annotated[int, Field(ge=1)]
    expert_load: tuple[tuple[float, ...], ...] = ()
    constraints: Constraints
    hardware: HardwareProfile
    decisions: Decisions
    prediction: Prediction
    engines: tuple[EngineRow, ...]
    certificate: Certificate
    num_simulations: int
    checkpoints: CheckpointPlan | None = None
    others: tuple[DeviceKind, ...] | None = None
    divisions_bound_s: float | None = None
    model_digest: str = ""
    hardware_digest: str = ""
    content_digest: str = ""

    @model_validator(mode="after")
    def _untouched(self) -> Self:
        if self.content_digest and self.content_digest != (found := self.digest()):
            raise ValueError(
                f"content_digest is {self.content_digest[:12]}, but the content has {found[:12]}: the file was changed "
                "after it was written, or by another Ullage; make the plan again with the options you want"
            )
        return self

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON of everything but ``content_digest``."""
        data = self.model_dump(mode="json", exclude={"content_digest"}, exclude_none=True)
        return _digest(data)

    def sealed(self) -> Self:
        """Return the same plan with its digest."""
        parts = {
            f"{name}_digest": _digest(getattr(self, name).model_dump(mode="json", exclude_none=True))
            for name in ("model", "hardware")
        }
        plan = self.model_copy(update=parts)
        return plan.model_copy(update={"content_digest": plan.digest()})

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about the numbers."""
        assumed = self.model.assumed if isinstance(self.model, CapturedModel) else None
        return (*self.prediction.warnings, *(assumed or ()))

    @property
    def request(self) -> Request:
        """The request that the plan answers."""
        return Request(
            self.model,
            self.hardware,
            seq_len=self.seq_len,
            precision=self.decisions.precision,
            optimizer=self.decisions.optimizer,
            clip=self.decisions.clip,
            speculate=self.decisions.speculate is not None,
            subgroup_params=self.decisions.subgroup_params,
            expert_load=self.expert_load,
            **vars(self.constraints),
        )

    def of_rank(self, rank: int) -> Self:
        """Return the plan as a rank executes it: with the machine, the decisions and the prediction of its kind."""
        for kind in self.others or ():
            if rank in kind.ranks:
                own = {"hardware": kind.hardware, "decisions": kind.decisions, "prediction": kind.prediction}
                return self.model_copy(update=own | {"others": None, "divisions_bound_s": None}).sealed()
        return self

    def kinds(self) -> list[DeviceKind]:
        """Return all kinds of devices, in the order of their ranks."""
        others = self.others or ()
        first = DeviceKind(
            hardware=self.hardware,
            first_rank=0,
            num_ranks=self.decisions.num_devices - sum(kind.num_ranks for kind in others),
            decisions=self.decisions,
            prediction=self.prediction,
        )
        return [first, *others]

    def units(self, decisions: Decisions | None = None) -> tuple[Unit, ...]:
        """Return the model's units for this plan's micro-batch, or one tensor-parallel rank's share of them.

        Args:
            decisions: left out, the plan's own.

        Raises:
            ModelConfigError: the model was captured, but not for these decisions.
        """
        decisions = decisions or self.decisions
        batch = batch_of(decisions, decisions.precision, self.seq_len, self.expert_load, self.hardware)
        return units(build_graph(self.model, batch))

    def schedule(self, *, takes_snapshots: bool = False) -> Schedule:
        """Return the schedule of one iteration, which the simulator and the executor run.

        Args:
            takes_snapshots: include the tasks that take snapshots for checkpoints.
        """
        asynchronous = self.hardware.device.kind == "gpu"
        return lower(self.units(), self.decisions, asynchronous=asynchronous, takes_snapshots=takes_snapshots)

    def __str__(self) -> str:
        """Return the plan in one line; `ullage explain` has more of a plan that was saved."""
        seen = self.prediction
        memory = ", ".join(
            f"{gigabytes(use.peak_bytes)} of {gigabytes(use.capacity_bytes)} on {_TIERS[tier]}"
            for tier, use in seen.memory.items()
            if use.peak_bytes
        )
        return (
            f"{self.model.name} on {self.decisions.num_devices} device(s) of {self.hardware.name}: "
            f"{1e3 * seen.iteration_s:.4g} ms per iteration, {describe(self.decisions, self.units())}; {memory}"
        )

    def save(self, path: Path | str) -> None:
        """Write ``plan.json``, whole or not at all; :func:`load_plan` reads it.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(Path(path), self.to_json())

    def to_json(self) -> str:
        """Return the text of ``plan.json``: equal plans give equal bytes."""
        data = self.sealed().model_dump(mode="json", exclude_none=True)
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"

    @property
    def gpu_memory(self) -> TierMemory:
        """Peak memory of one device."""
        return self.prediction.memory[Tier.GPU]


def load_plan(path: Path | str) -> Plan:
    """Read and check a plan file.

    Raises:
        PlanError: it is missing, no plan, of another schema version, or was edited.
    """
    path = Path(path)
    remedy, again = "make a plan with `ullage plan`", "make the plan again with this version"
    plan = read_document(Plan, path, "plan", remedy, again, PlanError)
    if not plan.content_digest:
        raise PlanError(f"{path}: content_digest is missing, so the file cannot be trusted; make the plan again")
    return plan


def describe(decisions: Decisions, units: tuple[Unit, ...]) -> str:
    """Return the placement in one line: recomputed units, parameters on the host, places of updates."""
    placed = decisions.params_by_place(units)
    total = sum(placed.values())
    parts = [f"{100 * n / total:.0f} % of updates {_VERBS[place]}" for place, n in placed.items() if n > total / 200]
    offloaded = sum(map(decisions.offloads, decisions.units))
    recomputed = sum(
        u.activations == "recompute" and not decisions.offloads(name) for name, u in decisions.units.items()
    )
    if offloaded:
        parts.append(f"activations of {offloaded} of {len(decisions.units)} units offloaded")
    if recomputed or not offloaded:
        parts.append(f"{recomputed} of {len(decisions.units)} units recomputed" if recomputed else "activations kept")
    fetched = {where: sum(unit.params == where for unit in decisions.units.values()) for where in ("host", "nvme")}
    parts += [f"parameters of {count} units on the {where}" for where, count in fetched.items() if count]
    if any(map(decisions.moves_fp8, units)):
        parts.append("weights fetched in fp8")
    parts += ["master copies split"] if decisions.split_masters else []
    parts += ["updates before the norm is known"] if decisions.takes_back else []
    tiles = {"loss": decisions.loss_tile_tokens, "layers": decisions.layer_tile_tokens}
    parts += [f"{name} in tiles of {tokens} tokens" for name, tokens in tiles.items() if tokens]
    if (sequences := decisions.segment_tile_sequences) is not None:
        parts.append(f"{sequences} of {decisions.micro_batch} sequences pass a layer at a time")
    if decisions.kernels not in {None, "transformers"}:
        parts.append(f"{decisions.kernels} kernels")
    if decisions.precision.products:
        parts.append(f"products of hidden layers in {decisions.precision.products}")
    if decisions.data_parallel > 1:
        parts.append(decisions.shared_in_words)
    degrees = {"tensor parallel": decisions.tensor_parallel, "pipeline parallel": decisions.pipeline_parallel}
    degrees |= {"rounds": decisions.pipeline_rounds}
    degrees |= {"expert parallel": decisions.expert_parallel, "context parallel": decisions.context_parallel}
    parts += [f"{name} {count}" for name, count in degrees.items() if count > 1]
    parts += ["gradients of weights where stages would wait"] if decisions.pipeline_order else []
    parts += ["keys pass from rank to rank"] if decisions.context_exchange else []
    return ", ".join(parts)


_VERBS = {
    Place.GPU: "on the device",
    Place.STREAM: "streamed through the device",
    Place.CPU: "on the CPU",
    Place.NVME: "on the CPU from NVMe",
}
_TIERS = {Tier.GPU: "the device", Tier.HOST: "the host", Tier.NVME: "NVMe"}


def gigabytes(num_bytes: int) -> str:
    """Return a size in words."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.3g} MB"


def _digest(data: Any) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()
