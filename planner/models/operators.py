"""A model's batch, and its operators."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from planner.models.kernels import Kernels, Work
from planner.models.parameters import ParameterSpec
from planner.models.patterns import Pattern
from planner.terms import KernelChoice

UNUSED: Final = "unused"
"""The kind of an operator that only has the parameters of modules which the batch does not reach."""


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one forward and backward.

    Attributes:
        micro_batch: sequences.
        seq_len: tokens of each.
        dtype_bytes: 2 for bf16, 4 for fp32 (weights and activations).
        flash_attention: fused attention (``sdpa``), otherwise ``eager``.
        attention_scratch: whether its backward takes the scratch memory of CUDA's kernels.
        tensor_parallel: ranks that share every layer; operators are then those of one of them.
        kernels: the implementation that runs; see [Note: Kernel lists], and [Note: Kernel sets] in
            :mod:`planner.models.formulas.kernel_sets`.
        expert_parallel: ranks that share the experts of every layer; operators are those of the rank with most tokens.
        context_parallel: ranks that share the tokens of every sequence, a divisor of their number.
        passes_keys: whether their keys and values pass from rank to rank; otherwise they exchange tokens for heads.
        expert_units: the most units into which a rank's experts of a layer are divided.
        expert_load: shares of all visits that go to each expert, one row for all layers or one for each; empty if
            they are equal.
        loss_tile_tokens: tokens whose logits exist at a time; ``None``: all.
        layer_tile_tokens: tokens for which norms and MLPs compute at a time; ``None``: all.
        segment_tile_sequences: sequences that pass a segment at a time, a divisor of the micro-batch; ``None``: all.
        fp8_products: linear layers of hidden layers multiply in fp8, on the ``device``, or ``emulated`` in fp32 as CPUs
            do; see :mod:`planner.models.formulas.float8`. ``None``: in the type of weights.
        splits_backward: gradients of weights are apart from backward, see [Note: Zero bubble] in
            :mod:`planner.models.zero_bubble`.
        in_stages: stages of a pipeline share the layers, so that a captured model has to know what crosses cuts.
        casts_weights: whether these products cast their weights; otherwise weights come in fp8.
    """

    micro_batch: int
    seq_len: int
    dtype_bytes: Literal[2, 4] = 2
    flash_attention: bool = True
    attention_scratch: bool = False
    tensor_parallel: int = 1
    kernels: KernelChoice = "transformers"
    expert_parallel: int = 1
    context_parallel: int = 1
    passes_keys: bool = False
    expert_units: int = 1
    expert_load: tuple[tuple[float, ...], ...] = ()
    loss_tile_tokens: int | None = None
    layer_tile_tokens: int | None = None
    segment_tile_sequences: int | None = None
    fp8_products: Literal["device", "emulated"] | None = None
    casts_weights: bool = True
    splits_backward: bool = False
    in_stages: bool = False

    def __post_init__(self) -> None:
        for name in (
            "micro_batch", "seq_len", "tensor_parallel", "expert_parallel", "expert_units", "loss_tile_tokens",
            "layer_tile_tokens", "segment_tile_sequences", "context_parallel",
        ):  # fmt: skip
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1; give a positive number")
        if self.dtype_bytes not in {2, 4}:
            raise ValueError(f"dtype_bytes is {self.dtype_bytes}, but must be 2 (bf16) or 4 (fp32); choose one")

    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch on one rank."""
        return self.micro_batch * self.seq_len // self.context_parallel

    @property
    def num_read_tokens(self) -> int:
        """Tokens that a rank reads: with those of the ranks that share its sequences."""
        return self.micro_batch * self.seq_len

    @property
    def separate_experts(self) -> bool:
        """Whether experts are units of their own, as they must be under expert parallelism."""
        return self.expert_units > 1 or self.expert_parallel > 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operator(Work):
    """One operator of a model's forward, with its backward: work, and where it is in the model.

    Attributes:
        name: path of the module in ``transformers``; joint operators such as ``self_attn.qkv_proj`` have a path of
            the same form.
        kind: ``embedding``, ``rotary``, ``norm``, ``qkv``, ``attention``, ``output``, ``up``, ``activation``, ``down``,
            ``mlp``, ``router``, ``experts``, ``projection``, ``head`` or ``loss``.
        unit, segment: names of its unit and its segment; a segment is recomputed as a whole.
        parameters: in order of use.
        output_bytes: bytes of its output.
        shared_parameters: names of parameters of other operators that it uses too (tied embeddings).
        num_skipped: number of kernels at the end of ``forward`` that recomputation leaves out.
        in_tiles: whether its module computes a tile of tokens at a time.
        differentiates: whether its forward makes the gradients too, so that backward needs no workspace.
        measured: whether its workspace is the measured peak of its whole unit; otherwise it is what the operator alone
            needs.
        product_bytes: bytes of the outputs of its products, without those that recomputation leaves out.
        changed_inputs: of the first one of a segment, the arguments that are changed in place when the segment runs or
            later, by position among the leaves of its ``(args, kwargs)``. To run it again, they must be copied before.
        fp8_twin: the same operator where its weights come in fp8; ``None`` where that changes nothing.
        call: the call of the model that runs it, from 1 on; see :attr:`planner.models.captured.CapturedModel.calls`.
        evaluates: whether it runs without gradients in a step that calls the model several times.
        stays: whether its weights and activations stay on the device; see [Note: Second order] in
            :mod:`planner.setup`.
        writes: whether its forward writes to its trained weights; see [Note: Written weights] in :mod:`planner.setup`.
        given_bytes: what a stage of a pipeline is sent that begins with its segment, where that is more than hidden
            states; else 0.
        uncut: why no stage of a pipeline can begin with its segment; ``None``: one can.
        num_tiles: tiles of sequences that pass its segment one after another, of which it describes one.
        weight_gradients: kernels that are not in ``backward`` but run later, see [Note: Zero bubble] in
            :mod:`planner.models.zero_bubble`.
        kept_bytes: what they need from backward on.
    """

    name: str
    kind: str
    unit: str
    segment: str
    parameters: tuple[ParameterSpec, ...]
    pattern: Pattern
    output_bytes: int
    shared_parameters: tuple[str, ...] = ()
    num_skipped: int = 0
    product_bytes: int = 0
    measured: bool = False
    in_tiles: bool = False
    differentiates: bool = False
    changed_inputs: tuple[int, ...] = ()
    fp8_twin: "Operator | None" = None
    call: int = 1
    evaluates: bool = False
    stays: bool = False
    writes: bool = False
    given_bytes: int = 0
    uncut: str | None = None
    num_tiles: int = 1
    weight_gradients: Kernels = ()
    kept_bytes: int = 0

    def doing(self, work: Work) -> "Operator":
        """Return the same operator with other kernels and memory."""
        return dataclasses.replace(self, **{name: getattr(work, name) for name in Work.__slots__})

    @property
    def path(self) -> str:
        """Path of its module."""
        return self.name.partition("@")[0].partition("#")[0]

    @property
    def num_params(self) -> int:
        """Number of its own parameters."""
        return sum(spec.num_params for spec in self.parameters)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of its own parameters, in order of use, and of those that it shares."""
        return (*(spec.name for spec in self.parameters), *self.shared_parameters)


Owned = Mapping[str, Sequence[ParameterSpec]]
"""Parameters by the path of the module that has them."""


def by_module(parameters: Iterable[ParameterSpec]) -> Owned:
    """Return parameters by the path of the module that has them."""
    found: dict[str, list[ParameterSpec]] = {}
    for spec in parameters:
        found.setdefault(spec.name.rpartition(".")[0], []).append(spec)
    return found


def operator_of(
    owned: Owned,
    unit: str,
    name: str,
    kind: str,
    pattern: Pattern,
    work: Work,
    output_bytes: int,
    *modules: str,
    **more: Any,
) -> Operator:
    """Return an operator of a unit that is its own segment.

    It has the parameters of ``modules``, or of the module with its ``name`` if there is one; ``more`` are other fields.
    """
    parameters = tuple(spec for module in modules for spec in owned[module]) or tuple(owned.get(name, ()))
    made = Operator(
        name=name, kind=kind, unit=unit, segment=unit, parameters=parameters, pattern=pattern, output_bytes=output_bytes
    )
    return dataclasses.replace(made.doing(work), **more)


def weight_of(operator: Operator) -> str:
    """Return the name that the weight of a captured operator's module has, if it has one."""
    return f"{operator.path}.weight"
