"""Check that real kernels accept the arguments that fake kernels accepted, by a trial of each operator.

Fake kernels check shapes, but not all types: they accept a product of integers and bf16 numbers. So each operator is
called once with real tensors like the fake ones, which takes milliseconds. If it raises an error here, training would
have failed.

Large operators are tried on small tensors. Sizes above 16 become the smallest numbers that keep their order, their
equality, and their remainders by 16, because some kernels need alignment. An operator may have further rules for its
sizes. Then the fake kernel refuses the small sizes, or the real kernel refuses them with all types. In this case
nothing is known about the operator, and it is assumed to run.
"""

import contextlib
import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ullage.capture.records import CaptureError, Layout

_MOST_VALUES = 2**16  # values of arguments and results up to which an operator is tried at its own sizes
_GRAIN = 16
_LARGEST_SIZE = 2**48  # larger integers are marks such as "to the end"
_OTHER, _MOST_OTHERS = (torch.float32, torch.int64, torch.bool), 1024
_PUTS = frozenset({torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default})
_NARROW = frozenset({torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})


def _shrunk(layout: Layout, sizes: dict[int, int]) -> Layout:
    """Return a layout with other sizes. Strides keep their order and alignment; contiguous stays contiguous."""
    shape = tuple(sizes.get(size, size) for size in layout.shape)
    strides, room = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (layout.strides[dim], -dim)):
        if layout.strides[dim]:
            strides[dim] = room + (layout.strides[dim] - room) % _GRAIN
            room = strides[dim] * max(shape[dim], 1)
    return Layout(layout.dtype, shape, tuple(strides))


def check_operator(
    function: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any, *, as_on_gpu: bool, tried: set[Any]
) -> None:
    """Check that a real kernel accepts a call that the fake kernel accepted. Call it under the fake tensor mode.

    Args:
        function: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        output: what the fake kernel returned.
        as_on_gpu: a GPU will run the operators; it has kernels for bf16 and fp16 that a CPU lacks.
        tried: calls that were tried, to which this one is added; equal calls are tried once.

    Raises:
        CaptureError: the real kernel refuses the call.
    """
    if function in _PUTS and any(index is not None and index.dtype is torch.bool for index in args[1]):
        return  # the number of values depends on the values of the mask
    if as_on_gpu and function.overloadpacket is torch.ops.aten._scaled_mm:
        _check_narrow(args[0].shape, args[1].shape)
    leaves, spec = tree_flatten((args, kwargs))
    if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in leaves):
        return  # a sparse one cannot be made anew from its sizes
    likes = [Layout.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    key = (function, str(spec), *((type(like), like) for like in likes))
    if key in tried:
        return
    tried.add(key)
    call = _Call(function, spec, likes)
    written = sum(leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    if sum(math.prod(like.shape) for like in call.layouts()) + written > _MOST_VALUES:
        small = call.shrunk()
        refusal = small.refusal() if small.is_possible() else None
        if refusal is not None and all(other.refusal() for other in small.of_other_types()):
            return
    else:
        refusal = call.refusal()
    is_narrow = any(like.dtype in _NARROW for like in call.layouts())
    if refusal is None or (as_on_gpu and _lacks_kernel(refusal) and is_narrow):
        return
    reason = next(iter(str(refusal).strip().splitlines()), type(refusal).__name__)
    raise CaptureError(
        f"{call} does not run: {reason}; give its operands types that it takes "
        "(--input-shape SHAPE:TYPE for an input, .to(...) in the module)"
    )


def _check_narrow(one: torch.Size, other: torch.Size) -> None:
    """Check the sizes of a product in fp8 on a GPU; CPUs have no such rule."""
    if any(size % _GRAIN for size in (one[1], *other)):
        raise CaptureError(
            f"a product in fp8 of {list(one)} and {list(other)} does not run on a GPU, which needs multiples of "
            f"{_GRAIN}; leave the layer out with module_filter_fn, or give it such sizes and numbers of tokens"
        )


def _lacks_kernel(refusal: Exception) -> bool:
    # torch 2.11 has no kernel on the CPU for one scale a row, and says so by an assertion.
    return isinstance(refusal, NotImplementedError) or "for CPU backend" in str(refusal)


@dataclasses.dataclass(frozen=True)
class _Call:
    function: Any
    spec: Any
    leaves: list[Any]  # with a `Layout` for each tensor

    def layouts(self) -> "Iterator[Layout]":
        return (leaf for leaf in self.leaves if isinstance(leaf, Layout))

    def shrunk(self) -> "_Call":
        """Return the call with small sizes, also for integers among its arguments."""
        found = {size for like in self.layouts() for size in like.shape}
        found |= {leaf for leaf in self.leaves if type(leaf) is int}
        large = sorted(size for size in found if _GRAIN < size < _LARGEST_SIZE)
        sizes = {size: _GRAIN * number + size % _GRAIN for number, size in enumerate(large, 1)}
        leaves = [
            _shrunk(leaf, sizes) if isinstance(leaf, Layout) else sizes.get(leaf, leaf) if type(leaf) is int else leaf
            for leaf in self.leaves
        ]
        return dataclasses.replace(self, leaves=leaves)

    def of_other_types(self) -> "Iterator[_Call]":
        """Yield the call with the type of one tensor changed at a time."""
        choices = [{leaf.dtype, *_OTHER} if isinstance(leaf, Layout) else {None} for leaf in self.leaves]
        for dtypes in itertools.islice(itertools.product(*choices), _MOST_OTHERS):
            pairs = zip(self.leaves, dtypes, strict=True)
            leaves = [dataclasses.replace(leaf, dtype=dtype) if dtype else leaf for leaf, dtype in pairs]
            yield dataclasses.replace(self, leaves=leaves)

    def is_possible(self) -> bool:
        """Return whether fake kernels accept the call."""
        with contextlib.suppress(Exception):  # whatever an operator raises
            self._run(0)
            return True
        return False

    def refusal(self) -> Exception | None:
        """Return the error of real kernels, or ``None``. Two values are tried, because some values are refused.

        It has no traceback, which would keep recorded tensors alive.
        """
        with _disable_current_modes(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._run(0)
            except Exception as error:  # noqa: BLE001
                try:
                    self._run(1)
                except Exception:  # noqa: BLE001
                    return error.with_traceback(None)
        return None

    def _run(self, value: int) -> None:
        made = [
            leaf.within(torch.full((leaf.room,), value, dtype=leaf.dtype))
            if isinstance(leaf, Layout)
            else leaf.clone_state()  # the user's own generator stays where it is
            if isinstance(leaf, torch.Generator)
            else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(made, self.spec)
        self.function(*args, **kwargs)

    def __str__(self) -> str:
        operands = (f"{str(like.dtype).removeprefix('torch.')}{list(like.shape)}" for like in self.layouts())
        return f"{self.function.overloadpacket}({', '.join(operands)})"
