"""What a request asks for beside its model and machine: each field once, with its help, its limit and its values.

:class:`planner.choices.request.Request`, the keywords of ``ullage.plan``, the options of commands, the axes of studies
and the reference pages are made from these fields. This is light, because the command line's parser imports it.
"""

# ruff: noqa: RUF009 - a function makes the fields

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, get_args

from annotated_types import Ge

from planner.optimizers import ELEMENTWISE, OPTIMIZERS, Optimizer
from planner.terms import DEFAULT_MICRO_BATCH, DEFAULT_SEQ_LEN, KernelRequest, Storage

if TYPE_CHECKING:
    from hwprofiles.profile import Dtype
    from planner.decisions import Precision

Count = Annotated[int, Ge(1)]
ExpertLoad = tuple[tuple[float, ...], ...]

MOST_MICRO_BATCHES: Final = 4096  # per iteration: a schedule has tasks for each
TRAINED: Final = "what is trained, on which machine"
DIVIDED: Final = "how devices and the batch are divided, and in what ways a plan may run"
_OFFERED: Final = tuple(name for name in OPTIMIZERS if name not in ELEMENTWISE)  # others are users' own


def described(words: str, default: Any = None, *, group: str = DIVIDED, **more: Any) -> Any:
    """Return a field with its help.

    Args:
        words: help text.
        default: the default.
        group: heading in the help.
        more: ``choices``, the values that are offered, and ``known``, if there are more; ``texts``, the values as text,
            if Python takes more; ``most``, of a whole number: a larger one is a mistake, and planning would take very
            long; ``switch``, if the values are yes and no; ``flags``, if they are not the name, or none; ``part``, the
            name of the field in the value of its flag, if several fields share that; and what
            :meth:`argparse.ArgumentParser.add_argument` takes.
    """
    return dataclasses.field(default=default, metadata={"help": words, "group": group, **more})


def check_values(kind: type[Any], holder: Any) -> None:
    """Check values against the limits and choices of the fields of a class.

    Raises:
        ValueError: a value is not one that its field can have.
    """
    for field in dataclasses.fields(kind):
        value, most, choices = getattr(holder, field.name), field.metadata.get("most"), field.metadata.get("choices")
        if value is None:
            continue
        if most is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} is {value!r}, but must be a whole number of at least 1")
            if value > most:
                raise ValueError(f"{field.name} is {value}, but no more than {most} can be planned; ask for less")
        if choices is not None and value not in field.metadata.get("known", choices):
            raise ValueError(f"{field.name} is {value!r}, but must be one of {', '.join(choices)}; choose one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
    """The values that the user gave; ``None`` leaves the choice to the planner."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    num_devices: Count = described(
        "devices to train on, over as many nodes as they fill (default: 1)", 1, most=100_000, flags=("--gpus", "-n")
    )
    micro_batch: Count | None = described(
        f"sequences per forward on each device (default: {DEFAULT_MICRO_BATCH}, fewer if they are longer than 8192 "
        "tokens; or chosen with --global-batch)",
        most=1_000_000,
    )
    num_micro_batches: Count | None = described(
        "micro-batches per iteration: gradient accumulation (1, or chosen with --global-batch)",
        most=MOST_MICRO_BATCHES,
        flags=("--accumulate",),
    )
    global_batch: Count | None = described(
        "sequences per iteration over all devices. The planner then chooses the micro-batch, accumulation and "
        "parallel degrees, unless they are given",
        most=10_000_000,
    )
    tensor_parallel: Count | None = described(
        "ranks that share every layer", most=100_000, flags=("--parallel",), part="tensor"
    )
    pipeline_parallel: Count | None = described(
        "stages that share the layers", most=100_000, flags=("--parallel",), part="pipeline"
    )
    pipeline_rounds: Count | None = described(
        "times that a micro-batch comes to a stage, each time for other layers, whose weights come once for all "
        "micro-batches (1, or chosen with --global-batch)",
        most=10_000,
        flags=("--parallel",),
        part="rounds",
    )
    pipeline_order: Literal["1f1b", "zero-bubble"] | None = described(
        "when stages make gradients of weights. 1f1b: in backward. zero-bubble: later, where a stage would wait "
        "(default: the faster)",
        choices=("1f1b", "zero-bubble"),
        flags=("--parallel",),
        part="order",
    )
    expert_parallel: Count | None = described(
        "data-parallel ranks that share the experts", most=100_000, flags=("--parallel",), part="expert"
    )
    context_parallel: Count | None = described(
        "data-parallel ranks that share every sequence, so that each computes with a part of its tokens: for sequences "
        "that one device does not hold, or fewer than there are devices",
        most=100_000,
        flags=("--parallel",),
        part="context",
    )
    context_exchange: Literal["all-to-all", "ring"] | None = described(
        "how these ranks attend. all-to-all: each gets all tokens of some heads (Ulysses). ring: keys and values pass "
        "from rank to rank while the ones before are attended to, for any number of heads (default: the faster)",
        choices=("all-to-all", "ring"),
        flags=("--parallel",),
        part="exchange",
    )
    expert_units: Count | None = described(
        "units per rank into which the experts of a layer are divided (default: units that are large enough to be "
        "worth moving)",
        most=10_000,
        flags=("--parallel",),
        part="expert-units",
    )
    loss_tile_tokens: Count | None = described(
        "tokens for which the loss is computed at a time, so that the logits of a micro-batch never exist whole",
        most=100_000_000,
        flags=("--tiles",),
        part="loss",
    )
    layer_tile_tokens: Count | None = described(
        "tokens for which norms and MLPs are computed at a time, which makes their intermediate tensors small",
        most=100_000_000,
        flags=("--tiles",),
        part="layer",
    )
    segment_tile_sequences: Count | None = described(
        "sequences that pass a layer at a time, forward and backward: all of the micro-batch's pass it before the next "
        "layer begins, so its weights come once for all of them (breadth order)",
        most=1_000_000,
        flags=("--tiles",),
        part="segment",
    )
    collectives: Literal["fabric", "host"] | None = described(
        "how data-parallel ranks gather weights and sum gradients. fabric: with NCCL or gloo. host: through host "
        "memory that the ranks of a machine share, which is faster where devices have no link of their own (default: "
        "the faster)",
        choices=("fabric", "host"),
        flags=("--parallel",),
        part="collectives",
    )
    fp8_weights: bool | None = described(
        "whether the weights of fp8 products are copied from the host, and gathered, in fp8: the host casts them once "
        "after each update, the device before each gather (default: where that is faster)",
        switch=True,
        group=TRAINED,
        flags=("--precision",),
        part="fp8-weights",
    )
    split_masters: bool | None = described(
        "whether fp32 master copies that are not resident on the device are kept as bf16 weights and remainders of 16 "
        "bits: the same values, 2 bytes less per parameter (default: where that is faster)",
        switch=True,
        group=TRAINED,
        flags=("--precision",),
        part="split-masters",
    )
    kernels: KernelRequest | None = described(
        "kernels that run beside products and attention: those of transformers, module by module (the default); "
        "compiled: of blocks and a loss that torch.compile has compiled, as execute then does; compiled-layers: of "
        "whole layers, which then move as one; auto: the fastest of these; liger: of Liger-Kernel, which can only be "
        "compared",
        choices=get_args(KernelRequest),
    )
    storage: Storage = described(
        "what else the plan may offload, beside optimizer state and parameters to the host. never: nothing (the "
        "default); activations: activations to the host; nvme: also everything to the drives, which wears them",
        "never",
        choices=get_args(Storage),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(Constraints):
    """The same, and what is trained; the default of what is ``None`` follows from the model and the machine."""

    seq_len: Count | None = described(
        f"tokens per sequence (default: {DEFAULT_SEQ_LEN}, or the model's limit if that is smaller)",
        group=TRAINED,
        most=100_000_000,
    )
    expert_load: "ExpertLoad | str | None" = described(
        "distribution of tokens over experts (default: uniform); a JSON file holds one list of shares, or one "
        "list per layer",
        group=TRAINED,
        metavar="uniform|zipf:S|FILE",
    )
    precision: "Precision | Dtype | None" = described(
        "type of weights and gradients (default: bf16; fp32 if the device multiplies fp32 more than twice as fast, as "
        "CPUs without bf16 instructions do)",
        group=TRAINED,
        texts=("bf16", "fp32"),
        flags=("--precision",),
        part="",
    )
    optimizer: Optimizer = described(
        "optimizer, and its state per parameter: "
        + ", ".join(f"{name} {OPTIMIZERS[name].state_bytes_per_param} B/param" for name in _OFFERED)
        + " (default: adamw, also for Adam). sgd has momentum. muon uses AdamW, with 12 B/param, for all parameters "
        "but the matrices of layers",
        "adamw",
        group=TRAINED,
        choices=_OFFERED,
        known=tuple(OPTIMIZERS),
    )
    clip: bool = described(
        "clip gradients by their global norm (the default), or not", True, group=TRAINED, switch=True
    )
    speculate: bool = described(
        "begin updates before the norm of gradients is known, and take them back where it exceeds the limit: for runs "
        "that seldom clip",
        False,
        group=TRAINED,
        switch=True,
    )
    subgroup_params: Count = described(
        "most parameters in one subgroup, the smallest part whose update can be placed",
        100_000_000,
        group=TRAINED,
        most=math.inf,
        flags=(),
    )
