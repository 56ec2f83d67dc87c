"""The options for model, machine and batch, shared by several commands.

:mod:`ullage.cli.request` reads them. It is separate because it imports the planner, which parsing does not need.
"""

import argparse
import contextlib
import re
from pathlib import Path
from typing import Final, get_args

from planner.optimizers import OPTIMIZERS
from planner.terms import DEFAULT_MICRO_BATCH, Storage
from ullage.cli.arguments import input_shape, lora, parse_bytes, positive_int

PACKAGED_HARDWARE: Final = "a100-80"  # the default where this machine was not calibrated
DEFAULT_SEQ_LEN: Final = 2048
QUANTIZATIONS: Final = ("nf4", "int8")
BATCHES: Final = ("whole", "masked")
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_request_options(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    """Add the options of a request. Their default is ``None``, so that the program knows which options were given."""
    group = parser.add_argument_group("what is trained, on which machine")
    group.add_argument(
        "--model",
        "-m",
        required=model_required,
        help="name (see `ullage models`), hub id, path of a config.json, or package.module:function that returns any "
        "nn.Module. Ullage captures such a module without allocating its memory, and also architectures of "
        "transformers that it has no formulas for. If parameters of the module are frozen, the plan keeps them frozen, "
        "in their own type",
    )
    group.add_argument(
        "--input-shape",
        type=input_shape,
        nargs="+",
        metavar="[NAME=]SHAPE[:TYPE]",
        help="inputs of a captured model, as in 4x2048:int64 or input_ids=4x2048:int64 labels=4x2048:int64. TYPE is "
        "float (the type of the weights; the default), int64, int32 or bool. The first dimension is the micro-batch; "
        "--micro-batch changes it, and --seq-len changes the tokens of integer inputs. "
        "The loss is the output if that is a scalar; else its .loss; else its only scalar; else the mean of its first "
        "floating tensor",
    )
    group.add_argument(
        "--lora",
        type=lora,
        metavar="rank=N[,...]",
        help="train LoRA adapters of peft beside frozen weights: rank=N[,targets=NAME+NAME][,alpha=X][,dropout=X], as "
        "in rank=16,targets=q_proj+v_proj. The default targets are all-linear (every projection but the head); the "
        "default alpha is the rank. Only for models by name, hub id or config.json. none: train all weights (the "
        "default)",
    )
    group.add_argument(
        "--quantize",
        choices=("none", *QUANTIZATIONS),
        help="keep the frozen projections of --lora quantized as bitsandbytes does: nf4 (4 bits, with double "
        "quantization) or int8",
    )
    group.add_argument("--gpus", "-n", type=positive_int, metavar="N", help="devices to train on (default: 1)")
    group.add_argument(
        "--hardware",
        metavar="NAME|PATH|local",
        help="profile of the machine; see `ullage hardware` (default: this machine's own profile if `ullage calibrate` "
        f"wrote one; else {PACKAGED_HARDWARE})",
    )
    group.add_argument(
        "--seq-len",
        type=positive_int,
        metavar="N",
        help=f"tokens per sequence (default: {DEFAULT_SEQ_LEN}, or the model's limit if that is smaller)",
    )
    group.add_argument(
        "--batches",
        choices=BATCHES,
        help="whole: all sequences have the same length (the default). masked: texts of any length are padded or "
        "packed, as by TRL; the plan then includes the memory of an attention mask",
    )
    group.add_argument(
        "--micro-batch",
        type=positive_int,
        metavar="N",
        help=f"sequences per forward (default: {DEFAULT_MICRO_BATCH}, fewer if they are longer than 8192 tokens)",
    )
    group.add_argument("--accumulate", type=positive_int, metavar="N", help="micro-batches per iteration (1)")
    group.add_argument(
        "--global-batch",
        type=positive_int,
        metavar="N",
        help="sequences per iteration over all devices. The planner then chooses the micro-batch, accumulation and "
        "parallel degrees, unless they are given",
    )
    group.add_argument(
        "--nodes", type=positive_int, metavar="N", help="nodes that share the devices (default: the fewest possible)"
    )
    for kind, what in (
        ("tensor", "ranks that share every layer"),
        ("pipeline", "stages that share the layers"),
        ("expert", "data-parallel ranks that share the experts"),
    ):
        group.add_argument(
            f"--{kind}-parallel", type=positive_int, metavar="N", help=f"{what} (1, or chosen with --global-batch)"
        )
    group.add_argument(
        "--expert-units",
        type=positive_int,
        metavar="N",
        help="units per rank into which the experts of a layer are divided",
    )
    group.add_argument(
        "--loss-tile",
        type=positive_int,
        metavar="TOKENS",
        help="compute the loss for this many tokens at a time, so that the logits of a micro-batch never exist whole. "
        "The size of a micro-batch means: all at once (default: the planner uses tiles if logits take much memory)",
    )
    group.add_argument(
        "--layer-tile",
        type=positive_int,
        metavar="TOKENS",
        help="compute norms and MLPs for this many tokens at a time, which makes their intermediate tensors small. The "
        "size of a micro-batch means: all at once (default: the planner uses tiles if layers take much memory)",
    )
    group.add_argument(
        "--expert-load",
        metavar="uniform|zipf:S|FILE",
        help="distribution of tokens over experts (default: uniform); a JSON file holds one list of shares, or one "
        "list per layer",
    )
    group.add_argument(
        "--storage",
        choices=get_args(Storage),
        help="what else the plan may offload, beside optimizer state and parameters to the host. never: nothing (the "
        "default); activations: activations to the host; nvme: also everything to the drives, which wears them",
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="type of weights and gradients (default: bf16; fp32 if the device multiplies fp32 more than twice as "
        "fast, as CPUs without bf16 instructions do)",
    )
    group.add_argument(
        "--products",
        choices=("weights", "fp8"),
        help="type in which linear layers of hidden layers multiply, forward and backward. weights: that of weights "
        "(the default). fp8: as torchao's Float8Linear, with a scale for each tensor; for devices that have such "
        "products (compute capability 8.9 or newer)",
    )
    group.add_argument(
        "--fp8-weights",
        choices=("yes", "no"),
        help="with --products fp8: copy weights of these products from the host, and gather them, in fp8. The host "
        "casts them once after each update, the device before each gather (default: where that is faster)",
    )
    group.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="optimizer, and its state per parameter: "
        + ", ".join(f"{name} {state.state_bytes_per_param} B/param" for name, state in OPTIMIZERS.items())
        + " (default: adamw, also for Adam). sgd has momentum. muon uses AdamW, with 12 B/param, for all parameters "
        "but the matrices of layers",
    )
    group.add_argument(
        "--master",
        choices=("fp32", "bf16"),
        help="type of the optimizer's master copy of weights (default: fp32). bf16, with --optimizer "
        + " or ".join(name for name, state in OPTIMIZERS.items() if state.rounded)
        + ": the bf16 weight itself, rounded stochastically, so that state takes 2 B/param less and no copy is kept",
    )
    group.add_argument(
        "--no-clip", action="store_true", default=None, help="do not clip gradients by their global norm"
    )
    group.add_argument(
        "--device-memory",
        type=parse_bytes,
        metavar="SIZE",
        help="take at most this much of each device, as in 150MB or 16GiB; of a GPU, 1 GiB of it is for libraries",
    )
    group.add_argument(
        "--host-memory",
        type=parse_bytes,
        metavar="SIZE",
        help="use this much of each host's memory, whatever its profile says: what was free at calibration is too "
        "little if the memory of a virtual machine grows as it is used",
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """Return the options that were given, as written on the command line."""
    alone = argparse.ArgumentParser(add_help=False)
    add_request_options(alone, model_required=False)
    return [action.option_strings[0] for action in alone._actions if getattr(args, action.dest) is not None]


def is_captured(model: str) -> bool:
    """Return whether ``--model`` names a function that returns a module, not a file."""
    return bool(_FACTORY.fullmatch(model)) and not Path(model).exists()


def check_adapters(args: argparse.Namespace) -> None:
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

    load_profile(args.hardware or default_hardware().name)
    check_adapters(args)
    if not is_captured(args.model):
        with contextlib.suppress(NoFormulasError):
            resolve_model(args.model)
