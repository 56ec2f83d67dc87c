"""Cases of training that others reported, in the words of a request: any engine that has a row, on any machine."""

import contextlib
import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from hwprofiles.files import write_whole
from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.choices.variants import Variant, variant
from planner.costs.model import CostModel
from planner.decisions import Choice
from planner.graph import Batch, Operator, units
from planner.models.adapters import Lora
from planner.models.captured import Model
from planner.models.config import ModelConfig, NoFormulasError
from planner.models.quantization import Quantization
from planner.models.registry import resolve_model
from planner.optimizers import Optimizer
from planner.placements import ACTIVATIONS
from planner.terms import KernelChoice
from ullage.rivals.best import best_of_engine, scorer_of
from ullage.rivals.cases.attention import AttentionKernel, with_attention
from ullage.rivals.cases.base import Amount, Case, CaseError, Metric, Number, Outcome, Strict
from ullage.rivals.cases.streaming import within
from ullage.rivals.cases.training import simulated
from ullage.rivals.decisions import RivalDecisions
from ullage.rivals.engines.catalogue import POLICIES, STORAGE_POLICIES
from ullage.rivals.engines.deciding import gpu_only
from ullage.rivals.engines.deepspeed_config import DeepSpeed, configured
from ullage.rivals.kernels import dataflow, megatron_core
from ullage.rivals.precision import RivalPrecision


def _megatron_core(config: ModelConfig, batch: Batch) -> tuple[Operator, ...]:
    sizes = batch.micro_batch, batch.seq_len
    return megatron_core.build_graph(config, megatron_core.Batch(*sizes, tensor_parallel=batch.tensor_parallel))


_OF_OTHERS: Final[dict[str, Callable[[ModelConfig, Batch], tuple[Operator, ...]]]] = {
    "megatron-core": _megatron_core,
    "dataflow": dataflow.build_graph,
}


class Measured(Strict):
    """What was measured, as far as it was: milliseconds, and GiB that the device's allocator had handed out."""

    iteration_ms: Amount
    peak_gpu_allocated_gib: Amount | None = None


class ReportedCase(Case):
    """A run of an engine that has a row in ``ullage plan``.

    Attributes:
        machine: the machine in words, as far as its source names it.
        differs: what is known to differ between the machine and its profile.
        note: what else the source says.
        model: a name of ``ullage models``, or the content of a ``config.json``.
        lora, quantize: adapters beside frozen projections, as ``--lora`` and ``--quantize`` have them.
        engine: ``deepspeed``; ``fsdp``, which shards everything over the devices; or one of ``ullage simulate``, at
            its best setting.
        zero_stage: what ``fsdp`` shards.
        deepspeed: the settings of :class:`ullage.rivals.engines.deepspeed_config.DeepSpeed`.
        devices, tensor_parallel, pipeline_parallel: their number, and what is split over them.
        micro_batch, num_micro_batches, seq_len: sequences per forward on a rank, forwards per iteration, tokens.
        kernels: as in a request; or those of Megatron-Core, whose ranks share tokens, or of ``dataflow``.
        loss_tile, precision, optimizer, clip: as in a request.
        attention: the attention kernel, if it is known.
        activations: what layers did with theirs; ``None``: as the engine's users would choose.
        inputs_on_host: whether inputs of recomputed layers waited on the host.
        updates_in_backward: whether each gradient was used as soon as it was there.
        keeps_output: whether the loop kept the model's output, and with it all logits, while backward ran.
        fused_update: whether the optimizer of ``fsdp`` was one kernel a tensor, as with ``fused=True``. PyTorch's AdamW
            is not by default: it takes the square roots of all second moments before it uses any.
        device_budget_gib: device memory that the engine might use.
    """

    machine: str = ""
    differs: str = ""
    note: str = ""
    model: str | dict[str, Any]
    lora: str | None = None
    quantize: Quantization | None = None
    engine: str
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    devices: Number = 1
    tensor_parallel: Number = 1
    pipeline_parallel: Number = 1
    micro_batch: Number
    num_micro_batches: Number = 1
    seq_len: Number
    kernels: KernelChoice | Literal["megatron-core", "dataflow"] = "transformers"
    attention: AttentionKernel | None = None
    loss_tile: Number | None = None
    precision: RivalPrecision = RivalPrecision(weights="bf16")
    optimizer: Optimizer = "adamw"
    clip: bool = True
    activations: Literal["keep", "recompute"] | None = None
    inputs_on_host: bool = False
    updates_in_backward: bool = False
    keeps_output: bool = False
    fused_update: bool = False
    device_budget_gib: Annotated[float, Field(gt=0, le=10_000)] | None = None
    measured: Measured

    def measurements(self) -> dict[Metric, float]:
        """Return what was measured, in SI units."""
        found = {Metric.ITERATION: self.measured.iteration_ms * 1e-3}
        if (peak_gib := self.measured.peak_gpu_allocated_gib) is not None:
            found[Metric.PEAK_GPU] = peak_gib * 2**30
        return found

    def check(self) -> None:
        """Check that the case can be expressed."""
        engines = ("deepspeed", "fsdp", *POLICIES, *STORAGE_POLICIES)
        if self.engine not in engines:
            raise CaseError(f"case {self.id}: engine is {self.engine!r}, but must be one of {', '.join(engines)}")
        if self.devices % (self.tensor_parallel * self.pipeline_parallel):
            raise CaseError(
                f"case {self.id}: devices is {self.devices}, but must be a multiple of tensor_parallel "
                f"{self.tensor_parallel} x pipeline_parallel {self.pipeline_parallel}; correct it"
            )
        unknown = set(self.deepspeed) - {field.name for field in dataclasses.fields(DeepSpeed)}
        if unknown:
            raise CaseError(f"case {self.id}: deepspeed.{min(unknown)} is not known; leave it out")

    def _predict(self, profile: HardwareProfile) -> Outcome:
        """Simulate the engine's iterations until they repeat."""
        if self.device_budget_gib:
            profile = within(profile, self.device_budget_gib)
        if self.attention:
            profile = with_attention(profile, self.attention)
        with self._named() as name:  # a model that is captured is captured again at other sizes
            built = self._variant(self._model(name, as_on_gpu=profile.device.kind == "gpu"), profile)
        return simulated(self.id, profile, built.setup.units, self.decide(built))

    def _variant(self, model: Model, profile: HardwareProfile) -> Variant:
        """Return the case's model and batch on a machine, in its types."""
        request = Request(
            model,
            profile,
            num_devices=self.devices,
            seq_len=self.seq_len,
            clip=self.clip,
        )
        choice = Choice(
            data_parallel=self.devices // (self.tensor_parallel * self.pipeline_parallel),
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            loss_tile_tokens=self.loss_tile,
            kernels=None if self.kernels in _OF_OTHERS else self.kernels,
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches,
        )
        built = variant(request, choice)
        # A request takes only the types and kernels that our executor has.
        types = {"precision": self.precision, "optimizer": self.optimizer}
        given = built.setup.given.model_copy(update=types)
        setup = dataclasses.replace(built.setup, given=given)
        if make := _OF_OTHERS.get(self.kernels):
            if not isinstance(model, ModelConfig):
                raise CaseError(f"case {self.id}: kernels is {self.kernels}, which are not known of a captured model")
            setup = dataclasses.replace(setup, units=units(make(model, request.batch(choice))))
        return Variant(request, setup, CostModel(profile, setup.units, given))

    def decide(self, built: Variant) -> RivalDecisions:
        """Return what the engine decided.

        Raises:
            CaseError: the engine does not do what the case says.
        """
        if self.engine not in {"deepspeed", "fsdp"}:
            found = best_of_engine(built.setup, scorer_of(built), self.engine).decisions
            assert isinstance(found, RivalDecisions)
            return found
        pairs = dict(zip(ACTIVATIONS, self._sharded(built), strict=False))  # activations kept, and recomputed
        changes: dict[str, Any] = {
            "inputs_on_host": self.inputs_on_host,
            "pipeline_parallel": self.pipeline_parallel,
        }
        if self.keeps_output:
            tokens = self.micro_batch * self.seq_len
            changes["output_bytes"] = tokens * self._vocab_size(built) * self.precision.weight_bytes
        if self.updates_in_backward:
            changes |= {"update_start": "backward", "update_order": "backward"}
        elif self.engine == "fsdp" and self.optimizer == "adamw" and not self.fused_update:
            changes["step_scratch_bytes"] = 2 if self.precision.state else 4
        try:
            return RivalDecisions.model_validate(dict(pairs[self.activations or "keep"]) | changes)
        except ValidationError as error:
            raise CaseError(f"case {self.id}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from error

    def _vocab_size(self, built: Variant) -> int:
        if not isinstance(self.model, str):
            return int(self.model["vocab_size"])
        model = built.request.model
        if not isinstance(model, ModelConfig):
            raise CaseError(
                f"case {self.id}: keeps_output needs the size of the vocabulary, which {self.model} does not state; "
                "give the model's config.json"
            )
        return model.vocab_size

    def _sharded(self, built: Variant) -> Iterator[RivalDecisions]:
        if self.engine == "deepspeed":
            return configured(built.setup, DeepSpeed(**self.deepspeed))
        stage = self.zero_stage if built.choice.data_parallel > 1 else 0
        return itertools.islice((each for each in gpu_only(built.setup) if each.zero_stage == stage), 2)

    @contextlib.contextmanager
    def _named(self) -> Iterator[str]:
        """Yield a name or a file that describes the model."""
        if isinstance(self.model, str):
            yield self.model
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            write_whole(path, json.dumps(self.model))
            yield str(path)

    def _model(self, name: str, *, as_on_gpu: bool) -> Model:
        """Return the model, captured if there are no formulas for it or it has adapters."""
        if self.lora is None:
            with contextlib.suppress(NoFormulasError):
                return resolve_model(name)
        from ullage.capture import capture  # noqa: PLC0415 - torch is slow to import, and may be missing
        from ullage.capture.architectures import architecture  # noqa: PLC0415

        inputs = architecture(name).inputs(self.micro_batch, self.seq_len)
        lora = Lora.read(self.lora) if self.lora else None
        return capture(name, inputs, as_on_gpu=as_on_gpu, lora=lora, quantization=self.quantize)
