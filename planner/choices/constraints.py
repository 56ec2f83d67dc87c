"""What a request may fix or leave to the planner: each field once, with its help, its limit and its values.

:class:`planner.choices.request.Request`, the keywords of ``ullage.plan``, the options of commands, the axes of studies
and the reference pages are made from these fields. This is light, because the command line's parser imports it.
"""

# ruff: noqa: RUF009 - a function makes the fields

import dataclasses
from typing import Annotated, Any, ClassVar, Final, get_args

from annotated_types import Ge

from planner.terms import DEFAULT_MICRO_BATCH, KernelRequest, Storage

Count = Annotated[int, Ge(1)]

MOST_MICRO_BATCHES: Final = 4096  # per iteration: a schedule has tasks for each
DIVIDED: Final = "how devices and the batch are divided, and in what ways a plan may run"


def _field(words: str, default: Any = None, **more: Any) -> Any:
    """Return a field with its help.

    Args:
        words: help text.
        default: the default.
        more: ``choices``; ``most``, of a whole number: a larger one is a mistake, and planning would take very long;
            ``switch``, if the values are yes and no; ``metavar`` and ``flags``, as for
            :meth:`argparse.ArgumentParser.add_argument`, if they are not N and the name.
    """
    return dataclasses.field(default=default, metadata={"help": words, "group": DIVIDED, **more})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constraints:
    """The values that the user gave; ``None`` leaves the choice to the planner."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    num_devices: Count = _field(
        "devices to train on, over as many nodes as they fill (default: 1)",
        1,
        most=100_000,
        flags=("--gpus", "-n"),
    )
    micro_batch: Count | None = _field(
        f"sequences per forward on each device (default: {DEFAULT_MICRO_BATCH}, fewer if they are longer than 8192 "
        "tokens; or chosen with --global-batch)",
        most=1_000_000,
    )
    num_micro_batches: Count | None = _field(
        "micro-batches per iteration: gradient accumulation (1, or chosen with --global-batch)",
        most=MOST_MICRO_BATCHES,
        flags=("--accumulate",),
    )
    global_batch: Count | None = _field(
        "sequences per iteration over all devices. The planner then chooses the micro-batch, accumulation and "
        "parallel degrees, unless they are given",
        most=10_000_000,
    )
    tensor_parallel: Count | None = _field(
        "ranks that share every layer (1, or chosen with --global-batch)", most=100_000
    )
    pipeline_parallel: Count | None = _field(
        "stages that share the layers (1, or chosen with --global-batch)", most=100_000
    )
    expert_parallel: Count | None = _field(
        "data-parallel ranks that share the experts (1, or chosen with --global-batch)", most=100_000
    )
    expert_units: Count | None = _field(
        "units per rank into which the experts of a layer are divided (default: units that are large enough to be "
        "worth moving)",
        most=10_000,
    )
    loss_tile_tokens: Count | None = _field(
        "compute the loss for this many tokens at a time, so that the logits of a micro-batch never exist whole. "
        "The size of a micro-batch means: all at once (default: the planner uses tiles if logits take much memory)",
        most=100_000_000,
        metavar="TOKENS",
        flags=("--loss-tile",),
    )
    layer_tile_tokens: Count | None = _field(
        "compute norms and MLPs for this many tokens at a time, which makes their intermediate tensors small. The "
        "size of a micro-batch means: all at once (default: the planner uses tiles if layers take much memory)",
        most=100_000_000,
        metavar="TOKENS",
        flags=("--layer-tile",),
    )
    fp8_weights: bool | None = _field(
        "with --products fp8: copy weights of these products from the host, and gather them, in fp8. The host "
        "casts them once after each update, the device before each gather (default: where that is faster)",
        switch=True,
    )
    kernels: KernelRequest | None = _field(
        "kernels that run beside products and attention: those of transformers, module by module (the default); "
        "compiled: of blocks and a loss that torch.compile has compiled, as execute then does; auto: the faster of the "
        "two; liger: of Liger-Kernel, which can only be compared",
        choices=get_args(KernelRequest),
    )
    storage: Storage = _field(
        "what else the plan may offload, beside optimizer state and parameters to the host. never: nothing (the "
        "default); activations: activations to the host; nvme: also everything to the drives, which wears them",
        "never",
        choices=get_args(Storage),
    )
