"""Models of ``transformers`` with LoRA adapters of ``peft``, over a base that may be quantized."""

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from torch import nn

from planner.models.adapters import ALL_LINEAR, Lora
from planner.models.quantization import Quantization
from ullage.capture.architectures import Architecture
from ullage.capture.quantized import quantization_config, quantize
from ullage.capture.records import CaptureError

_BITSANDBYTES_LOG: Final = logging.getLogger("bitsandbytes.backends.cpu.ops")
# What `peft` calls the task of a class of `transformers`; others have none.
_TASKS: Final[dict[Any, str]] = {
    transformers.AutoModelForCausalLM: "CAUSAL_LM",
    transformers.AutoModelForSeq2SeqLM: "SEQ_2_SEQ_LM",
    transformers.AutoModelForSequenceClassification: "SEQ_CLS",
}


def make_adapted(
    architecture: Architecture,
    lora: Lora,
    quantization: Quantization | None,
    dtype: torch.dtype,
    weights: Path | None = None,
) -> nn.Module:
    """Return an architecture with adapters, everything else frozen.

    Args:
        architecture: of the base.
        lora: which adapters.
        quantization: of the base's projections.
        dtype: of all other weights, those of adapters included.
        weights: folder that the base's values are read from. Left out, they are random, or those of the device on which
            modules are made now.

    Raises:
        CaptureError: the architecture has no such projections.
        ValueError: ``peft`` or ``bitsandbytes`` is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs peft; install it: pip install 'ullage[finetune]'")
    _BITSANDBYTES_LOG.setLevel(logging.ERROR)  # it misses a kernel for CPUs that it can do without
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - takes seconds

    base: Any
    if weights is None:
        base = architecture.make(dtype)
        base = quantize(base, quantization) if quantization else base
    else:
        given = {} if quantization is None else {"quantization_config": quantization_config(quantization, dtype)}
        base = architecture.auto.from_pretrained(
            weights, config=architecture.config, dtype=dtype, device_map="cpu", **given
        )
    alpha = lora.alpha or lora.rank
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # only multiplied
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        task_type=_TASKS.get(architecture.auto),
    )
    names = sorted({path.rpartition(".")[2] for path, module in base.named_modules() if _is_projection(module)})
    wrong = [
        t for t in lora.targets for path, m in base.named_modules() if _ends(path, t) and isinstance(m, nn.Embedding)
    ]
    if wrong:
        raise CaptureError(
            f"LoRA {lora}: {wrong[0]} is an embedding, but adapters are planned beside projections; its projections "
            f"are {', '.join(names)}"
        )
    try:
        with warnings.catch_warnings():  # of names that `transformers` has changed, and of what `peft` corrects itself
            warnings.simplefilter("ignore")
            model = get_peft_model(base, config, autocast_adapter_dtype=False)
    except ValueError as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise CaptureError(f"LoRA {lora}: {why}; its projections are {', '.join(names) or '(none)'}") from error
    if unknown := [target for target in lora.targets if target != ALL_LINEAR and not _has(model, target)]:
        raise CaptureError(f"LoRA {lora}: it has no {unknown[0]}; its projections are {', '.join(names)}")
    for parameter in model.parameters():
        if parameter.requires_grad:  # beside a quantized base they are float32
            parameter.data = parameter.data.to(dtype)
    return model


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | transformers.pytorch_utils.Conv1D)


def _has(model: nn.Module, target: str) -> bool:
    """Return whether some adapter is beside a module of this name, or of one that ends with it."""
    return any(_ends(path, target) and hasattr(module, "base_layer") for path, module in model.named_modules())


def _ends(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")
