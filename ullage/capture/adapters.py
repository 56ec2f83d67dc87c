"""Models of ``transformers`` with LoRA adapters of ``peft``, over a base that may be quantized."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import nn

from executor.weights.loading import check_weights
from planner.models.adapters import ALL_LINEAR, Lora
from planner.models.quantization import Quantization
from ullage.capture.architectures import Architecture
from ullage.capture.quantized import quantization_config, quantize
from ullage.capture.records import CaptureError

# What `peft` calls the task of a class of `transformers`; others have none.
_TASKS: Final[dict[str, str]] = {
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
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
        ValueError: the folder does not have the base's weights.
        ValueError: ``peft`` or ``bitsandbytes`` is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs peft; install it: pip install 'ullage[finetune]'")
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - takes seconds
    from transformers.pytorch_utils import Conv1D  # noqa: PLC0415 - likewise

    projections = (nn.Linear, Conv1D)
    adapted = (*projections, nn.Embedding, nn.modules.conv._ConvNd, nn.MultiheadAttention)  # by LoRA
    base: Any
    if weights is None:
        base = architecture.make(dtype)
        base = quantize(base, quantization) if quantization else base
    else:
        base = _read(architecture, quantization, dtype, weights)
    alpha = lora.alpha or lora.rank
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]  # only multiplied
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        task_type=_TASKS.get(architecture.auto.__name__),
        modules_to_save=list(lora.save) or None,
    )
    names = sorted(
        {path.rpartition(".")[2] for path, module in base.named_modules() if isinstance(module, projections)}
    )
    for target in lora.targets:
        for path, module in base.named_modules():
            if _ends(path, target) and not isinstance(module, adapted):
                raise CaptureError(
                    f"LoRA {lora}: {target} is a {type(module).__name__}, but adapters are for projections and "
                    f"embeddings; its projections are {', '.join(names)}"
                )
    try:
        with warnings.catch_warnings():  # of names that `transformers` has changed, and of what `peft` corrects itself
            warnings.simplefilter("ignore")
            model = get_peft_model(base, config, autocast_adapter_dtype=False)
    except ValueError as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise CaptureError(f"LoRA {lora}: {why}; its projections are {', '.join(names) or '(none)'}") from error
    _check_names(model, lora, names)
    for parameter in model.parameters():
        if parameter.requires_grad:  # beside a quantized base they are float32
            parameter.data = parameter.data.to(dtype)
    return model


def _read(
    architecture: Architecture, quantization: Quantization | None, dtype: torch.dtype, weights: Path
) -> nn.Module:
    """Return an architecture with the weights of a folder, which may be quantized there already.

    Raises:
        ValueError: the folder does not have them.
    """
    quantized = getattr(architecture.config, "quantization_config", None)
    if quantized is not None and (method := quantized.get("quant_method")) != "bitsandbytes":
        raise ValueError(
            f"{weights} has weights that {method} has quantized, but those of the plan are quantized as bitsandbytes "
            "does it; give weights that are not quantized, or give ullage.prepare(model, optimizer, batch) the model "
            "that from_pretrained makes of these"
        )
    if quantized is None:
        with torch.device("meta"):
            check_weights(weights, architecture.make(dtype))
    given = {} if quantization is None else {"quantization_config": quantization_config(quantization, dtype)}
    try:
        return architecture.auto.from_pretrained(  # type: ignore[no-any-return]
            weights, config=architecture.config, dtype=dtype, device_map="cpu", **given
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{weights} cannot be read ({why}); copy all files of the model again") from error


def _check_names(model: nn.Module, lora: Lora, projections: list[str]) -> None:
    """Check that a model has what its adapters name."""
    adapted = [path for path, module in model.named_modules() if hasattr(module, "base_layer")]
    targets = [target for target in lora.targets if target != ALL_LINEAR]
    if unknown := [target for target in targets if not any(_ends(path, target) for path in adapted)]:
        raise CaptureError(f"LoRA {lora}: it has no {unknown[0]}; its projections are {', '.join(projections)}")
    if unknown := [name for name in lora.save if not any(_ends(path, name) for path, _ in model.named_modules())]:
        raise CaptureError(f"LoRA {lora}: it has no module {unknown[0]} to save; name one of its modules")


def _ends(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")
