"""Fake tensors with known values for captures.

A fake tensor has no values, but some values are known: those of ``torch.arange`` and ``torch.zeros``, those of inputs
that mark the positions of images, and results of operators on known values. Random numbers between 0 and 1 are known to
be above 0, so a layer that is dropped with probability 0 runs. Other random numbers are drawn where values are needed,
so they have the range that the operator gives them, and no two of a permutation are the same. Experts are assumed to
have equal shares of the tokens: ``topk``, and a maximum along a dimension, choose all experts in turn. So a loop over
the chosen experts, each with its tokens, is recorded like any other code.

[Note: Assumed values] Some models need values that are not known: branches and shapes that depend on data, functions
of NumPy, operators whose shapes no fake kernel knows. They are captured with assumed values. Small parameters and
buffers have their own values then, as inputs have those of the example batch. Of what is computed, an operator that
needs values is given numbers between 0.5 and 1.5; and so is one that yields integers or marks (a comparison), so that
all that is computed from these agrees. If a model refuses such values (corners of boxes that are not in order), it is
tried once more with comparisons that hold. A plan is a forecast: what differs in a step with other values runs on
demand.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor
from torch._meta_registrations import _create_grouped_mm_output_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.utils._python_dispatch import (
    _disable_current_modes,
)
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

import executor
from ullage.capture.records import UNKNOWN, CaptureError, Layout, strided

aten = torch.ops.aten
VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # an operator needs the values of a tensor
_OURS: Final = (
    *(str(Path(file).parent) for file in (torch.__file__, contextlib.__file__, __file__, executor.__file__)),
    "<",
)


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
    layout: Layout

    @functools.cached_property
    def values(self) -> Tensor:
        """All values of the storage, computed at the first use, because few models need them."""
        values = torch.zeros(self.layout.room, dtype=self.layout.dtype)
        self.layout.within(values).copy_(tree_leaves(_computed(self.function, self.arguments))[self.result])
        return values

    @functools.cached_property
    def is_assumed(self) -> bool:
        """Whether they are assumed or drawn, or computed from such values."""
        return self.function is _assumed_values or _draws(self.function) or _is_assumed(self.arguments)


@dataclasses.dataclass(frozen=True)
class _Known:
    """A tensor whose values are known."""

    recipe: _Recipe
    layout: Layout


def _computed(function: Any, arguments: Any) -> Any:
    args, kwargs = tree_map_only(_Known, lambda known: known.layout.within(known.recipe.values), arguments)
    return _drawn(function, args, kwargs) if _draws(function) else function(*args, **kwargs)


def _drawn(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator with random numbers that are the same each time, and take none from the user's generators."""
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    try:
        return function(*args, **{name: None if name == "generator" else value for name, value in kwargs.items()})
    finally:
        torch.default_generator.set_state(state)


def users_line(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line of the user's code in brackets; empty if there is none."""
    own = [frame for frame in frames if not frame.filename.startswith(_OURS) and frame.line]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno}: {own[-1].line})" if own else ""


@contextlib.contextmanager
def traceable_functions() -> Iterator[None]:
    """Replace functions of torch that read or write memory where no operator shows it.

    ``torch.tensor`` takes a list of fake scalars then, and so does an index. Packed sequences are padded, sparse
    tensors that take gradients are dense, and a module that is converted to the type that it has keeps its parameters.
    ``transformers`` looks at masks as it does in training: for fake tensors it would keep one that masks nothing.
    """
    imported = sys.modules.get("transformers.utils.import_utils", types.SimpleNamespace())
    real, sparse, product, swap = torch.tensor, torch.sparse_coo_tensor, torch.sparse.mm, torch.utils.swap_tensors

    def tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        if (found := _stacked(data)) is not data:
            return found.to(kwargs.get("dtype", found.dtype))  # type: ignore[no-any-return]
        made: Tensor = real(data, *args, **kwargs)
        return made

    def sparse_coo_tensor(indices: Tensor, values: Any, size: Any = None, **kwargs: Any) -> Tensor:
        if size is None or not isinstance(values, FakeTensor) or not values.requires_grad:
            return sparse(indices, values, *([] if size is None else [size]), **kwargs)
        return values.new_zeros(tuple(size)).index_put(tuple(indices), values, accumulate=True)

    def swap_tensors(old: Tensor, new: Tensor) -> None:
        if old.dtype is not new.dtype:  # else a fake tensor that PyTorch has in a cache could not be swapped
            swap(old, new)  # type: ignore[no-untyped-call]

    def mm(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        return a @ b if isinstance(a, FakeTensor) and a.layout is torch.strided else product(a, b, *rest)

    with (
        mock.patch.object(torch, "tensor", tensor),
        mock.patch.object(torch, "sparse_coo_tensor", sparse_coo_tensor),
        mock.patch.object(torch.sparse, "mm", mm),
        mock.patch.object(torch.utils, "swap_tensors", swap_tensors),
        mock.patch.multiple(FakeTensor, coalesce=lambda dense: dense, _nnz=Tensor.numel, create=True),
        mock.patch.multiple(FakeTensor, __getitem__=_get_item, __setitem__=_set_item, create=True),
        mock.patch.object(torch._VF, "_pad_packed_sequence", _pad_packed_sequence, create=True),
        mock.patch.object(imported, "is_fake_tensor", lambda _: False, create=True),
    ):
        yield


@contextlib.contextmanager
def fake_operators(values: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Callable[..., Any]]:
    """Return a context with what runs operators on fake tensors, of which these have known values."""
    fakes = Fakes(values, lambda _tensor: "", all_hold=False)
    with traceable_functions(), fakes.readable():
        yield fakes.run


def _stacked(values: Any) -> Any:
    """Return a list or tuple of fake tensors as one; anything else as it is."""
    is_list = isinstance(values, list | tuple) and len(values) > 0
    return torch.stack(tuple(values)) if is_list and all(isinstance(value, FakeTensor) for value in values) else values


def _index(given: Any) -> Any:
    return tuple(map(_stacked, given)) if isinstance(given, tuple) else given


def _get_item(tensor: Tensor, index: Any) -> Tensor:
    return Tensor.__getitem__(tensor, _index(index))


def _set_item(tensor: Tensor, index: Any, values: Any) -> None:
    Tensor.__setitem__(tensor, _index(index), values)


def _pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    sizes: list[int] = batch_sizes.tolist()
    steps = torch.tensor([step for step, size in enumerate(sizes) for _ in range(size)])
    rows = torch.tensor([row for size in sizes for row in range(size)])
    padded = data.new_full((max(total_length, len(sizes)), sizes[0], *data.shape[1:]), padding_value)
    padded = padded.index_put((steps, rows), data)
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


class Fakes:
    """Runs operators on fake tensors.

    Args:
        values: fake tensors whose values are known, each with a real one. Shapes may depend on the positions of images.
        trained: returns the trained parameter in whose memory a real tensor lies; empty if there is none.
        all_hold: whether comparisons of assumed values hold, whatever these are.
    """

    def __init__(
        self, values: Iterable[tuple[Tensor, Tensor]], trained: Callable[[Tensor], str], *, all_hold: bool
    ) -> None:
        self._trained, self._all_hold = trained, all_hold
        self._recipes: Any = WeakIdKeyDictionary()  # by storage
        self._random: Any = WeakIdKeyDictionary()  # storages of random numbers between 0 and 1
        self.by_values: set[Any] = set()  # operators that needed values
        self.reader: str | None = None  # the first code that needed assumed values, in brackets
        for tensor, known in values:
            self._know(tensor, known)

    def _know(self, tensor: Tensor, values: Tensor) -> None:
        self._recipes[tensor.untyped_storage()] = _Recipe(values.clone, ((), {}), 0, Layout.in_storage(tensor))

    def run(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and return its result.

        Raises:
            DataDependentOutputException, DynamicOutputShapeException: the operator needs values that are not known.
            CaptureError: it reads a real tensor in the memory of a trained parameter, which no fake one follows.
        """
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor) and (owner := self._trained(leaf)):
                through = "a variable" if isinstance(leaf, torch.nn.Parameter) else "a tensor"
                raise CaptureError(
                    f"the memory of {owner} is read through {through} that is kept elsewhere (an attribute, a list, a "
                    "closure), which a plan would not update; read the parameter from its module in forward"
                )
        if _is_collective(function):
            self._forget_constants(args)
        try:
            output = _FAKES.get(function, function)(*args, **kwargs)
        except Exception as error:
            if isinstance(error, VALUES) and function in _INDEXING:
                if (places := self._mask_positions(*args[:2])) is not None:
                    return self.run(function, (args[0], places, *args[2:]), kwargs)
            elif not isinstance(error, VALUES + UNKNOWN) and (
                function.namespace == "aten" or not isinstance(error, RuntimeError)
            ):
                raise  # not because there is no fake kernel
            given = tree_map_only(Tensor, _any_numbers, args) if function in _SHAPED_BY_INTEGERS else args
            if (known := self._known((given, kwargs), assumes=True)) is None:
                raise
            self._note_reader(known)
            with _disable_current_modes():
                real = _computed(function, known)
            self.by_values.add(function)
            output = tree_map_only(Tensor, _fake_like, real)
            if function is aten._pack_padded_sequence.default:
                output = output[0], real[1]  # recurrent layers read the sizes of batches where no operator shows it
        self._record(function, args, kwargs, output)
        return output

    def logged(self, tensor: Tensor) -> float:
        """Return a number that a step reads: it may choose by one that is drawn. Others are for a log."""
        if (known := self._known(tensor)) is None:
            return 1.0
        with _disable_current_modes():
            return float(_computed(torch.clone, ((known,), {})))

    def _forget_constants(self, args: Sequence[Any]) -> None:
        """Forget the values of a collective's arguments: of constants alone, PyTorch would run it for real."""
        for leaf in tree_leaves(args):
            if isinstance(leaf, FakeTensor):
                leaf.constant = None
                self._forget(leaf)  # its schema does not say what it writes

    def _forget(self, tensor: Tensor) -> None:
        self._recipes.pop(tensor.untyped_storage(), None)
        self._random.pop(tensor.untyped_storage(), None)

    def _record(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> None:
        """Record how values are computed, if the arguments are known."""
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if function._schema.is_mutable:
            self._record_write(function, args, kwargs)
            return
        if any(leaf.layout is not torch.strided for leaf in results) or self._record_random(function, args, results):
            return
        if function is aten.lift_fresh.default and not isinstance(args[0], FakeTensor):  # torch.tensor(...)
            with _disable_current_modes():  # a copy: what recipes hold would count as memory
                self._know(results[0], args[0].clone())
            return
        if function.is_view and results and type(args[0]) is Tensor:  # a real one
            self._recipes.setdefault(results[0].untyped_storage(), self._recipe(args[0], assumes=False))
        if function.is_view or not results:
            return
        are_whole = not any(result.is_floating_point() or result.is_complex() for result in results)
        if (dimension := _CHOICES.get(function)) is not None:
            given = args[dimension] if len(args) > dimension else -1
            num_choices = (args[0].shape or (1,))[-1 if given is None else given]
            layout = Layout.in_storage(results[-1])
            chosen = _Recipe(_balanced_choices, ((layout.shape, num_choices), {}), 0, layout)
            self._recipes[results[-1].untyped_storage()] = chosen
        elif _has_values(function) and (known := self._known((args, kwargs), assumes=are_whole)) is not None:
            for number, result in enumerate(results):  # a result may be an argument
                layout = Layout.in_storage(result)
                recipe = _Recipe(function, known, number, layout)
                if self._all_hold and result.dtype is torch.bool and recipe.is_assumed:
                    recipe = _assumed(layout)
                self._recipes.setdefault(result.untyped_storage(), recipe)

    def _record_write(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Forget the values of tensors that an operator writes, or record how they change."""
        named = {a.name: value for a, value in zip(function._schema.arguments, args, strict=False)} | kwargs
        written = [a.name for a in function._schema.arguments if a.alias_info and a.alias_info.is_write]
        tensors = strided([named.get(name) for name in written])
        after = None
        if len(tensors) == 1 and args and tensors[0] is args[0] and _has_values(function):
            known = self._known((args, kwargs), assumes=_draws(function))
            after = None if known is None else _after(function, *known)
        for changed in tensors:
            self._forget(changed)
        if after is not None:
            self._recipes[tensors[0].untyped_storage()] = after

    def _record_random(self, function: Any, args: Sequence[Any], results: Sequence[Tensor]) -> bool:
        """Note random numbers between 0 and 1; record comparisons of them with 0, and return whether this was one."""
        if function is aten.rand.default:
            self._random[results[0].untyped_storage()] = True
        if function in _ABOVE_ZERO and args[1] == 0 and args[0].untyped_storage() in self._random:
            with _disable_current_modes():
                self._know(results[0], torch.full(args[0].shape, _ABOVE_ZERO[function]))
            return True
        return False

    def _mask_positions(self, tensor: Tensor, indices: Sequence[Tensor | None]) -> list[Tensor | None] | None:
        """Return a tensor's indices with masks replaced by the positions that they choose.

        ``None`` if there is no mask, or one is not known.
        """
        if not any(index is not None and index.dtype is torch.bool for index in indices):
            return None
        found: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool:
                found.append(index)
            elif (known := self._known(index, assumes=True)) is None:
                return None
            else:
                if index.shape != tensor.shape[len(found) : len(found) + index.dim()]:
                    raise IndexError(f"a mask {list(index.shape)} does not match the tensor {list(tensor.shape)}")
                self._note_reader(known)
                with _disable_current_modes():
                    chosen = known.layout.within(known.recipe.values).nonzero(as_tuple=True)
                for places in chosen:
                    found.append(fake := _fake_like(places))
                    with _disable_current_modes():
                        self._know(fake, places)
        return found

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Let functions of NumPy and SciPy, and texts, read the values of fake tensors.

        Afterwards no operator runs, and no values are known: what they come from has the memory of the model's weights,
        which is the session's from then on.
        """

        def numpy(tensor: Tensor, **_named: Any) -> Any:
            known = self._known(tensor.detach(), assumes=True)
            self._note_reader(known)
            with _disable_current_modes():
                return _computed(torch.clone, ((known,), {})).numpy()

        def in_text(tensor: Tensor, spec: str) -> str:
            return format(numpy(tensor).item() if tensor.dim() == 0 else repr(tensor), spec)

        try:
            with mock.patch.multiple(FakeTensor, numpy=numpy, __format__=in_text):
                yield
        finally:
            del self._recipes, self._trained

    def _note_reader(self, known: Any) -> None:
        if self.reader is None and _is_assumed(known):
            self.reader = users_line(traceback.extract_stack())

    def _known(self, arguments: Any, *, assumes: bool = False) -> Any:
        """Return arguments with tensors replaced by their known values; ``None`` if some are not known."""
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
        found = {id(leaf): self._recipe(leaf, assumes=assumes) for leaf in tensors}
        recipes = {number: recipe for number, recipe in found.items() if recipe is not None}
        if len(recipes) < len(found):
            return None
        return tree_map_only(Tensor, lambda leaf: _Known(recipes[id(leaf)], Layout.in_storage(leaf)), arguments)

    def _recipe(self, tensor: Tensor, *, assumes: bool) -> _Recipe | None:
        """Return how a tensor's values are computed; ``None`` if they are not known."""
        if tensor.layout is not torch.strided:
            return None
        storage, layout = tensor.untyped_storage(), Layout.in_storage(tensor)
        if not isinstance(tensor, FakeTensor):
            return _Recipe(_real_values, ((storage, layout.dtype), {}), 0, _all_of(storage, layout.dtype))
        found: _Recipe | None = self._recipes.get(storage)
        if found is not None and found.layout.dtype is layout.dtype:
            return found
        if not assumes:
            return None
        return _assumed(_all_of(storage, layout.dtype))


def _after(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> _Recipe:
    """Return the values of the first argument's whole storage after an operator has written to it."""
    target: _Known = args[0]
    whole = _row(target.layout.dtype, target.recipe.layout.room)

    def write(before: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        values = before.clone()
        _computed(function, ((target.layout.within(values), *args), kwargs))
        return values

    before = _assumed(whole) if _draws(function) else target.recipe
    return _Recipe(write, ((_Known(before, whole), *args[1:]), kwargs), 0, whole)


def _row(dtype: torch.dtype, num_values: int) -> Layout:
    return Layout(dtype, (num_values,), (1,))


def _all_of(storage: torch.UntypedStorage, dtype: torch.dtype) -> Layout:
    """Return the layout of all values in a storage."""
    return _row(dtype, storage.nbytes() // dtype.itemsize)


def _is_collective(function: Any) -> bool:
    """Return whether an operator exchanges values between ranks. One rank captures alone, so it must not run."""
    return function.namespace in {"c10d", "_c10d_functional", "_c10d_functional_autograd"}


def _has_values(function: Any) -> bool:
    """Return whether an operator can run on known values."""
    return not _is_collective(function) and "empty" not in function.overloadpacket.__name__


def _draws(function: Any) -> bool:
    """Return whether a function is an operator that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())


def _is_assumed(arguments: Any) -> bool:
    """Return whether some values among arguments are assumed, or computed from such."""
    return any(leaf.recipe.is_assumed for leaf in tree_leaves(arguments) if isinstance(leaf, _Known))


def _real_values(storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
    """Return all values in the storage of a real tensor."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).cpu()


def _assumed(layout: Layout) -> _Recipe:
    """Return a recipe of values that are assumed, the same ones each time."""
    return _Recipe(_assumed_values, ((layout,), {}), 0, layout)


def _assumed_values(layout: Layout) -> Tensor:
    """Return values that are assumed: numbers between 0.5 and 1.5, ``True``, or zeros of other integers."""
    if layout.dtype is torch.bool:
        return torch.ones(layout.shape, dtype=torch.bool)
    if not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        return torch.zeros(layout.shape, dtype=layout.dtype)
    return torch.rand(layout.shape, generator=torch.Generator().manual_seed(0)).add(0.5).to(layout.dtype)


def _fake_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _any_numbers(tensor: Tensor) -> Tensor:
    """Return real numbers of a tensor's shape if it has no integers; else itself."""
    if not tensor.is_floating_point():
        return tensor
    with _disable_current_modes():
        return torch.ones(tensor.shape, dtype=tensor.dtype)


def _balanced_choices(shape: tuple[int, ...], num_choices: int) -> Tensor:
    """Return choices of equal frequency in which neighbours differ."""
    return torch.arange(math.prod(shape)).remainder(num_choices).view(shape)


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *_rest: Any, **_named: Any) -> Tensor:
    """Fake the grouped product for all types that the real kernel takes. PyTorch's own fake takes only bf16."""
    return _create_grouped_mm_output_tensor(a, b, offs, None)  # type: ignore[no-any-return, no-untyped-call]


def _norm(function: Any, values: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, ...]:
    """Fake a norm whose weights have another type than its input, as under autocast: its statistics have theirs."""
    output, *statistics = function(values, *rest, **named)
    weight = next((one for one in (*rest, *named.values()) if isinstance(one, Tensor)), values)
    return output, *(one.to(weight.dtype) for one in statistics)


_NORMS = (aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default)
_FAKES: dict[Any, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    **{norm: functools.partial(_norm, norm) for norm in _NORMS},
}
_INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
# Operators whose shapes depend on the values of integers alone.
_SHAPED_BY_INTEGERS = frozenset({aten._pack_padded_sequence.default, aten._ctc_loss.default, aten._ctc_loss.Tensor})
# Comparisons with 0, and their results for a number above 0.
_ABOVE_ZERO = {aten.gt.Scalar: True, aten.ge.Scalar: True, aten.lt.Scalar: False, aten.le.Scalar: False}
# Operators whose last result is the chosen index along a dimension, and the position of that dimension's argument.
_CHOICES = {aten.topk.default: 2, aten.max.dim: 1, aten.argmax.default: 1}
