"""Turn the options of :mod:`ullage.cli.options` into a request."""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable

from hwprofiles.paths import replace
from hwprofiles.profile import Dtype, HardwareProfile
from hwprofiles.quantity import Provenance
from hwprofiles.registry import load_profile
from planner.choices.constraints import Constraints
from planner.choices.request import Request
from planner.decisions import Precision
from planner.models.adapters import Lora
from planner.models.captured import CapturedInput, CapturedModel, Model, micro_batch_of, resized, tokens_of
from planner.models.config import NoFormulasError
from planner.models.quantization import Quantization
from planner.models.registry import resolve_model
from planner.plan.planning import default_precision
from planner.terms import default_micro_batch
from ullage.cli.default_hardware import default_hardware
from ullage.cli.expert_load import expert_load
from ullage.cli.options import DEFAULT_SEQ_LEN, Options, check_adapters, is_captured


def request_of(
    args: argparse.Namespace | Options,
    change_machine: Callable[[HardwareProfile], HardwareProfile] = lambda hardware: hardware,
    change_model: Callable[[Model], Model] = lambda model: model,
) -> Request:
    """Return the request that the options describe.

    Args:
        args: parsed options.
        change_machine: changes the machine that the options name.
        change_model: changes the model that the options name.

    Raises:
        ValueError: the model or machine does not exist, or the machine cannot meet the request.
    """
    hardware = change_machine(load_profile(args.hardware or default_hardware()[0]))
    if args.device_memory is not None:
        hardware = hardware.with_device_limit(args.device_memory)
    if args.host_memory is not None:
        asked_for = Provenance(
            origin="assumed", source=f"asked for, in place of {hardware.host.memory_bytes.value:.0f} B"
        )
        hardware = replace(hardware, {"host.memory_bytes": args.host_memory}, asked_for)
    if args.nodes is not None:
        hardware = _with_nodes(hardware, args.num_devices or 1, args.nodes)
    precision = precision_of(args, hardware)
    if args.products == "fp8":
        precision = precision.model_copy(update={"products": "fp8"})
    as_on_gpu = hardware.device.kind == "gpu"
    model, seq_len, micro_batch = trained(args, precision, change_model, as_on_gpu=as_on_gpu)
    asked = {field.name: getattr(args, field.name) for field in dataclasses.fields(Constraints)}
    asked |= {"micro_batch": micro_batch, "fp8_weights": {"yes": True, "no": False}.get(str(args.fp8_weights))}
    return Request(
        model=model,
        hardware=hardware,
        seq_len=seq_len,
        expert_load=expert_load(args.expert_load or "uniform", model),
        precision=precision,
        optimizer=args.optimizer or "adamw",
        clip=args.clip is not False,
        **{name: value for name, value in asked.items() if value is not None},
    )


def precision_of(args: argparse.Namespace | Options, hardware: HardwareProfile) -> Precision:
    """Return the types that the options ask for.

    Raises:
        ValueError: a master copy in bf16 for weights in fp32.
    """
    if args.master != "bf16":
        return Precision(weights=args.precision) if args.precision else default_precision(hardware.device)
    if args.precision == "fp32":
        raise ValueError("--master bf16 is for weights in bf16, but --precision is fp32; change one of them")
    return Precision(weights="bf16", master="bf16")


def _with_nodes(hardware: HardwareProfile, num_devices: int, num_nodes: int) -> HardwareProfile:
    """Return a machine in which ``num_nodes`` nodes have ``num_devices`` devices together."""
    per_node, rest = divmod(num_devices, num_nodes)
    if rest or not 0 < per_node <= hardware.devices_per_node:
        raise ValueError(
            f"--nodes {num_nodes} cannot share --gpus {num_devices} evenly with at most {hardware.devices_per_node} "
            f"device(s) per node of {hardware.name}; change one of them"
        )
    return hardware.model_copy(update={"devices_per_node": per_node})


def trained(
    args: argparse.Namespace | Options, precision: Precision, change: Callable[[Model], Model], *, as_on_gpu: bool
) -> tuple[Model, int, int | None]:
    """Return the model, its tokens per sequence, and the sequences per micro-batch (``None`` if not fixed)."""
    check_adapters(args)
    if not is_captured(args.model):
        if args.input_shape:
            raise ValueError(
                f"--input-shape is for captured models, but --model {args.model} names no function; "
                "give package.module:function, or --seq-len and --micro-batch"
            )
        quantization = None if args.quantize == "none" else args.quantize
        called_with = args.seq_len, first_micro_batch(args.micro_batch, args.global_batch)
        found = model_named(
            args.model,
            *called_with,
            precision.weights,
            lora=args.lora,
            quantization=quantization,
            masked=args.batches == "masked",
            as_on_gpu=as_on_gpu,
        )
        model = change(found)
        if isinstance(model, CapturedModel):
            return model, model.seq_len, args.micro_batch
        return model, args.seq_len or min(DEFAULT_SEQ_LEN, model.max_positions), args.micro_batch
    inputs = tuple(args.input_shape or ())
    if args.batches == "masked":
        raise ValueError(
            f"--batches masked is for models of transformers, but --model {args.model} is a function; give its mask "
            "with the other inputs, as in --input-shape input_ids=2x512:int64 attention_mask=2x512:int64 "
            "labels=2x512:int64"
        )
    if inputs and args.seq_len is not None and tokens_of(inputs) == 1:
        raise ValueError(
            f"--seq-len {args.seq_len}: the first input of --model {args.model} is not a sequence of tokens; leave "
            "--seq-len out, or give another --input-shape"
        )
    if inputs and (args.seq_len or args.micro_batch):
        inputs = resized(inputs, args.micro_batch or micro_batch_of(inputs), args.seq_len or tokens_of(inputs))
    captured = _captured(args.model, inputs, precision.weights, as_on_gpu=as_on_gpu)
    changed = change(captured)
    assert isinstance(changed, CapturedModel)
    chosen = (
        changed.is_free and args.global_batch is not None and args.micro_batch is None
    )  # the planner chooses the micro-batch
    return changed, changed.seq_len, None if chosen else changed.micro_batch


def first_micro_batch(micro_batch: int | None, global_batch: int | None) -> int | None:
    """Return the micro-batch for the first capture of a model: 1 if the planner chooses it."""
    return micro_batch or (1 if global_batch else None)


def model_named(
    text: str,
    seq_len: int | None,
    micro_batch: int | None,
    dtype: Dtype,
    *,
    lora: Lora | None = None,
    quantization: Quantization | None = None,
    masked: bool = False,
    as_on_gpu: bool,
) -> Model:
    """Return the model that a name or a file describes.

    Ullage captures architectures that it has no formulas for, and all models with adapters or masks.

    Args:
        text: see :func:`planner.models.registry.resolve_model`.
        seq_len: tokens per sequence for capture; ``None``: the default.
        micro_batch: sequences per micro-batch for capture; ``None``: the default.
        dtype: type of the weights.
        lora: adapters to train in place of all weights.
        quantization: of the frozen projections beside them.
        masked: whether batches have an attention mask.
        as_on_gpu: see :func:`ullage.capture.capture`.

    Raises:
        ValueError: the model does not exist, or cannot be captured.
    """
    with contextlib.suppress(NoFormulasError):
        sizes = resolve_model(text)
        if lora is None and not masked:
            return sizes
    from ullage.capture.architectures import architecture  # noqa: PLC0415 - torch is slow to import

    found = architecture(text)
    seq_len = found.seq_len(seq_len, DEFAULT_SEQ_LEN)
    inputs = found.inputs(micro_batch or default_micro_batch(seq_len), seq_len, masked=masked)
    return _captured(text, inputs, dtype, lora, quantization, as_on_gpu=as_on_gpu)


@functools.cache  # a study captures the same model many times
def _captured(
    factory: str,
    inputs: tuple[CapturedInput, ...],
    dtype: Dtype,
    lora: Lora | None = None,
    quantization: Quantization | None = None,
    *,
    as_on_gpu: bool,
) -> CapturedModel:
    from ullage.capture import capture  # noqa: PLC0415 - torch is slow to import, and may be missing

    return capture(factory, inputs, dtype, as_on_gpu=as_on_gpu, lora=lora, quantization=quantization)
