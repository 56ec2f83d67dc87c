"""Activations that leave the device between forward and backward, and what they come back for.

[Note: Kept products] ``torch.utils.checkpoint`` runs a segment's forward again before its backward, on the values and
random numbers of the first time. Two dispatch modes see the operators of the two runs. In the first the outputs of
products are kept, together with what the segment was given, until the unit's ``OFFLOAD`` has copied them to the host:
then the device has them no more. In the second, when ``RELOAD`` has brought them back, what a product would make is
taken from them and the product does not run. All else does, on the same bits.

[Note: Room] A unit has exactly the room that the plan counts. What a model's products make beyond that (a device whose
attention is not fused hands on all scores) stays, and is made again: the least of it that makes the rest fit, and the
latest of equals, as recomputation may not reach it. So the bits do not depend on it, but how long backward takes does.
"""

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from executor.backend import Backend
from executor.marks import Marks
from executor.memory import Arena
from planner.decisions import Decisions
from planner.graph import Unit
from planner.lowering.activations import OffloadRooms
from planner.schedule import Lane, MemoryClass

# torch counts the FLOP of all products but these.
_PRODUCTS: Final = frozenset(flop_registry) | {
    torch.ops.aten._grouped_mm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
}


_CHANGED: Final = (
    "{} was changed in place after it had been used; write the model without that, or plan with activations 'keep'"
)


class ActivationError(RuntimeError):
    """A model does with its activations what offloading cannot follow."""


@dataclasses.dataclass(eq=False, slots=True)
class _Leaving:
    """A tensor that leaves the device and comes back, of the same shape, strides and bits.

    Attributes:
        tensor: on the device; ``None`` while it is elsewhere.
        version: autograd's count of changes when it was made.
        start: where it is in its unit's room; -1 if it stays.
    """

    tensor: torch.Tensor | None
    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    start: int = -1

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Leaving":
        """Return what is to leave, without its history, which would keep the graph."""
        # Beneath autograd a view shares the count of changes only if it is made with this key.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            tensor = tensor.detach()
        return cls(tensor, tensor._version, tensor.shape, tensor.stride(), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_as_made(self) -> bool:
        """Whether it has not been changed in place."""
        return self.tensor is not None and self.tensor._version == self.version

    @property
    def is_dense(self) -> bool:
        """Whether it is one block of memory without gaps, in some order of its dimensions."""
        sizes = sorted((stride, size) for stride, size in zip(self.stride, self.shape, strict=True) if size != 1)
        inner = itertools.accumulate((size for _, size in sizes), operator.mul, initial=1)
        return all(stride == expected for (stride, _), expected in zip(sizes, inner, strict=False))

    def flat(self) -> torch.Tensor:
        """Return its values on the device, in the order of memory, uint8."""
        assert self.tensor is not None
        return self.tensor.as_strided((self.shape.numel(),), (1,)).view(torch.uint8)

    def take(self, backend: Backend) -> torch.Tensor:
        """Give it up to whoever computes with it now."""
        if self.tensor is None:
            raise ActivationError("backward went through one forward twice, whose activations are gone")
        if not self.is_as_made:
            raise ActivationError(_CHANGED.format("the input of a segment"))
        tensor, self.tensor = self.tensor, None
        backend.used(tensor)
        return tensor


@dataclasses.dataclass(eq=False, slots=True)
class _Product:
    """One product that ran in forward.

    Attributes:
        leaves, structure: its output, with a :class:`_Leaving` in the place of every floating tensor.
        random_state: of the generator behind it, if it drew random numbers.
        leaves_device: whether its output is moved; it is made again otherwise.
    """

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    random_state: tuple[torch.Generator, torch.Tensor] | None
    leaves_device: bool = False

    @property
    def tensors(self) -> list[_Leaving]:
        """What may leave."""
        return [leaf for leaf in self.leaves if isinstance(leaf, _Leaving)]

    @property
    def num_bytes(self) -> int:
        """Bytes of that."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class _Visit:
    """One run of a segment's forward, until its backward has begun.

    Attributes:
        given: tensors that the segment was given.
        products: in the order in which they ran.
        made: the same by the unit that ran them.
        position: in ``products``, of the next one that would run again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.given: list[_Leaving] = []
        self.products: list[_Product] = []
        self.made: dict[str, list[_Product]] = {name: [] for name in names}
        self.position = 0

    def moved(self, unit: str) -> Iterator[_Leaving]:
        """Yield what leaves with a unit."""
        if unit == next(iter(self.made)):
            yield from (tensor for tensor in self.given if tensor.start >= 0)
        yield from (tensor for product in self.made[unit] if product.leaves_device for tensor in product.tensors)

    def forget(self) -> None:
        """Give up what nobody has taken."""
        for product in self.products:
            for tensor in product.tensors:
                tensor.tensor = None
        for tensor in self.given:
            tensor.tensor = None


@final
class OffloadedActivations:
    """Everything of the model's activations that leaves.

    Args:
        units: in forward order.
        decisions: which of them offload.
        host: where their rooms are taken.
        backend: the device.

    Raises:
        DeviceMemoryError: the host has too little.
    """

    def __init__(self, units: tuple[Unit, ...], decisions: Decisions, host: Arena, backend: Backend) -> None:
        self._backend = backend
        rooms = OffloadRooms(units, decisions)
        self._room = {
            name: host.take(f"{name} activations", MemoryClass.ACTIVATIONS, num_bytes, torch.uint8)
            for name, num_bytes in rooms.on_host.items()
        }
        self._visit: dict[str, _Visit] = {}  # the latest, by unit

    def begin(self, names: Sequence[str]) -> _Visit:
        """Begin the forward of a segment with these units."""
        visit = _Visit(names)
        self._visit |= dict.fromkeys(names, visit)
        return visit

    def leave(self, unit: str) -> None:
        """Copy to the host what a unit has made, and wait until the device has it no more.

        Raises:
            ActivationError: a tensor was changed while it left.
        """
        visit, room = self._visit[unit], self._room[unit]
        _assign(visit, unit, len(room))
        leaving = list(visit.moved(unit))
        for tensor in leaving:
            self._backend.copy(room[tensor.start : tensor.start + tensor.num_bytes], tensor.flat())
        # Memory is free for the next segment when this task ends, and not when the host gets to know of that.
        self._backend.seconds(self._backend.mark(Lane.ACTIVATION_OUT))
        if not all(tensor.is_as_made for tensor in leaving):
            raise ActivationError(_CHANGED.format(f"what {unit} was given or made"))
        for tensor in (*leaving, *(t for product in visit.made[unit] for t in product.tensors)):
            tensor.tensor = None

    def come_back(self, unit: str) -> None:
        """Bring back to the device what has left with a unit, into memory that goes when it has been used."""
        room = self._room[unit]
        for tensor in self._visit[unit].moved(unit):
            flat = self._backend.scratch(tensor.shape.numel(), tensor.dtype)
            self._backend.copy(flat.view(torch.uint8), room[tensor.start : tensor.start + tensor.num_bytes])
            tensor.tensor = flat.as_strided(tensor.shape, tensor.stride)
            tensor.version = tensor.tensor._version

    def forget(self, unit: str) -> None:
        """Give up what came back for a unit's segment and was not used."""
        self._visit[unit].forget()

    def forget_all(self) -> None:
        """Give up everything, as backward has ended: also of segments where nothing needed a gradient."""
        for visit in self._visit.values():
            visit.forget()
        self._visit.clear()


def _assign(visit: _Visit, unit: str, room_bytes: int) -> None:
    """Say what of a unit leaves, and where to; see [Note: Room]."""
    end = 0
    for tensor in visit.given if unit == next(iter(visit.made)) else ():
        if tensor.is_dense and end + tensor.num_bytes <= room_bytes:  # else it stays: nothing can make it again
            tensor.start = end
            end += tensor.num_bytes
    chosen = [p for p in visit.made[unit] if all(tensor.is_as_made and tensor.is_dense for tensor in p.tensors)]
    while (excess := sum(product.num_bytes for product in chosen) - (room_bytes - end)) > 0:
        enough = [product for product in reversed(chosen) if product.num_bytes >= excess]
        chosen.remove(
            min(enough, key=lambda product: product.num_bytes)
            if enough
            else max(reversed(chosen), key=lambda product: product.num_bytes)
        )
    for product in chosen:
        product.leaves_device = True
        for tensor in product.tensors:
            tensor.start = end
            end += tensor.num_bytes


class SegmentOffload:
    """What :func:`torch.utils.checkpoint.checkpoint` needs to offload one segment.

    Args:
        activations: of the model.
        names: of the segment's units, in forward order.
        marks: knows which unit computes, and wants to know when the segment is about to run again, before anything
            that came back is used.
    """

    def __init__(self, activations: OffloadedActivations, names: Sequence[str], marks: Marks) -> None:
        self._activations = activations
        self._names = names
        self._marks = marks

    @contextlib.contextmanager
    def forward(self, args: Sequence[Any]) -> Iterator[Callable[[], tuple[TorchDispatchMode, TorchDispatchMode]]]:
        """Enter a forward with these arguments: yields what makes the modes of both runs."""
        visit, backend = self._activations.begin(self._names), self._activations._backend
        given = iter([arg.requires_grad for arg in args if isinstance(arg, torch.Tensor)])

        def pack(tensor: torch.Tensor) -> _Leaving | torch.Tensor:
            if not next(given, False):
                return tensor  # a mask, positions: of all segments, or without a gradient
            visit.given.append(_Leaving.of(tensor))
            return visit.given[-1]

        def unpack(kept: _Leaving | torch.Tensor) -> torch.Tensor:
            self._run_again()
            if isinstance(kept, torch.Tensor):
                return kept
            return kept.take(backend)

        def modes() -> tuple[TorchDispatchMode, TorchDispatchMode]:
            return _Keeping(visit, self._unit), _Taking(visit, backend, self._run_again)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield modes

    def _run_again(self) -> None:
        self._marks.at_forward(self._names[0])

    def made_again(self) -> None:
        """Give up what the segment's second run did not need."""
        self._activations.forget(self._names[0])

    def _unit(self) -> str:
        """Return the unit of the segment that computes; what comes before the first belongs to that."""
        unit = self._marks.unit
        return unit if unit in self._names else self._names[0]


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what products make."""

    def __init__(self, visit: _Visit, unit: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._visit = visit
        self._unit = unit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            leaves, structure = tree_flatten(output)
            kept = [_Leaving.of(leaf) if _is_floating(leaf) else leaf for leaf in leaves]
            product = _Product(func, kept, structure, _random_state(func, leaves[0].device))
            self._visit.products.append(product)
            self._visit.made[self._unit()].append(product)
        return output


class _Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes what has come back where a product would make it."""

    def __init__(self, visit: _Visit, backend: Backend, begin: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._visit = visit
        self._backend = backend
        self._begin = begin

    def __enter__(self) -> Any:
        self._begin()
        self._visit.position = 0
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket not in _PRODUCTS:
            return func(*args, **(kwargs or {}))
        visit, position = self._visit, self._visit.position
        if position >= len(visit.products) or visit.products[position].function is not func:
            raise ActivationError(
                f"product {position} of the segment that is made again is {func}, and was not so in forward; make its "
                "forward the same every time, or plan with its activations 'keep'"
            )
        product = visit.products[position]
        visit.position += 1
        if not product.leaves_device:
            return func(*args, **(kwargs or {}))
        if product.random_state is not None:
            generator, state = product.random_state
            generator.set_state(state)
        leaves = [leaf.take(self._backend) if isinstance(leaf, _Leaving) else leaf for leaf in product.leaves]
        return tree_unflatten(leaves, product.structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _random_state(function: Any, device: torch.device) -> tuple[torch.Generator, torch.Tensor] | None:
    """Return the device's generator and its state, if a function draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return generator, generator.get_state()
