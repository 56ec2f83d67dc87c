"""Find modules that compute every token independently and so can run in tiles.

A module is token-wise if, in a forward under fake tensors, it takes one tensor
``[..., width]``, returns one of the same shape, and dispatches only operators that cannot mix tokens: functions of
single values, products with a parameter, reductions over the last dimension, and views that keep the leading sizes.
Operators that draw random numbers are excluded, because recomputing a tile would draw other numbers. So are modules
that change a buffer or an attribute, which each tile would do again.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from executor.memory.forward_state import ForwardState, Snapshot
from executor.packed import stored_parameters
from ullage.capture.records import CaptureError, strided

_PRODUCTS: Final = {"mm", "addmm"}
_LAST_DIM: Final = {"mean", "sum", "var", "amax"}
_VIEWS: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "alias", "detach", "expand", "unsqueeze", "squeeze", "slice", "split"}
)
_COPIES: Final = {"clone", "_to_copy", "copy_", "empty_like", "zeros_like", "ones_like", "native_layer_norm"}


class TokenWise:
    """Tracks running modules, and which of them dispatch an operator that may mix tokens.

    A norm runs several operators and no product. An MLP is wider inside and is part of a block, so of one unit. A layer
    norm of ``torch.nn`` is one kernel and gains nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        blocks = {block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module}
        inside = {inner for block in blocks for inner in block.modules() if inner is not block}
        self._named = {path: m for path, m in model.named_modules() if m in inside or next(m.children(), None) is None}
        self._failed: set[str] = set()
        self._widths: dict[str, int] = {}  # width of the input of each module that has run
        self._products: defaultdict[str, list[int]] = defaultdict(list)  # widths of the results of their products
        self._num_operators: Counter[str] = Counter()
        self._running: dict[str, torch.Size] = {}  # leading sizes of the input of each running module
        self._before: dict[str, tuple[ForwardState, Snapshot]] = {}
        # Storages of weights, and of tensors made only from weights. They are held so that no address is reused.
        stored = [t for each in stored_parameters(model).values() for t in (*each.tensors(), *each.tables())]
        self._weights = {tensor.untyped_storage()._cdata: tensor for tensor in strided([*stored, *model.buffers()])}

    def found(self) -> list[str]:
        """Return the paths of norms and MLPs that are token-wise.

        Raises:
            CaptureError: no module is token-wise.
        """
        paths: list[str] = []
        covered: set[nn.Module] = set()
        for path, module in self._named.items():  # outer ones first
            if module not in covered and self._is_worth(path) and next(module.parameters(), None) is not None:
                paths.append(path)
                covered.update(module.modules())
        if not paths:
            raise CaptureError(
                "no norm or MLP of its layers computes every token independently, so layers cannot be computed in "
                "tiles; leave --tiles layer out"
            )
        return paths

    def _is_worth(self, path: str) -> bool:
        """Return whether a module has run, is token-wise, and is a norm or an MLP."""
        if path in self._failed or path not in self._widths:
            return False
        products = self._products[path]
        return max(products) > 1.5 * self._widths[path] if products else self._num_operators[path] > 1

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module's forward begins."""
        if path not in self._named:
            return
        state = ForwardState(module, path)
        self._before[path] = state, state.save()
        is_one = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if is_one and args[0].is_floating_point() and args[0].ndim <= 3:  # with four, heads would count as tokens
            self._running[path] = args[0].shape[:-1]
            self._widths[path] = args[0].shape[-1]
        else:
            self._failed.add(path)

    def leave(self, path: str, output: Any) -> None:
        """Note that a module's forward has ended."""
        if path not in self._named:
            return
        leading = self._running.pop(path, ())
        state, before = self._before.pop(path)
        keeps_shape = isinstance(output, Tensor) and output.shape == (*leading, self._widths.get(path))
        if state.has_changed(before) or not keeps_shape:
            self._failed.add(path)

    def see(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        """Record one operator."""
        name = func.overloadpacket.__name__
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if read and all(map(self._is_weight, read)):  # the operator transposes, converts or adds weights
            self._weights |= {tensor.untyped_storage()._cdata: tensor for tensor in made}
            return
        for path, leading in self._running.items():
            if name in _PRODUCTS:
                self._products[path].append(output.shape[-1])
            self._num_operators[path] += name not in _VIEWS
            if path not in self._failed and not self._keeps_tokens(func, args, read, made, leading):
                self._failed.add(path)

    def _keeps_tokens(
        self, func: Any, args: Sequence[Any], read: list[Tensor], made: list[Tensor], leading: Any
    ) -> bool:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        if not all(_begins(tensor.shape, leading) for tensor in made if tensor.numel()):
            return False
        if torch.Tag.pointwise in func.tags or name in _VIEWS | _COPIES:
            return all(_begins(tensor.shape, leading) or self._is_vector(tensor) for tensor in read)
        if name in _PRODUCTS:
            return self._is_weight(args[-1]) and _begins(args[-2].shape, leading)
        if name in _LAST_DIM and len(args) > 1 and isinstance(args[1], list | tuple):
            return [dim % args[0].ndim for dim in args[1]] == [args[0].ndim - 1]
        return False

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._weights

    def _is_vector(self, tensor: Tensor) -> bool:
        """Return whether a tensor has the same values for all tokens."""
        return tensor.ndim == 0 or (tensor.ndim == 1 and self._is_weight(tensor))


def _begins(shape: torch.Size, leading: torch.Size) -> bool:
    """Return whether a shape begins with the dimensions of tokens, which may be merged into one."""
    return shape[: len(leading)] == leading or (len(shape) > 0 and shape[0] == leading.numel())
