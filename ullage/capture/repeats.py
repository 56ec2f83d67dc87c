"""Record equal blocks once: in a list of equal blocks the first two and the last run, and the others are copies.

Two blocks count as equal if they have the same classes, shapes and attributes, and are called with equal arguments.
This ignores uses of a block's own number while it runs. ``transformers`` reads that number only when it makes a block,
or to find an entry of a list in its configuration; these entries are compared. Copies are of the second block, because
the first block may compute values that later blocks use, and other code follows the last block. A copy runs nothing, so
blocks whose forward sets attributes are not copied. It returns tensors like those of the block, and in backward
gradients like those of the block. So a copy takes no memory, and every count is that of one block.

Code between two blocks must be the same after every copy as after the block, and must not read weights. If it differs,
or if the block is not a segment, all blocks are recorded.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from executor.memory.forward_state import ForwardState, Snapshot
from ullage.capture.records import Copy, Layout

_FEWEST: Final = 4  # minimum number of equal blocks for copies
_NUMBER: Final = re.compile(r"idx|index|layer")  # names of attributes with a block's own number
_SIMPLE: Final = (int, float, str, bool, type(None), torch.dtype)


class UnequalError(BaseException):
    """Blocks that were assumed to be equal are not, or cannot be distinguished, so all blocks must be recorded.

    It is no ``Exception``: the model's code may handle those.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class _Like:
    """Stands for a tensor: the argument of a call with this number, or one to make."""

    layout: Layout
    requires_grad: bool
    number: int | None

    @classmethod
    def of(cls, tensor: Tensor, number: int | None = None) -> "_Like":
        return cls(Layout.of(tensor), tensor.requires_grad, number)


class Repeats:
    """Decides which blocks are copies, and returns their outputs.

    Attributes:
        copies: copies in the order of their calls.
        begins: forward events before which blocks were called, including copies.
        most_events: forward events that may be recorded; ``None`` for any number.
        runs: all blocks of lists with equal blocks, and whether each must run.
    """

    def __init__(self, model: nn.Module, most_events: int | None = None) -> None:
        self.most_events = most_events
        self.copies: list[Copy] = []
        self.begins: list[int] = []
        self._kinds: dict[nn.Module, Any] = {}
        self.runs: dict[nn.Module, bool] = {}
        owners = Counter(id(parameter) for module in model.modules() for parameter in module._parameters.values())
        for members in _lists(model):
            self._join([(member, _kind(member, number, len(members), owners)) for number, member in enumerate(members)])
        self._paths = {module: path for path, module in model.named_modules() if module in self.runs}
        # By kind, the path of a block, how it was called, and its output with a `_Like` in place of each tensor.
        self._made: dict[Any, tuple[str, Any, Any]] = {}
        self._before = ""
        self._state: dict[nn.Module, tuple[ForwardState, Snapshot]] = {}  # of blocks that are running

    def _join(self, members: list[tuple[nn.Module, Any]]) -> None:
        """Choose the copies of a list: of each kind all but the first two, and never the last block of the list."""
        count = Counter(kind for _, kind in members)
        seen: Counter[Any] = Counter()
        first, last = members[0][0], members[-1][0]
        for member, kind in members:
            seen[kind] += 1
            self.runs[member] = kind is None or count[kind] < _FEWEST or seen[kind] <= 2 or member is last
            if kind is not None:
                self._kinds[member] = (id(first), kind)

    def begin(self, module: nn.Module, args: Any, kwargs: Any, position: int) -> bool:
        """Record the call of a module before forward event ``position``; return whether it is a copy."""
        if module not in self.runs:
            return False
        self.begins.append(position)
        if self.copies and self.copies[-1].stop < 0:
            self.copies[-1] = dataclasses.replace(self.copies[-1], stop=position)
        path, kind = self._paths[module], self._kinds.get(module)
        before, self._before = self._before, path
        like, call, _ = self._made.get(kind, ("", None, None))
        if kind is not None and self.runs[module]:
            state = ForwardState(module, path)
            self._state[module] = state, state.save()
        if self.runs[module] or not like or call != _call(args, kwargs):
            return False
        self.copies.append(Copy(path, like, before, position))
        return True

    def end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record the output of a block that ran."""
        kind = self._kinds.get(module)
        if kind is None or not self.runs[module]:
            return
        state, before = self._state.pop(module)
        if state.has_set_attributes(before):
            return
        given = tree_leaves((args, kwargs))

        def like(tensor: Tensor) -> _Like:
            return _Like.of(tensor, next((number for number, leaf in enumerate(given) if leaf is tensor), None))

        self._made[kind] = self._paths[module], _call(args, kwargs), tree_map_only(Tensor, like, output)

    def copy(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the output of a copy.

        Raises:
            UnequalError: a transform of ``torch.func`` runs it, which needs operators.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UnequalError(self._paths[module])
        (_, _, output), given = self._made[self._kinds[module]], tree_leaves((args, kwargs))
        likes = [leaf for leaf in tree_leaves(output) if isinstance(leaf, _Like) and leaf.number is None]
        sources = [leaf for leaf in given if isinstance(leaf, Tensor) and leaf.requires_grad]
        new = iter(_Copied.apply(likes, *sources) if likes else ())  # type: ignore[no-untyped-call]
        return tree_map_only(_Like, lambda like: next(new) if like.number is None else given[like.number], output)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, likes: list[_Like], *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.sources = list(map(Layout.of, sources))
        made = tuple(like.layout.make() for like in likes)
        ctx.mark_non_differentiable(*(t for t, like in zip(made, likes, strict=True) if not like.requires_grad))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return gradients with the strides of the incoming gradients, if the shapes are equal."""
        strides = {tuple(gradient.shape): gradient.stride() for gradient in gradients if gradient is not None}
        layouts = (dataclasses.replace(each, strides=strides.get(each.shape, each.strides)) for each in ctx.sources)
        return None, *(layout.make() for layout in layouts)


def _call(args: Any, kwargs: Any) -> Any:
    """Return a description of a call: types and shapes of tensors, identity of tensors, and plain values."""
    leaves, structure = tree_flatten((args, kwargs))
    first: dict[int, int] = {}
    found: list[Any] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found.append((_Like.of(leaf), first.setdefault(id(leaf), number)))
        else:
            is_sparse = isinstance(leaf, Tensor)  # each is another
            found.append(leaf if is_sparse or isinstance(leaf, _SIMPLE) else type(leaf))
    return str(structure), tuple(found)


def _lists(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the outermost lists of composite modules in which enough modules have the same class and size."""
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
    """Return a key that is equal for equal blocks; ``None`` if a block cannot be compared.

    The block's own number is left out. Lists in the configuration with one entry per block count by their entry.
    """
    found: list[Any] = []
    for path, module in block.named_modules():
        own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        if "forward" in own or module._forward_hooks or module._forward_pre_hooks:
            return None  # the block has hooks of others
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
    """Return the entries for a block in the lists of a configuration."""
    lists = sorted((name, value) for name, value in vars(config).items() if isinstance(value, list | tuple))
    return [(name, value[number]) for name, value in lists if len(value) == num_blocks]
