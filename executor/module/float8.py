"""Products in fp8 for a model that was made for a plan.

torchao's ``Float8Linear`` takes the place of each linear layer that the plan multiplies in fp8. Its parameters stay.

[Note: Compiled casts] Run one by one, the operators of a cast move 33 bytes a value, and casts would take longer than
products in fp8 save. So ``torch.compile`` makes two passes of them: one finds the largest value, one scales, clamps and
writes. The code is torchao's own, and so are the bits. It sees each tensor as a row of values in the order of memory.
So it is compiled once for each type, whatever the shapes.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from executor.distributed.shards import BindingError
from planner.graph import Gemm, Unit
from planner.models.formulas.float8 import fits

_WARM_UP = 4096  # values

_Cast = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def multiply_in_fp8(model: nn.Module, units: Iterable[Unit], device: torch.device) -> None:
    """Convert the linear layers that a plan multiplies in fp8, in place, and compile their casts for a device.

    Raises:
        BindingError: torchao is missing, or the casts cannot be compiled.
    """
    try:
        from torchao.float8 import convert_to_float8_training, float8_linear  # noqa: PLC0415 - optional
    except ImportError as error:
        raise BindingError(
            "the plan has products in fp8, but torchao is not installed; run `pip install torchao`, or plan without "
            "--products fp8"
        ) from error
    names = _layers_in_fp8(units)
    convert_to_float8_training(model, module_filter_fn=lambda _module, name: name in names)
    if float8_linear.hp_tensor_to_float8_dynamic.__module__ != __name__:
        float8_linear.hp_tensor_to_float8_dynamic = _with_compiled_cast(float8_linear.hp_tensor_to_float8_dynamic)
    try:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            _compiled_cast()(torch.ones(_WARM_UP, dtype=next(model.parameters()).dtype, device=device), dtype)
    except (TorchDynamoException, RuntimeError) as error:
        what = " ".join(str(error).strip().split("\n\n")[0].split())
        raise BindingError(f"casts to fp8 cannot be compiled: {what}; plan without --products fp8") from error


def _layers_in_fp8(units: Iterable[Unit]) -> set[str]:
    """Return the names of the linear layers that a plan multiplies in fp8."""
    operators = (operator for unit in units for operator in unit.operators)
    chosen = (o for o in operators if any(isinstance(kernel, Gemm) and kernel.fp8 for kernel in o.forward))
    specs = (spec for operator in chosen for spec in operator.parameters)
    return {spec.name.rpartition(".")[0] for spec in specs if len(spec.shape) == 2 and fits(*spec.shape)}


@functools.cache
def _compiled_cast() -> _Cast:
    """Return the function that casts a row of values and returns them with their scale; see [Note: Compiled casts]."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated  # noqa: PLC0415 - optional

    def cast(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scale = tensor_to_scale(values, dtype)
        return to_fp8_saturated(values.to(torch.float32) * scale, dtype), scale

    compiled: _Cast = torch.compile(cast, dynamic=True)
    return compiled


def _with_compiled_cast(eager: Callable[..., Any]) -> Callable[..., Any]:
    """Return torchao's cast of a tensor with one scale, compiled; ``eager`` makes those with several scales."""
    from torchao.float8.config import ScalingGranularity  # noqa: PLC0415 - optional
    from torchao.float8.float8_training_tensor import Float8TrainingTensor  # noqa: PLC0415

    def cast(tensor: Tensor, dtype: torch.dtype, config: Any, **options: Any) -> Any:
        role = options.get("gemm_input_role")
        is_dense = tensor.is_contiguous() or (tensor.dim() == 2 and tensor.t().is_contiguous())
        has_one_scale = options.get("scaling_granularity") is ScalingGranularity.TENSORWISE
        if not is_dense or not has_one_scale or role is None or options.get("round_scales_to_power_of_2"):
            return eager(tensor, dtype, config, **options)
        turned = tensor if tensor.is_contiguous() else tensor.t()
        bits, scale = _compiled_cast()(turned.detach().view(-1), dtype)
        bits = bits.view(turned.shape)
        return Float8TrainingTensor(
            bits if turned is tensor else bits.t(), scale, tensor.dtype, linear_mm_config=config, gemm_input_role=role
        )

    return cast
