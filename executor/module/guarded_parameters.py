"""Parameters that read current weights, and write them to where the plan keeps them.

[Note: Guarded parameters] A plan keeps weights in its own memory. So while its unit does not compute, a parameter has
the class :class:`Guarded`, whose ``__torch_function__`` sees every call. A call that needs only metadata, such as a
shape, is made as it is. Any other call reads values, and is made with the current weights in place of the parameter. A
call that writes is made with copies, which then become the weights in all places that hold them. Where weights cannot
be had, or written, the call is refused: in an iteration, say, for weights that move or are being updated.

In grad mode, gradients pass through such a read to the parameter, as in memory: autograd adds them to what comes from
its module, and ``torch.autograd.grad`` finds them. ``parameter.data`` and ``parameter.detach()`` are guarded too, and
read current weights at each use. So are results that are views of weights, as ``parameter[0]``, but they cannot be used
any more once weights may have changed by another way. When a parameter gets other data (``parameter.data = average``),
what shared its weights keeps those of before, as in torch.

While its unit computes, a parameter is an ordinary one, without any overhead. A write during that time changes the
parameter's version, see :meth:`executor.module.visibility.WeightVisibility.check_unmodified`. What is taken as its
``data`` has a version of its own, so :class:`Computing` remembers it.

Some functions read a tensor's memory without calling ``__torch_function__``: ``torch.tensor(parameter)``,
``torch.Tensor(parameter)``, ``torch.as_tensor(parameter, dtype=...)``, ``torch.utils.dlpack.to_dlpack(parameter)``,
``tensor.set_(parameter)`` and ``tensor.data = parameter``. They get NaN, see [Note: Out of sight] in
:mod:`executor.module.visibility`. Of ``parameter.detach()`` they get current values, or an error: where these cannot
be had, it has no memory.

``nn.Parameter(parameter)`` and ``nn.Parameter(parameter.data)`` share weights with the parameter, as in memory. So they
are guarded like it, but have gradients of their own. So is what has shared its memory since before the session, as a
parameter of another model or a state dict (:func:`join`). When the session ends, all of these share its memory again.
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, Protocol

import numpy as np
import torch
from torch import nn
from torch._functorch import eager_transforms, vmap
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from executor.callbacks import OF_SESSION, is_captured, outside_transforms
from executor.memory.state import without_values

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
METADATA: Final = frozenset(
    {
        *("shape", "size", "dim", "ndim", "ndimension", "dim_order", "numel", "nelement", "__len__", "dense_dim"),
        *("dtype", "itemsize", "element_size", "nbytes", "result_type", "device", "get_device", "layout", "sparse_dim"),
        *("names", "has_names", "name", "_cdata", "data_ptr", "untyped_storage", "__hash__", "_base", "_version"),
        *("requires_grad", "requires_grad_", "retains_grad", "retain_grad", "grad", "_grad", "grad_fn", "_grad_fn"),
        *("output_nr", "grad_dtype", "register_hook", "register_post_accumulate_grad_hook", "backward"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "__dlpack_device__"),
        *("_has_compatible_shallow_copy_type", "new_empty", "new_empty_strided", "new_zeros", "new_ones"),
        *(f"{name}_like" for name in ("empty", "zeros", "ones", "rand", "randn", "randint")),
    }
)
"""Names of functions and attributes that need no values; those that begin with ``is_`` need none either."""
_OF_AUTOGRAD: Final = frozenset({"__set__", "requires_grad", "grad", "retain_grad", "register_hook"}) | _HARMLESS
_GEOMETRY: Final = frozenset({"stride", "storage_offset", "is_contiguous"})  # out of sight, a parameter has another
_CONVERSIONS: Final = frozenset(
    {
        *("to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"),
        *("type_as", "view_as", "expand_as", "reshape_as"),
    }
)
_VIEWS_OF_SELF: Final = frozenset({"view_as", "expand_as"})  # lead to the node that accumulates gradients
_ALIASES: Final = frozenset({"data", "detach"})
_EXPORTS: Final = frozenset({"numpy", "__array__", "__dlpack__"})  # their results would not notice other weights
_NAME, _CLASS, _READER, _SHARED, _TAKEN, LAST_HOOK, REACHED, _IS_PARAM = OF_SESSION
"""``_SHARED``: aliases and views of the parameter, weakly. ``LAST_HOOK``: the id of the session's hook on its gradient,
which runs after those of the user's."""
_VERSION: Final = "version_of_weights"
_IS_ALIAS: Final = "is_alias_of_weights"
_BASE: Final = "values_of_view"  # of a view of weights: the whole values that it is a view of
_LIKE: Final = "like_weights"  # of an alias without memory: a tensor with its metadata
_STALE: Final = -1
HIDDEN: Final = 1 << 30
"""In the version of parameters out of sight, see [Note: Out of sight] in :mod:`executor.module.visibility`."""
_GRADIENT: Final[Any] = torch.Tensor.grad
_DATA: Final[Any] = torch.Tensor.data


class WeightReader(Protocol):
    """Gives current weights to code that reads a guarded parameter."""

    @property
    def version(self) -> int:
        """A number that changes whenever weights may have changed."""

    def check_readable(self, name: str, *, alone: bool = False, is_held: bool = False) -> None:
        """Check that a parameter's weights can be read now. Raises ValueError.

        Args:
            name: the parameter.
            alone: without other ranks.
            is_held: by what has them whole, and is current.
        """

    def current(self, name: str) -> torch.Tensor:
        """Return a parameter's current weights, in memory that no other tensor's storage has.

        Ranks that hold parts of them call this together. Raises ValueError if they cannot be read now.
        """

    def write(self, name: str, values: torch.Tensor) -> None:
        """Set a parameter's weights in all places that hold them. Raises ValueError if they cannot be written now."""

    def leaves(self, name: str) -> list[torch.Tensor]:
        """Return the leaves of autograd's that a parameter's gradient goes to."""

    def gradients(self, name: str, gradient: torch.Tensor) -> list[torch.Tensor]:
        """Return their gradients, given the parameter's. Raises ValueError where it would be lost."""


class Guarded(torch.Tensor):
    """A parameter that is out of sight, or what shares its weights. :func:`guard` gives parameters this class.

    It is not a subclass of ``Parameter``. torch recognises parameters by the attribute ``_is_param``, which views lack.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with current weights, and keep what it writes to them.

        Raises:
            ValueError: the weights cannot be read or written now.
        """
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        written = [t for t in tree_leaves(list(_written(name, func, args, kwargs))) if isinstance(t, Guarded)]
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        with unguarded():
            if written:
                return _write(name, func, args, kwargs, written)
            if name in _GEOMETRY and vars(args[0]).get(_VERSION, _STALE) == _STALE:
                return func(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), *args[1:], **kwargs)
            if name in _VIEWS_OF_SELF and args[0] is args[-1] and _VERSION not in vars(args[0]):
                view = func(*args)
                view.__class__ = Guarded
                return _share(view, args[0])
            if _needs_no_values(name, func, args, kwargs):
                asks_memory = isinstance(args[0], Guarded) and name not in _OF_AUTOGRAD
                like = vars(args[0]).get(_LIKE, args[0]) if asks_memory else args[0]
                result = func(like, *args[1:], **kwargs)
                if name == "register_post_accumulate_grad_hook" and LAST_HOOK in vars(args[0]):
                    hooks, last = args[0]._post_accumulate_grad_hooks, vars(args[0])[LAST_HOOK]
                    hooks[last] = hooks.pop(last)
                return args[0] if result is like else result
            return _read(name, func, args, kwargs)

    @property
    def grad(self) -> Any:
        """The gradient, which has its own memory. Clipping reads it four times for each parameter."""
        with unguarded():
            return _GRADIENT.__get__(self)

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        with unguarded():
            _GRADIENT.__set__(self, gradient)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def set_(self, *_args: object, **_kwargs: object) -> NoReturn:
        """Refuse other memory. torch does not call ``__torch_function__`` for this method.

        Raises:
            ValueError: always.
        """
        raise ValueError(refusal(getattr(self, _NAME, "this tensor")))

    def as_subclass(self, cls: Any) -> Any:
        """Read values, for which torch does not call ``__torch_function__``. Raises ValueError as other reads do."""
        return Guarded.__torch_function__(torch.Tensor.as_subclass, (), (self, cls))

    def __copy__(self) -> torch.Tensor:
        """Share weights with what does so too. Raises as :meth:`__reduce_ex__`."""
        if _VERSION not in vars(self):
            self.__reduce_ex__(2)
        return self.detach()

    def __deepcopy__(self, _memo: object) -> torch.Tensor:
        """Copy current values. Raises as :meth:`__reduce_ex__`."""
        if _VERSION not in vars(self):
            self.__reduce_ex__(2)
        with torch.no_grad(), unguarded():
            values = _current(self).detach().as_subclass(torch.Tensor).clone()
            return nn.Parameter(values, self.requires_grad) if _IS_PARAM in vars(self) else values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle current values of what shares weights with a parameter.

        Raises:
            TypeError: it is the parameter.
            ValueError: the weights cannot be read now.
        """
        if _VERSION in vars(self):
            values: Any = self.__deepcopy__({})
            return values.__reduce_ex__(protocol)
        raise TypeError(
            f"{getattr(self, _NAME, 'this')} is a parameter of a prepared model, which cannot be copied or pickled, "
            "because its weights are in the session's memory; take them from model.state_dict()"
        )


class Computing(nn.Parameter):
    """A parameter whose unit computes; it remembers what is taken as its ``data``."""

    @property
    def data(self) -> torch.Tensor:
        """The weights, without autograd."""
        values: torch.Tensor = _DATA.__get__(self)
        vars(self).setdefault(_TAKEN, []).append(values)
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _DATA.__set__(self, values)

    def detach(self) -> torch.Tensor:
        """Return the weights without autograd; to ``nn.Parameter``, of their own class, as it wants of subclasses."""
        values = super().detach()
        asks = sys._getframe(1).f_code
        return values.as_subclass(type(self)) if asks is nn.Parameter.__new__.__code__ else values


def was_written_as_data(parameter: torch.Tensor) -> bool:
    """Return whether data taken from a computing parameter were written to in place since the last call."""
    taken = vars(parameter).pop(_TAKEN, ())
    return any(not values.is_inference() and values._version for values in taken)


def version_of(parameter: torch.Tensor) -> int:
    """Return how often a parameter was written to in place, whether it is in sight or not."""
    return parameter._version & ~HIDDEN


unguarded: Final = torch._C.DisableTorchFunctionSubclass
"""Context without guards, for code that touches only gradients or the memory of parameters."""


def guard(parameter: nn.Parameter, name: str, reader: WeightReader) -> None:
    """Refuse all writes to a parameter from now on, and let reads get the weights of ``reader``."""
    own = vars(parameter)
    if _CLASS not in own:
        own.update({_CLASS: type(parameter), _NAME: name, _READER: reader, _IS_PARAM: True})
    parameter.__class__ = Guarded  # type: ignore[assignment]


def has_session(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one of a prepared model, or shares weights with one."""
    return _NAME in vars(parameter)


def lift_guard(parameter: nn.Parameter) -> None:
    """Allow writes to a guarded parameter, until it is guarded again."""
    parameter.__class__ = vars(parameter).get(_CLASS, type(parameter))


@contextlib.contextmanager
def lifted(parameter: nn.Parameter) -> Iterator[None]:
    """Return a context in which a parameter is an ordinary one, whether it is guarded or not."""
    if is_guarded := isinstance(parameter, Guarded):
        lift_guard(parameter)
    try:
        yield
    finally:
        if is_guarded:
            parameter.__class__ = Guarded  # type: ignore[assignment]


def unguard(parameter: nn.Parameter) -> None:
    """Remove a parameter's guard for good. What shares its weights is guarded until :func:`rejoin`."""
    lift_guard(parameter)
    for key in (_CLASS, _NAME, _READER, REACHED, _IS_PARAM):
        vars(parameter).pop(key, None)


def alias_of(parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Make current weights of a guarded parameter what its ``data`` is: reads and writes go on to be its own."""
    values.__class__ = Guarded
    return _share(values, parameter, version=vars(parameter)[_READER].version)


def take_memory(values: torch.Tensor) -> None:
    """Take the memory of weights that were given out. What is guarded is read anew at each use from now on."""
    with unguarded():
        if _VERSION in vars(values):
            values.data = without_values(values.shape, values.dtype, values.device)
            vars(values)[_VERSION] = _STALE
        else:
            values.set_()  # type: ignore[call-overload]


def join(tensor: torch.Tensor, parameter: nn.Parameter, before: torch.Tensor) -> None:
    """Guard a tensor that had a part of a parameter's memory, so that it goes on to share its weights.

    What is another view than the whole parameter has current values until they change, and is then refused.

    Args:
        tensor: an ordinary one, or a parameter of another model.
        parameter: a guarded one.
        before: what the parameter was before the session.
    """
    with unguarded():
        is_param = isinstance(tensor, nn.Parameter)
        is_alias = _place(tensor) == _place(before)
        version = _STALE if is_alias else vars(parameter)[_READER].version
        tensor.__class__ = Guarded
        _share(tensor, parameter, version=version, is_alias=is_alias)
        vars(tensor).update({_IS_PARAM: True} if is_param else {}, **({} if is_alias else {_BASE: before}))


def rejoin(parameter: nn.Parameter) -> None:
    """Let what shares a parameter's weights have its memory, which it has got back from its session."""
    with unguarded():
        for shared in list(vars(parameter).pop(_SHARED, ())):
            base, values = vars(shared).get(_BASE, parameter), parameter.detach()
            has_graph = shared.requires_grad and shared._is_view() and _IS_PARAM not in vars(shared)
            if not has_graph and base.stride() == values.stride() and base.device == values.device:
                if not vars(shared)[_IS_ALIAS]:
                    offset = shared.storage_offset() - base.storage_offset() + values.storage_offset()
                    values = values.as_strided(shared.shape, shared.stride(), offset)
                _rebind(shared, values)


def refusal(name: str) -> str:
    """Return the error text for a write to a parameter that would be lost, with a remedy."""
    return (
        f"{name} is a parameter of a prepared model, so this write to it would be lost; write to the parameter itself "
        f"between two steps, change a clone(), or {INSTEAD}"
    )


def _written(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments that a call writes to: ``out=``, and the first one if the function's name ends in ``_``."""
    yield kwargs.get("out")
    first = args[0] if args else next(iter(kwargs.values()), None)
    if name == "__set__":  # of an attribute; module.to() sets an attribute to its own value if nothing changes
        if func.__self__.__name__ in _ATTRIBUTES and args[1] is not first:  # type: ignore[attr-defined]
            yield first
    elif name in _OPERATORS or kwargs.get("inplace") or (_IN_PLACE.fullmatch(name) and name not in _HARMLESS):
        yield first


def _needs_no_values(name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call reads no values of its guarded tensors."""
    if name in _CONVERSIONS:
        return _keeps(func, args, kwargs)
    return name in METADATA or name == "__set__" or (name.startswith("is_") and name != "is_nonzero")


def _keeps(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion gives back the tensor that it is given, or converts another to a guarded one's kind.

    Whether it does is tried with one value of the same type in the same place.
    """
    if not isinstance(args[0], Guarded):
        return True
    like = vars(args[0]).get(_LIKE, args[0])
    probe = torch.empty((1,) * like.dim(), dtype=like.dtype, device=like.device)
    return not any(isinstance(other, torch.Tensor) for other in args[1:]) and func(probe, *args[1:], **kwargs) is probe


class _Target(NamedTuple):
    """What a call writes to.

    Attributes:
        tensor: the guarded tensor.
        whole: a copy of its parameter's whole weights.
        values: its part of that, to write to.
        place: shape, strides and memory of ``values``, which the call must not change.
    """

    tensor: Guarded
    whole: torch.Tensor
    values: torch.Tensor
    place: tuple[Any, ...]


def _write(
    name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], written: list[Guarded]
) -> Any:
    """Call a function with copies of the guarded tensors that it writes to, and make the copies the weights.

    Raises:
        ValueError: the weights cannot be read or written now, or would get another shape, stride or type.
    """
    is_data = name == "__set__" and func.__self__.__name__ == "data"  # type: ignore[attr-defined]
    if is_data and _VERSION in vars(written[0]):
        values = _current(args[1]) if isinstance(args[1], Guarded) else args[1]
        _rebind(written[0], values.detach().as_subclass(torch.Tensor))
        return None
    targets, kept = list(_targets(written)), []
    if name == "__set__":
        result, kept = None, _kept(targets[0])
        _set_data(targets[0], args[1] if is_data else None)
    else:
        result = _read(name, func, args, kwargs, {id(target.tensor): target for target in targets})
    for target in targets:
        if _place(target.values) != target.place:
            raise ValueError(refusal(vars(target.tensor)[_NAME]))
    for target in {vars(target.tensor)[_NAME]: target for target in targets}.values():
        if is_captured():
            continue
        own = vars(target.tensor)
        before = own[_READER].version
        own[_READER].write(own[_NAME], target.whole)
        for shared in list(own.get(_SHARED, ())):  # views go on to be those of current weights
            of_view = vars(shared)
            if of_view[_VERSION] == before and (base := of_view.get(_BASE)) is not None:
                base.copy_(target.whole)
                of_view[_VERSION] = own[_READER].version
    for shared, values in kept:
        _rebind(shared, values)
    return result


def _targets(written: list[Guarded]) -> Iterator[_Target]:
    wholes: dict[str, torch.Tensor] = {}
    for tensor in written:
        own = vars(tensor)
        current, base = _current(tensor), own.get(_BASE)
        if own[_NAME] not in wholes:
            source = current.detach().as_subclass(torch.Tensor) if base is None else base
            like = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=source.device)
            wholes[own[_NAME]] = like.copy_(source)
        whole = wholes[own[_NAME]]
        values = whole.detach()
        if base is not None:
            values = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - base.storage_offset())
        # Where the parameter does, so that torch refuses to write to a leaf in grad mode.
        yield _Target(tensor, whole, values.requires_grad_(current.requires_grad), _place(values))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage()._cdata


def _set_data(target: _Target, values: Any) -> None:
    """Write what ``parameter.data = values`` does."""
    if isinstance(values, Guarded):
        values = _current(values).detach().as_subclass(torch.Tensor)
    expected = target.tensor.shape, target.tensor.dtype
    if not isinstance(values, torch.Tensor) or (values.shape, values.dtype) != expected:
        raise ValueError(refusal(vars(target.tensor)[_NAME]))
    target.values.detach().copy_(values)


def _kept(target: _Target) -> list[tuple[Guarded, torch.Tensor]]:
    """Return what shares a parameter's weights, with the values of now, for when the parameter gets other data.

    So ``backup = parameter.data``, before ``parameter.data = average``, is what it is in torch.
    """
    found, whole = [], target.whole.detach().clone()
    for shared in list(vars(target.tensor).get(_SHARED, ())):
        own = vars(shared)
        if own[_IS_ALIAS]:
            found.append((shared, whole.to(own.get(_LIKE, whole).device)))
        elif own[_VERSION] == own[_READER].version:
            offset = shared.storage_offset() - own[_BASE].storage_offset()
            found.append((shared, whole.as_strided(shared.shape, shared.stride(), offset)))
    return found


def _rebind(shared: Guarded, values: torch.Tensor) -> None:
    """Make an alias or a view of weights an ordinary tensor with other memory."""
    own = vars(shared)
    own[_SHARED].pop(shared, None)
    has_memory, needs_gradient = own.get(_LIKE) is None, shared.requires_grad
    kind = nn.Parameter if own.pop(_IS_PARAM, False) else torch.Tensor
    for key in (_NAME, _READER, _VERSION, _IS_ALIAS, _BASE, _LIKE, _SHARED):
        own.pop(key, None)
    shared.__class__ = torch.Tensor  # type: ignore[assignment]
    if has_memory:
        shared.data = values
    else:
        torch.utils.swap_tensors(shared, values.view(values.shape).requires_grad_(needs_gradient))  # type: ignore[no-untyped-call]
    shared.__class__ = kind  # type: ignore[assignment]


def _read(
    name: str,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    targets: Mapping[int, _Target] = MappingProxyType({}),
) -> Any:
    """Call a function with current weights, or the ``targets`` that it writes, in place of guarded parameters."""
    readings = {key: (target.tensor, target.values) for key, target in targets.items()}

    def reading(tensor: Guarded) -> torch.Tensor:
        if id(tensor) not in readings:
            values = _current(tensor)
            readings[id(tensor)] = tensor, values.clone() if name in _EXPORTS else values
        return readings[id(tensor)][1]

    try:
        if name == "__repr__":  # which debuggers call anywhere
            vars(args[0])[_READER].check_readable(vars(args[0])[_NAME], alone=True, is_held=_is_held(args[0]))
        given, named = tree_map_only(Guarded, reading, (args, dict(kwargs)))
    except ValueError as refused:
        if name in _ALIASES:  # it may serve for metadata alone, and is read at its use
            alias = _share(torch.empty(args[0].shape, dtype=args[0].dtype, device="meta"), args[0])
            vars(alias)[_LIKE] = func(*args)
            return alias
        if name == "__repr__":
            return f"{type(args[0]).__name__}({tuple(args[0].shape)}, {args[0].dtype}): {refused}"
        raise
    result = func(*given, **named)
    if name in _ALIASES:
        return _share(result, args[0], version=vars(args[0])[_READER].version)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if name == "tolist":  # many numbers, and no tensor
        return result
    return _guarded(result, list(readings.values()))


def _share(values: torch.Tensor, source: torch.Tensor, *, version: int = _STALE, is_alias: bool = True) -> torch.Tensor:
    """Guard values of a guarded tensor. If they are stale, an alias (``parameter.data``) is read anew at each use."""
    shared = values if isinstance(values, Guarded) else values.as_subclass(Guarded)
    own = vars(source)
    others = own.setdefault(_SHARED, WeakIdKeyDictionary())
    others[shared] = True
    own_keys = {_NAME: own[_NAME], _READER: own[_READER], _VERSION: version, _IS_ALIAS: is_alias, _SHARED: others}
    vars(shared).update(own_keys)
    return shared


def _is_held(tensor: Guarded) -> bool:
    """Return whether a tensor has the current weights in its own memory."""
    own = vars(tensor)
    reader: WeightReader = own[_READER]
    return bool(own.get(_VERSION, _STALE) == reader.version)


def _current(tensor: Guarded) -> torch.Tensor:
    """Return the current values of a guarded tensor.

    Raises:
        ValueError: they cannot be read now.
    """
    own = vars(tensor)
    reader: WeightReader = own[_READER]
    if is_captured():  # another model is: what is read has no values
        like = own.get(_LIKE, tensor)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=like.device, requires_grad=tensor.requires_grad)
    if _VERSION in own:
        reader.check_readable(own[_NAME], is_held=_is_held(tensor))
        if _is_held(tensor):
            return tensor
        if not own[_IS_ALIAS]:
            raise ValueError(
                f"a view of {own[_NAME]} was taken before the weights of the prepared model changed; take it from the "
                "parameter again, or from session.full_parameters()"
            )
    with outside_transforms():
        values = reader.current(own[_NAME]).to(own.get(_LIKE, tensor).device)
        if torch.is_grad_enabled() and tensor.requires_grad:
            # A parameter over the same memory has a gradient of its own.
            is_apart = _VERSION in own and tensor.is_leaf
            of = [] if is_apart else reader.leaves(own[_NAME])
            values = _Reading.apply(own, is_apart, values.detach(), *(of or [tensor]))  # type: ignore[no-untyped-call]
    return values


def _of_values(wrap: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function by which ``torch.func`` wraps a tensor, of current weights in place of a guarded parameter."""

    @functools.wraps(wrap)
    def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(tensor, Guarded):
            with unguarded():
                tensor = _current(tensor)
                if isinstance(tensor, Guarded):  # an alias; tracers know no such class
                    with outside_transforms():
                        tensor = torch.Tensor.as_subclass(tensor, torch.Tensor)
        return wrap(tensor, *args, **kwargs)

    return wrapped


# They read memory without calling __torch_function__ too, and arguments of torch.func.grad are often parameters.
for _transforms, _name in (
    (eager_transforms, "_wrap_for_grad"),
    (vmap, "_add_batch_dim"),
    (forward_ad, "make_dual"),
):
    if _wrap := getattr(_transforms, _name, None):  # private: another version of torch may not have it
        setattr(_transforms, _name, _of_values(_wrap))


class _Reading(torch.autograd.Function):
    """Values of a parameter that were read outside of its module. Their gradient goes to the parameter's leaves."""

    @staticmethod
    def forward(
        ctx: Any, own: Mapping[str, Any], is_apart: bool, values: torch.Tensor, *_leaves: torch.Tensor
    ) -> torch.Tensor:
        ctx.own, ctx.is_apart = own, is_apart
        return values

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reader: WeightReader = ctx.own[_READER]
        of = [] if ctx.is_apart else reader.gradients(ctx.own[_NAME], gradient)
        return None, None, None, *(of or [gradient])


def _guarded(result: Any, readings: list[tuple[Guarded, torch.Tensor]]) -> Any:
    """Return the result with all views of weights guarded, and with a guarded tensor that came back unchanged."""
    given = {id(values): tensor for tensor, values in readings}
    memory = {values.untyped_storage()._cdata: tensor for tensor, values in readings}

    def guarded_view(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in given:
            return given[id(tensor)]
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or is_wrapped:
            return tensor
        if (source := memory.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        view = _share(tensor, source, version=vars(source)[_READER].version, is_alias=False)
        vars(view)[_BASE] = vars(source).get(_BASE, next(v for s, v in readings if s is source).detach())
        return view

    return tree_map_only(torch.Tensor, guarded_view, result)
