"""Our plans beside measured runs of an engine that has no row."""

from typing import Final, Literal

from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.config import ModelConfigError
from planner.models.registry import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError, make_plan
from planner.terms import KernelChoice
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome

_KERNELS: Final[tuple[KernelChoice, ...]] = ("transformers", "compiled", "compiled-layers")


class BesideCase(Case):
    """A run of LLMQ, which trains all in bf16 with kernels of its own, and CUDA graphs.

    Our plan of the same work stands beside it: the same model, sequences per step, types and machine. How a step is cut
    into micro-batches and shared by devices is each engine's choice. LLMQ's state is all bf16 with stochastic rounding,
    as that of ``adamw-bf16`` with a master copy in bf16.

    Attributes:
        machine: the machine in words.
        model: a name of ``ullage models``.
        devices, micro_batch, num_micro_batches, seq_len: devices, and what each does in a step.
        products: ``fp8``, or ``None``: as weights.
        tokens_per_s: measured, over all devices.
    """

    machine: str = ""
    model: str
    devices: Number
    micro_batch: Number
    num_micro_batches: Number
    seq_len: Number
    products: Literal["fp8"] | None = None
    tokens_per_s: Amount

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, over all devices."""
        return self.devices * self.micro_batch * self.num_micro_batches

    def measurements(self) -> dict[Metric, float]:
        """Return the time of a step."""
        return {Metric.OURS: self.num_sequences * self.seq_len / self.tokens_per_s}

    def check(self) -> None:
        """Nothing can be wrong: planning says what is."""

    def plans(self, profile: HardwareProfile) -> dict[KernelChoice, Plan]:
        """Return our plans on a machine by their kernels, without those that do not fit."""
        found: dict[KernelChoice, Plan] = {}
        for kernels in _KERNELS:
            try:
                request = Request(
                    resolve_model(self.model),
                    profile,
                    num_devices=self.devices,
                    seq_len=self.seq_len,
                    global_batch=self.num_sequences,
                    precision=Precision(weights="bf16", master="bf16", products=self.products),
                    optimizer="adamw-bf16",
                    pipeline_parallel=1,  # which can be executed
                    kernels=kernels,
                    storage="activations" if kernels == "transformers" else "never",
                )
                found[kernels] = make_plan(request)
            except (InfeasibleError, ModelConfigError):
                continue
        return found

    def _predict(self, profile: HardwareProfile) -> Outcome:
        if not (plans := self.plans(profile)):
            raise CaseError(f"case {self.id}: no plan of ours fits on {profile.name}")
        return Outcome({Metric.OURS: min(found.prediction.iteration_s for found in plans.values())})
