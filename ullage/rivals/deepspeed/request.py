"""A DeepSpeed configuration as a request, with what has to be assumed."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from hwprofiles.profile import HardwareProfile
from planner.choices.request import Request
from planner.decisions import BF16, Precision
from planner.optimizers import Optimizer
from planner.terms import default_micro_batch
from ullage.rivals.deepspeed.file import AUTO, Config, left_out, unknown_keys
from ullage.rivals.engines.deepspeed_config import Offload, Zero

# Ullage's optimizers by DeepSpeed's and PyTorch's names.
_OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adam": "adamw",
    "adamw": "adamw",
    "fusedadam": "adamw",
    "deepspeedcpuadam": "adamw",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "lion": "lion",
}


def imported(config: Config, request: Request, given: Callable[[str], bool]) -> tuple[Request, tuple[str, ...]]:
    """Return a configuration as a request, and what was assumed, in words.

    Args:
        config: the configuration.
        request: the request of the command line, with model and machine.
        given: returns whether the command line sets ``micro_batch``, ``num_micro_batches``, ``num_devices``,
            ``precision``, ``optimizer``, ``clip`` or ``storage``.

    Raises:
        ValueError: the configuration contradicts itself or the command line, or cannot be simulated.
    """
    assumed = [f"{key}; ignored" for key in unknown_keys(config)] + left_out(config)
    request = _with_types(config, request, given, assumed)
    request = _with_batch(config, request, given, assumed)
    zero = config.zero_optimization
    _note_settings(zero, request.hardware, assumed)
    if not given("storage") and "nvme" in {zero.optimizer.device, zero.params.device}:
        request = dataclasses.replace(request, storage="nvme")
    assumed.append(
        "the model, not the configuration, decides whether activations are recomputed: the faster way is assumed"
    )
    return request, tuple(assumed)


def _precision(config: Config, assumed: list[str]) -> Precision:
    switches = {"bf16": config.bf16, "fp16": config.fp16}
    on = [name for name, enabled in switches.items() if enabled is True]
    if not on and AUTO in switches.values():
        assumed.append("the type of weights is 'auto': bf16")
        return BF16
    if not on:
        assumed.append("neither bf16 nor fp16 is on: weights are fp32, as in DeepSpeed; --precision sets another type")
        return Precision(weights="fp32")
    if "fp16" in on:
        assumed.append("fp16 is simulated as bf16, which has the same bytes and rates")
    return BF16


def _with_types(config: Config, request: Request, given: Callable[[str], bool], assumed: list[str]) -> Request:
    """Return the request with the configuration's types, optimizer and clipping."""
    changes: dict[str, Any] = {}
    if not given("precision"):
        changes["precision"] = _precision(config, assumed)
    if not given("optimizer"):
        name = config.optimizer or "AdamW"
        if config.optimizer is None:
            assumed.append("no optimizer is named: AdamW")
        if name.lower() not in _OPTIMIZERS:
            raise ValueError(
                f"optimizer.type is {name}, which is not simulated; choose the one with the most similar state by "
                f"--optimizer ({', '.join(dict.fromkeys(_OPTIMIZERS.values()))})"
            )
        changes["optimizer"] = _OPTIMIZERS[name.lower()]
    elif request.optimizer not in _OPTIMIZERS.values():
        raise ValueError(
            f"--optimizer is {request.optimizer}, which is not simulated for DeepSpeed; choose one of "
            f"{', '.join(dict.fromkeys(_OPTIMIZERS.values()))}"
        )
    if not given("clip"):
        if config.gradient_clipping == AUTO:
            assumed.append("gradient_clipping is 'auto': gradients are clipped")
        changes["clip"] = config.gradient_clipping == AUTO or config.gradient_clipping > 0
    return dataclasses.replace(request, **changes)


def _with_batch(config: Config, request: Request, given: Callable[[str], bool], assumed: list[str]) -> Request:
    """Return the request with the configuration's batch sizes, which must match the number of devices."""
    whole, micro, accumulate = (
        None if value == AUTO else value
        for value in (
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
        )
    )
    for name, key, value in (
        ("micro_batch", "train_micro_batch_size_per_gpu", micro),
        ("num_micro_batches", "gradient_accumulation_steps", accumulate),
    ):
        if given(name) and value is not None and value != getattr(request, name):
            raise ValueError(
                f"{key} is {value}, but the command line says {getattr(request, name)}; leave one of them out"
            )
    micro = request.micro_batch if given("micro_batch") else micro
    accumulate = request.num_micro_batches if given("num_micro_batches") else accumulate
    shared = (request.tensor_parallel or 1) * (request.pipeline_parallel or 1) * (request.context_parallel or 1)
    ranks = request.num_devices // shared if given("num_devices") else None
    if ranks is None and whole and micro and accumulate:
        ranks = max(whole // (micro * accumulate), 1)
        assumed.append(f"{ranks * shared} device(s), which follows from train_batch_size; --gpus sets another number")
    ranks = ranks or 1
    if micro is None and whole:
        micro = max(whole // (ranks * (accumulate or 1)), 1)
    if micro is None:
        micro = default_micro_batch(request.seq_len)
        assumed.append(f"the micro-batch is not given: {micro} is assumed; --micro-batch sets another")
    if accumulate is None:
        accumulate = max(whole // (micro * ranks), 1) if whole else 1
    if whole and whole != micro * accumulate * ranks:
        raise ValueError(
            f"train_batch_size is {whole}, but {micro} sequences x {accumulate} micro-batches x {ranks} data-parallel "
            f"device(s) are {micro * accumulate * ranks}; change one of them, or --gpus"
        )
    return dataclasses.replace(
        request, num_devices=ranks * shared, micro_batch=micro, num_micro_batches=accumulate, global_batch=None
    )


def _note_settings(zero: Zero, hardware: HardwareProfile, assumed: list[str]) -> None:
    """Check where state is, and note what of the settings is simulated otherwise."""
    optimizer, params = zero.optimizer, zero.params
    _check_devices(zero.stage, optimizer, params, hardware)
    if zero.stage < 3 and optimizer.ratio < 1:
        assumed.append(f"offload_optimizer.ratio needs stage 3; in stage {zero.stage} the CPU updates all")
    if 0 < zero.stage < 3 and optimizer.device == "cpu":
        assumed.append(f"stage {zero.stage} moves gradients to the host as stage 3 does, without hooks and gathers")
    if params.device != "none" and not params.pin_memory:
        assumed.append("offload_param.pin_memory is off, but pinned memory is simulated, which is faster")
    if params.device != "none" and 0 < optimizer.ratio < 1 and optimizer.device == "cpu":
        assumed.append("parameters that the device updates stay on the device")
    if params.device == "nvme" and optimizer.device == "cpu":
        assumed.append("parameters on NVMe are simulated as on the host, as their optimizer state is there")
    if optimizer.super_offload:
        assumed.append("offload_optimizer.super_offload: its kernels are not simulated; CPUAdam is")


def _check_devices(stage: int, optimizer: Offload, params: Offload, hardware: HardwareProfile) -> None:
    if stage == 0 and optimizer.device != "none":
        raise ValueError("offload_optimizer needs zero_optimization.stage 1, 2 or 3, but it is 0")
    for key, device in (("offload_param", params.device), ("offload_optimizer", optimizer.device)):
        if stage < 3 and (device == "nvme" or (key == "offload_param" and device != "none")):
            raise ValueError(f"{key}.device {device} needs zero_optimization.stage 3, but it is {stage}")
        if device == "nvme" and hardware.nvme is None:
            raise ValueError(
                f"{key}.device is nvme, but {hardware.name} has no drives; give a --hardware that has some"
            )
