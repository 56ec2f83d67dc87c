"""Saves the outputs of matrix products in forward, and reuses them in the recomputation during backward.

[Note: Saved products] ``torch.utils.checkpoint`` recomputes a segment's forward before its backward, with the same
values and RNG state. Two dispatch modes intercept the operators of the two runs. The first mode saves the outputs of
matrix products and the segment's inputs, until the unit's ``OFFLOAD`` has copied them to the host and freed them. The
second mode runs after ``RELOAD`` has copied them back. Instead of running a product, it returns the saved output. All
other operators run again, on the same bits.
"""

import contextlib
import dataclasses
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from executor.devices.backend import Backend
from executor.distributed.products import grouped_product, summed_product_operator
from executor.distributed.ring_attention import attend_in_ring

# Products for which torch has no FLOP formula; this version of torch may lack some of them.
_UNCOUNTED: Final = ("_grouped_mm", "linalg_solve_triangular", "_scaled_dot_product_flash_attention_for_cpu")
_PRODUCTS: Final = (
    frozenset(flop_registry)
    | {getattr(torch.ops.aten, name) for name in _UNCOUNTED if hasattr(torch.ops.aten, name)}
    | {each._opoverload.overloadpacket for each in (grouped_product, summed_product_operator, attend_in_ring)}
)

_inside: Final = threading.local()


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    """Return a context in which this thread's products run again: they are not saved, nor replaced by saved outputs."""
    before = is_running_again()
    _inside.runs_again = True
    try:
        yield
    finally:
        _inside.runs_again = before


def is_running_again() -> bool:
    """Return whether this thread is inside :func:`running_again`."""
    return getattr(_inside, "runs_again", False)


class ActivationError(RuntimeError):
    """A model changes or uses activations in a way that offloading does not support."""


def modified_in_place(what: str) -> ActivationError:
    """Return the error for a tensor that was modified in place after its use, so that its saved value is wrong."""
    return ActivationError(
        f"{what} was changed in place after it had been used, which it was not when the model was captured; change a "
        "copy of it (x = x + y instead of x += y), or do in each forward what the example batch does"
    )


@dataclasses.dataclass(eq=False, slots=True)
class SavedTensor:
    """A tensor that is offloaded, and reloaded with the same shape, strides and bits.

    Attributes:
        tensor: the tensor on the device; ``None`` while it is offloaded.
        version: autograd's version counter when the tensor was saved.
        start: its offset in the unit's host memory; -1 if it is not offloaded.
    """

    tensor: torch.Tensor | None
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int = -1

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "SavedTensor":
        """Return a tensor to save. It is detached, because its history would keep the graph alive."""
        # Below autograd, a view shares the version counter only if this dispatch key is not excluded.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            tensor = tensor.detach()
        return cls(tensor, tensor._version, tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_unmodified(self) -> bool:
        """Whether it is on the device, and has not been modified in place."""
        return self.tensor is not None and self.tensor._version == self.version

    @property
    def is_dense(self) -> bool:
        """Whether it is one block of memory without gaps, for some order of its dimensions."""
        sizes = sorted((stride, size) for stride, size in zip(self.stride, self.shape, strict=True) if size != 1)
        inner = itertools.accumulate((size for _, size in sizes), operator.mul, initial=1)
        return all(stride == expected for (stride, _), expected in zip(sizes, inner, strict=False))

    def flat(self) -> torch.Tensor:
        """Return its values on the device, in memory order, uint8."""
        assert self.tensor is not None
        return self.tensor.as_strided((self.shape.numel(),), (1,)).view(torch.uint8)

    def restore(self, backend: Backend, *, keep: bool) -> torch.Tensor:
        """Return the tensor to the recomputation, and drop the reference, so that its memory is freed after use.

        To ``keep`` it for another recomputation, return a copy.
        """
        if self.tensor is None:
            raise ActivationError(
                "backward ran twice through one forward, whose activations have been freed or overwritten since; run "
                "forward before each backward"
            )
        if not self.is_unmodified:
            raise modified_in_place("the input of a segment")
        assert self.tensor is not None
        if keep:
            return self.tensor.clone()
        tensor, self.tensor = self.tensor, None
        backend.record_stream(tensor)
        return tensor


@dataclasses.dataclass(eq=False, slots=True)
class Product:
    """One product that ran in forward.

    Attributes:
        leaves, structure: its output, with a :class:`SavedTensor` in place of each floating-point tensor.
        random_state: the generator and its state after the product, if the product drew random numbers.
        is_offloaded: whether its output is offloaded. If not, the product runs again.
        is_changed: whether its output was changed in place after that.
    """

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    random_state: tuple[torch.Generator, torch.Tensor] | None
    is_offloaded: bool = False
    is_changed: bool = False

    @property
    def tensors(self) -> list[SavedTensor]:
        """Tensors that may be offloaded."""
        return [leaf for leaf in self.leaves if isinstance(leaf, SavedTensor)]

    @property
    def is_unmodified(self) -> bool:
        """Whether its output is on the device, as it was computed."""
        return not self.is_changed and all(tensor.is_unmodified for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of these tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class SegmentActivations:
    """The activations of one run of a segment's forward.

    Attributes:
        rooms: its units in forward order, each with the name of its memory on the host.
        micro_batch: which one ran.
        inputs: tensors that the segment was called with.
        products: in the order in which they ran.
        products_of: the same, by the unit that ran them.
        position: index in ``products`` of the next product of the recomputation.
        moved: units that were offloaded.
        away: those of them whose offloaded tensors are not on the device.
        is_dropped: whether the backward that was to use them has ended.
        in_forward: whether the forward still runs. A gradient that it takes inside recomputes what ran so far.
    """

    def __init__(self, rooms: Mapping[str, str], micro_batch: int = 0) -> None:
        self.rooms, self.micro_batch = rooms, micro_batch
        self.inputs: list[SavedTensor] = []
        self.products: list[Product] = []
        self.products_of: dict[str, list[Product]] = {name: [] for name in rooms}
        self.position = 0
        self.moved: set[str] = set()
        self.away: set[str] = set()
        self.is_dropped = False
        self.in_forward = True

    @property
    def is_kept(self) -> bool:
        """Whether another recomputation may follow the one that runs (as with ``retain_graph``, ``create_graph``)."""
        keeps_graph: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        return self.in_forward or keeps_graph

    def offloaded(self, unit: str) -> Iterator[SavedTensor]:
        """Yield a unit's offloaded tensors."""
        if unit == next(iter(self.products_of)):
            yield from (tensor for tensor in self.inputs if tensor.start >= 0)
        yield from (tensor for product in self.products_of[unit] if product.is_offloaded for tensor in product.tensors)

    def forget_changed(self, output: Any) -> None:
        """Let products run again whose outputs an operator has changed in place; ``output`` is what it returned.

        Their versions do not show this: in place of a product of three dimensions, ``nn.Linear`` returns a tensor that
        is no view for autograd, but has the same memory.
        """
        changed = {leaf.untyped_storage()._cdata for leaf in tree_leaves(output) if _is_floating(leaf)}
        for product in self.products:
            held = (saved.tensor for saved in product.tensors if saved.tensor is not None)
            if any(tensor.untyped_storage()._cdata in changed for tensor in held):
                product.is_changed = True

    def drop(self) -> None:
        """Free the tensors that were not restored. Offloaded ones can be brought back for another backward."""
        self.away |= self.moved
        self.is_dropped = True
        for product in self.products:
            for tensor in product.tensors:
                tensor.tensor = None
        for tensor in self.inputs:
            tensor.tensor = None


class Running(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets a function run operators. It gets what ``__torch_dispatch__`` gets."""

    def __init__(self, run: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._run(func, types, args, kwargs or {})


def saving_products(segment: SegmentActivations, unit: Callable[[], str]) -> Running:
    """Return a mode that saves the outputs of products during forward, but for those of a backward inside it."""
    graph_task = _graph_task()

    def run(func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _has_parts(types):
            return NotImplemented
        output = func(*args, **kwargs)
        if func._schema.is_mutable and segment.products:
            segment.forget_changed(output)
        if _is_product(func) and not is_running_again() and _graph_task() == graph_task:
            leaves, structure = tree_flatten(output)
            saved = [SavedTensor.of(leaf) if _is_floating(leaf) else leaf for leaf in leaves]
            product = Product(func, saved, structure, _random_state(func, leaves[0].device))
            segment.products.append(product)
            segment.products_of[unit()].append(product)
        return output

    return Running(run)


class ReuseProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns saved outputs during recomputation, instead of running the products."""

    def __init__(self, segment: SegmentActivations, backend: Backend, begin: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._segments = segment
        self._backend = backend
        self._begin = begin
        self._graph_task = -1

    def __enter__(self) -> Any:
        self._begin()
        self._segments.position = 0
        self._graph_task = _graph_task()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: object) -> None:
        """Free the tensors that the recomputation did not need; it ends when it has all that backward needs."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if not self._segments.is_kept:
            self._segments.drop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _has_parts(types):
            return NotImplemented
        if not _is_product(func) or is_running_again() or _graph_task() != self._graph_task:
            return func(*args, **(kwargs or {}))
        segment, position = self._segments, self._segments.position
        if position >= len(segment.products) or segment.products[position].function is not func:
            raise ActivationError(
                f"product {position} of the recomputed segment is {func}, but was another in forward; make its "
                "forward the same every time, or plan with its activations 'keep'"
            )
        product = segment.products[position]
        segment.position += 1
        if not product.is_offloaded:
            return func(*args, **(kwargs or {}))
        if product.random_state is not None:
            generator, state = product.random_state
            generator.set_state(state)
        keep = segment.is_kept
        restored = [
            leaf.restore(self._backend, keep=keep) if isinstance(leaf, SavedTensor) else leaf for leaf in product.leaves
        ]
        return tree_unflatten(restored, product.structure)


def _graph_task() -> int:
    """Return which backward runs in this thread; -1 if none does."""
    task: int = torch._C._current_graph_task_id()
    return task


def _has_parts(types: Any) -> bool:
    """Return whether a class of tensors runs other operators instead, on its parts, as those of ``torchao`` do."""
    return any(map(is_traceable_wrapper_subclass_type, types))


def _is_product(function: Any) -> bool:
    packet = function.overloadpacket
    # The operator of bitsandbytes exists only after bitsandbytes has been imported.
    return packet in _PRODUCTS or packet._qualified_op_name == "bitsandbytes::gemm_4bit"


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _random_state(function: Any, device: torch.device) -> tuple[torch.Generator, torch.Tensor] | None:
    """Return the device's generator and its state, if a function draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return generator, generator.get_state()
