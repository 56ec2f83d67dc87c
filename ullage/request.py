"""The options that say what is trained on which machine, shared by the commands that ask for it."""

import argparse

from hwprofiles.registry import load_profile
from planner.decisions import Precision
from planner.models.registry import resolve_model
from planner.planning import Request
from ullage.arguments import parse_bytes, positive_int

DEFAULT_HARDWARE = "a100-80"
_DEFAULT_SEQ_LEN = 2048
_DEFAULT_MICRO_BATCH = 4


def add_request_options(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    """Add the options that :func:`request_of` reads. None has a default, so that what was given can be told."""
    group = parser.add_argument_group("what is trained, on which machine")
    group.add_argument(
        "--model", required=model_required, help="name (see `ullage models`), hub id, or path of a config.json"
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
    model = resolve_model(args.model)
    return Request(
        model=model,
        hardware=hardware,
        num_devices=args.gpus or 1,
        seq_len=args.seq_len or min(_DEFAULT_SEQ_LEN, model.max_positions),
        micro_batch=args.micro_batch,
        num_micro_batches=args.accumulate,
        precision=Precision(weights=args.precision or "bf16"),
        clip=not args.no_clip,
    )
