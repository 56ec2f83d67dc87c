"""Turn :class:`ullage.cli.options.Options` into a request, for the command line, ``ullage.plan`` and studies."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, TypeAdapter, ValidationError

from hwprofiles.files import read_json
from hwprofiles.paths import replace
from hwprofiles.profile import Dtype, HardwareProfile, Storage
from hwprofiles.quantity import Curve, CurvePoint, Provenance, Quantity
from planner.choices.constraints import Asked
from planner.choices.request import Request, precision_of
from planner.decisions import Precision
from planner.models.adapters import Lora
from planner.models.captured import CapturedInput, CapturedModel, Model, micro_batch_of, resized, tokens_of
from planner.models.config import ModelConfig, NoFormulasError
from planner.models.formulas import experts
from planner.models.quantization import Quantization
from planner.models.registry import resolve_model
from planner.plan.checkpoints import CheckpointRequest
from planner.plan.planning import default_precision
from planner.plan.unlike import Machine
from planner.terms import DEFAULT_SEQ_LEN, MIN_CHECKPOINTS, default_micro_batch
from ullage.cli.default_hardware import default_hardware, machine_named
from ullage.cli.options import Options, check_adapters, is_captured

_T = TypeVar("_T")


def _unchanged(whole: _T) -> _T:
    return whole


def request_of(
    asked: Options,
    change_machine: Callable[[HardwareProfile], HardwareProfile] = _unchanged,
    change_model: Callable[[Model], Model] = _unchanged,
) -> Request:
    """Return the request that is asked for.

    Args:
        asked: the options.
        change_machine: changes the machine that the options name.
        change_model: changes the model that the options name.

    Raises:
        ValueError: the model or machine does not exist, or the machine cannot meet the request.
    """
    if asked.memory is not None:
        raise ValueError(
            "--memory free is for plans of this machine now; here, give sizes, as in --memory device=16GiB"
        )
    hardware = _with_memory(asked, change_machine(machine_of(asked)))
    if asked.nodes is not None:
        hardware = _with_nodes(hardware, asked.num_devices, asked.nodes)
    precision = types_of(asked, hardware)
    model, seq_len, micro_batch = trained(asked, precision, change_model, as_on_gpu=hardware.device.kind == "gpu")
    load = asked.expert_load or ()
    found = {field.name: getattr(asked, field.name) for field in dataclasses.fields(Asked)} | {
        "seq_len": seq_len,
        "micro_batch": micro_batch,
        "precision": precision,
        "expert_load": expert_load(load, model) if isinstance(load, str) else load,
    }
    return Request(model, hardware, **found)


def unlike_request(asked: Options, beside: Mapping[str, int]) -> tuple[Request, list[Machine]]:
    """Return the request for devices of several kinds, and the kinds: see :mod:`planner.plan.unlike`.

    Args:
        asked: the options, with the first kind of device and its number.
        beside: the numbers of other devices, by the names of their profiles.

    Raises:
        ValueError: see :func:`request_of`; or a node does not hold all devices that are to be in it.
    """
    if asked.nodes not in {None, 1}:
        raise ValueError(
            f"--nodes is {asked.nodes}, but kinds of devices are in nodes of their own, or all in one; leave it out, "
            "or give --nodes 1"
        )
    named = [(asked, asked.num_devices), *((_on(asked, name), count) for name, count in beside.items())]
    machines, total = [], sum(count for _, count in named)
    for each, count in named:
        machine = _with_memory(each, machine_of(each))
        if asked.nodes and total > machine.devices_per_node:
            raise ValueError(
                f"--nodes 1: {machine.name} holds {machine.devices_per_node} device(s), but there are {total}; leave "
                "--nodes out, or give a profile of a larger machine"
            )
        per_node = total if asked.nodes else min(count, machine.devices_per_node)
        machines.append((machine.model_copy(update={"devices_per_node": per_node}), count))
    return request_of(dataclasses.replace(asked, nodes=None)), machines


def _on(asked: Options, name: str) -> Options:
    return dataclasses.replace(asked, hardware=name)


def _with_memory(asked: Options, hardware: HardwareProfile) -> HardwareProfile:
    """Return a machine with the memory that is asked for."""
    if asked.device_memory is not None:
        hardware = hardware.with_device_limit(asked.device_memory)
    if asked.host_memory is not None:
        asked_for = Provenance(
            origin="assumed", source=f"asked for, in place of {hardware.host.memory_bytes.value:.0f} B"
        )
        hardware = replace(hardware, {"host.memory_bytes": asked.host_memory}, asked_for)
    return hardware


def machine_of(asked: Options) -> HardwareProfile:
    """Return the machine that the options name, or that is the default."""
    named = asked.hardware or default_hardware()[0]
    return named if isinstance(named, HardwareProfile) else machine_named(named)


def types_of(asked: Options, hardware: HardwareProfile) -> Precision:
    """Return the types that the options ask for.

    Raises:
        ValueError: a type does not exist; or a master copy in bf16 for weights in fp32.
    """
    if asked.precision is not None:
        found = precision_of(asked.precision)
    elif isinstance(asked.model, CapturedModel):
        found = Precision(weights=asked.model.dtype)
    else:
        found = Precision(weights="bf16") if asked.master == "bf16" else default_precision(hardware.device)
    if asked.master == "bf16":
        if found.weights == "fp32":
            raise ValueError(
                "a master copy in bf16 is for weights in bf16, but the precision is fp32; change one of them"
            )
        found = found.model_copy(update={"master": "bf16"})
    return found.model_copy(update={"products": "fp8"}) if asked.products == "fp8" else found


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
    asked: Options, precision: Precision, change: Callable[[Model], Model] = _unchanged, *, as_on_gpu: bool
) -> tuple[Model, int, int | None]:
    """Return the model, its tokens per sequence, and the sequences per micro-batch (``None`` if not fixed)."""
    check_adapters(asked)
    is_named = isinstance(asked.model, str | Path) and not is_captured(asked.model)
    if asked.input_shape and not is_captured(asked.model):
        raise ValueError(
            f"--input-shape is for captured models, but --model {asked.model} names no function; "
            "give package.module:function, or --seq-len and --micro-batch"
        )
    if is_named:
        model = change(
            model_named(
                str(asked.model),
                asked.seq_len,
                asked.micro_batch or (1 if asked.global_batch else None),  # the first of those that the planner tries
                precision.weights,
                lora=Lora.read(asked.lora) if isinstance(asked.lora, str) else asked.lora,
                quantization=None if asked.quantize == "none" else asked.quantize,
                masked=asked.batches == "masked",
                as_on_gpu=as_on_gpu,
            )
        )
    elif asked.batches == "masked":
        raise ValueError(
            f"--batches masked is for models of transformers, but --model {asked.model} is a function; give its mask "
            "with the other inputs, as in --input-shape input_ids=2x512:int64 attention_mask=2x512:int64 "
            "labels=2x512:int64"
        )
    else:
        given = asked.model
        model = change(_called(asked, precision, as_on_gpu=as_on_gpu) if isinstance(given, str | Path) else given)
    if not isinstance(model, CapturedModel):
        return model, asked.seq_len or min(DEFAULT_SEQ_LEN, model.max_positions), asked.micro_batch
    if is_named:
        return model, model.seq_len, asked.micro_batch
    chosen = model.is_free and asked.global_batch is not None  # the planner chooses the micro-batch
    return model, asked.seq_len or model.seq_len, asked.micro_batch or (None if chosen else model.micro_batch)


def _called(asked: Options, precision: Precision, *, as_on_gpu: bool) -> Model:
    """Return the model that a function makes, for inputs of the sizes that are asked for."""
    inputs = tuple(asked.input_shape or ())
    if inputs and asked.seq_len is not None and tokens_of(inputs) == 1:
        raise ValueError(
            f"--seq-len {asked.seq_len}: the first input of --model {asked.model} is not a sequence of tokens; leave "
            "--seq-len out, or give another --input-shape"
        )
    if inputs and (asked.seq_len or asked.micro_batch):
        inputs = resized(inputs, asked.micro_batch or micro_batch_of(inputs), asked.seq_len or tokens_of(inputs))
    return _captured(str(asked.model), inputs, precision.weights, as_on_gpu=as_on_gpu)


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


def _rows(value: object) -> object:
    """Return a single list of shares as a list of one row."""
    return [value] if isinstance(value, list) and value and not isinstance(value[0], list) else value


_Shares = Annotated[tuple[tuple[float, ...], ...], BeforeValidator(_rows)]


def expert_load(text: str, model: Model) -> tuple[tuple[float, ...], ...]:
    """Return each expert's share of the tokens, from ``uniform``, ``zipf:S`` or a file.

    Raises:
        ValueError: the text is none of these.
    """
    if text == "uniform":
        return ()
    if not isinstance(model, ModelConfig) or not model.is_expert_model:
        raise ValueError(f"--expert-load {text}: {model.name} has no experts; leave it out")
    if text.startswith("zipf:"):
        try:
            exponent = float(text.removeprefix("zipf:"))
        except ValueError:
            exponent = math.nan
        if not 0 <= exponent <= 10:
            raise ValueError(f"--expert-load {text}: the exponent must be a number from 0 to 10, as in zipf:1.2")
        return (experts.zipf(model.num_experts, exponent),)
    data = read_json(Path(text), ValueError, "--expert-load takes uniform, zipf:S or a JSON file")
    try:
        return TypeAdapter(_Shares).validate_python(data)
    except ValidationError as error:
        raise ValueError(
            f"--expert-load {text} must hold a list of shares, or one for each layer; "
            f"{error.errors()[0]['msg'].lower()}"
        ) from error


_UNKNOWN_CAPACITY_BYTES = 1e15
_REQUEST_BYTES = 1e9


def checkpoints_of(asked: Options) -> CheckpointRequest | None:
    """Return the request that the options describe; ``None`` without ``--mtbf``.

    Raises:
        ValueError: options of checkpoints are given without ``--mtbf``, or ``--keep`` is below 2.
    """
    given: dict[str, Any] = {
        "max_overhead": asked.max_checkpoint_overhead,
        "max_lost_s": asked.max_lost_work,
        "restart_s": asked.restart,
        "keep": asked.keep,
        "buffer_bytes": asked.checkpoint_buffer,
        "drive_writes_per_day": asked.drive_writes_per_day,
        "num_iterations": asked.iterations,
    }
    found = {name: value for name, value in given.items() if value is not None}
    if asked.mtbf is None:
        if found or asked.pfs_bandwidth is not None:
            raise ValueError("--checkpoints has no effect without --mtbf; give it, as in --mtbf 6h")
        return None
    if found.get("keep", MIN_CHECKPOINTS) < MIN_CHECKPOINTS:
        raise ValueError(
            f"keep={asked.keep} of --checkpoints is too few: one checkpoint may be damaged; keep at "
            f"least {MIN_CHECKPOINTS} at each level"
        )
    return CheckpointRequest(mtbf_s=asked.mtbf, **found)


def with_pfs(hardware: HardwareProfile, bytes_per_s: int) -> HardwareProfile:
    """Return a profile with a shared file system of the given rate for each node.

    Raises:
        ValueError: the profile has a shared file system already.
    """
    if hardware.pfs is not None:
        raise ValueError(f"pfs-bandwidth of --checkpoints: profile {hardware.name} has a pfs already; leave it out")
    provenance = Provenance(origin="assumed", source="asked for with --checkpoints pfs-bandwidth")
    point = CurvePoint(
        size=_REQUEST_BYTES, **dict.fromkeys(("p10_s", "median_s", "p90_s"), _REQUEST_BYTES / bytes_per_s)
    )
    curve = Curve(size_unit="bytes", points=(point,), provenance=provenance)
    capacity = Quantity(
        value=_UNKNOWN_CAPACITY_BYTES,
        unit="bytes",
        provenance=Provenance(origin="assumed", source="not known; as much as is needed"),
    )
    return hardware.model_copy(update={"pfs": Storage(capacity_bytes=capacity, read=curve, write=curve)})
