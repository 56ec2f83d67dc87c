"""The options for model, machine and batch, and for checkpoints: fields of one type, with their help and their values.

The command line, the axes of studies and the reference pages are made from these fields. :mod:`ullage.cli.request`
makes a request from them. It is separate because it imports the planner, which parsing does not need.
"""

# ruff: noqa: RUF009 - a function makes the fields

import argparse
import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from planner.choices.constraints import DIVIDED, Constraints
from planner.optimizers import ELEMENTWISE, OPTIMIZERS
from planner.terms import DEFAULT_RESTART_S, MIN_CHECKPOINTS, Level
from ullage.cli.arguments import (
    fraction,
    input_shape,
    lora,
    mtbf,
    parse_bytes,
    positive_float,
    positive_int,
    seconds,
)

if TYPE_CHECKING:
    from planner.models.adapters import Lora
    from planner.models.captured import CapturedInput

PACKAGED_HARDWARE: Final = "a100-80"  # the default where this machine was not calibrated
DEFAULT_SEQ_LEN: Final = 2048
QUANTIZATIONS: Final = ("nf4", "int8")
BATCHES: Final = ("whole", "masked")
CHECKPOINTS: Final = "when to make checkpoints (with --mtbf)"
_OPTIMIZERS: Final = tuple(name for name in OPTIMIZERS if name not in ELEMENTWISE)  # others are users' own
_WHAT: Final = "what is trained, on which machine"
_GROUPS: Final = (_WHAT, DIVIDED, CHECKPOINTS)
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def _option(
    words: str,
    of: Callable[[str], Any] | Sequence[str] | None = None,
    metavar: str | None = None,
    *,
    group: str = _WHAT,
    **more: Any,
) -> Any:
    """Return a field whose option has this help.

    Args:
        words: help text.
        of: reads a value, or all values.
        metavar: what stands for a value in the help.
        group: heading in the help.
        more: other arguments of :meth:`argparse.ArgumentParser.add_argument`; ``flags`` if they are not the name.
    """
    kind = {"choices": tuple(of)} if isinstance(of, Sequence) else {"type": of} if of else {}
    shown = {} if metavar is None else {"metavar": metavar}
    return dataclasses.field(default=None, metadata={"group": group, "help": words, **kind, **shown, **more})


_checkpoint = functools.partial(_option, group=CHECKPOINTS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Constraints):
    """What was asked for, beside the constraints.

    ``None``: not given; only commands that take a plan do without a model.
    """

    model: str = _option(
        "name (see `ullage models`), hub id, path of a config.json, or package.module:function that returns any "
        "nn.Module. Ullage captures such a module without allocating its memory, and also architectures of "
        "transformers that it has no formulas for. If parameters of the module are frozen, the plan keeps them frozen, "
        "in their own type",
        flags=("--model", "-m"),
    )
    input_shape: "Sequence[CapturedInput] | None" = _option(
        "inputs of a captured model, as in 4x2048:int64 or input_ids=4x2048:int64 labels=4x2048:int64. TYPE is "
        "float (the type of the weights; the default), int64, int32 or bool. The first dimension is the micro-batch; "
        "--micro-batch changes it, and --seq-len changes the tokens of integer inputs. "
        "The loss is the output if that is a scalar; else its .loss; else its only scalar; else the mean of its first "
        "floating tensor",
        input_shape,
        "[NAME=]SHAPE[:TYPE]",
        nargs="+",
    )
    lora: "Lora | None" = _option(
        "train LoRA adapters of peft beside frozen weights: "
        "rank=N[,targets=NAME+NAME][,alpha=X][,dropout=X][,save=NAME+NAME], as in rank=16,targets=q_proj+v_proj. The "
        "default targets are all-linear (every projection but the head); the default alpha is the rank; save names "
        "modules that are trained as a whole. Only for models by name, hub id or config.json. none: train all weights "
        "(the default)",
        lora,
        "rank=N[,...]",
    )
    quantize: Literal["none", "nf4", "int8"] | None = _option(
        "keep the frozen projections of --lora quantized as bitsandbytes does: nf4 (4 bits, with double "
        "quantization) or int8",
        ("none", *QUANTIZATIONS),
    )
    hardware: str | None = _option(
        "profile of the machine; see `ullage hardware` (default: this machine's own profile if `ullage calibrate` "
        f"wrote one; else {PACKAGED_HARDWARE})",
        metavar="NAME|PATH|local",
    )
    seq_len: int | None = _option(
        f"tokens per sequence (default: {DEFAULT_SEQ_LEN}, or the model's limit if that is smaller)", positive_int, "N"
    )
    batches: Literal["whole", "masked"] | None = _option(
        "whole: all sequences have the same length (the default). masked: texts of any length are padded or "
        "packed, as by TRL; the plan then includes the memory of an attention mask",
        BATCHES,
    )
    nodes: int | None = _option("nodes that share the devices (default: the fewest possible)", positive_int, "N")
    expert_load: str | None = _option(
        "distribution of tokens over experts (default: uniform); a JSON file holds one list of shares, or one "
        "list per layer",
        metavar="uniform|zipf:S|FILE",
    )
    precision: Literal["bf16", "fp32"] | None = _option(
        "type of weights and gradients (default: bf16; fp32 if the device multiplies fp32 more than twice as "
        "fast, as CPUs without bf16 instructions do)",
        ("bf16", "fp32"),
    )
    products: Literal["weights", "fp8"] | None = _option(
        "type in which linear layers of hidden layers multiply, forward and backward. weights: that of weights "
        "(the default). fp8: as torchao's Float8Linear, with a scale for each tensor; for devices that have such "
        "products (compute capability 8.9 or newer)",
        ("weights", "fp8"),
    )
    optimizer: Any = _option(
        "optimizer, and its state per parameter: "
        + ", ".join(f"{name} {OPTIMIZERS[name].state_bytes_per_param} B/param" for name in _OPTIMIZERS)
        + " (default: adamw, also for Adam). sgd has momentum. muon uses AdamW, with 12 B/param, for all parameters "
        "but the matrices of layers",
        _OPTIMIZERS,
    )
    master: Literal["fp32", "bf16"] | None = _option(
        "type of the optimizer's master copy of weights (default: fp32). bf16, with --optimizer "
        + " or ".join(name for name, state in OPTIMIZERS.items() if state.rounded)
        + ": the bf16 weight itself, rounded stochastically, so that state takes 2 B/param less and no copy is kept",
        ("fp32", "bf16"),
    )
    clip: bool | None = _option(
        "do not clip gradients by their global norm", flags=("--no-clip",), action="store_const", const=False
    )
    device_memory: int | None = _option(
        "take at most this much of each device, as in 150MB or 16GiB; of a GPU, 1 GiB of it is for libraries",
        parse_bytes,
        "SIZE",
    )
    host_memory: int | None = _option(
        "use this much of each host's memory, whatever its profile says: what was free at calibration is too "
        "little if the memory of a virtual machine grows as it is used",
        parse_bytes,
        "SIZE",
    )
    mtbf: dict[Level, float] | None = _checkpoint(
        "mean time between failures of the whole job, as in 6h. The planner then chooses levels and intervals of "
        "checkpoints. Or one time for each kind of failure, named by the fastest level that survives it: memory=2h (a "
        "process fails), nvme=1d (power fails), pfs=30d (a node fails)",
        mtbf,
        "TIME|LEVEL=TIME,...",
    )
    max_checkpoint_overhead: float | None = _checkpoint(
        "largest share of the time that checkpoints may cost, as in 1%%", fraction, "SHARE"
    )
    max_lost_work: float | None = _checkpoint("most training time that one failure may lose", seconds, "TIME")
    restart: float | None = _checkpoint(
        f"time from a failure until the restarted job reads a checkpoint ({DEFAULT_RESTART_S:g}s)", seconds, "TIME"
    )
    keep: int | None = _checkpoint(f"checkpoints to keep at each level ({MIN_CHECKPOINTS})", positive_int, "N")
    checkpoint_buffer: int | None = _checkpoint(
        "host memory per rank for checkpoint data that is not written yet (default: the best size)", parse_bytes, "SIZE"
    )
    drive_writes_per_day: float | None = _checkpoint(
        "how often the node's drives may be overwritten per day, from their data sheet (default: the profile's)",
        positive_float,
        "N",
    )
    pfs_bandwidth: int | None = _checkpoint(
        "bandwidth of each node to a shared file system, if the profile has none", parse_bytes, "SIZE"
    )
    iterations: int | None = _checkpoint(
        "length of the run whose expected time is shown (default: one day)", positive_int, "N"
    )

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """Return the options among parsed arguments."""
        names = (field.name for field in dataclasses.fields(cls))
        return cls(**{name: value for name in names if (value := getattr(args, name, None)) is not None})


def option_fields() -> dict[str, dict[str, Any]]:
    """Return each option by its name: ``dest``, ``flags``, ``help``, ``group``, and ``type`` or ``choices``."""
    found = {}
    for field in sorted(dataclasses.fields(Options), key=lambda field: _GROUPS.index(field.metadata["group"])):
        of = {"dest": field.name, "flags": (f"--{field.name.replace('_', '-')}",), **field.metadata}
        if of.pop("most", None):
            of = {"type": positive_int, "metavar": "N", **of}
        if of.pop("switch", None):
            of["choices"] = ("yes", "no")
        found[of["flags"][0].removeprefix("--").removeprefix("no-").replace("-", "_")] = of
    return found


def add_options(parser: argparse.ArgumentParser, *, model_required: bool, checkpoints: bool = False) -> None:
    """Add the options. Their default is ``None``, so that the program knows which options were given."""
    for group in _GROUPS if checkpoints else (_WHAT, DIVIDED):
        shown = parser.add_argument_group(group)
        for name, of in option_fields().items():
            if of.pop("group") == group:
                if name == "model":
                    of["required"] = model_required
                shown.add_argument(*of.pop("flags"), default=None, **of)


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options for model, machine and batch that were given, as written on the command line."""
    return [
        of["flags"][0]
        for of in option_fields().values()
        if of["group"] != CHECKPOINTS and getattr(args, of["dest"]) is not None
    ]


def is_captured(model: str) -> bool:
    """Return whether ``--model`` names a function that returns a module, not a file."""
    return bool(_FACTORY.fullmatch(model)) and not Path(model).exists()


def check_adapters(args: argparse.Namespace | Options) -> None:
    """Check that ``--quantize`` comes with ``--lora``, and that the model can have adapters.

    Raises:
        ValueError: it does not, or the model cannot.
    """
    if args.lora is None:
        if args.quantize not in {None, "none"}:
            raise ValueError(
                f"--quantize {args.quantize} is for frozen weights, but without --lora all weights are trained; give "
                "--lora rank=16 too"
            )
        return
    if is_captured(args.model):
        raise ValueError(
            f"--lora is for models of transformers, but --model {args.model} is a function; let it return the model "
            "that peft.get_peft_model makes, without --lora"
        )


def check_names(args: argparse.Namespace) -> None:
    """Check that the machine and the model exist. This is faster than importing the planner.

    Raises:
        ValueError: the machine or the model does not exist.
    """
    from hwprofiles.registry import load_profile  # noqa: PLC0415 - `--help` does without
    from planner.models.config import NoFormulasError  # noqa: PLC0415
    from planner.models.registry import resolve_model  # noqa: PLC0415
    from ullage.cli.default_hardware import default_hardware  # noqa: PLC0415

    load_profile(args.hardware or default_hardware()[0])
    check_adapters(args)
    if not is_captured(args.model):
        with contextlib.suppress(NoFormulasError):
            resolve_model(args.model)
