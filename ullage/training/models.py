"""Make the model and the optimizer of a plan, on a machine that it is for."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from executor.distributed.mesh import Mesh
from executor.distributed.shards import BindingError
from executor.module.empty import empty_parameters
from executor.optimizer.reference import ROUNDS
from executor.optimizer.table import torch_class_of
from executor.prepare import OffloadedOptimizer
from executor.weights.loading import load
from hwprofiles.machine import keep_freed_memory
from planner.models import num_parameters, to_hf_config_dict
from planner.models.adapters import Lora
from planner.models.captured import CapturedModel
from planner.optimizers import OPTIMIZERS, Optimizer
from planner.plan.document import Plan, PlanError
from ullage.capture.adapters import make_adapted
from ullage.capture.architectures import architecture
from ullage.capture.attention import use_attention
from ullage.capture.module import load_factory
from ullage.capture.records import DTYPES
from ullage.capture.scans import check_scans
from ullage.this_machine.checks import check_options
from ullage.this_machine.planning import Options
from ullage.training.out_of_memory import reporting_out_of_memory
from ullage.training.preparing import options_of, prepare_planned
from ullage.training.processes import local_rank, rank, ranks_per_node

CONFIG: Final = "config.json"
_SHARE_TO_MAKE: Final = 0.8  # of free device memory; weights that are tied later are first drawn separately

# Hyperparameters of the optimizer beside the learning rate.
_HYPER_PARAMETERS: dict[Optimizer, dict[str, Any]] = {
    "adamw": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "adamw-bf16": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "adamw-8bit": {"betas": (0.9, 0.95), "weight_decay": 0.1},
    "sgd": {"momentum": 0.9},
    "adagrad": {},
    "lion": {"betas": (0.95, 0.98), "weight_decay": 0.1},
    "muon": {"adjust_lr_fn": "match_rms_adamw"},  # so that one rate serves both kinds of parameters
}


def prepared(
    plan: Plan, *, lr: float, seed: int, weights: Path | None, options: Options
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Make a plan's model and an optimizer with usual settings, and prepare both.

    Args:
        plan: a plan for this machine.
        lr: learning rate.
        seed: seed of random weights, and of dropout.
        weights: a folder of weights to begin with, in place of random ones.
        options: options for executing the plan.

    Raises:
        ValueError: the weights do not match the plan, or the model cannot be made.
        OutOfMemoryError: memory ran out.
    """
    check_options("execute", options, Options.__annotations__)
    if plan.hardware.device.kind == "host":
        torch.set_num_threads(plan.hardware.device.num_cores)
        keep_freed_memory()
    else:
        torch.cuda.set_device(local_rank())
    torch.manual_seed(seed)
    chosen = options_of(plan, options)
    with reporting_out_of_memory(plan), _naming_weights(weights):
        model = planned_model(plan, weights).train()
        model, optimizer = prepare_planned(model, _optimizer(plan, model, lr), plan, chosen)
    if weights is not None:
        with contextlib.ExitStack() as failing:
            failing.push(optimizer.session)  # on a failure, the session tells the other ranks
            if brings_weights(plan):
                optimizer.weights_folder = weights
            else:
                load(optimizer, weights)
            failing.pop_all()
    mesh, stage = position(plan)
    if number := stage * plan.decisions.data_parallel + mesh.data:
        # Different dropout on data-parallel ranks and stages; ranks that share layers keep the same RNG state.
        torch.manual_seed(seed + number)
    return model, optimizer


def _optimizer(plan: Plan, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    name = plan.decisions.optimizer
    make, more = torch_class_of(name), _HYPER_PARAMETERS.get(name, {})
    if OPTIMIZERS[name].others:
        adamw = {"lr": lr, **_HYPER_PARAMETERS["adamw"]}
        return make(model.named_parameters(), adamw, lr=lr, **more)
    if plan.decisions.precision.rounds:
        more = {**more, ROUNDS: True}
    return make(model.parameters(), lr=lr, **more)


@contextlib.contextmanager
def _naming_weights(folder: Path | None) -> Iterator[None]:
    """If the model was made for weights in a folder and does not match the plan, name the folder in the error."""
    try:
        yield
    except BindingError as error:
        if folder is None:
            raise
        raise BindingError(f"the model in {folder} does not match the plan: {error} (--model {folder})") from error


def check_machine(plan: Plan) -> None:
    """Check that this machine matches a plan.

    Raises:
        PlanError: the machine has another kind of device, or too few devices or cores.
    """
    kind = plan.hardware.device.kind
    if kind == "gpu" and not torch.cuda.is_available():
        raise PlanError(
            f"the plan was made for {plan.hardware.name}, but this machine has no GPU that PyTorch can use; "
            "run `ullage calibrate` here and plan with --hardware local"
        )
    if kind == "gpu" and (count := torch.cuda.device_count()) <= local_rank():
        raise PlanError(
            f"the plan is for {ranks_per_node(plan)} devices on a node, but this machine has {count}; plan with --gpus "
            f"{count}, or for a profile of this machine"
        )
    wanted = plan.hardware.device.name
    is_known = kind == "gpu" and plan.decisions.shares and plan.hardware.measured_on is not None
    if is_known and (found := torch.cuda.get_device_name(local_rank())) != wanted:
        raise PlanError(
            f"rank {rank()} is planned for a {wanted}, but its device is a {found}: the slowest kind has the "
            "first ranks; give the devices in that order (CUDA_VISIBLE_DEVICES), or nodes (--node-rank)"
        )
    wanted_cores = plan.hardware.device.num_cores * ranks_per_node(plan)
    if kind == "host" and (cores := len(os.sched_getaffinity(0))) < wanted_cores:
        raise PlanError(
            f"the plan computes on {wanted_cores} cores, but this process may use {cores}; "
            "run `ullage calibrate` here and plan with --hardware local"
        )


def position(plan: Plan) -> tuple[Mesh, int]:
    """Return this process's place among the ranks of its pipeline stage, and the number of the stage."""
    stage, rank_of_stage = divmod(rank(), plan.decisions.num_devices // plan.decisions.pipeline_parallel)
    return Mesh(plan.decisions, rank_of_stage), stage


def planned_model(plan: Plan, weights: Path | None = None) -> nn.Module:
    """Return a plan's model with random weights. With ``weights``, it is made without values, from their config.json.

    A quantized base is made with its weights, because they cannot be loaded under a plan. Layers that the plan
    multiplies in fp8 are torchao's.

    Args:
        plan: the plan.
        weights: a folder of weights that are loaded later.

    Raises:
        CaptureError: the function of a captured model does not exist.
        BindingError: products in fp8 are planned, but torchao or a compiler is missing.
    """
    model = _made(plan, weights)
    if plan.decisions.precision.products:
        try:
            from executor.module.float8 import multiply_in_fp8  # noqa: PLC0415 - optional
        except ImportError as error:
            raise BindingError(
                f"the plan has products in fp8, but torchao cannot be imported: {error}; pip install one that fits "
                f"torch {torch.__version__}, or plan without --precision products=fp8"
            ) from error
        multiply_in_fp8(model, plan.units(), torch.device("cpu" if plan.hardware.device.kind == "host" else "cuda"))
    return model


def _made(plan: Plan, weights: Path | None) -> nn.Module:
    if isinstance(plan.model, CapturedModel):
        made = _captured(plan.model, weights)
        if plan.model.attention is not None:
            use_attention(made, plan.model.attention)
        check_scans(plan.model.scans or ())
        return made
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - takes seconds

    config = AutoConfig.for_model(**to_hf_config_dict(plan.model))
    dtype = DTYPES[plan.decisions.precision.weights]
    if weights is not None:
        if (weights / CONFIG).exists():
            config = architecture(weights).config
        with empty_parameters():
            return AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-any-return, no-untyped-call]
    where = _where_to_make(plan, num_parameters(plan.model) * dtype.itemsize)
    with torch.device(where):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.to("cpu")
    if where == "cuda":
        torch.cuda.empty_cache()
    return model


def brings_weights(plan: Plan) -> bool:
    """Return whether the planned model is made with its weights, because its base is quantized."""
    return isinstance(plan.model, CapturedModel) and plan.model.quantization is not None


def _captured(model: CapturedModel, weights: Path | None) -> nn.Module:
    if model.lora is not None:
        return _adapted(model, model.lora, weights)
    if weights is None:
        return load_factory(model.factory, DTYPES[model.dtype])()
    is_function = ":" in model.factory and not Path(model.factory).exists()
    has_config = not is_function and (weights / CONFIG).exists()
    with empty_parameters():
        return load_factory(str(weights) if has_config else model.factory, DTYPES[model.dtype])()


def _adapted(model: CapturedModel, lora: Lora, weights: Path | None) -> nn.Module:
    has_config = weights is not None and (weights / CONFIG).exists()
    found = architecture(weights if weights is not None and has_config else model.factory)
    parts = found, lora, model.quantization, DTYPES[model.dtype]
    if weights is None:
        return make_adapted(*parts)
    found.config.name_or_path = str(weights)  # saved adapters name their base model
    if model.quantization is not None:
        return make_adapted(*parts, weights)
    with empty_parameters():
        return make_adapted(*parts)


def _where_to_make(plan: Plan, needed_bytes: int) -> str:
    """Return a GPU if it has room for all weights: one core of the host takes minutes to draw billions of numbers."""
    if plan.hardware.device.kind != "gpu":
        return "cpu"
    return "cuda" if needed_bytes <= _SHARE_TO_MAKE * torch.cuda.mem_get_info()[0] else "cpu"
