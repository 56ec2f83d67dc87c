"""The bytes of a frozen parameter: one tensor, or the several tensors of a quantized one.

[Note: Packed parameters] ``bitsandbytes`` keeps a quantized matrix as a parameter of packed values, with scales in
attributes beside it, and its modules dequantize it at each use. So it is enough to keep and move bytes: those of all
these tensors, one after another, each from a whole grain on. Wherever a unit's bytes are, the tensors are views of
them. The tables of what a code stands for stay: they are equal for all parameters, which share one.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.models.quantization import in_grains


class _Place(NamedTuple):
    """An attribute that holds a tensor."""

    owner: Any
    name: str

    def get(self) -> torch.Tensor:
        held: torch.Tensor = getattr(self.owner, self.name)
        return held


class StoredParameter(NamedTuple):
    """A parameter, and the module that owns it; see [Note: Packed parameters]."""

    parameter: nn.Parameter
    module: nn.Module

    @property
    def is_quantized(self) -> bool:
        """Whether its values are packed."""
        return _state(self.parameter) is not None or hasattr(self.parameter, "SCB")

    @property
    def shape(self) -> torch.Size:
        """Its shape before it was quantized."""
        state = _state(self.parameter)
        return self.parameter.shape if state is None else torch.Size(state.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept and moved."""
        sizes = [tensor.numel() * tensor.itemsize for tensor in self.tensors()]
        return in_grains(sizes)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it consists of, its own first."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be guarded
            return tuple(places[0].get() for places in self._places())

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return the tables of what its codes stand for."""
        return tuple(level.code for level in self._levels())

    def own_tables(self) -> None:
        """Give it tables that no other parameter has: safetensors writes no tensor twice."""
        for level in self._levels():
            level.code = level.code.clone()

    def read(self, into: torch.Tensor) -> None:
        """Copy its bytes, ``uint8 [num_bytes]``; what is between its tensors becomes zero."""
        into.zero_()
        for tensor, view in zip(self.tensors(), self._views(into), strict=True):
            view.copy_(tensor)

    def live_in(self, held: torch.Tensor) -> None:
        """Make all its tensors views of bytes, ``uint8 [num_bytes]``."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be guarded
            for places, view in zip(self._places(), list(self._views(held)), strict=True):
                for place in places:
                    setattr(*place, view)
            for level in self._levels():
                level.code = _shared(level.code.numpy(force=True).tobytes(), held.device)

    @contextlib.contextmanager
    def living_in(self, held: torch.Tensor) -> Iterator[None]:
        """Let it live in other bytes for a while."""
        before = [(place, place.get()) for places in self._places() for place in places]
        self.live_in(held)
        try:
            yield
        finally:
            with torch._C.DisableTorchFunctionSubclass():
                for place, tensor in before:
                    setattr(*place, tensor)

    def _views(self, held: torch.Tensor) -> Iterator[torch.Tensor]:
        tensors = self.tensors()
        starts = itertools.accumulate((in_grains([t.numel() * t.itemsize]) for t in tensors), initial=0)
        for tensor, start in zip(tensors, starts, strict=False):
            yield held[start : start + tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)

    def _levels(self) -> list[Any]:
        """Return the states of quantization: of values, and of their scales."""
        state = _state(self.parameter)
        return [level for level in (state, getattr(state, "state2", None)) if level is not None]

    def _places(self) -> list[list[_Place]]:
        """Return the attributes that hold each tensor."""
        own = _Place(self.parameter, "data")
        if (state := _state(self.parameter)) is not None:
            nested = [[_Place(state.state2, "absmax")], [_Place(state, "offset")]] if state.nested else []
            return [[own], [_Place(state, "absmax")], *nested]
        if self.is_quantized:  # the first forward moves them from the parameter to the module
            holder = self.parameter if self.parameter.SCB is not None else self.module.state  # type: ignore[attr-defined]
            return [[own, _Place(holder, "CB")], [_Place(holder, "SCB")]]
        return [[own]]


def stored_parameters(model: nn.Module) -> dict[str, StoredParameter]:
    """Return the parameters of a model by name, tied ones once, as ``named_parameters()`` does."""
    named: dict[int, tuple[str, StoredParameter]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            named.setdefault(id(parameter), (f"{path}.{name}" if path else name, StoredParameter(parameter, module)))
    return dict(named.values())


def _state(parameter: nn.Parameter) -> Any:
    return getattr(parameter, "quant_state", None)


@functools.cache
def _shared(table: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(table), dtype=torch.float32).to(device)
