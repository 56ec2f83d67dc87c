"""The parts of a recording: calls of modules, operators, storages, and the tensors that autograd saves."""

import dataclasses
import functools
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException, UnsupportedOperatorException
from torch.func import debug_unwrap

from executor.callbacks import tensors_of
from planner.models.captured import CapturedInput
from planner.models.kernels import Kernels

DTYPES: Final[dict[Literal["bf16", "fp32"], torch.dtype]] = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The types of weights that can be planned, by name."""


OF_STEP: Final = "the step's loss: "
"""How the description of a loss begins that is not the model's own."""


class LongLoopError(BaseException):
    """A recording has more events than a model without loops over tokens has; see :mod:`planner.models.loops`.

    It is no ``Exception``: the model's code may handle those.
    """


Block = tuple[str, int]
"""Path of a module, and the call of the model in which it runs."""


@dataclasses.dataclass(slots=True)
class Visit:
    """One call of a module's forward. Those inside it follow it in a recording, without others between them.

    Attributes:
        parent: index of the calling visit; -1 for the model, and for what else the user's step calls.
        first, stop: range of forward events.
        last: index of the last visit inside it; its own if there is none.
        input_bytes: bytes of inputs with a gradient, which must be kept for recomputation.
        inputs: storages of inputs with a gradient; if there are none, the storage of the first input.
        given: storages of all strided tensors among its arguments, with their positions among the leaves of
            ``(args, kwargs)``.
        state_bytes: bytes of buffers that must be copied for recomputation.
        call: the call of the model that it belongs to, from 1 on. What the user's step calls is another call as soon as
            a module runs again.
        evaluates: whether it is without gradients.
    """

    path: str
    module: nn.Module
    parent: int
    first: int
    call: int
    evaluates: bool
    input_bytes: int
    inputs: frozenset[int]
    given: tuple[tuple[int, int], ...]
    last: int = -1
    stop: int = -1
    state_bytes: int = 0

    @property
    def block(self) -> "Block":
        """The module, and the call in which it runs."""
        return self.path, self.call


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One dispatched operator.

    Attributes:
        visit: index of the visit that ran it; in backward, the visit whose gradient it computes.
        source: index of its forward event; in backward, the event whose autograd node runs.
        kernels: its kernels; empty for views and bookkeeping.
        storages: numbers of the storages that it wrote.
        output_bytes: bytes of its first result.
        product_bytes: bytes of all floating results, if it is a product.
        parameters: names of the parameters that it read.
        changes: whether it changes these storages in place.
    """

    visit: int
    source: int
    kernels: Kernels
    storages: tuple[int, ...]
    output_bytes: int
    product_bytes: int
    parameters: tuple[str, ...]
    changes: bool = False


@dataclasses.dataclass(slots=True)
class Storage:
    """One allocated storage.

    Attributes:
        born, died: first and last event at which it exists; -1 if it exists before the first event.
        owner: ``parameter``, ``buffer``, ``input``, ``gradient`` (of a parameter), or empty.
    """

    num_bytes: int
    born: int
    died: int | None = None
    owner: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Save:
    """A tensor that autograd saves for backward.

    Attributes:
        position: number of forward events before it was saved.
    """

    storage: int
    position: int
    visit: int


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A block that was not recorded.

    Attributes:
        path: path of the block.
        of: path of the equal block that was recorded.
        after: path of the block that was called before it.
        first: forward event before which the block was called.
        stop: forward event before which the next block was called.
    """

    path: str
    of: str
    after: str
    first: int
    stop: int = -1


@dataclasses.dataclass
class Recording:
    """A recorded forward and backward.

    Attributes:
        is_step: whether a step of the user's loop runs, which may call the model and its parts any number of times.
        num_values: for every input of table indices, the length of the table; ``None`` for other inputs.
        visits: calls of modules, in order.
        forward, backward: events; backward events are numbered from ``len(forward)``.
        loss: description of the loss.
        gradients: numbers of the storages of parameters' gradients at the end, by name.
        sums: for every sum in backward, the storages of its terms.
        unpriced: forward's operators without a known cost, each with the path of the module that ran it first.
        reader: the first line of code that needed values, which were assumed, in brackets; ``None`` if none did.
        backward_inside: visits whose forward runs a backward, which would begin a recomputation.
        copies: blocks that were not recorded, because they equal recorded ones.
        begins: forward events before which blocks of lists with copies were called, in order.
        arrivals: visits whose outputs backward reached, in order, with the number of backward events until then.
        tiled: paths of modules that compute in tiles.
        called_with: what the first call of a module was called with.
        second_order: whether a backward that makes a graph of its own reached a visit's output.
        unfollowed: whether hooks on modules do not see where a step reads weights: transforms of ``torch.func`` run the
            model, or code outside of modules reads weights.
        written: trained parameters that forward writes to.
        as_buffers: frozen ones, which count as buffers; see [Note: Written weights] in :mod:`planner.setup`.
        of_written: forward events that read or write these.
        compiled: whether a function that ``torch.compile`` has compiled calls modules, or gets parameters.
    """

    model: nn.Module
    is_step: bool
    num_values: list[int | None]
    visits: list[Visit] = dataclasses.field(default_factory=list)
    forward: list[Event] = dataclasses.field(default_factory=list)
    backward: list[Event] = dataclasses.field(default_factory=list)
    storages: list[Storage] = dataclasses.field(default_factory=list)
    saves: list[Save] = dataclasses.field(default_factory=list)
    loss: str = ""
    gradients: dict[str, int] = dataclasses.field(default_factory=dict)
    sums: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    arrivals: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unpriced: dict[str, str] = dataclasses.field(default_factory=dict)
    reader: str | None = None
    backward_inside: set[int] = dataclasses.field(default_factory=set)
    copies: list[Copy] = dataclasses.field(default_factory=list)
    begins: list[int] = dataclasses.field(default_factory=list)
    tiled: frozenset[str] = frozenset()
    called_with: tuple[CapturedInput, ...] = ()
    second_order: bool = False
    unfollowed: bool = False
    written: set[str] = dataclasses.field(default_factory=set)
    as_buffers: set[str] = dataclasses.field(default_factory=set)
    of_written: set[int] = dataclasses.field(default_factory=set)
    compiled: bool = False

    @property
    def rewrites(self) -> set[str]:
        """All parameters that forward writes to."""
        return self.written | self.as_buffers

    @functools.cached_property
    def skipped(self) -> frozenset[int]:
        """Forward events that ran in place of copied blocks, or between a copied block and the next block."""
        return frozenset(index for copy in self.copies for index in range(copy.first, copy.stop))

    @functools.cached_property
    def changed(self) -> dict[int, int]:
        """For each storage that forward changes in place, the last event that does."""
        return {number: index for index, event in enumerate(self.forward) if event.changes for number in event.storages}

    @functools.cached_property
    def visit_of(self) -> dict[Block, Visit]:
        """The visit of each module in each call; the last one where there are several."""
        return {visit.block: visit for visit in self.visits}

    @property
    def calls(self) -> tuple[str, ...] | None:
        """Paths of the modules that the user's step calls; ``None`` if that is the model alone, once."""
        paths = tuple(visit.path for visit in self.visits if visit.parent < 0)
        return None if paths == ("",) else paths

    @functools.cached_property
    def parameters(self) -> tuple[str, ...]:
        """The parameters outside of copied blocks that do not count as buffers."""
        copied = tuple(f"{copy.path}." for copy in self.copies)
        names = (name for name, _ in self.model.named_parameters() if name not in self.as_buffers)
        return tuple(name for name in names if not name.startswith(copied))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Type and shape of a tensor, and where its values are in its storage."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout of a tensor in a storage of its own."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @classmethod
    def in_storage(cls, tensor: Tensor) -> "Layout":
        """Return the layout of a tensor in its storage."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    @property
    def room(self) -> int:
        """Number of values of a storage that ends with the tensor."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return max(self.offset + 1 + last, 0)

    def within(self, values: Tensor) -> Tensor:
        """Return the tensor with this layout in a storage of ``values``."""
        return values.as_strided(self.shape, self.strides, self.offset)

    def make(self) -> Tensor:
        """Return a tensor of this shape and type, without values."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


def strided(value: Any) -> list[Tensor]:
    """Return the tensors among values; those that hold its parts in place of a sparse one."""
    # Inside torch.vmap, tensors are wrapped.
    found = [debug_unwrap(each) if is_functorch_wrapped_tensor(each) else each for each in tensors_of(value)]
    if all(leaf.layout is torch.strided for leaf in found):
        return found
    parts = ([getattr(leaf, name)() for name in _PARTS.get(leaf.layout, ())] or [leaf] for leaf in found)
    return [part for each in parts for part in each]


_PARTS: Final = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
}


UNKNOWN: Final = (UnsupportedOperatorException, UnsupportedFakeTensorException)
"""Errors of PyTorch where it has no fake kernel for an operator."""


class CaptureError(ValueError):
    """A model cannot be captured; the message contains the remedy.

    Attributes:
        assumed: whether it does not run with the values that were assumed of its tensors.
    """

    assumed = False


def remedy(error: Exception, *, has_model: bool, is_step: bool = False) -> str:
    """Return what to do if a model, or the function that makes it, fails."""
    if any(word in str(error) for word in ("NestedTensor", "nested_tensor", "shape_env")):  # depends on the layout
        return "compute on padded tensors with lengths or a mask, because nested ones have no shapes to plan for"
    if isinstance(error, UNKNOWN):
        return (
            "PyTorch does not know the shapes that this operator makes: register a fake implementation "
            "(torch.library.register_fake)"
        )
    if not has_model:
        return (
            "it runs for a model without memory: give device='cpu' for tensors whose values it reads, do not load "
            "weights, and do not move the model"
        )
    if is_step:
        return (
            "make it run with this batch first, or leave step= out and give prepare() what the model is called with: "
            "then this step leaves the plan, which is slower"
        )
    return "make it run with these inputs first"


def first_line(error: Exception) -> str:
    """Return an error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
