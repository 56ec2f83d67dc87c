"""The bytes of a frozen parameter: one tensor, or the several tensors of a quantized one.

``bitsandbytes`` keeps a quantized matrix as a parameter of packed values, with scales in
attributes beside it; ``torchao`` as a parameter of a class of its own, which has all of them as attributes. The modules
of both dequantize it at each use. So it is enough to keep and move bytes: those of all these tensors, one after
another, each from a whole grain on. Wherever a unit's bytes are, the tensors are views of them. The tables by which
``bitsandbytes`` decodes values do not move: all parameters share one.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # as documented

from planner.models.quantization import in_grains

_WRAPPERS: Final = frozenset({"Int8Tensor", "NF4Tensor"})  # classes of torchao


_Place = tuple[Any, str]
"""An attribute that holds a tensor: its owner, and its name."""


class StoredParameter(NamedTuple):
    """A parameter, and the module that owns it."""

    parameter: nn.Parameter
    module: nn.Module

    @property
    def is_quantized(self) -> bool:
        """Whether its values are packed."""
        return _state(self.parameter) is not None or hasattr(self.parameter, "SCB") or self.is_wrapper

    @property
    def is_wrapper(self) -> bool:
        """Whether its class wraps its tensors, as those of ``torchao`` do."""
        return is_traceable_wrapper_subclass(self.parameter)

    @property
    def shape(self) -> torch.Size:
        """Its shape before it was quantized; of a complex one, that of its real and imaginary parts."""
        state = _state(self.parameter)
        if state is not None:
            return torch.Size(state.shape)
        return torch.Size((*self.parameter.shape, 2)) if self.parameter.is_complex() else self.parameter.shape

    @property
    def num_bytes(self) -> int:
        """Bytes that are kept and moved."""
        sizes = [tensor.numel() * tensor.itemsize for tensor in self.tensors()]
        return in_grains(sizes)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that it consists of."""
        with torch._C.DisableTorchFunctionSubclass():  # parameters may be guarded
            return tuple(getattr(*places[0]) for places in self._places())

    def tables(self) -> tuple[torch.Tensor, ...]:
        """Return the tables that decode its values."""
        return tuple(level.code for level in self._levels())

    def own_tables(self) -> None:
        """Give it tables that no other parameter has: safetensors writes no tensor twice."""
        for level in self._levels():
            level.code = level.code.clone()

    def read(self, into: torch.Tensor) -> None:
        """Copy its bytes, ``uint8 [num_bytes]``; gaps between its tensors become zero."""
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
        """Let it live in other bytes for a while, each of its tensors with a storage of its own."""
        with torch._C.DisableTorchFunctionSubclass():
            before = [(place, getattr(*place)) for places in self._places() for place in places]
        before += [((level, "code"), level.code) for level in self._levels()]
        self.live_in(held)
        self.own_tables()
        try:
            with torch._C.DisableTorchFunctionSubclass():
                for places in self._places():
                    view = with_own_storage(getattr(*places[0]))
                    for place in places:
                        setattr(*place, view)
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
        if is_traceable_wrapper_subclass(self.parameter):
            return [[(self.parameter, name)] for name in self.parameter.__tensor_flatten__()[0]]
        own = self.parameter, "data"
        if (state := _state(self.parameter)) is not None:
            nested = [[(state.state2, "absmax")], [(state, "offset")]] if state.nested else []
            return [[own], [(state, "absmax")], *nested]
        if self.is_quantized:  # the first forward moves them from the parameter to the module
            holder = self.parameter if self.parameter.SCB is not None else self.module.state  # type: ignore[attr-defined]
            return [[own, (holder, "CB")], [(holder, "SCB")]]
        return [[own]]


def as_real(values: torch.Tensor) -> torch.Tensor:
    """Return values as real numbers: of complex ones, ``[..., 2]`` real and imaginary parts, which plans keep."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def with_own_storage(values: torch.Tensor) -> torch.Tensor:
    """Return the same values in the same memory, with a storage that holds nothing else.

    Code that looks at storages then sees a separate tensor: ``torch.save`` writes only these values, and
    ``safetensors`` sees no shared memory. The memory block stays alive as long as any tensor in it.
    """
    values = values.detach()
    if values.untyped_storage().nbytes() <= values.nbytes:
        return values
    # A capsule marks any host memory as CPU memory; torch.from_dlpack(values) would mark pinned memory as CUDA's.
    return from_dlpack(to_dlpack(values))


def format_refusal(name: str, stored: StoredParameter) -> str | None:
    """Return why a parameter is of a class that cannot be kept packed, and what can be; ``None`` if it can be."""
    parameter: Any = stored.parameter
    if not stored.is_wrapper:
        return None
    kind = type(parameter).__name__
    remedy = "quantize frozen projections as bitsandbytes does, or with torchao's Int8WeightOnlyConfig or to_nf4"
    if kind == "WeightWithDynamicFloat8CastTensor":
        remedy = "convert the model without enable_fsdp_float8_all_gather, as a plan moves weights in their own type"
    if kind == "DTensor":
        remedy = "give the model without parallelize_module, as a plan divides weights itself (ullage plan --parallel)"
    if kind not in _WRAPPERS or not type(parameter).__module__.startswith("torchao."):
        return f"parameter {name} is of class {type(parameter).__module__}.{kind}, which plans do not know; {remedy}"
    if parameter.requires_grad:
        return f"parameter {name}, quantized to {kind}, is trained, but what is quantized is frozen; {remedy}"
    if not isinstance(stored.module, nn.Linear):
        owner = type(stored.module).__name__
        return f"parameter {name}, quantized to {kind}, is of module {owner}, which is no nn.Linear; {remedy}"
    if getattr(parameter, "act_quant_kwargs", None) is not None:
        return (
            f"parameter {name}, quantized to {kind}, quantizes activations too, which have no gradient then; use "
            "torchao's Int8WeightOnlyConfig"
        )
    return None


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
