"""Cases of in-memory training with Megatron-LM, stated by degrees and micro-batches."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from hwprofiles.profile import HardwareProfile
from planner.decisions import Sharding
from planner.graph import units
from planner.models.config import LatentAttention, ModelConfig
from planner.setup import Setup
from ullage.rivals.cases import training
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, Strict
from ullage.rivals.cases.training import simulated
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.kernels.megatron_core import Batch, build_graph, share
from ullage.rivals.precision import RivalPrecision


class LlamaModel(training.Model):
    """Sizes of a dense model."""

    architecture: Literal["llama"]


class DeepSeekModel(Strict):
    """Sizes of a model with multi-head latent attention and experts; ``num_dense_layers`` layers come first."""

    name: str
    architecture: Literal["deepseek_v2", "deepseek_v3"]
    num_layers: Number
    num_dense_layers: Annotated[int, Field(ge=0)]
    hidden_size: Number
    ffn_hidden_size: Number
    moe_ffn_hidden_size: Number
    shared_expert_ffn_hidden_size: Number
    num_experts: Number
    experts_per_token: Number
    num_attention_heads: Number
    q_lora_rank: Number
    kv_lora_rank: Number
    qk_nope_head_dim: Number
    qk_rope_head_dim: Number
    v_head_dim: Number
    vocab_size: Number
    mlp: Literal["swiglu"]
    norm: Literal["rmsnorm"]
    tied_embeddings: bool
    bias: Literal[False]
    flash_attention: Literal[True]

    def config(self, seq_len: int) -> ModelConfig:
        """Return the model for sequences of ``seq_len`` tokens."""
        same = (
            "name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size", "mlp", "norm",
            "tied_embeddings", "num_experts", "experts_per_token", "shared_expert_ffn_hidden_size",
        )  # fmt: skip
        return ModelConfig(
            family="deepseek",
            num_key_value_heads=self.num_attention_heads,
            head_dim=self.qk_nope_head_dim + self.qk_rope_head_dim,
            max_positions=seq_len,
            word_embed_proj_dim=self.hidden_size,
            expert_ffn_hidden_size=self.moe_ffn_hidden_size,
            dense_layers=tuple(range(min(self.num_dense_layers, self.num_layers))),
            latent=LatentAttention(
                q_lora_rank=self.q_lora_rank,
                kv_lora_rank=self.kv_lora_rank,
                qk_rope_head_dim=self.qk_rope_head_dim,
                v_head_dim=self.v_head_dim,
            ),
            **{name: getattr(self, name) for name in same},
        )


class Engine(Strict):
    """What trained it.

    Attributes:
        gradients: the type in which micro-batches' gradients are added up and reduced.
        sequence_parallel: whether tensor-parallel ranks share the tokens of norms and residuals.
    """

    name: Literal["gpu-only"]
    zero_stage: Annotated[int, Field(ge=0, le=1)]
    gradients: Literal["bf16", "fp32"]
    fused_cross_entropy: bool
    sequence_parallel: bool


class Parallel(Strict):
    """Degrees; expert-parallel ranks are among those that share tokens or layers."""

    data_parallel: Number
    tensor_parallel: Number
    pipeline_parallel: Number
    context_parallel: Number
    expert_parallel: Number


class Measured(Strict):
    """What was measured: milliseconds, and GiB that the allocator had handed out at most."""

    iteration_ms: Amount
    peak_gpu_allocated_gib: Amount | None = None


class InMemoryCase(Case):
    """A run of Megatron-LM with all state on the devices of one node, without recomputation.

    Attributes:
        predicted_by_simumax_ms: what SimuMax predicts for the iteration; it is kept for comparison only.
    """

    model: Annotated[LlamaModel | DeepSeekModel, Field(discriminator="architecture")]
    engine: Engine
    parallel: Parallel
    seq_len: Number
    micro_batch: Number
    num_micro_batches: Number
    measured: Measured
    predicted_by_simumax_ms: Amount | None = None

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        found = {Metric.ITERATION: self.measured.iteration_ms * 1e-3}
        if (peak_gib := self.measured.peak_gpu_allocated_gib) is not None:
            found[Metric.PEAK_GPU] = peak_gib * 2**30
        return found

    def check(self) -> None:
        """Check that the case can be expressed."""
        for field, value, allowed in self._requirements():
            if value != allowed:
                raise CaseError(f"case {self.id}: {field} is {value}, but only {allowed} can be predicted so far")
        parallel = self.parallel
        replicas, tensor_parallel = parallel.data_parallel * parallel.context_parallel, parallel.tensor_parallel
        if isinstance(self.model, DeepSeekModel) and (
            parallel.expert_parallel % tensor_parallel or replicas * tensor_parallel % parallel.expert_parallel
        ):
            raise CaseError(
                f"case {self.id}: parallel.expert_parallel is {parallel.expert_parallel}, but must be a multiple of "
                f"tensor_parallel {tensor_parallel} and divide data_parallel x context_parallel x tensor_parallel, "
                f"{replicas * tensor_parallel}; correct it"
            )
        self.share()

    def _requirements(self) -> Iterator[tuple[str, object, object]]:
        """Yield field, value and what it must be."""
        yield "engine.gradients", self.engine.gradients, "fp32"
        yield "engine.fused_cross_entropy", self.engine.fused_cross_entropy, True
        yield "engine.zero_stage", self.engine.zero_stage, 1
        yield "model.flash_attention", self.model.flash_attention, True
        yield "model.bias", self.model.bias, False
        yield "model.mlp", self.model.mlp, "swiglu"
        if self.parallel.tensor_parallel > 1:  # otherwise there is nothing to share
            yield "engine.sequence_parallel", self.engine.sequence_parallel, True
        if not isinstance(self.model, DeepSeekModel):
            yield "parallel.expert_parallel", self.parallel.expert_parallel, 1

    def share(self) -> tuple[ModelConfig, Batch]:
        """Return the model and the batch, whose graph is one rank's share of every layer.

        Raises:
            CaseError: the sizes contradict one another, or do not divide evenly.
        """
        try:
            config = self.model.config(self.seq_len)
            batch = Batch(
                self.micro_batch,
                self.seq_len,
                tensor_parallel=self.parallel.tensor_parallel,
                context_parallel=self.parallel.context_parallel,
                expert_parallel=self.parallel.expert_parallel,
            )
            share(config, batch)
        except ValueError as error:
            raise CaseError(f"case {self.id}: model: {error}") from error
        return config, batch

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Train with everything on the device, ZeRO-1 over data- and context-parallel ranks, nothing recomputed."""
        parallel = self.parallel
        replicas = parallel.data_parallel * parallel.context_parallel
        ranks = replicas * parallel.tensor_parallel * parallel.pipeline_parallel
        if ranks > profile.devices_per_node:
            raise CaseError(
                f"case {self.id}: parallel has {ranks} ranks, but {profile.name} has {profile.devices_per_node} "
                "devices per node; name another profile"
            )
        config, batch = self.share()
        setup = Setup(
            units(build_graph(config, batch)),
            Sharding(
                data_parallel=replicas,
                micro_batch=self.micro_batch,
                num_micro_batches=self.num_micro_batches,
                precision=RivalPrecision(weights="bf16", gradients="fp32"),
                tensor_parallel=parallel.tensor_parallel,
                expert_parallel=max(parallel.expert_parallel // parallel.tensor_parallel, 1),
            ),
        )
        decisions = next(gpu_only(setup)).model_copy(
            update={"reduce_start": "step", "pipeline_parallel": parallel.pipeline_parallel}
        )
        return simulated(self.id, profile, setup.units, decisions)
