"""Parameters of modules with others inside: backward reads them where no hook of a module may be.

A module that computes by itself returns what its weights make, and a hook on that says that backward has reached its
unit. A module with others inside, as the model itself, uses weights of its own between these. What it makes of them it
may keep for the loss alone: then backward reads a weight before any hook says so. So while its unit computes, such a
parameter has the class :class:`Watched`, which hooks the nodes that have saved its memory. Most have not: a sum has no
use for what it has added.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from executor.callbacks import is_within, report_before, saved_as_is
from executor.module.guarded_parameters import REACHED, Computing, unguarded
from executor.module.own_checkpoints import saved_tensors_hooks_of

_Reached = Callable[[], Callable[[bool], None] | None]


class Watched(torch.Tensor):
    """A parameter whose unit computes, or a view of it."""

    data = Computing.data

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, and hook what backward will read weights for."""
        begun = torch._C._autograd._get_sequence_nr()
        with unguarded():
            result = func(*args, **(kwargs or {}))
            if torch._C._autograd._get_sequence_nr() == begun:
                return result
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Watched)]
            for made in tree_leaves(result):
                if isinstance(made, torch.Tensor) and (node := made.grad_fn) is not None:
                    _watch(made, node, given, begun)
        return result


def watch(parameter: torch.Tensor, reached: _Reached) -> None:
    """Let a parameter report that backward reads it, once its class is :class:`Watched`.

    Args:
        parameter: of a module with others inside.
        reached: called in forward where it is read. Returns what is called in backward before that reads it, with
            whether it may not read it, as a checkpoint has what it saves; ``None`` if nothing is.
    """
    vars(parameter)[REACHED] = reached


def _watch(made: torch.Tensor, node: Any, given: Iterable[torch.Tensor], begun: int) -> None:
    for weights in given:
        if made._is_view() and is_within(weights, made) and type(made) is torch.Tensor:
            made.__class__ = Watched
            watch(made, vars(weights)[REACHED])
            continue
        saved = (one.data for inner in _made_since(node, begun) for one in saved_as_is(inner))
        may_not = saved_tensors_hooks_of() == "checkpoint"
        reads = may_not or any(is_within(weights, values) for values in saved)
        if reads and (reached := vars(weights)[REACHED]()) is not None:
            report_before(node, functools.partial(reached, may_not))


def _made_since(node: Any, begun: int) -> Iterator[Any]:
    """Yield the nodes behind one that have been made since a number, and itself if it was."""
    end = torch._C._autograd._get_sequence_nr()  # nodes that accumulate gradients have a larger number
    left = [node]
    while left:
        if begun <= (inner := left.pop())._sequence_nr() < end:
            yield inner
            left += [after for after, _ in inner.next_functions if after is not None]
