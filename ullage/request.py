"""The options that say what is trained on which machine, shared by the commands that ask for it."""

import argparse
import re
from pathlib import Path

from hwprofiles.registry import load_profile
from planner.decisions import Precision
from planner.models.captured import CapturedModel, Model
from planner.models.registry import resolve_model
from planner.planning import Request
from ullage.arguments import input_shape, parse_bytes, positive_int

DEFAULT_HARDWARE = "a100-80"
_DEFAULT_SEQ_LEN = 2048
_DEFAULT_MICRO_BATCH = 4
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_request_options(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    """Add the options that :func:`request_of` reads. None has a default, so that what was given can be told."""
    group = parser.add_argument_group("what is trained, on which machine")
    group.add_argument(
        "--model",
        required=model_required,
        help="name (see `ullage models`), hub id, path of a config.json, or package.module:function that returns any "
        "nn.Module, which is then captured without its memory",
    )
    group.add_argument(
        "--input-shape",
        type=input_shape,
        nargs="+",
        metavar="[NAME=]SHAPE[:TYPE]",
        help="what a captured model is called with, as in 4x2048:int64 or input_ids=4x2048:int64 "
        "labels=4x2048:int64; TYPE is float (that of the weights; the default), int64, int32 or bool. The leading "
        "dimension is the micro-batch. The loss is the output if it is a scalar, its .loss if it has one, the only "
        "scalar in it, or else the mean of its first floating tensor",
    )
    group.add_argument("--gpus", type=positive_int, metavar="N", help="devices to train on (default: 1)")
    group.add_argument(
        "--hardware",
        metavar="NAME|PATH|local",
        help=f"profile of the machine, see `ullage hardware` (default: {DEFAULT_HARDWARE})",
    )
    group.add_argument(
        "--seq-len",
        type=positive_int,
        metavar="N",
        help=f"tokens per sequence ({_DEFAULT_SEQ_LEN}, or the model's limit)",
    )
    group.add_argument(
        "--micro-batch", type=positive_int, metavar="N", help=f"sequences per forward ({_DEFAULT_MICRO_BATCH})"
    )
    group.add_argument("--accumulate", type=positive_int, metavar="N", help="micro-batches per iteration (1)")
    group.add_argument("--precision", choices=("bf16", "fp32"), help="of weights and gradients (bf16)")
    group.add_argument(
        "--no-clip", action="store_true", default=None, help="do not clip gradients by their global norm"
    )
    group.add_argument(
        "--device-memory", type=parse_bytes, metavar="SIZE", help="use this much of each device, as in 150MB or 16GiB"
    )


def given_options(args: argparse.Namespace) -> list[str]:
    """Return which of the options were given, as they are written on the command line."""
    alone = argparse.ArgumentParser(add_help=False)
    add_request_options(alone, model_required=False)
    return [action.option_strings[0] for action in alone._actions if getattr(args, action.dest) is not None]


def request_of(args: argparse.Namespace) -> Request:
    """Return what the options ask for.

    Raises:
        ValueError: no such model or machine, or it cannot do what is asked for.
    """
    hardware = load_profile(args.hardware or DEFAULT_HARDWARE)
    if args.device_memory is not None:
        hardware = hardware.with_device_memory(args.device_memory)
    precision = Precision(weights=args.precision or "bf16")
    model, seq_len, micro_batch = _trained(args, precision, as_on_gpu=hardware.device.kind == "gpu")
    return Request(
        model=model,
        hardware=hardware,
        num_devices=args.gpus or 1,
        seq_len=seq_len,
        micro_batch=micro_batch,
        num_micro_batches=args.accumulate or 1,
        precision=precision,
        clip=not args.no_clip,
    )


def _trained(args: argparse.Namespace, precision: Precision, *, as_on_gpu: bool) -> tuple[Model, int, int]:
    """Return the model, its tokens per sequence and the sequences of a micro-batch."""
    if not _FACTORY.fullmatch(args.model) or Path(args.model).exists():
        if args.input_shape:
            raise ValueError(
                f"--input-shape is for models that are captured, but --model {args.model} has no function; "
                "give package.module:function, or --seq-len and --micro-batch"
            )
        model = resolve_model(args.model)
        seq_len = args.seq_len or min(_DEFAULT_SEQ_LEN, model.max_positions)
        return model, seq_len, args.micro_batch or _DEFAULT_MICRO_BATCH
    for option in ("seq_len", "micro_batch"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} and --model {args.model}: what a captured model is called "
                "with says --input-shape alone; leave it out"
            )
    from ullage.capture import capture  # noqa: PLC0415 - torch is slow to import, and may be missing

    captured: CapturedModel = capture(args.model, args.input_shape or (), precision.weights, as_on_gpu=as_on_gpu)
    return captured, captured.seq_len, captured.micro_batch
