"""The options that say what is trained on which machine, shared by the commands that ask for it."""

import argparse
import math
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices import DEFAULT_MICRO_BATCH
from planner.decisions import Precision
from planner.models import experts
from planner.models.config import ModelConfig
from planner.models.registry import resolve_model
from planner.planning import Request
from ullage.arguments import parse_bytes, positive_int

DEFAULT_HARDWARE = "a100-80"
_DEFAULT_SEQ_LEN = 2048


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
        "--micro-batch", type=positive_int, metavar="N", help=f"sequences per forward ({DEFAULT_MICRO_BATCH})"
    )
    group.add_argument("--accumulate", type=positive_int, metavar="N", help="micro-batches per iteration (1)")
    group.add_argument(
        "--global-batch",
        type=positive_int,
        metavar="N",
        help="sequences per iteration over all devices: chooses what is not given of micro-batch, accumulation and "
        "degrees",
    )
    group.add_argument(
        "--nodes", type=positive_int, metavar="N", help="nodes that share the devices (as few as hold them)"
    )
    for kind, what in (
        ("tensor", "ranks that share every layer"),
        ("pipeline", "stages that share the layers"),
        ("expert", "data-parallel ranks that share the experts"),
    ):
        group.add_argument(f"--{kind}-parallel", type=positive_int, metavar="N", help=f"{what} (1)")
    group.add_argument(
        "--expert-units", type=positive_int, metavar="N", help="units that a rank's experts of a layer are placed in"
    )
    group.add_argument(
        "--expert-load",
        metavar="uniform|zipf:S|FILE",
        help="how tokens spread over experts; a JSON file has shares, or one list of them for each layer (uniform)",
    )
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
    if args.nodes is not None:
        hardware = _spread(hardware, args.gpus or 1, args.nodes)
    model = resolve_model(args.model)
    return Request(
        model=model,
        hardware=hardware,
        num_devices=args.gpus or 1,
        seq_len=args.seq_len or min(_DEFAULT_SEQ_LEN, model.max_positions),
        micro_batch=args.micro_batch,
        num_micro_batches=args.accumulate,
        global_batch=args.global_batch,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        expert_parallel=args.expert_parallel,
        expert_units=args.expert_units,
        expert_load=_expert_load(args.expert_load or "uniform", model),
        precision=Precision(weights=args.precision or "bf16"),
        clip=not args.no_clip,
    )


def _spread(hardware: HardwareProfile, num_devices: int, num_nodes: int) -> HardwareProfile:
    """Return nodes of which each gives as many of its devices as ``num_nodes`` take to have all."""
    per_node, rest = divmod(num_devices, num_nodes)
    if rest or not 0 < per_node <= hardware.devices_per_node:
        raise ValueError(
            f"--nodes {num_nodes} cannot share --gpus {num_devices} evenly with at most {hardware.devices_per_node} "
            f"device(s) per node of {hardware.name}; change one of them"
        )
    return hardware.model_copy(update={"devices_per_node": per_node})


def _expert_load(text: str, model: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Return the shares of visits that ``uniform``, ``zipf:S`` or a file gives to experts.

    Raises:
        ValueError: it is none of them.
    """
    if text == "uniform":
        return ()
    if text.startswith("zipf:"):
        try:
            exponent = float(text.removeprefix("zipf:"))
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= 10:
            raise ValueError(f"--expert-load {text}: the exponent must be a number from 0 to 10, as in zipf:1.2")
        return (experts.zipf(max(model.num_experts, 1), exponent),)
    try:
        return TypeAdapter(_Shares).validate_json(Path(text).read_bytes())
    except OSError as error:
        raise ValueError(f"--expert-load {text}: {error.strerror}; give uniform, zipf:S or a JSON file") from error
    except ValidationError as error:
        raise ValueError(
            f"--expert-load {text} must hold a list of shares, or one for each layer; "
            f"{error.errors()[0]['msg'].lower()}"
        ) from error


def _rows(value: object) -> object:
    """One row of shares is a list of one."""
    return [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value


_Shares = Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_rows)]
