"""Quantized modules in a capture: their packed weights as fake tensors, and what a kernel of ``bitsandbytes`` runs.

A factory may return them quantized or, as they are made, with weights that are to be quantized: a model without memory
has no values to quantize.
"""

import copy
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from executor.packed import StoredParameter, format_refusal, stored_parameters
from planner.models.quantization import Quantization
from ullage.capture.records import CaptureError


def quantize(model: Any, quantization: Quantization) -> nn.Module:
    """Quantize the projections of a model of ``transformers``, as its ``BitsAndBytesConfig`` does; return the model.

    Head, embeddings and norms stay as they are. If the model is on the meta device, projections are marked only.

    Raises:
        ValueError: ``bitsandbytes`` is not installed.
    """
    config = quantization_config(quantization, model.dtype)
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear  # noqa: PLC0415 - slow, as what follows
    from transformers.quantizers.base import get_keys_to_not_convert  # noqa: PLC0415

    in_4bit = quantization == "nf4"
    plain = dict(model.named_modules())
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), config)
    for path, module in model.named_modules():
        given = plain.pop(path)
        if module is not given and not given.weight.is_meta:
            _take_over(module, given)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = in_4bit, not in_4bit  # peft asks
    return model  # type: ignore[no-any-return]


def quantization_config(quantization: Quantization, dtype: torch.dtype) -> Any:
    """Return the ``BitsAndBytesConfig`` of a quantization whose products are in ``dtype``.

    Raises:
        ValueError: ``bitsandbytes`` is not installed.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"weights in {quantization} need bitsandbytes; install it: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig  # noqa: PLC0415 - slow

    in_4bit = quantization == "nf4"
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=in_4bit,
        load_in_8bit=not in_4bit,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def _take_over(module: Any, given: Any) -> None:
    """Give a quantized module the values of the one that it replaces. ``Conv1D`` has its weights transposed."""
    weight = given.weight.data if isinstance(given, nn.Linear) else given.weight.data.T.contiguous()
    settings = {name: value for name, value in vars(module.weight).items() if name not in {"CB", "SCB"}}
    module.weight = type(module.weight)(weight, requires_grad=False, **settings).to("cpu")
    module.bias = None if given.bias is None else nn.Parameter(given.bias.data, requires_grad=False)


def check_formats(model: nn.Module, name: str) -> None:
    """Check that packed parameters of a model can be kept as they are.

    Raises:
        CaptureError: some cannot; says what can be instead.
    """
    for path, stored in stored_parameters(model).items():
        if (refusal := format_refusal(path, stored)) is not None:
            raise CaptureError(f"{name}: {refusal}")


def is_packed(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one that its module keeps quantized."""
    if is_traceable_wrapper_subclass(parameter):
        return True
    return hasattr(parameter, "quant_storage") or not getattr(parameter, "has_fp16_weights", True)


def pack(parameter: Any, module: Any, dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter of fake tensors: quantized from weights of this type, or as it is if it is of ``torchao``."""
    if is_traceable_wrapper_subclass(parameter):
        names, settings = parameter.__tensor_flatten__()
        inner = {name: torch.empty_like(getattr(parameter, name), device="cpu") for name in names}
        made = type(parameter).__tensor_unflatten__(inner, settings, parameter.size(), parameter.stride())
        return nn.Parameter(made, requires_grad=False)
    from bitsandbytes import functional  # noqa: PLC0415 - slow, and there if a model has such parameters

    weights = torch.empty(StoredParameter(parameter, module).shape, dtype=dtype)
    packed: Any
    if hasattr(parameter, "quant_storage"):
        with _disable_current_modes():  # or this table, which is made once, would be fake ever after
            functional.name2qmap.setdefault("dynamic", functional.create_dynamic_map())  # type: ignore[no-untyped-call]
        settings = ("blocksize", "compress_statistics", "quant_type", "quant_storage")
        data, state = functional.quantize_4bit(weights, **{name: getattr(parameter, name) for name in settings})
        packed = nn.Parameter(data, requires_grad=False)
        packed.quant_state = module.quant_state = state
    else:
        data, scales, _ = functional.int8_vectorwise_quant(weights.half())
        packed = nn.Parameter(data, requires_grad=False)
        packed.CB, packed.SCB = packed.data, scales
        module.state = copy.copy(module.state)
        module.state.reset_grads()
    return packed  # type: ignore[no-any-return]


def multiply_4bit(
    values: Tensor, packed: Tensor, shape: list[int], scales: Tensor, blocksize: int, quant_type: str, *rest: Any
) -> Tensor:
    """Run the operators inside ``bitsandbytes::gemm_4bit``, whose arguments these are, for more than a few tokens."""
    bias, codes, table, offset = [*rest, None, None, None, None][:4]
    operators = torch.ops.bitsandbytes
    if codes is not None:
        scales = operators.dequantize_blockwise(codes, scales, table, 256, torch.float32) + offset
    weight = operators.dequantize_4bit(packed, scales, blocksize, quant_type, shape, values.dtype)
    rows = values.reshape(-1, values.shape[-1])
    product = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return product.view(*values.shape[:-1], -1)
