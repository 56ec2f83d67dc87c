"""Equal blocks are recorded once: of a list of equal blocks the first two run, and the last; others are copies.

[Note: Copies] Two blocks count as equal if they have the same classes, shapes and attributes, and are called with equal
arguments. That leaves out what a block makes of its own number while it runs; ``transformers`` reads that number when a
block is made, or to find an entry of a list in its configuration, which is compared. The second block is the one that
is copied: the first may do what later ones use too, and the last is followed by something else. A copy runs nothing.
It hands on tensors like those of the block, and in backward gradients like theirs. So every count is that of the block:
a copy takes no memory, and the block's own share is found as if there were no others.

What runs between two blocks must be the same after every copy as after the block, and read no weights. Where it is not,
or the block turns out to be no segment, all blocks are recorded.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_FEWEST: Final = 4  # equal blocks of which some are worth leaving out
_NUMBER: Final = re.compile(r"idx|index|layer")  # in names of attributes that hold a block's own number
_SIMPLE: Final = (int, float, str, bool, type(None), torch.dtype)


class UnequalError(Exception):
    """Blocks that looked equal are not, or cannot be distinguished: all of them have to be recorded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A block that was not recorded.

    Attributes:
        path: the block's own.
        of: path of the block that it is like.
        after: path of the block that was called before it.
        first: forward event before which it was called.
        stop: that before which the next block was.
    """

    path: str
    of: str
    after: str
    first: int
    stop: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """The argument of a call with this number."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """What a block returned: for each leaf the argument that it is, what a tensor is like, or a value."""

    call: Any
    leaves: tuple[Any, ...]
    structure: Any


class Repeats:
    """Decides which calls of blocks are copied, and copies them.

    Attributes:
        copies: in the order of their calls.
        begins: forward events before which blocks were called, copied ones or not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: list[Copy] = []
        self.begins: list[int] = []
        self._kinds: dict[nn.Module, Any] = {}
        self._runs: dict[nn.Module, bool] = {}  # of all members of lists with equal blocks: whether it runs in any case
        owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
        for members in _lists(model):
            self._join([(member, _kind(member, number, len(members), owners)) for number, member in enumerate(members)])
        self._paths = {module: path for path, module in model.named_modules() if module in self._runs}
        self._made: dict[Any, _Made] = {}
        self._second: dict[Any, str] = {}
        self._before = ""

    def _join(self, members: list[tuple[nn.Module, Any]]) -> None:
        """Record which members of a list are copied: of each kind all but two, and never the list's last."""
        count = Counter(kind for _, kind in members)
        seen: Counter[Any] = Counter()
        first, last = members[0][0], members[-1][0]
        for member, kind in members:
            seen[kind] += 1
            self._runs[member] = kind is None or count[kind] < _FEWEST or seen[kind] <= 2 or member is last
            if kind is not None:
                self._kinds[member] = (id(first), kind)

    @property
    def members(self) -> Iterator[nn.Module]:
        """All blocks of lists in which some are equal."""
        return iter(self._runs)

    def begin(self, module: nn.Module, args: Any, kwargs: Any, position: int) -> bool:
        """Record that a module is called, before which forward event; return whether it is copied."""
        if module not in self._runs:
            return False
        self.begins.append(position)
        if self.copies and self.copies[-1].stop < 0:
            self.copies[-1] = dataclasses.replace(self.copies[-1], stop=position)
        path, kind = self._paths[module], self._kinds.get(module)
        before, self._before = self._before, path
        made = self._made.get(kind)
        if self._runs[module] or made is None or made.call != _call(args, kwargs):
            return False
        self.copies.append(Copy(path, self._second[kind], before, position))
        return True

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record what a block returned, if it ran."""
        kind = self._kinds.get(module)
        if kind is None or not self._runs[module]:
            return
        self._second[kind] = self._paths[module]
        given = tree_flatten((args, kwargs))[0]
        leaves, structure = tree_flatten(output)

        def described(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return next((_Given(number) for number, other in enumerate(given) if other is leaf), _Like.of(leaf))

        self._made[kind] = _Made(_call(args, kwargs), tuple(map(described, leaves)), structure)

    def copy(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the outputs of a copied block."""
        made = self._made[self._kinds[module]]
        given = tree_flatten((args, kwargs))[0]
        likes = [leaf for leaf in made.leaves if isinstance(leaf, _Like)]
        sources = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
        new = iter(_Copied.apply(likes, *sources) if likes else ())  # type: ignore[no-untyped-call]

        def handed_on(leaf: Any) -> Any:
            if isinstance(leaf, _Like):
                return next(new)
            return given[leaf.number] if isinstance(leaf, _Given) else leaf

        return tree_unflatten([handed_on(leaf) for leaf in made.leaves], made.structure)


@dataclasses.dataclass(frozen=True, slots=True)
class _Like:
    """Shape, strides and type of a tensor to make."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "_Like":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, likes: list[_Like], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.sources = [_Like.of(source) for source in sources]
        made = tuple(like.make() for like in likes)
        ctx.mark_non_differentiable(*(t for t, like in zip(made, likes, strict=True) if not like.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients with the strides of those that arrived, if the shape is the same."""
        strides = {tuple(gradient.shape): gradient.stride() for gradient in gradients if gradient is not None}
        likes = (dataclasses.replace(like, strides=strides.get(like.shape, like.strides)) for like in ctx.sources)
        return None, *(like.make() for like in likes)


def _call(args: Any, kwargs: Any) -> Any:
    """Return a key of a call: tensors by type and shape, which of them are the same, and plain values."""
    leaves, structure = tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    found: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            found.append((_Like.of(leaf), first.setdefault(id(leaf), number)))
        else:
            found.append(leaf if isinstance(leaf, _SIMPLE) else type(leaf))
    return str(structure), tuple(found)


def _lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost lists of modules with modules inside them, of which enough have one class and size."""
    children = list(model.children())
    if isinstance(model, nn.ModuleList | nn.Sequential):
        inner = [child for child in children if next(child.children(), None) is not None]
        sizes = Counter((type(child), sum(p.numel() for p in child.parameters())) for child in inner)
        if max(sizes.values(), default=0) >= _FEWEST and len(inner) == len(children):
            yield children
            return
    for child in children:
        yield from _lists(child)


def _kind(block: nn.Module, number: int, num_blocks: int, owners: Counter[int]) -> Any:
    """Return what equal blocks have in common; ``None`` if a block is like no other.

    The block's own number is replaced by what it selects in lists with one entry for each block.
    """
    found: list[Any] = []
    for path, module in block.named_modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        if "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            return None  # watched by somebody
        if any(owners[id(parameter)] > 1 for parameter in module._parameters.values() if parameter is not None):
            return None
        plain = sorted(
            (name, value)
            for name, value in own.items()
            if isinstance(value, _SIMPLE) and not (value == number and _NUMBER.search(name))
        )
        tensors = [
            (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        ]
        entries = [_entries(value, number, num_blocks) for value in own.values() if hasattr(value, "model_type")]
        found.append((path, type(module), repr(plain), tuple(tensors), repr(entries)))
    return tuple(found)


def _entries(config: Any, number: int, num_blocks: int) -> Sequence[Any]:
    """Return what a configuration has for a block, in lists of its attributes."""
    lists = sorted((name, value) for name, value in vars(config).items() if isinstance(value, list | tuple))
    return [(name, value[number]) for name, value in lists if len(value) == num_blocks]
