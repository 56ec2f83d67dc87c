"""Tensors whose rows are computed when they are needed."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

Handler = Callable[..., Any]
"""Takes the lazy tensor, the function, and its arguments. ``NotImplemented``: the function needs the values."""


class LazyRows(Tensor):
    """A tensor ``[..., width]`` that is computed when its values are used.

    Operations that only choose or arrange its rows are done to a stand-in, ``[..., any width]``. Any other operation
    without a handler gets the values.
    """

    handlers: ClassVar[Mapping[str, Handler]]
    """Operations that do not need the values, by name."""

    @property
    @abstractmethod
    def stand_in(self) -> Tensor:
        """What has a row for each of the tensor's rows."""

    @abstractmethod
    def of(self, stand_in: Tensor) -> Self:
        """Return the rows that another stand-in has."""

    @property
    @abstractmethod
    def is_computed(self) -> bool:
        """Whether the values are kept."""

    @abstractmethod
    def whole(self) -> Tensor:
        """Return the values as an ordinary tensor."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "")
        if func in _KNOWN_WITHOUT_VALUES or (
            name == "__get__" and getattr(func, "__self__", None) in _KNOWN_WITHOUT_VALUES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, LazyRows) and not first.is_computed and (handler := first.handlers.get(name)) is not None:
            result = handler(first, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*in_values(args), **{key: in_values(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*in_values(args), **{key: in_values(value) for key, value in (kwargs or {}).items()})


def in_values(value: Any) -> Any:
    """Return a value with all lazy tensors replaced by ordinary ones."""
    if isinstance(value, LazyRows):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(map(in_values, value))
    return value


_KNOWN_WITHOUT_VALUES: Final = frozenset(
    {
        *(torch.is_floating_point, torch.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout, Tensor.ndim, Tensor.is_cuda, Tensor.is_meta),
        *(Tensor.requires_grad, Tensor.grad_fn, Tensor.is_leaf),
    }
)
"""Attributes that are known before values are computed."""


def _unchanged(rows: LazyRows, *_args: Any, **_kwargs: Any) -> LazyRows:
    return rows


def _reshape(rows: LazyRows, _func: object, _self: object, *shape: Any, **kwargs: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not sizes or isinstance(sizes[0], torch.dtype) or sizes[-1] != rows.shape[-1]:
        return NotImplemented
    return rows.of(rows.stand_in.reshape(*sizes[:-1], rows.stand_in.shape[-1]))


def _flatten(rows: LazyRows, _func: object, _self: object, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % rows.ndim == rows.ndim - 1:
        return NotImplemented
    return rows.of(rows.stand_in.flatten(start_dim, end_dim))


def _split(rows: LazyRows, _func: object, _self: object, size: Any, dim: int = 0) -> Any:
    if dim % rows.ndim == rows.ndim - 1:
        return NotImplemented
    return tuple(map(rows.of, torch.split(rows.stand_in, size, dim)))


def _index(rows: LazyRows, _func: object, _self: object, index: Any) -> Any:
    """Select rows. The index must not change the last dimension."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not (item is Ellipsis or isinstance(item, int | slice | Tensor)) for item in items):
        return NotImplemented
    num_dims = sum(item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items)
    last = items[-1]
    reaches_last = num_dims == rows.ndim or any(item is Ellipsis for item in items)
    if reaches_last and (isinstance(last, Tensor) or last not in (Ellipsis, slice(None))):
        return NotImplemented
    device = rows.stand_in.device
    there = tuple(item.to(device) if isinstance(item, Tensor) else item for item in items)
    return rows.of(rows.stand_in[there])


CHOOSING: Final[dict[str, Handler]] = {
    "contiguous": _unchanged,
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "split": _split,
    "__getitem__": _index,
}
"""Operations that choose or arrange rows."""
