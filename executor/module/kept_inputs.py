"""What a segment is given: its second pass must be given the same, whatever has been changed in place since.

A block, those behind it, or the loop may change a tensor that a block is given: a position that each block advances, a
scale that the loop sets. Small tensors without gradients are copied before forward
(:mod:`executor.memory.forward_state`). A large one is copied if it was changed in place when the model was captured. If
another one changes, its old values are gone, and an error is raised before any weight changes.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from executor.memory.recompute_cache import modified_in_place


def giving_again(
    name: str, args: Any, kwargs: Any, copies: Iterable[torch.Tensor], moved: Collection[torch.Tensor]
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a function that returns arguments for another pass, given those that checkpointing has kept of a call.

    It raises ActivationError if one was changed in place, and its old values are gone.

    Args:
        name: of the segment.
        args: what checkpointing keeps, see :func:`with_copies`.
        kwargs: likewise.
        copies: tensors among these that each pass may change.
        moved: tensors whose values are kept elsewhere.
    """
    copied, moving = {id(copy) for copy in copies}, {id(tensor) for tensor in moved}
    own_copies: dict[int, torch.Tensor] = {}
    versions: dict[int, int] = {}
    for number, leaf in enumerate(tree_leaves((args, kwargs))):
        if id(leaf) in copied:
            own_copies[number] = leaf
        elif type(leaf) is torch.Tensor and not leaf.is_inference() and id(leaf) not in moving:
            versions[number] = leaf._version

    def given_again(args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, structure = tree_flatten((args, kwargs))
        if any(leaves[number]._version != version for number, version in versions.items()):
            raise modified_in_place(f"an input of {name}")
        copies = {id(copy): copy.clone() for copy in own_copies.values()}  # there may be more passes
        for number, copy in own_copies.items():
            leaves[number] = copies[id(copy)]
        return tree_unflatten(leaves, structure)  # type: ignore[no-any-return]

    return given_again


def with_copies(
    args: Any, kwargs: Any, positions: Collection[int], copies: Mapping[int, torch.Tensor]
) -> tuple[Any, Any]:
    """Return arguments with copies: these, by ``id`` of what they copy, and others at some positions."""
    leaves, structure = tree_flatten((args, kwargs))
    for number, leaf in enumerate(leaves):
        if id(leaf) in copies:
            leaves[number] = copies[id(leaf)]
        elif number in positions and isinstance(leaf, torch.Tensor):
            leaves[number] = leaf.clone()
    return tree_unflatten(leaves, structure)  # type: ignore[no-any-return]
