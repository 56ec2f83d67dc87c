"""Parameters that refuse writes.

[Note: Guarded parameters] A plan keeps weights in its own memory. If a user wrote to a parameter, the write would be
lost at the next upload or fetch, or when an update rounds the master copy. So while its unit does not compute, a
parameter has the class :class:`Guarded`, whose ``__torch_function__`` refuses calls that write to it. Its views
(``parameter.data``, ``parameter[0]``) are guarded too. While its unit computes, it is an ordinary parameter, without
any overhead. A write during that time changes the parameter's version, see
:meth:`executor.module.visibility.WeightVisibility.check_unmodified`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

INSTEAD: Final = (
    "close the session (optimizer.session.close()), which gives the model its weights back, change it, and prepare() "
    "it again"
)
"""Remedy for changes to a prepared model."""

_OPERATORS: Final = frozenset(
    f"__i{name}__"
    for name in (
        *("add", "sub", "mul", "matmul", "div", "truediv", "floordiv", "mod", "pow"),
        *("and", "or", "xor", "lshift", "rshift"),
    )
) | {"__setitem__"}
_IN_PLACE: Final = re.compile(r".*[^_]_")
_ATTRIBUTES: Final = frozenset({"data", "real", "imag"})
_HARMLESS: Final = frozenset({"requires_grad_", "retain_grad_"})
_NAME: Final = "name_in_model"
_CLASS: Final = "class_in_model"
# It only reads, and the gradient has its own memory.
_READ_GRADIENT: Final = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class Guarded(torch.Tensor):
    """A parameter that cannot be written to, or a view of one. :func:`guard` gives existing parameters this class.

    It is not a subclass of ``Parameter``. torch recognises parameters by the attribute ``_is_param``, which views lack.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, unless it writes to a guarded tensor.

        Raises:
            ValueError: it does.
        """
        if func == _READ_GRADIENT:  # clipping reads it four times for each parameter
            with unguarded():
                return func(*args)
        kwargs = kwargs or {}
        written = [t for t in tree_leaves(list(_written(func, args, kwargs))) if isinstance(t, Guarded)]
        if written:
            raise ValueError(refusal(getattr(written[0], _NAME, "this tensor")))
        with unguarded():
            result = func(*args, **kwargs)
            return _guarded(result, [t for t in tree_leaves((args, dict(kwargs))) if isinstance(t, Guarded)])

    def set_(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Refuse other memory. torch does not call ``__torch_function__`` for this method.

        Raises:
            ValueError: always.
        """
        raise ValueError(refusal(getattr(self, _NAME, "this tensor")))

    def __deepcopy__(self, _memo: object) -> NoReturn:
        """Refuse to be copied. See :meth:`__reduce_ex__`."""
        self.__reduce_ex__(2)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{getattr(self, _NAME, 'this')} is a parameter of a prepared model, which cannot be copied or pickled, "
            "because its weights are in the session's memory; take them from model.state_dict()"
        )


unguarded: Final = torch._C.DisableTorchFunctionSubclass
"""Context without guards, for code that touches only gradients or the memory of parameters."""


def guard(parameter: nn.Parameter, name: str) -> None:
    """Refuse all writes to a parameter from now on."""
    own = vars(parameter)
    if _CLASS not in own:
        own.update({_CLASS: type(parameter), _NAME: name, "_is_param": True})
    parameter.__class__ = Guarded  # type: ignore[assignment]


def lift_guard(parameter: nn.Parameter) -> None:
    """Allow writes to a guarded parameter, until it is guarded again."""
    parameter.__class__ = vars(parameter).get(_CLASS, type(parameter))


def unguard(parameter: nn.Parameter) -> None:
    """Remove a parameter's guard for good."""
    lift_guard(parameter)
    for key in (_CLASS, _NAME, "_is_param"):
        vars(parameter).pop(key, None)


def refusal(name: str) -> str:
    """Return the error text for writing to a parameter, with a remedy."""
    return f"{name} is a parameter of a prepared model, so a write to it would be lost; {INSTEAD}"


def _written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments that a call writes to: ``out=``, and the first one if the function's name ends in ``_``."""
    yield kwargs.get("out")
    name = getattr(func, "__name__", "")
    first = args[0] if args else next(iter(kwargs.values()), None)
    if name == "__set__":  # of an attribute; module.to() sets an attribute to its own value if nothing changes
        if func.__self__.__name__ in _ATTRIBUTES and args[1] is not first:  # type: ignore[attr-defined]
            yield first
    elif name in _OPERATORS or kwargs.get("inplace") or (_IN_PLACE.fullmatch(name) and name not in _HARMLESS):
        yield first


def _guarded(result: Any, given: list[Guarded]) -> Any:
    """Return the result with all views of guarded tensors guarded."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    memory = {tensor.untyped_storage()._cdata: getattr(tensor, _NAME, "") for tensor in given}

    def guarded_view(tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return tensor
        if (name := memory.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        view = tensor.as_subclass(Guarded)
        setattr(view, _NAME, name)
        return view

    return tree_map_only(torch.Tensor, guarded_view, result)
