"""Make the model of a plan before training."""

from pathlib import Path
from typing import Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from executor.distributed.shards import BindingError
from executor.module.empty import empty_parameters
from planner.models import num_parameters, to_hf_config_dict
from planner.models.adapters import Lora
from planner.models.captured import CapturedModel
from planner.plan.document import Plan
from ullage.capture.adapters import make_adapted
from ullage.capture.architectures import architecture
from ullage.capture.module import load_factory
from ullage.capture.records import DTYPES

CONFIG: Final = "config.json"
_SHARE_TO_MAKE: Final = 0.8  # of free device memory; weights that are tied later are first drawn separately


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
                f"torch {torch.__version__}, or plan without --products fp8"
            ) from error
        multiply_in_fp8(model, plan.units(), torch.device("cpu" if plan.hardware.device.kind == "host" else "cuda"))
    return model


def _made(plan: Plan, weights: Path | None) -> nn.Module:
    if isinstance(plan.model, CapturedModel):
        return _captured(plan.model, weights)
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
