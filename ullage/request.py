"""The options that say what is trained on which machine, shared by the commands that ask for it."""

import argparse
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.registry import load_profile
from planner.choices import DEFAULT_MICRO_BATCH
from planner.decisions import Precision, Storage
from planner.models.captured import CapturedInput, CapturedModel, Model
from planner.models.registry import resolve_model
from planner.optimizers import OPTIMIZERS
from planner.planning import Request, default_precision
from ullage.arguments import input_shape, parse_bytes, positive_int
from ullage.expert_load import expert_load

DEFAULT_HARDWARE = "a100-80"
_DEFAULT_SEQ_LEN = 2048
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add_request_options(parser: argparse.ArgumentParser, *, model_required: bool) -> None:
    """Add the options that :func:`request_of` reads. None has a default, so that what was given can be told."""
    group = parser.add_argument_group("what is trained, on which machine")
    group.add_argument(
        "--model",
        required=model_required,
        help="name (see `ullage models`), hub id, path of a config.json, or package.module:function that returns any "
        "nn.Module, which is then captured without its memory; frozen parameters have room for state and gradients too",
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
        group.add_argument(
            f"--{kind}-parallel", type=positive_int, metavar="N", help=f"{what} (1, or chosen with --global-batch)"
        )
    group.add_argument(
        "--expert-units", type=positive_int, metavar="N", help="units that a rank's experts of a layer are placed in"
    )
    group.add_argument(
        "--expert-load",
        metavar="uniform|zipf:S|FILE",
        help="how tokens spread over experts; a JSON file has shares, or one list of them for each layer (uniform)",
    )
    group.add_argument(
        "--storage",
        choices=get_args(Storage),
        help="what a plan may use beside device and host: never anything (the default); activations: these may wait on "
        "the host instead of being computed again; nvme: anything may also be on the drives, which wear with every "
        "iteration",
    )
    group.add_argument(
        "--precision",
        choices=("bf16", "fp32"),
        help="of weights and gradients (bf16; fp32 on a "
        "device that multiplies it more than twice as fast, as processors without bf16 instructions do)",
    )
    group.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        help="what updates the parameters, which says how much state they have: "
        + ", ".join(f"{name} {state.state_bytes_per_param} B/param" for name, state in OPTIMIZERS.items())
        + " (adamw, which Adam is planned as too; sgd has momentum)",
    )
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


def request_of(
    args: argparse.Namespace,
    change_machine: Callable[[HardwareProfile], HardwareProfile] = lambda hardware: hardware,
    change_model: Callable[[Model], Model] = lambda model: model,
) -> Request:
    """Return what the options ask for.

    Args:
        args: parsed options.
        change_machine: makes another machine of the one that the options name.
        change_model: likewise.

    Raises:
        ValueError: no such model or machine, or it cannot do what is asked for.
    """
    hardware = change_machine(load_profile(args.hardware or DEFAULT_HARDWARE))
    if args.device_memory is not None:
        hardware = hardware.with_device_memory(args.device_memory)
    if args.nodes is not None:
        hardware = _spread(hardware, args.gpus or 1, args.nodes)
    precision = Precision(weights=args.precision) if args.precision else default_precision(hardware.device)
    as_on_gpu = hardware.device.kind == "gpu"
    model, seq_len, micro_batch = trained(args, precision, change_model, as_on_gpu=as_on_gpu)
    return Request(
        model=model,
        hardware=hardware,
        num_devices=args.gpus or 1,
        seq_len=seq_len,
        micro_batch=micro_batch,
        num_micro_batches=args.accumulate,
        global_batch=args.global_batch,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
        expert_parallel=args.expert_parallel,
        expert_units=args.expert_units,
        expert_load=expert_load(args.expert_load or "uniform", model),
        storage=args.storage or "never",
        precision=precision,
        optimizer=args.optimizer or "adamw",
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


def trained(
    args: argparse.Namespace, precision: Precision, change: Callable[[Model], Model], *, as_on_gpu: bool
) -> tuple[Model, int, int | None]:
    """Return the model, its tokens per sequence and the sequences of a micro-batch, if that is fixed."""
    if not _FACTORY.fullmatch(args.model) or Path(args.model).exists():
        if args.input_shape:
            raise ValueError(
                f"--input-shape is for models that are captured, but --model {args.model} has no function; "
                "give package.module:function, or --seq-len and --micro-batch"
            )
        model = change(resolve_model(args.model))
        assert not isinstance(model, CapturedModel)
        return model, args.seq_len or min(_DEFAULT_SEQ_LEN, model.max_positions), args.micro_batch
    for option in ("seq_len", "micro_batch"):
        if getattr(args, option) is not None:
            raise ValueError(
                f"--{option.replace('_', '-')} and --model {args.model}: what a captured model is called "
                "with says --input-shape alone; leave it out"
            )
    captured = _captured(args.model, tuple(args.input_shape or ()), precision.weights, as_on_gpu=as_on_gpu)
    changed = change(captured)
    assert isinstance(changed, CapturedModel)
    return changed, changed.seq_len, changed.micro_batch


@functools.cache  # a study asks for the same again and again
def _captured(factory: str, inputs: tuple[CapturedInput, ...], dtype: Dtype, *, as_on_gpu: bool) -> CapturedModel:
    from ullage.capture import capture  # noqa: PLC0415 - torch is slow to import, and may be missing

    return capture(factory, inputs, dtype, as_on_gpu=as_on_gpu)
