"""The choice before placement: degrees of parallelism, batch sizes and tiles."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field

from hwprofiles.quantity import Frozen
from planner.terms import COMPILED, KernelChoice

Count = Annotated[int, Field(ge=1)]
TILES: Final = ("loss_tile_tokens", "layer_tile_tokens", "segment_tile_sequences")
DEGREES: Final = ("data_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel", "context_parallel")


class Choice(Frozen):
    """Degrees of parallelism, batch sizes and tiles.

    Attributes:
        data_parallel: ranks that share the model's data; each has one device.
        tensor_parallel: ranks that share every layer, per data-parallel rank; units are then one rank's share.
        pipeline_parallel: stages that share the layers, per data-parallel rank.
        pipeline_rounds: times that each micro-batch comes to a stage, each time for other layers; see [Note: Rounds] in
            :mod:`planner.lowering.stages`.
        pipeline_order: ``zero-bubble``: stages leave the gradients of weights for later, see [Note: Zero bubble] in
            :mod:`planner.models.zero_bubble`. ``None``: they make them in backward.
        expert_parallel: data-parallel ranks that share the experts of every layer.
        context_parallel: data-parallel ranks that share the tokens of every sequence; see [Note: Context parallelism]
            in :mod:`planner.models.formulas.context`.
        context_exchange: ``ring``: keys and values pass from rank to rank, see [Note: Ring] in
            :mod:`planner.models.formulas.context`. ``None``: ranks exchange tokens for heads.
        expert_units: units into which a rank's experts of a layer are divided.
        loss_tile_tokens: tokens whose logits exist at a time, see [Note: Tiled logits] in
            :mod:`executor.module.tiled_logits`; ``None``: all of the micro-batch.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time, see [Note: Tiled layers] in
            :mod:`executor.module.tiled_layers`; ``None``: all of the micro-batch.
        segment_tile_sequences: sequences that pass a segment at a time, see [Note: Breadth order] in
            :mod:`planner.lowering.compute`; ``None``: all of the micro-batch.
        fp8_weights: weights of products in fp8 are fetched from the host, and gathered, in fp8; see [Note: Weights in
            fp8] in :mod:`planner.decisions.fp8`. ``None``: in the type of weights.
        split_masters: fp32 master copies are split where they are not resident on the device: the weight in bf16 and a
            remainder of 16 bits, see [Note: Split masters] in :mod:`executor.optimizer.split`. ``None``: whole.
        collectives: ``host``: data-parallel ranks of a machine gather weights and sum gradients through host memory
            that they share, see [Note: Through the host] in :mod:`executor.devices.host_exchange`. ``None``: over the
            fabric between devices.
        kernels: the kernels that run beside products and attention, see [Note: Kernel sets] in
            :mod:`planner.models.formulas.kernel_sets`; ``None``: those of ``transformers``.
        micro_batch: sequences per forward, on each rank, or on the ranks that share them.
        num_micro_batches: forwards+backwards per iteration (gradient accumulation).
    """

    data_parallel: Count = 1
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    pipeline_rounds: Count = 1
    pipeline_order: Literal["zero-bubble"] | None = None
    expert_parallel: Count = 1
    context_parallel: Count = 1
    context_exchange: Literal["ring"] | None = None
    expert_units: Count = 1
    loss_tile_tokens: Count | None = None
    layer_tile_tokens: Count | None = None
    segment_tile_sequences: Count | None = None
    fp8_weights: Literal[True] | None = None
    split_masters: Literal[True] | None = None
    collectives: Literal["host"] | None = None
    kernels: KernelChoice | None = None
    micro_batch: Count = 1
    num_micro_batches: Count = 1

    @classmethod
    def of(cls, more: Any) -> Self:
        """Return the fields of this class from what also has others."""
        return cls(**{name: getattr(more, name) for name in cls.model_fields})

    @property
    def tiles(self) -> dict[str, int | None]:
        """The tokens or sequences of tiles, by field; the model's units depend on them."""
        return {name: getattr(self, name) for name in TILES}

    @property
    def why_not_apart(self) -> str:
        """Why stages cannot make gradients of weights apart from backward, in words; empty if they can."""
        beside = {
            "tiles of layers": self.layer_tile_tokens,
            "compiled kernels": self.kernels in COMPILED,
        }
        found = [name for name, is_there in beside.items() if is_there]
        return f"gradients of weights are not made apart from backward beside {found[0]}" if found else ""

    @property
    def contradiction(self) -> str:
        """Why degrees contradict one another, whatever the model is, and what to change, in words; empty if not."""
        return next(_contradictions(self), "")

    @property
    def num_devices(self) -> int:
        """All ranks, each with one device."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel

    @property
    def divides_weights(self) -> bool:
        """Whether ranks compute with parts of weights, which they hold for good."""
        return max(self.tensor_parallel, self.expert_parallel) > 1

    @property
    def num_readers(self) -> int:
        """Data-parallel ranks, or groups of those that share sequences: each reads sequences of its own."""
        return self.data_parallel // self.context_parallel

    @property
    def num_sequences(self) -> int:
        """Sequences that all ranks together read in an iteration."""
        return self.num_readers * self.num_micro_batches * self.micro_batch

    @property
    def words(self) -> str:
        """A short description."""
        degrees = ((name.removesuffix("_parallel"), getattr(self, name)) for name in DEGREES)
        spread = " x ".join(f"{name} {count}" for name, count in degrees if count > 1) or "one device"
        spread += f" in {self.pipeline_rounds} rounds" if self.pipeline_rounds > 1 else ""
        spread += ", zero bubble" if self.pipeline_order else ""
        spread += " (a ring)" if self.context_exchange else ""
        spread += ", collectives through the host" if self.collectives else ""
        split = ", master copies split" if self.split_masters else ""
        return f"{spread}, {self.num_micro_batches} micro-batch(es) of {self.micro_batch}{split}"


def _contradictions(choice: Choice) -> Iterator[str]:
    if choice.pipeline_order and (choice.pipeline_parallel == 1 or choice.why_not_apart):
        why = choice.why_not_apart or "it is of a pipeline's stages"
        yield f"order={choice.pipeline_order}: {why}; leave it out, or choose other --parallel degrees"
    for name in ("expert_parallel", "context_parallel"):
        if choice.data_parallel % getattr(choice, name):
            yield (
                f"{name} {getattr(choice, name)} must divide the {choice.data_parallel} data-parallel ranks, of which "
                "so many share experts or sequences; change one of them"
            )
    if choice.context_exchange and choice.context_parallel == 1:
        yield "exchange=ring is of ranks that share sequences; leave it out, or choose --parallel context= too"
    if choice.pipeline_rounds > 1 and choice.pipeline_parallel == 1:
        yield (
            f"{choice.pipeline_rounds} rounds are of a pipeline's stages; leave --parallel rounds out, or choose "
            "pipeline= too"
        )
    if choice.segment_tile_sequences is not None and choice.pipeline_parallel > 1:
        yield (
            f"layers of {choice.pipeline_parallel} pipeline stages cannot compute tiles of sequences; leave --tiles "
            "segment or --parallel pipeline out"
        )
