"""Models made on the meta device. Their weights take memory only where a plan keeps them."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Final
from unittest import mock

import torch
from torch import nn

from executor.memory.state import without_values

_LORA: Final = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def take_off_meta(model: nn.Module, failing: contextlib.ExitStack) -> tuple[frozenset[int], frozenset[str]]:
    """Move parameters from the meta device to the host, without memory.

    Buffers that ``transformers`` computes from a configuration, such as rotary frequencies, get their values. So do
    adapters that ``peft`` initialises without reading the weights (LoRA by default).

    Args:
        model: changed in place; its parameters stay the same objects.
        failing: gets callbacks that move parameters back to the meta device.

    Returns:
        What has a shape but no values: ``id`` of each parameter, and names of the buffers that files of weights hold.

    Raises:
        ValueError: neither files nor ``transformers`` have the values of a buffer.
    """
    persistent = _make_buffers(model)
    _draw_adapters(model)
    absent = [parameter for parameter in model.parameters() if parameter.is_meta]
    for parameter in absent:
        _swap_tensor(parameter, without_values(parameter.shape, parameter.dtype))
        failing.callback(
            functools.partial(_swap_tensor, parameter, parameter.new_empty(parameter.shape, device="meta"))
        )
    return frozenset(map(id, absent)), frozenset(persistent)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Return a context in which new modules have parameters on the meta device, and ordinary buffers."""
    register = nn.Module.register_parameter

    def register_empty(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # a tied parameter stays one object
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with mock.patch.object(nn.Module, "register_parameter", register_empty):
        yield


def give_values(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Set a parameter's values, also if it is on the meta device."""
    if parameter.is_meta:
        _swap_tensor(parameter, values)
    else:
        parameter.data = values


def _swap_tensor(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Move a parameter to another device, which assigning its ``data`` does not allow."""
    other = nn.Parameter(values, requires_grad=parameter.requires_grad)
    vars(other).update(vars(parameter))
    torch.utils.swap_tensors(parameter, other)  # type: ignore[no-untyped-call]


def _draw_adapters(model: nn.Module) -> None:
    """Give adapters on the meta device the initial values of ``peft``."""
    for adapter, config in getattr(model, "peft_config", {}).items():
        if (way := getattr(config, "init_lora_weights", None)) not in {True, "gaussian"}:
            continue  # initialised from weights, which have no values; or of another kind
        for module in model.modules():
            if not callable(reset := getattr(module, "reset_lora_parameters", None)):
                continue
            own = [held[adapter] for kind in _LORA if adapter in (held := getattr(module, kind, {}))]
            drawn = [p for each in own for p in (each.parameters() if isinstance(each, nn.Module) else [each])]
            if drawn and all(parameter.is_meta for parameter in drawn):
                for parameter in drawn:
                    _swap_tensor(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu"))
                reset(adapter, way)


def _make_buffers(model: nn.Module) -> list[str]:
    """Move buffers from the meta device to the host; return the names of those whose values must come from files."""
    persistent = []
    makers = {"": model}
    for path, module in model.named_modules():
        if callable(getattr(module, "_init_weights", None)):
            makers[path] = module
        own = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in own.items():
            setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        if not own:
            continue
        prefix = f"{path}." if path else ""
        saved = [name for name in own if name not in module._non_persistent_buffers_set]
        persistent += [prefix + name for name in saved]
        maker = makers[max((p for p in makers if f"{path}.".startswith(f"{p}." if p else "")), key=len)]
        is_made = callable(getattr(maker, "_init_weights", None)) and all(
            parameter.is_meta for parameter in module.parameters(recurse=False)
        )
        if is_made:
            maker._init_weights(module)  # type: ignore[operator]
        elif len(saved) < len(own):
            name = next(name for name in own if name not in saved)
            raise ValueError(
                f"buffer {prefix}{name} is on the meta device, and no file has its values; make the model with buffers "
                "on the CPU (accelerate.init_empty_weights(include_buffers=False))"
            )
    return persistent
