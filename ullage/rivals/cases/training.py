"""Cases of training: an engine, its parallelism and batch, and the phases of its iteration."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from hwprofiles.profile import HardwareProfile
from planner.costs.model import CostModel
from planner.decisions import BF16, Sharding
from planner.graph import Batch, Unit, units
from planner.models.config import ModelConfig, ModelConfigError
from planner.models.huggingface import build
from planner.models.parameters import num_parameters
from planner.schedule.tasks import Tier
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks
from ullage.rivals.cases.attention import AttentionKernel, with_attention
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, Strict, shortages
from ullage.rivals.decisions import GradientPath, RivalDecisions
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed import twin_flow, with_host_parameters, zero_infinity, zero_offload
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.kernels import megatron_lm
from ullage.rivals.lowering import lower

# Of one iteration: more would take minutes to simulate, and say nothing new.
_MAX_PASSES = 100_000
_MAX_SUBGROUPS = 20_000
# Number of learned positions where a published run does not record it: at least as many as it was trained on.
DEFAULT_POSITIONS = 2048
# DeepSpeed reduces gradients after the last micro-batch in buckets (``MEMORY_OPT_ALLREDUCE_SIZE`` in
# ``deepspeed/runtime/engine.py``), so that few all-reduces pay their latency.
_BUCKET_PARAMS = 500_000_000


class Model(Strict):
    """Sizes of the model. ``num_key_value_heads`` share heads of ``hidden_size / num_attention_heads``."""

    name: str
    architecture: Literal["llama", "gpt2"]
    num_layers: Number
    hidden_size: Number
    ffn_hidden_size: Number
    num_attention_heads: Number
    num_key_value_heads: Number
    vocab_size: Number
    mlp: str
    norm: str
    tied_embeddings: bool
    bias: bool
    flash_attention: bool
    max_positions: Number | None = None
    num_params: Number | None = None

    def config(self, num_positions: int) -> ModelConfig:
        """Return the model, which has so many positions unless they are stated.

        Raises:
            ModelConfigError: a size breaks a rule, or the parameters do not add up to ``num_params``.
        """
        others = {"name", "architecture", "bias", "flash_attention", "num_params"}
        sizes = {"max_positions": num_positions} | self.model_dump(exclude_none=True, exclude=others)
        sizes |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), self.bias)
        config = build(sizes, self.name, self.architecture)
        if self.num_params is not None and (found := num_parameters(config)) != self.num_params:
            raise ModelConfigError(
                f"{self.name}: its sizes make {found} parameters, but num_params is {self.num_params}; correct the "
                "sizes or leave it out"
            )
        return config


class Engine(Strict):
    """What trained it.

    Attributes:
        gradient_flush: whether backward waits for unpinned copies of gradients to the host.
        cpu_optimizer_fraction: fraction of the parameters that the CPU updates; the first ones stay on the device.
        subgroup_params: parameters in one subgroup of the optimizer step.
        stride: every so many subgroups one is streamed to the device (``interleaved``).
    """

    name: Literal["gpu-only", "zero3-offload", "interleaved"]
    gradient_flush: Literal["blocking", "async"] | None = None
    cpu_optimizer_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    subgroup_params: Number = 100_000_000
    stride: Number | None = None


class Parallel(Strict):
    """How many devices, and what is split over them."""

    data_parallel: Number
    tensor_parallel: Number = 1
    pipeline_parallel: Number = 1
    gpus_per_node: Number
    nodes: Number = 1


class BatchSizes(Strict):
    """Sequences per forward on one device, sequences per iteration on all, tokens per sequence."""

    micro_batch: Number
    global_batch: Number
    seq_len: Number


class Offload(Strict):
    """Where parameters and optimizer state live."""

    params: str
    optimizer: str


class Measured(Strict):
    """What was measured, as far as it was.

    Milliseconds, and what the allocator had handed out at most: GiB, which DeepSpeed's log calls GB
    (``utils.py::see_memory_usage``).
    """

    forward_ms: Amount | None = None
    backward_ms: Amount | None = None
    update_ms: Amount | None = None
    iteration_ms: Amount
    peak_gpu_allocated_gb: Amount | None = None


class TrainingCase(Case):
    """A run whose iterations were timed.

    Attributes:
        attention: its attention kernel, if that is not the one whose rate the profile has.
    """

    model: Model
    attention: AttentionKernel | None = None
    engine: Engine
    parallel: Parallel
    batch: BatchSizes
    activations: Literal["keep", "recompute"]
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    offload: Offload = Offload(params="gpu", optimizer="gpu")
    precision: str
    measured: Measured

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        measured = self.measured
        found = {
            Metric.FORWARD: (measured.forward_ms, 1e-3),
            Metric.BACKWARD: (measured.backward_ms, 1e-3),
            Metric.UPDATE: (measured.update_ms, 1e-3),
            Metric.ITERATION: (measured.iteration_ms, 1e-3),
            Metric.PEAK_GPU: (measured.peak_gpu_allocated_gb, 2**30),
        }
        return {metric: value * unit for metric, (value, unit) in found.items() if value is not None}

    def check(self) -> None:
        """Check that the case can be expressed."""
        for field, value, allowed in _requirements(self):
            if value not in allowed:
                choices = " or ".join(str(choice) for choice in allowed)
                raise CaseError(f"case {self.id}: {field} is {value}, but only {choices} can be predicted so far")
        parallel, data_parallel = self.parallel, self.parallel.data_parallel
        ranks = data_parallel * parallel.tensor_parallel * parallel.pipeline_parallel
        if ranks > (devices := parallel.gpus_per_node * parallel.nodes):
            raise CaseError(
                f"case {self.id}: parallel.data_parallel {data_parallel} x tensor_parallel {parallel.tensor_parallel} "
                f"x pipeline_parallel {parallel.pipeline_parallel} need {ranks} devices, but there are {devices}; "
                "correct it"
            )
        if parallel.pipeline_parallel > self.model.num_layers:
            raise CaseError(
                f"case {self.id}: parallel.pipeline_parallel is {parallel.pipeline_parallel}, but there are "
                f"{self.model.num_layers} layers to deal to the stages; correct it"
            )
        self._check_nodes(ranks)
        self.share()
        if self.batch.global_batch % (self.batch.micro_batch * data_parallel):
            raise CaseError(
                f"case {self.id}: batch.global_batch is {self.batch.global_batch}, but must be a multiple of "
                f"micro_batch {self.batch.micro_batch} times data_parallel {data_parallel}; correct it"
            )
        self._check_size()

    def _check_nodes(self, ranks: int) -> None:
        """Check that ranks fill one node after the other; see [Note: Layout] in :mod:`planner.costs.layout`."""
        parallel = self.parallel
        needed = -(-ranks // parallel.gpus_per_node)
        if parallel.nodes > needed:
            raise CaseError(
                f"case {self.id}: parallel.nodes is {parallel.nodes}, but {ranks} ranks fill {needed} of "
                f"them with {parallel.gpus_per_node} devices each; state how many were used"
            )
        tensor_parallel, per_node = parallel.tensor_parallel, parallel.gpus_per_node
        if needed > 1 and per_node % tensor_parallel and tensor_parallel % per_node:
            raise CaseError(
                f"case {self.id}: parallel.tensor_parallel is {tensor_parallel}, which on nodes of {per_node} devices "
                "spreads some groups of ranks over two nodes and others not; choose one that divides the other"
            )

    def _check_size(self) -> None:
        """Check that one iteration can be walked: every micro-batch's passes and every subgroup is a task."""
        stages, num_micro_batches = self.parallel.pipeline_parallel, _num_micro_batches(self)
        passes = num_micro_batches * (stages if stages > 1 else self.model.num_layers)
        if passes > _MAX_PASSES:
            raise CaseError(
                f"case {self.id}: batch.global_batch {self.batch.global_batch} makes {num_micro_batches} micro-batches "
                f"and {passes} passes through layers or stages, more than {_MAX_PASSES}; predict a smaller one, as "
                "time grows in proportion"
            )
        config, _ = self.share()
        subgroups = num_parameters(config) // (self.engine.subgroup_params * self.parallel.data_parallel)
        if subgroups > _MAX_SUBGROUPS:
            raise CaseError(
                f"case {self.id}: engine.subgroup_params is {self.engine.subgroup_params}, which makes {subgroups} "
                f"subgroups per rank, more than {_MAX_SUBGROUPS}; state a larger one"
            )

    def share(self) -> tuple[ModelConfig, Batch]:
        """Return the model and the batch, whose graph is one rank's share of every layer.

        Raises:
            CaseError: the sizes contradict one another, or do not divide evenly.
        """
        batch = Batch(
            self.batch.micro_batch,
            self.batch.seq_len,
            2,
            flash_attention=self.model.flash_attention,
            tensor_parallel=self.parallel.tensor_parallel,
        )
        try:
            config = self.model.config(max(DEFAULT_POSITIONS, self.batch.seq_len))
            megatron_lm.share(config, batch)
        except ValueError as error:
            raise CaseError(f"case {self.id}: model: {error}") from error
        return config, batch

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Lower what the case's engine did, and simulate it until iterations repeat."""
        if self.parallel.gpus_per_node != profile.devices_per_node:
            raise CaseError(
                f"case {self.id}: parallel.gpus_per_node is {self.parallel.gpus_per_node}, but {profile.name} has "
                f"{profile.devices_per_node} devices per node; name another profile"
            )
        model_units, setup = setup_of(self)
        profile = with_attention(profile, self.attention) if self.attention else profile
        return simulated(self.id, profile, model_units, decide(self, setup))


def simulated(
    case_id: str, profile: HardwareProfile, model_units: tuple[Unit, ...], decisions: RivalDecisions
) -> Outcome:
    """Return what is predicted for a case's decisions: simulated until iterations repeat."""
    cost = CostModel.of(profile, model_units, decisions)
    schedule = lower(model_units, decisions, asynchronous=cost.asynchronous)
    simulation = run_until_steady(schedule, cost)
    phases = simulation.phases
    peaks = memory_peaks(simulation.timeline, simulation.steady, cost)
    values = {
        Metric.FORWARD: phases.forward_s,
        Metric.BACKWARD: phases.backward_s,
        Metric.UPDATE: phases.update_s,
        Metric.ITERATION: phases.iteration_s,
        Metric.PEAK_GPU: float(peaks[Tier.GPU].peak_bytes),
    }

    def iteration_s(machine: HardwareProfile) -> float:
        return run_until_steady(schedule, CostModel.of(machine, model_units, decisions)).phases.iteration_s

    return Outcome(values, simulation.converged, (*cost.warnings, *shortages(case_id, peaks)), iteration_s)


def setup_of(case: TrainingCase) -> tuple[tuple[Unit, ...], Setup]:
    """Return the units of a case's model at its batch, and the setup of its engine."""
    config, batch = case.share()
    try:
        model_units = units(megatron_lm.build_graph(config, batch, adds_gradients=case.zero_stage < 3))
    except ValueError as error:
        raise CaseError(f"case {case.id}: model: {error}") from error
    setup = Setup(
        model_units,
        Sharding(
            data_parallel=case.parallel.data_parallel,
            micro_batch=case.batch.micro_batch,
            num_micro_batches=_num_micro_batches(case),
            precision=BF16,
            subgroup_params=case.engine.subgroup_params,
        ),
    )
    return model_units, setup


def decide(case: TrainingCase, setup: Setup) -> RivalDecisions:
    """Return the decisions that stand for what a case's engine did, in a script that also logs and loads data."""
    decisions = _engine(case, setup)
    try:
        if case.offload.params == "cpu":
            decisions = with_host_parameters(decisions, setup)
        return RivalDecisions.model_validate(
            dict(decisions) | {"loop": True, "tensor_parallel": case.parallel.tensor_parallel}
        )
    except ValidationError as error:
        rule = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise CaseError(f"case {case.id}: offload.params: {rule}") from error


def _engine(case: TrainingCase, setup: Setup) -> RivalDecisions:
    engine = case.engine
    if engine.name == "gpu-only":
        # Without sharding, every rank updates all parameters, so the pieces are those of one rank.
        whole = setup if case.zero_stage else setup.changed(data_parallel=1)
        chosen = _pick(gpu_only(whole), case, zero_stage=case.zero_stage if setup.given.data_parallel > 1 else 0)
        return chosen.model_copy(
            update={
                "data_parallel": setup.given.data_parallel,
                "pipeline_parallel": case.parallel.pipeline_parallel,
                # DeepSpeed adds gradients up after the last micro-batch, unless it shards them.
                "reduce_start": "step" if case.zero_stage < 2 else "backward",
                "bucket_params": _BUCKET_PARAMS if case.zero_stage == 0 else 0,
            }
        )
    if engine.name == "interleaved":
        assert engine.stride is not None
        candidates = interleaved(setup, (engine.stride,), engine.cpu_optimizer_fraction)
    elif engine.cpu_optimizer_fraction < 1:
        candidates = twin_flow(setup, (engine.cpu_optimizer_fraction,))
    elif case.offload.optimizer == "nvme":  # gradients always leave through pinned buffers
        return _pick(zero_infinity(setup), case)
    else:
        candidates = zero_offload(setup)
    path = GradientPath.ZERO3_BLOCKING if engine.gradient_flush == "blocking" else GradientPath.ZERO3_ASYNC
    return _pick(candidates, case).model_copy(update={"gradient_path": path})


def _requirements(case: TrainingCase) -> Iterator[tuple[str, object, tuple[object, ...]]]:
    """Yield field, value and what it may be."""
    engine = case.engine
    offloaded = engine.name != "gpu-only"
    yield "offload.params", case.offload.params, ("gpu", "cpu") if offloaded else ("gpu",)
    offloads = ("cpu", "nvme") if engine.name == "zero3-offload" else ("cpu",)
    yield "offload.optimizer", case.offload.optimizer, offloads if offloaded else ("gpu",)
    if case.offload.optimizer == "nvme":
        yield "engine.cpu_optimizer_fraction", engine.cpu_optimizer_fraction, (1.0,)
    # fp16 products take what bf16 ones take; the optimizer works in fp32 either way.
    yield "precision", case.precision, ("bf16+fp32-adam", "fp16+fp32-adam")
    if offloaded:
        yield "parallel.pipeline_parallel", case.parallel.pipeline_parallel, (1,)
        yield "zero_stage", case.zero_stage, (3,)
        yield "engine.gradient_flush", engine.gradient_flush, ("async", "blocking")
    else:
        # Pipeline engines refuse more: every micro-batch would send its gradients again.
        yield "zero_stage", case.zero_stage, (0, 1) if case.parallel.pipeline_parallel > 1 else (0, 1, 2, 3)
        yield "engine.gradient_flush", engine.gradient_flush, (None,)
        yield "engine.cpu_optimizer_fraction", engine.cpu_optimizer_fraction, (1.0,)
    if engine.name == "interleaved":
        yield "engine.stride given", engine.stride is not None, (True,)
    else:
        yield "engine.stride", engine.stride, (None,)


def _pick(candidates: Iterator[RivalDecisions], case: TrainingCase, *, zero_stage: int | None = None) -> RivalDecisions:
    for decisions in candidates:
        keeps_activations = all(unit.activations == "keep" for unit in decisions.units.values())
        if keeps_activations == (case.activations == "keep") and zero_stage in {None, decisions.zero_stage}:
            return decisions
    raise AssertionError(f"{case.id}: the policy offers no such decisions")


def _num_micro_batches(case: TrainingCase) -> int:
    return case.batch.global_batch // (case.batch.micro_batch * case.parallel.data_parallel)
