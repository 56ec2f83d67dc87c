"""What products of a forward make, kept until the same forward runs again in backward.

[Note: Kept products] ``torch.utils.checkpoint`` runs a segment's forward again before its backward, on the values and
random numbers of the first time. Two dispatch modes see the operators of the two runs. In the first the outputs of
products are kept, together with what the segment was given, until the unit's ``OFFLOAD`` has copied them to the host:
then the device has them no more. In the second, when ``RELOAD`` has brought them back, what a product would make is
taken from them and the product does not run. All else does, on the same bits.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from executor.devices.backend import Backend
from executor.distributed.products import grouped_product, summed_product_operator

# torch counts the FLOP of all products but these, of which not every version has all, and ours.
_UNCOUNTED: Final = ("_grouped_mm", "linalg_solve_triangular", "_scaled_dot_product_flash_attention_for_cpu")
_PRODUCTS: Final = (
    frozenset(flop_registry)
    | {getattr(torch.ops.aten, name) for name in _UNCOUNTED if hasattr(torch.ops.aten, name)}
    | {product._opoverload.overloadpacket for product in (grouped_product, summed_product_operator)}
)


class ActivationError(RuntimeError):
    """A model does with its activations what offloading cannot follow."""


def changed(what: str) -> ActivationError:
    """Return the error for what was changed in place and would come back otherwise than it was used."""
    return ActivationError(
        f"{what} was changed in place after it had been used; write the model without that, or plan with activations "
        "'keep'"
    )


@dataclasses.dataclass(eq=False, slots=True)
class Leaving:
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
    def of(cls, tensor: torch.Tensor) -> "Leaving":
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
            raise changed("the input of a segment")
        tensor, self.tensor = self.tensor, None
        backend.used(tensor)
        return tensor


@dataclasses.dataclass(eq=False, slots=True)
class Product:
    """One product that ran in forward.

    Attributes:
        leaves, structure: its output, with a :class:`Leaving` in the place of every floating tensor.
        random_state: of the generator behind it, if it drew random numbers.
        leaves_device: whether its output is moved; it is made again otherwise.
    """

    function: Any
    leaves: list[Any]
    structure: TreeSpec
    random_state: tuple[torch.Generator, torch.Tensor] | None
    leaves_device: bool = False

    @property
    def tensors(self) -> list[Leaving]:
        """What may leave."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Leaving)]

    @property
    def num_bytes(self) -> int:
        """Bytes of that."""
        return sum(tensor.num_bytes for tensor in self.tensors)


class Visit:
    """One run of a segment's forward, until its backward has begun.

    Attributes:
        given: tensors that the segment was given.
        products: in the order in which they ran.
        made: the same by the unit that ran them.
        position: in ``products``, of the next one that would run again.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.given: list[Leaving] = []
        self.products: list[Product] = []
        self.made: dict[str, list[Product]] = {name: [] for name in names}
        self.position = 0

    def moved(self, unit: str) -> Iterator[Leaving]:
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


class Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what products make."""

    def __init__(self, visit: Visit, unit: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._visit = visit
        self._unit = unit

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            leaves, structure = tree_flatten(output)
            kept = [Leaving.of(leaf) if _is_floating(leaf) else leaf for leaf in leaves]
            product = Product(func, kept, structure, _random_state(func, leaves[0].device))
            self._visit.products.append(product)
            self._visit.made[self._unit()].append(product)
        return output


class Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes what has come back where a product would make it."""

    def __init__(self, visit: Visit, backend: Backend, begin: Callable[[], None]) -> None:
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
        leaves = [leaf.take(self._backend) if isinstance(leaf, Leaving) else leaf for leaf in product.leaves]
        return tree_unflatten(leaves, product.structure)


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _random_state(function: Any, device: torch.device) -> tuple[torch.Generator, torch.Tensor] | None:
    """Return the device's generator and its state, if a function draws random numbers."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    return generator, generator.get_state()
