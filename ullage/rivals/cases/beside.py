"""Our plans beside measured runs of an engine with kernels of its own."""

from typing import Final

from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.config import ModelConfigError
from planner.models.registry import resolve_model
from planner.plan.document import Plan
from planner.plan.planning import InfeasibleError, make_plan
from planner.terms import KernelChoice
from ullage.rivals.cases.base import Case, CaseError, Metric, Outcome
from ullage.rivals.cases.training import TrainingCase
from ullage.rivals.engines.catalogue import GRAPHS

_KERNELS: Final[tuple[KernelChoice, ...]] = ("transformers", "compiled", "compiled-layers")


class BesideCase(Case):
    """A run of LLMQ, beside which our plan of the same work stands.

    That is the same model, sequences per step, types and machine. How a step is cut into micro-batches and shared by
    devices is each engine's choice. LLMQ's state is all bf16 with stochastic rounding, as that of ``adamw-bf16`` with a
    master copy in bf16.

    Attributes:
        run: the run.
    """

    run: TrainingCase

    @classmethod
    def of(cls, run: Case) -> "BesideCase | None":
        """Return our plan's place beside a run of an engine with kernels of its own; ``None`` beside others."""
        if not isinstance(run, TrainingCase) or run.engine not in GRAPHS:
            return None
        return cls(id=run.id, hardware=run.hardware, source=run.source, run=run)

    @property
    def num_sequences(self) -> int:
        """Sequences of a step, over all devices."""
        return self.run.tokens_per_step // self.run.seq_len

    def measurements(self) -> dict[Metric, float]:
        """Return the time of a step."""
        return {Metric.OURS: self.run.measurements()[Metric.ITERATION]}

    def check(self) -> None:
        """Check the run."""
        self.run.check()

    def plans(self, profile: HardwareProfile) -> dict[KernelChoice, Plan]:
        """Return our plans on a machine by their kernels, without those that do not fit."""
        found: dict[KernelChoice, Plan] = {}
        assert isinstance(self.run.model, str)
        for kernels in _KERNELS:
            try:
                request = Request(
                    resolve_model(self.run.model),
                    profile,
                    num_devices=self.run.devices,
                    seq_len=self.run.seq_len,
                    global_batch=self.num_sequences,
                    precision=Precision(weights="bf16", master="bf16", products=self.run.precision.products),
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
