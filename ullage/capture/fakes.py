"""Fake tensors with known values for captures.

A fake tensor has no values, but some values are known: those of ``torch.arange`` and ``torch.zeros``, those of inputs
that mark the positions of images, and results of operators on known values. Random numbers between 0 and 1 are known to
be above 0, so a layer that is dropped with probability 0 runs. Experts are assumed to have equal shares of the tokens:
``topk``, and a maximum along a dimension, choose all experts in turn. So a loop over the chosen experts, each with its
tokens, is recorded like any other code.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from ullage.capture.records import CaptureError

aten = torch.ops.aten
VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # an operator needs the values of a tensor


@dataclasses.dataclass(frozen=True)
class _Layout:
    """The layout of a tensor in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def room(self) -> int:
        """Return the number of values of a storage that ends with the tensor."""
        return self.offset + 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def within(self, values: Tensor) -> Tensor:
        """Return the tensor with this layout in a storage of ``values``."""
        return values.as_strided(self.shape, self.strides, self.offset)


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How the values in a storage are computed.

    Attributes:
        arguments: positional and keyword arguments of ``function``, with a :class:`_Known` in place of each tensor.
        result: index of the result of ``function``.
    """

    function: Any
    arguments: Any
    result: int
    layout: _Layout

    @functools.cached_property
    def values(self) -> Tensor:
        """All values of the storage, computed at the first use, because few models need them."""
        values = torch.zeros(max(self.layout.room(), 0), dtype=self.layout.dtype)
        self.layout.within(values).copy_(tree_leaves(_computed(self.function, self.arguments))[self.result])
        return values


@dataclasses.dataclass(frozen=True)
class _Known:
    """A tensor whose values are known."""

    recipe: _Recipe
    layout: _Layout


def _computed(function: Any, arguments: Any) -> Any:
    args, kwargs = tree_map_only(_Known, lambda known: known.layout.within(known.recipe.values), arguments)
    return function(*args, **kwargs)


@contextlib.contextmanager
def lists_of_scalars() -> Iterator[None]:
    """Let ``torch.tensor`` take a list of fake scalars without reading their values."""
    real = torch.tensor

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(data, list) and data and all(isinstance(value, FakeTensor) for value in data):
            return torch.stack(data).to(kwargs.get("dtype", data[0].dtype))
        made: Tensor = real(data, *args, **kwargs)
        return made

    with mock.patch.object(torch, "tensor", tensor):
        yield


class Untracked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators on real tensors that lie in the memory of a trained parameter, which no fake one follows.

    Args:
        trained: returns the trained parameter in whose memory a tensor lies; empty if there is none.
    """

    def __init__(self, trained: Callable[[Tensor], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trained = trained

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an operator.

        Raises:
            CaptureError: it reads such a tensor.
        """
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and (owner := self._trained(leaf)):
                raise CaptureError(
                    f"the memory of {owner} is read through a tensor that is kept elsewhere (an attribute, a list, a "
                    "variable), which a plan would not update; read the parameter itself in forward"
                )
        return func(*args, **kwargs or {})


class Fakes:
    """Runs operators on fake tensors."""

    def __init__(self) -> None:
        self._recipes: Any = WeakIdKeyDictionary()  # by storage
        self._random: Any = WeakIdKeyDictionary()  # storages of random numbers between 0 and 1

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Make the values of an input known. Shapes may depend on the positions of images."""
        self._recipes[tensor.untyped_storage()] = _Recipe(values.clone, ((), {}), 0, _Layout.of(tensor))

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and return its result.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: the operator needs values that are not known.
        """
        try:
            output = _FAKES.get(function, function)(*args, **kwargs)
        except VALUES:
            if function in _INDEXING and (places := self._mask_positions(args[1])) is not None:
                return self.run(function, (args[0], places, *args[2:]), kwargs)
            if (known := self._known((args, kwargs))) is None:
                raise
            with _disable_current_modes():
                real = _computed(function, known)
            output = tree_map_only(Tensor, _fake_like, real)
        self._record(function, args, kwargs, output)
        return output

    def _record(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record how values are computed, if the arguments are known."""
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if function._schema.is_mutable:
            self._record_write(function, args, kwargs)
            return
        if self._record_random(function, args, results):
            return
        if function is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):  # torch.tensor(...)
            self.know(results[0], args[0])
            return
        if function.is_view or not results:
            return
        if (dimension := _CHOICES.get(function)) is not None:
            given = args[dimension] if len(args) > dimension else -1
            num_choices = (args[0].shape or (1,))[-1 if given is None else given]
            layout = _Layout.of(results[-1])
            chosen = _Recipe(_balanced_choices, ((layout.shape, num_choices), {}), 0, layout)
            self._recipes[results[-1].untyped_storage()] = chosen
        elif _has_values(function) and (known := self._known((args, kwargs))) is not None:
            for number, result in enumerate(results):  # a result may be an argument
                self._recipes.setdefault(result.untyped_storage(), _Recipe(function, known, number, _Layout.of(result)))

    def _record_write(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Forget the values of tensors that an operator writes, or record how they change."""
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)} | kwargs
        written = [a.name for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
        tensors = [t for t in tree_leaves([named.get(name) for name in written]) if isinstance(t, Tensor)]
        after = None
        if len(tensors) == 1 and args and tensors[0] is args[0] and _has_values(function):
            known = self._known((args, kwargs))
            after = None if known is None else _after(function, *known)
        for changed in tensors:
            self._recipes.pop(changed.untyped_storage(), None)
            self._random.pop(changed.untyped_storage(), None)
        if after is not None:
            self._recipes[tensors[0].untyped_storage()] = after

    def _record_random(self, function: Any, args: Sequence[Any], results: Sequence[Tensor]) -> bool:
        """Record random numbers, and comparisons of them with 0; return whether the operator was one of these."""
        if function is aten.rand.default:
            self._random[results[0].untyped_storage()] = True
            return True
        if function in _ABOVE_ZERO and args[1] == 0 and args[0].untyped_storage() in self._random:
            with _disable_current_modes():
                self.know(results[0], torch.full(args[0].shape, _ABOVE_ZERO[function]))
            return True
        return False

    def _mask_positions(self, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Return indices with masks replaced by the positions that they choose; ``None`` if no mask is known."""
        if not any(index is not None and index.dtype is torch.bool for index in indices):
            return None
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                found.append(index)
            elif (known := self._known(index)) is None:
                return None
            else:
                with _disable_current_modes():
                    chosen = known.layout.within(known.recipe.values).nonzero(as_tuple=True)
                for places in chosen:
                    fake = _fake_like(places)
                    found.append(fake)
                    with _disable_current_modes():
                        self.know(fake, places)
        return found

    def _known(self, arguments: Any) -> Any:
        """Return arguments with tensors replaced by their known values; ``None`` if some are not known."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        recipes = {id(leaf): self._recipes.get(leaf.untyped_storage()) for leaf in tensors}
        if any(recipes[id(leaf)] is None or recipes[id(leaf)].layout.dtype is not leaf.dtype for leaf in tensors):
            return None
        return tree_map_only(Tensor, lambda leaf: _Known(recipes[id(leaf)], _Layout.of(leaf)), arguments)


def _after(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Recipe:
    """Return the values of the first argument's whole storage after an operator has written to it."""
    target: _Known = args[0]
    whole = _Layout(target.layout.dtype, (max(target.recipe.layout.room(), 0),), (1,), 0)

    def write(before: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = before.clone()
        function(target.layout.within(values), *args, **kwargs)
        return values

    return _Recipe(write, ((_Known(target.recipe, whole), *args[1:]), kwargs), 0, whole)


def _has_values(function: Any) -> bool:
    """Return whether an operator is deterministic."""
    return torch.Tag.nondeterministic_seeded not in function.tags and "empty" not in function.overloadpacket.__name__


def _fake_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _balanced_choices(shape: tuple[int, ...], num_choices: int) -> Tensor:
    """Return choices of equal frequency in which neighbours differ."""
    return torch.arange(math.prod(shape)).remainder(num_choices).view(shape)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_rest: Any, **_named: Any) -> Tensor:
    """Fake the grouped product for all types that the real kernel takes. PyTorch's own fake takes only bf16."""
    return _create_grouped_mm_output_tensor(a, b, offs, None)  # type: ignore[no-any-return, no-untyped-call]


_FAKES: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}
_INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
# Comparisons with 0, and their results for a number above 0.
_ABOVE_ZERO = {aten.gt.Scalar: True, aten.ge.Scalar: True, aten.lt.Scalar: False, aten.le.Scalar: False}
# Operators whose last result is the chosen index along a dimension, and the position of that dimension's argument.
_CHOICES = {aten.topk.default: 2, aten.max.dim: 1, aten.argmax.default: 1}
