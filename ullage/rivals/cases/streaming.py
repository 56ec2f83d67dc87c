"""Cases of training that streams a model through one device, within a budget of its memory."""

from typing import Annotated, Literal

from pydantic import Field

from hwprofiles.profile import HardwareProfile
from planner.costs.model import CostModel
from planner.decisions import Sharding
from planner.graph import Batch, units
from planner.search.scoring import Scorer
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, Strict, shortages
from ullage.rivals.cases.training import DEFAULT_POSITIONS, Model
from ullage.rivals.engines.streaming import best_streaming
from ullage.rivals.kernels.dataflow import build_graph
from ullage.rivals.lowering import lower
from ullage.rivals.precision import RivalPrecision

# The search for the engine's decisions simulates at most so many rounds: further ones change all of them alike.
_ROUNDS = 4


class State(Strict):
    """Types of what lives on the host. ``master`` is ``null``: weights are their own master copy."""

    weights: Literal["bf16"]
    gradients: Literal["bf16"]
    moments: Literal["bf16"]
    master: None


class Engine(Strict):
    """What trained it: ShadowSpill (als244/dataflow), the closest engine of this kind."""

    name: Literal["dataflow"]
    optimizer: Literal["adamw", "muon"]
    optimizer_on: Literal["gpu"]
    clip: Literal[False]
    attention: Literal["flash-attention-2", "flash-attention-3"]
    loss: Literal["head and loss in chunks of tokens"]
    state: State


class Measured(Strict):
    """What was measured; and its seconds over those that the engine itself predicted, if stated."""

    tokens_per_s: Amount
    over_their_prediction: Amount | None = None


class StreamingCase(Case):
    """A run on one device.

    Attributes:
        seq_len: tokens of a sequence.
        tokens_per_round: of one forward and backward.
        tokens_per_step: of one iteration.
        device_budget_gib: device memory that the engine may use.
    """

    model: Model
    engine: Engine
    seq_len: Number
    tokens_per_round: Number
    tokens_per_step: Number
    device_budget_gib: Annotated[float, Field(gt=0, le=10_000)]
    measured: Measured

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        return {Metric.ITERATION: self.tokens_per_step / self.measured.tokens_per_s}

    def check(self) -> None:
        """Check that sequences fill rounds, and rounds steps."""
        for name, whole, part in (
            ("tokens_per_round", self.tokens_per_round, self.seq_len),
            ("tokens_per_step", self.tokens_per_step, self.tokens_per_round),
        ):
            if whole % part:
                raise CaseError(f"case {self.id}: {name} is {whole}, but must be a multiple of {part}; correct it")

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Stream as the simulator finds best within the budget, and simulate that until iterations repeat."""
        self.check_one_device(profile)
        machine = within(profile, self.device_budget_gib)
        num_rounds = self.tokens_per_step // self.tokens_per_round
        few = self.setup(min(num_rounds, _ROUNDS))
        cost = CostModel(machine, few.units, few.given)
        best = best_streaming(few, Scorer(few.units, self.seq_len, cost, lower=lower))
        decisions = best.decisions.model_copy(update={"num_micro_batches": num_rounds})
        simulation = run_until_steady(lower(few.units, decisions, asynchronous=True), cost)
        peaks = memory_peaks(simulation.timeline, simulation.steady, cost)
        warnings = (*cost.warnings, *shortages(self.id, peaks))
        return Outcome({Metric.ITERATION: simulation.period_s}, simulation.converged, warnings)

    def setup(self, num_rounds: int) -> Setup:
        """Return the engine's setup, with so many rounds in an iteration."""
        config = self.model.config(max(DEFAULT_POSITIONS, self.seq_len))
        batch = Batch(
            self.tokens_per_round // self.seq_len,
            self.seq_len,
            flash_attention=self.model.flash_attention,
        )
        model_units = units(build_graph(config, batch))
        return Setup(
            model_units,
            Sharding(
                micro_batch=batch.micro_batch,
                num_micro_batches=num_rounds,
                clip=False,
                precision=RivalPrecision(weights="bf16", state="bf16"),
                optimizer=self.engine.optimizer,
                subgroup_params=max(unit.num_params for unit in model_units if unit.can_swap),
            ),
        )


def within(profile: HardwareProfile, budget_gib: float) -> HardwareProfile:
    """Return the machine with at most so much device memory."""
    memory = profile.device.memory_bytes
    budget = memory.model_copy(update={"value": min(budget_gib * 2**30, memory.value)})
    return profile.model_copy(update={"device": profile.device.model_copy(update={"memory_bytes": budget})})
