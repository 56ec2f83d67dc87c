"""Cases of training that others measured, in the words of a request: any engine that has a row, on any machine."""

import contextlib
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from hwprofiles.files import write_whole
from hwprofiles.paths import replace
from hwprofiles.profile import HardwareProfile
from hwprofiles.quantity import Provenance
from planner.choices.request import batch_of
from planner.costs.model import CostModel, total_flop
from planner.decisions import Place, Sharding
from planner.graph import Operator, Unit, build_graph, units
from planner.models.adapters import Lora
from planner.models.captured import Model
from planner.models.config import ModelConfig, NoFormulasError
from planner.models.formulas.ends import with_loss_of
from planner.models.kernels import Elementwise
from planner.models.parameters import num_parameters
from planner.models.quantization import Quantization
from planner.models.registry import configuration, resolve_model
from planner.optimizers import Optimizer
from planner.placements import ACTIVATIONS
from planner.schedule.tasks import Phase, Tier
from planner.search import Scorer
from planner.setup import Setup
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import always_held, capacities, memory_peaks
from planner.terms import KernelChoice
from ullage.rivals.best import best_of_engine
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, shortages
from ullage.rivals.cases.process import beside_tensors_bytes
from ullage.rivals.cases.rates import AttentionKernel, with_attention, with_fp16_sums, with_pair
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES
from ullage.rivals.engines.deciding import gpu_only, unsharded
from ullage.rivals.engines.deepspeed import super_offload, twin_flow, with_host_parameters, zero_infinity
from ullage.rivals.engines.deepspeed_config import Zero, configured
from ullage.rivals.engines.interleaved import interleaved
from ullage.rivals.engines.llmq import Placement, place
from ullage.rivals.engines.ratel import ratel
from ullage.rivals.engines.streaming import best_streaming
from ullage.rivals.kernels import dataflow, llmq, megatron_core, megatron_lm, whole_logits
from ullage.rivals.kernels.llmq import Remade
from ullage.rivals.lowering import lower
from ullage.rivals.precision import RivalPrecision

# Of one iteration: more would take minutes to simulate, and say nothing new.
_MAX_PASSES: Final = 100_000
_MAX_SUBGROUPS: Final = 20_000
# The search for the placement of a streaming engine simulates at most so many micro-batches: further ones change all
# placements alike.
_SEARCHED_MICRO_BATCHES: Final = 4
# DeepSpeed reduces gradients after the last micro-batch in buckets (``MEMORY_OPT_ALLREDUCE_SIZE`` in
# ``deepspeed/runtime/engine.py``), so that few all-reduces pay their latency.
_BUCKET_PARAMS: Final = 500_000_000
# PyTorch's AdamW moves 20 values of each parameter, one operation after another (``torch/optim/adam.py``,
# ``_multi_tensor_adam``), where one kernel moves 7.
_CHAIN_VALUES: Final = 20 - 7
_IN_MEMORY: Final = ("fsdp", "megatron")
_LINK: Final = {"down": "host_link.down", "up": "host_link.up", "both": "host_link.both_bytes_per_s"}

DEEPSPEED: Final[dict[str, str]] = {
    "stage": "stage",
    "optimizer_device": "offload_optimizer.device",
    "cpu_ratio": "offload_optimizer.ratio",
    "pin_optimizer": "offload_optimizer.pin_memory",
    "pipeline_read": "offload_optimizer.pipeline_read",
    "pipeline_write": "offload_optimizer.pipeline_write",
    "super_offload": "offload_optimizer.super_offload",
    "param_device": "offload_param.device",
    "overlap_comm": "overlap_comm",
    "reduce_bucket_params": "reduce_bucket_size",
    "prefetch_params": "stage3_prefetch_bucket_size",
    "persistent_params": "stage3_param_persistence_threshold",
    "max_live_params": "stage3_max_live_parameters",
    "max_reuse_params": "stage3_max_reuse_distance",
}
"""What cases call the settings of ``zero_optimization`` in DeepSpeed's configuration."""

Quantity = Literal[
    "forward_ms",
    "backward_ms",
    "update_ms",
    "iteration_ms",
    "tokens_per_s",
    "tflops",
    "peak_gpu_allocated_gib",
    "peak_gpu_reserved_gib",
    "peak_gpu_process_gib",
]
"""What may be measured: milliseconds, tokens of all devices together, 1e12 FLOP/s of the model (recomputation not
counted), and GiB that the device's allocator had handed out at most, that it had reserved, or that the process had
taken of the device. Of what the allocator reserves beside what is handed out, logits alone are known
(:meth:`TrainingCase._kept_logit_bytes`).
DeepSpeed's log calls GiB "GB" (``utils.py::see_memory_usage``)."""

_MEASURED: Final[dict[Quantity, tuple[Metric, float]]] = {
    "forward_ms": (Metric.FORWARD, 1e-3),
    "backward_ms": (Metric.BACKWARD, 1e-3),
    "update_ms": (Metric.UPDATE, 1e-3),
    "iteration_ms": (Metric.ITERATION, 1e-3),
    "tflops": (Metric.COMPUTE_RATE, 1e12),
    "peak_gpu_allocated_gib": (Metric.PEAK_GPU, 2**30),
    "peak_gpu_reserved_gib": (Metric.PEAK_GPU, 2**30),
    "peak_gpu_process_gib": (Metric.PEAK_GPU, 2**30),
}


class TrainingCase(Case):
    """A run of an engine whose iterations were timed.

    Attributes:
        machine: the machine in words, as far as its source names it.
        differs: what is known to differ between the run and what is simulated, as of its machine and the profile.
        note: what else the source says.
        model: a name of ``ullage models``, the content of a ``config.json``, or the model itself.
        lora, quantize: adapters beside frozen projections, as ``--lora`` and ``--quantize`` have them.
        engine: ``deepspeed``; ``fsdp``, which shards everything over the devices; ``megatron``, which keeps everything
            on the devices and reduces gradients after backward; or one of ``ullage simulate``. What of its setting and
            its activations is not stated is the best that the engine finds.
        zero_stage: what ``fsdp`` and ``megatron`` shard.
        deepspeed: DeepSpeed's settings, by the names in :data:`DEEPSPEED`; gradients leave through pinned memory unless
            said otherwise. ``waits``: stage 3 waits for the last copy of a gradient, as it did before 0.19.5.
        host_share: the fraction of parameters that the host updates (``twin-flow``, ``super-offload``,
            ``interleaved``); the first ones stay on the device.
        stride: every so many subgroups one is streamed to the device (``interleaved``).
        host_params: whether weights that the host updates are fetched from it (the same engines).
        gradient_path: how these engines copied gradients: whether backward waited for the last, unpinned copy.
        subgroup_params: parameters in one subgroup of the optimizer step; ``None``: as ours.
        ssds: NVMe drives that were used, out of those of the machine; ``None``: all.
        devices, tensor_parallel, pipeline_parallel: their number, and what is split over them.
        nodes, gpus_per_node: of the machine, if they are known; its profile must have as many devices per node.
        context_parallel, expert_parallel: ranks, among those that share neither layers nor stages, which share the
            tokens of a sequence; and ranks that share experts (only with ``megatron-core``).
        sequence_parallel: whether tensor-parallel ranks share tokens between products (``megatron-core``).
        loss_in_place: whether the loss is TransformerEngine's (``megatron-core``).
        micro_batch, num_micro_batches, seq_len: sequences per forward on a rank, forwards per iteration, tokens.
        kernels: as in a request; or those of Megatron-LM, of Megatron-Core, whose ranks share tokens, of ``dataflow``
            or of ``llmq``.
        placed, remade: what LLMQ had on the host, and made again in backward; see
            :class:`ullage.rivals.engines.llmq.Placement`. Its ``zero_stage`` shards gradients if it is 2.
        through_host: whether ranks summed gradients by copies through host memory.
        loss_tile, precision, optimizer, clip: as in a request.
        joint_qkv: whether one module makes queries, keys and values, as in Qwen's first models (no adapters).
        fp16_sums: whether products of fp16 were added up in fp16.
        attention: the attention kernel, if it is known; ``unfused``: products and a softmax.
        activations: what layers did with theirs; ``None``: as the engine's users would choose.
        reruns_all: whether recomputation runs all of a layer again, as PyTorch's reentrant checkpoints do. Others stop
            when the last saved tensor is back.
        loop: whether the script's own work between iterations counts: logging, data, waiting for the device, reports of
            memory ([Note: Reports]).
        inputs_on_host: whether inputs of recomputed layers waited on the host.
        updates_in_backward: whether each gradient was used as soon as it was there.
        dtensors: whether parameters are ``DTensor``, as in PyTorch's FSDP2.
        reduces_once: whether ranks of ``fsdp`` reduced gradients in the last micro-batch only, and added up whole ones
            before (``no_sync``).
        keeps_output: whether the loop kept the model's output, and with it all logits, while backward ran. ``fp32``: it
            had cast them.
        fused_head: whether the head of ``liger`` computes the loss, too, and makes no logits.
        loss: ``transformers``: head and loss are those of ``transformers``, operation by operation on all logits in
            fp32, beside layers with other ``kernels``; ``None``: those of ``kernels``.
        biases_by_expert: whether each expert's bias is added to all of its rows at once. ``transformers`` looks up one
            for each row, and in backward adds up one row after another ([Note: Kernel lists] in
            :mod:`planner.models.kernels`).
        fused_update: whether the optimizer of ``fsdp`` was one kernel a tensor, as with ``fused=True``. PyTorch's AdamW
            is not by default: it takes the square roots of all second moments before it uses any.
        paged: whether optimizer state is on the host, and in an update the driver moves it to the device and back, as
            ``bitsandbytes`` has it.
        step_copies: tensors that this AdamW makes of all second moments: before PyTorch 2.1, one more with epsilon.
        device_budget_gib: device memory that the engine might use.
        link_gb_s: what the source measured of the host link, in GB/s: copies alone, and both ways at once.
        predicted_by_simumax_ms, over_their_prediction: the iteration that SimuMax predicts, and the measured iteration
            over the one that the engine itself predicts. They are kept for comparison only.
    """

    machine: str = ""
    differs: str = ""
    note: str = ""
    model: str | dict[str, Any] | ModelConfig
    lora: str | None = None
    quantize: Quantization | None = None
    engine: str
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    host_share: Annotated[float, Field(ge=0, le=1)] | None = None
    stride: Number | None = None
    host_params: bool = False
    gradient_path: Literal["zero3-blocking", "zero3-async"] | None = None
    subgroup_params: Number | None = None
    ssds: Number | None = None
    devices: Number = 1
    nodes: Number | None = None
    gpus_per_node: Number | None = None
    tensor_parallel: Number = 1
    pipeline_parallel: Number = 1
    context_parallel: Number = 1
    expert_parallel: Number = 1
    sequence_parallel: bool = True
    loss_in_place: bool = False
    micro_batch: Number
    num_micro_batches: Number = 1
    seq_len: Number
    kernels: KernelChoice | Literal["megatron-lm", "megatron-core", "dataflow", "llmq"] = "transformers"
    placed: dict[Literal["streams", "fetches", "gradients_on_host"], bool] = Field(default_factory=dict)
    remade: list[Remade] = Field(default_factory=list)
    through_host: bool = False
    attention: AttentionKernel | Literal["unfused"] | None = None
    joint_qkv: bool = False
    fp16_sums: bool = False
    loss_tile: Number | None = None
    precision: RivalPrecision = RivalPrecision(weights="bf16")
    optimizer: Optimizer = "adamw"
    clip: bool = True
    activations: Literal["keep", "recompute"] | None = None
    reruns_all: bool = False
    loop: bool = False
    inputs_on_host: bool = False
    updates_in_backward: bool = False
    dtensors: bool = False
    reduces_once: bool = False
    keeps_output: bool | Literal["fp32"] = False
    fused_head: bool = True
    loss: Literal["transformers"] | None = None
    biases_by_expert: bool = False
    fused_update: bool = False
    paged: bool = False
    step_copies: Literal[1, 2] = 1
    device_budget_gib: Annotated[float, Field(gt=0, le=10_000)] | None = None
    link_gb_s: dict[Literal["down", "up", "both"], Amount] = Field(default_factory=dict)
    measured: dict[Quantity, Amount]
    predicted_by_simumax_ms: Amount | None = None
    over_their_prediction: Amount | None = None

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        found = {
            metric: self.measured[name] * unit for name, (metric, unit) in _MEASURED.items() if name in self.measured
        }
        if (rate := self.measured.get("tokens_per_s")) is not None:
            found[Metric.ITERATION] = self.tokens_per_step / rate
        return found

    @property
    def data_parallel(self) -> int:
        """Ranks that share neither layers nor stages."""
        return self.devices // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one iteration over all devices."""
        return self.data_parallel // self.context_parallel * self.num_micro_batches * self.micro_batch * self.seq_len

    def check(self) -> None:
        """Check that the case can be expressed."""
        if not self.measured.keys() & {"iteration_ms", "tokens_per_s", "tflops"}:
            raise CaseError(
                f"case {self.id}: measured has no whole iteration; give iteration_ms, tokens_per_s or tflops"
            )
        engines = ("deepspeed", *_IN_MEMORY, *POLICIES, *STORAGE_POLICIES)
        if self.engine not in engines:
            raise CaseError(f"case {self.id}: engine is {self.engine!r}, but must be one of {', '.join(engines)}")
        if self.devices % (self.tensor_parallel * self.pipeline_parallel):
            raise CaseError(
                f"case {self.id}: devices is {self.devices}, but must be a multiple of tensor_parallel "
                f"{self.tensor_parallel} x pipeline_parallel {self.pipeline_parallel}; correct it"
            )
        if self.context_parallel * self.expert_parallel > 1 and self.kernels != "megatron-core":
            raise CaseError(
                f"case {self.id}: context_parallel and expert_parallel are only known of kernels megatron-core, not of "
                f"{self.kernels}; leave them out"
            )
        if self.precision.products and self.kernels in _KERNELS_OF_OTHERS.keys() - {"llmq"}:
            raise CaseError(
                f"case {self.id}: precision.products is {self.precision.products}, but products of kernels "
                f"{self.kernels} are only known in the type of weights; leave it out, or state other kernels"
            )
        ranks, tensor = self.data_parallel * self.tensor_parallel, self.tensor_parallel
        shares_experts = self.expert_parallel > 1 or (isinstance(self.model, ModelConfig) and self.model.num_experts)
        if shares_experts and (self.expert_parallel % tensor or ranks % self.expert_parallel):
            raise CaseError(
                f"case {self.id}: expert_parallel is {self.expert_parallel}, but must be a multiple of tensor_parallel "
                f"{tensor} and divide the {ranks} ranks of a stage; correct it"
            )
        if unknown := self.deepspeed.keys() - DEEPSPEED.keys() - {"waits"}:
            raise CaseError(f"case {self.id}: deepspeed.{min(unknown)} is not known; leave it out")
        self._zero()
        if isinstance(self.model, ModelConfig):
            self._check_sizes(self.model)

    def _check_sizes(self, model: ModelConfig) -> None:
        """Check that a model divides as stated, and that one iteration can be walked: passes and pieces are tasks."""
        if self.pipeline_parallel > model.num_layers:
            raise CaseError(
                f"case {self.id}: pipeline_parallel is {self.pipeline_parallel}, but there are {model.num_layers} "
                "layers to deal to the stages; correct it"
            )
        passes = self.num_micro_batches * (self.pipeline_parallel if self.pipeline_parallel > 1 else model.num_layers)
        if passes > _MAX_PASSES:
            raise CaseError(
                f"case {self.id}: {self.num_micro_batches} micro-batches make {passes} passes through layers or "
                f"stages, more than {_MAX_PASSES}; predict a smaller batch, as time grows in proportion"
            )
        piece_params = (self.subgroup_params or num_parameters(model)) * self.data_parallel
        if (subgroups := num_parameters(model) // piece_params) > _MAX_SUBGROUPS:
            raise CaseError(
                f"case {self.id}: subgroup_params is {self.subgroup_params}, which makes {subgroups} subgroups per "
                f"rank, more than {_MAX_SUBGROUPS}; state a larger one"
            )
        if self.kernels in _KERNELS_OF_OTHERS:
            try:
                self._operators_of_others(model)
            except ValueError as error:
                raise CaseError(f"case {self.id}: model: {error}") from error

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Simulate the engine's iterations until they repeat."""
        profile = self.machine_of(profile)
        setup, decisions = self.decided(profile)
        outcome = simulated(self.id, profile, setup.units, decisions)
        if "tflops" in self.measured:
            rate = total_flop(setup.units, decisions) / outcome.values[Metric.ITERATION]
            outcome = dataclasses.replace(outcome, values=outcome.values | {Metric.COMPUTE_RATE: rate})
        if "peak_gpu_process_gib" in self.measured:
            peak_bytes = outcome.values[Metric.PEAK_GPU] + self.beside_tensors_bytes(profile)
            outcome = dataclasses.replace(outcome, values=outcome.values | {Metric.PEAK_GPU: peak_bytes})
        if "peak_gpu_reserved_gib" in self.measured:
            peak_bytes = outcome.values[Metric.PEAK_GPU]
            reserved_bytes = min(peak_bytes + self._kept_logit_bytes, profile.device.memory_bytes.value)
            outcome = dataclasses.replace(
                outcome, values=outcome.values | {Metric.PEAK_GPU: max(peak_bytes, reserved_bytes)}
            )
        # The placement of an engine that searches depends on the machine.
        return dataclasses.replace(outcome, iteration_s=None) if self._searches else outcome

    @property
    def _kept_logit_bytes(self) -> float:
        """Bytes of logits in the type of weights that a loss has cast to fp32.

        PyTorch's allocator asks CUDA for each large block, and cuts pieces off one that is
        free, but joins none. The logits, as they come from the head, are free when they are cast. All that the loss
        makes of them is larger, so their block stays beside it (``c10/cuda/CUDACachingAllocator.cpp``). If the device
        has no room for it, the allocator gives it back.
        """
        casts = self.loss == "transformers" or (self.kernels == "transformers" and not self.loss_tile)
        logits = self.micro_batch * self.seq_len * self._vocab_size("measured.peak_gpu_reserved_gib")
        return logits * self.precision.weight_bytes * casts

    @property
    def _searches(self) -> bool:
        return self.engine == "ratel" or (self.engine == "streaming" and self.kernels == "dataflow")

    def beside_tensors_bytes(self, profile: HardwareProfile) -> int:
        """Return the bytes that a process of the run holds of a device beside its tensors."""
        return beside_tensors_bytes(profile, self.devices, megatron=self.kernels in {"megatron-lm", "megatron-core"})

    def machine_of(self, profile: HardwareProfile) -> HardwareProfile:
        """Return what the run had of a machine: its memory, its drives, and the rate of its attention kernel.

        Raises:
            CaseError: the machine has fewer devices or drives.
        """
        per_node = profile.devices_per_node
        if self.gpus_per_node not in {None, per_node}:
            raise CaseError(
                f"case {self.id}: gpus_per_node is {self.gpus_per_node}, but {profile.name} has {per_node} devices per "
                "node; name another profile"
            )
        if self.nodes and self.devices > self.nodes * per_node:
            raise CaseError(
                f"case {self.id}: it had {self.devices} ranks on {self.nodes} node(s), but {profile.name} has "
                f"{per_node} devices per node; name another profile"
            )
        if self.devices > per_node and profile.inter_node is None:
            raise CaseError(
                f"case {self.id}: devices is {self.devices}, but {profile.name} has {profile.devices_per_node} and no "
                "network; name another profile"
            )
        profile = self._with_rates(profile)
        if self.device_budget_gib:
            capacity = profile.device.memory_bytes.value
            profile = profile.with_device_memory(int(min(self.device_budget_gib * 2**30, capacity)))
        if self.ssds is None:
            return profile
        nvme = profile.nvme
        if nvme is None or nvme.num_drives is None:
            raise CaseError(
                f"case {self.id}: {profile.name} does not say how many drives its NVMe has; add nvme.num_drives"
            )
        if self.ssds > nvme.num_drives:
            raise CaseError(
                f"case {self.id}: ssds is {self.ssds}, but {profile.name} has {nvme.num_drives}; correct it"
            )
        return profile.model_copy(update={"nvme": nvme.striped(self.ssds)})

    def _with_rates(self, profile: HardwareProfile) -> HardwareProfile:
        """Return a machine with the rates of the run's links, attention kernel and products."""
        if self.link_gb_s:
            measured = {_LINK[way]: rate * 1e9 for way, rate in self.link_gb_s.items()}
            profile = replace(profile, measured, Provenance(origin="published", source=self.source))
        if self.attention and self.attention != "unfused":
            profile = with_attention(profile, self.attention)
        if self.devices == 2:
            profile = with_pair(profile)
        return with_fp16_sums(profile) if self.fp16_sums else profile

    def setup(self, profile: HardwareProfile) -> Setup:
        """Return the model's units, one rank's share of every layer, and the batch and degrees in the case's types."""
        ours = self.kernels not in _KERNELS_OF_OTHERS
        given = Sharding(
            data_parallel=self.data_parallel,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=max(self.expert_parallel // self.tensor_parallel, 1),
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches,
            loss_tile_tokens=self.loss_tile,
            collectives="host" if self.through_host else None,
            kernels=self.kernels if ours else None,
            precision=self.precision,
            optimizer=self.optimizer,
            clip=self.clip,
        )
        with self._model(as_on_gpu=profile.device.kind == "gpu") as model:
            made = units(self._operators(model, given, profile) if ours else self._operators_of_others(model))
        subgroup_params = self.subgroup_params or given.subgroup_params
        if self._searches:  # these hand gradients to the optimizer, and move state, a whole unit at a time
            subgroup_params = max(unit.num_params for unit in made if unit.can_swap or self.engine == "ratel")
        return Setup(made, given.model_copy(update={"subgroup_params": subgroup_params}))

    def _operators(self, model: Model, given: Sharding, profile: HardwareProfile) -> tuple[Operator, ...]:
        batch = batch_of(given, self.precision, self.seq_len, (), profile)
        batch = dataclasses.replace(batch, flash_attention=self.attention != "unfused")
        if self.kernels == "liger" and isinstance(model, ModelConfig) and model.is_expert_model:
            # Of layers with experts, Liger's kernels are not known; their head is.
            plain = build_graph(model, dataclasses.replace(batch, kernels="transformers"))
            operators = with_loss_of(plain, "liger", model.vocab_size, batch.dtype_bytes)
        else:
            operators = build_graph(model, batch)
        if self.joint_qkv:
            operators = tuple(_in_one_module(operator) for operator in operators)
        if self.reruns_all:
            operators = tuple(dataclasses.replace(operator, num_skipped=0) for operator in operators)
        if self.biases_by_expert:
            operators = tuple(map(_added_by_expert, operators))
        if self.loss is None and (self.fused_head or self.kernels != "liger"):
            return operators
        plain = build_graph(model, dataclasses.replace(batch, kernels="transformers"))
        vocab = self._vocab_size("loss" if self.loss else "fused_head")
        operators = whole_logits.with_head_of(plain, operators, vocab)
        return operators if self.loss else whole_logits.with_loss_in_place(operators, vocab, batch.dtype_bytes)

    def _operators_of_others(self, model: Model) -> tuple[Operator, ...]:
        if not isinstance(model, ModelConfig):
            raise CaseError(f"case {self.id}: kernels is {self.kernels}, which are not known of a captured model")
        batch = megatron_core.MegatronBatch(
            self.micro_batch,
            self.seq_len,
            flash_attention=self.attention != "unfused",
            tensor_parallel=self.tensor_parallel,
            expert_parallel=self.expert_parallel,
            context_parallel=self.context_parallel,
            sequence_parallel=self.sequence_parallel,
            loss_in_place=self.loss_in_place,
        )
        if self.kernels == "llmq":
            batch = dataclasses.replace(batch, fp8_products="device" if self.precision.products else None)
            return llmq.build_graph(model, batch, self.remade)
        if self.kernels == "megatron-lm" and (self.engine not in _IN_MEMORY or self.zero_stage == 3):
            return megatron_lm.build_graph(model, batch, adds_gradients=False)
        return _KERNELS_OF_OTHERS[self.kernels](model, batch)

    def decided(self, profile: HardwareProfile) -> tuple[Setup, RivalDecisions]:
        """Return what the engine had on a machine, and what it decided.

        Raises:
            CaseError: the engine does not do what the case says.
        """
        setup = self.setup(profile)
        return setup, self._decided(setup, CostModel(profile, setup.units, setup.given))

    def _decided(self, setup: Setup, cost: CostModel) -> RivalDecisions:
        if self.engine == "ratel":
            return _swapping(setup, cost)
        if self._searches:
            few = setup.changed(num_micro_batches=min(self.num_micro_batches, _SEARCHED_MICRO_BATCHES))
            best = best_streaming(few, Scorer(few.units, self.seq_len, cost, lower=lower)).decisions
            assert isinstance(best, RivalDecisions)
            return best.model_copy(update={"num_micro_batches": self.num_micro_batches})
        if self.engine == "llmq" and self.activations:
            where = Placement(**self.placed, zero_stage=self.zero_stage or 1)
            return place(setup, where, self.activations, on_host=self.inputs_on_host)
        if (placements := self._placements(setup)) is None:
            scorer = Scorer(setup.units, self.seq_len, cost, lower=lower, whole=False)
            found = best_of_engine(setup, scorer, self.engine, self.activations).decisions
            assert isinstance(found, RivalDecisions)
            return found.model_copy(update={"inputs_on_host": True}) if self.inputs_on_host else found
        pairs = dict(zip(ACTIVATIONS, placements, strict=False))  # activations kept, and recomputed
        try:
            placed = pairs[self.activations or "keep"]
            placed = with_host_parameters(placed, setup) if self.host_params else placed
            placed = _paged(placed) if self.paged else placed
            return RivalDecisions.model_validate(dict(placed) | self._changes())
        except ValidationError as error:
            raise CaseError(f"case {self.id}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error

    def _placements(self, setup: Setup) -> Iterator[RivalDecisions] | None:
        """Return the engine's placements with activations kept and recomputed; ``None``: it chooses among more."""
        if self.engine == "deepspeed":
            return configured(setup, self._zero(), waits=bool(self.deepspeed.get("waits")))
        if self.engine in _IN_MEMORY:
            if not self.zero_stage or self.data_parallel == 1:
                return unsharded(setup)
            return (each for each in gpu_only(setup) if each.zero_stage == self.zero_stage)
        if self.engine == "interleaved" and self.stride:
            return interleaved(setup, (self.stride,), 1.0 if self.host_share is None else self.host_share)
        if self.host_share is not None and self.engine in {"twin-flow", "super-offload"}:
            return {"twin-flow": twin_flow, "super-offload": super_offload}[self.engine](setup, (self.host_share,))
        return zero_infinity(setup) if self.engine == "zero-infinity" and self.activations else None

    def _zero(self) -> Zero:
        """Return DeepSpeed's settings as its configuration has them."""
        found: dict[str, Any] = {"offload_optimizer": {"pin_memory": True}, "offload_param": {}}
        for name, path in DEEPSPEED.items():
            if name in self.deepspeed:
                outer, _, inner = path.rpartition(".")
                (found[outer] if outer else found)[inner] = self.deepspeed[name]
        try:
            return Zero.model_validate(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise CaseError(f"case {self.id}: deepspeed: {where}: {first['msg']}; correct it") from error

    def _changes(self) -> dict[str, Any]:
        """Return in what the run differed from the engine's placement."""
        changes: dict[str, Any] = {
            "data_parallel": self.data_parallel,
            "inputs_on_host": self.inputs_on_host,
            "pipeline_parallel": self.pipeline_parallel,
            "loop": self.loop,
            "reduces_once": self.reduces_once,
            "dtensors": self.dtensors,
            "adds_in_products": self.kernels in _KERNELS_OF_OTHERS,
        }
        if self.gradient_path:
            changes["gradient_path"] = self.gradient_path
        if self.keeps_output:
            logits = self.micro_batch * self.seq_len * self._vocab_size("keeps_output")
            changes["output_bytes"] = logits * (4 if self.keeps_output == "fp32" else self.precision.weight_bytes)
        if self.engine == "megatron" and self.zero_stage < 2:  # it adds gradients up after the last micro-batch
            changes["reduce_start"] = "step"
            changes["bucket_params"] = _BUCKET_PARAMS if self.zero_stage == 0 else 0
        changes["shards_masters"] = self.engine == "fsdp" and self.zero_stage == 3 and self.data_parallel > 1
        if self.updates_in_backward:
            changes |= {"update_start": "backward", "update_order": "backward"}
        elif self.engine == "fsdp" and self.optimizer == "adamw" and not self._fuses_update:
            value_bytes = 2 if self.precision.state else 4
            changes["step_scratch_bytes"] = self.step_copies * value_bytes
            changes["chain_bytes"] = _CHAIN_VALUES * value_bytes
        return changes

    @property
    def _fuses_update(self) -> bool:
        """Whether the optimizer is one kernel a tensor, as Megatron's is (``core/optimizer/__init__.py``)."""
        return self.fused_update or self.kernels in _KERNELS_OF_OTHERS

    def _vocab_size(self, field: str) -> int:
        if isinstance(self.model, ModelConfig):
            return self.model.vocab_size
        stated = configuration(self.model) if isinstance(self.model, str) else self.model
        if "vocab_size" not in stated:
            raise CaseError(
                f"case {self.id}: {field} needs the size of the vocabulary, which the model's config.json does not "
                "state; leave it out"
            )
        return int(stated["vocab_size"])

    @contextlib.contextmanager
    def _model(self, *, as_on_gpu: bool) -> Iterator[Model]:
        """Yield the model, captured if there are no formulas for it or it has adapters.

        A captured model is captured again, from the same file, at the sizes of a batch.
        """
        if isinstance(self.model, ModelConfig):
            yield self.model
        elif isinstance(self.model, str):
            yield self._named(self.model, as_on_gpu=as_on_gpu)
        else:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "config.json"
                write_whole(path, json.dumps(self.model))
                yield self._named(str(path), as_on_gpu=as_on_gpu)

    def _named(self, name: str, *, as_on_gpu: bool) -> Model:
        if self.lora is None:
            with contextlib.suppress(NoFormulasError):
                return resolve_model(name)
        from ullage.capture import capture  # noqa: PLC0415 - torch is slow to import, and may be missing
        from ullage.capture.architectures import architecture  # noqa: PLC0415

        inputs = architecture(name).inputs(self.micro_batch, self.seq_len)
        lora = Lora.read(self.lora) if self.lora else None
        return capture(name, inputs, as_on_gpu=as_on_gpu, lora=lora, quantization=self.quantize)


_KERNELS_OF_OTHERS: Final[dict[str, Callable[[ModelConfig, megatron_core.MegatronBatch], tuple[Operator, ...]]]] = {
    "megatron-lm": megatron_lm.build_graph,
    "megatron-core": megatron_core.build_graph,
    "dataflow": dataflow.build_graph,
    "llmq": llmq.build_graph,
}


def _in_one_module(operator: Operator) -> Operator:
    """Return the operator of queries, keys and values with its parameters in one module."""
    if operator.kind != "qkv":
        return operator
    joint = []
    for spec in operator.parameters:
        path, module, name = spec.name.rsplit(".", 2)
        joint.append(dataclasses.replace(spec, name=f"{path}.qkv_proj.{module}_{name}"))
    return dataclasses.replace(operator, parameters=tuple(joint))


def _added_by_expert(operator: Operator) -> Operator:
    """Return an operator whose rows are added up all at once, not one after another."""
    return dataclasses.replace(
        operator,
        backward=tuple(
            dataclasses.replace(kernel, num_meeting=1) if isinstance(kernel, Elementwise) else kernel
            for kernel in operator.backward
        ),
    )


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
        Metric.FORWARD: phases[Phase.FORWARD],
        Metric.BACKWARD: phases[Phase.BACKWARD],
        Metric.UPDATE: phases[Phase.UPDATE],
        Metric.ITERATION: simulation.iteration_s,
        Metric.PEAK_GPU: float(peaks[Tier.GPU].peak_bytes),
    }

    def iteration_s(machine: HardwareProfile) -> float:
        return run_until_steady(schedule, CostModel.of(machine, model_units, decisions)).iteration_s

    warnings = (*cost.warnings, *shortages(case_id, peaks))
    room_bytes = min(memory.capacity_bytes - memory.peak_bytes for memory in peaks.values())
    return Outcome(values, simulation.converged, warnings, room_bytes, iteration_s)


def _paged(placed: RivalDecisions) -> RivalDecisions:
    units = {
        name: unit.model_copy(update={"update": (Place.STREAM,) * len(unit.update)})
        for name, unit in placed.units.items()
    }
    return placed.model_copy(update={"units": units})


def _swapping(setup: Setup, cost: CostModel) -> RivalDecisions:
    """Return Ratel's decisions: as many activations swapped as the simulator finds best."""
    first = setup.swappable[0]
    swap_bytes = sum(unit.swap_bytes for unit in setup.units if unit.segment == first)
    (nothing,) = ratel(setup, (0,))
    held = always_held(lower(setup.units, nothing, asynchronous=cost.asynchronous), cost)
    num_on_host = max((capacities(cost)[Tier.HOST] - held[Tier.HOST]) // swap_bytes, 0)

    @functools.cache
    def iteration_s(count: int) -> float:
        (decisions,) = ratel(setup, (count,), num_on_host)
        return run_until_steady(lower(setup.units, decisions, asynchronous=cost.asynchronous), cost).period_s

    (best,) = ratel(setup, (lowest(iteration_s, len(setup.swappable)),), num_on_host)
    return best


def lowest(value: Callable[[int], float], last: int) -> int:
    """Return where a convex function of 0 to ``last`` is lowest, by ternary search."""
    low, high = 0, last
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=value)
