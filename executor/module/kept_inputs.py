"""What a segment is given: its second pass must be given the same, whatever has been changed in place since.

A block, those behind it, or the loop may change a tensor that a block is given: a position that each block advances, a
scale that the loop sets. Small tensors without gradients are copied before forward
(:mod:`executor.memory.forward_state`). A large one is copied if it was changed in place when the model was captured. If
another one changes, its old values are gone, and an error is raised before any weight changes.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from executor.memory.recompute_cache import modified_in_place


class KeptInputs:
    """The tensors among the arguments that checkpointing keeps of a call.

    Args:
        args, kwargs: these arguments, see :func:`with_copies`.
        copies: tensors that each pass may change.
        moved: tensors whose values are kept elsewhere.
    """

    def __init__(self, args: Any, kwargs: Any, copies: Iterable[torch.Tensor], moved: Collection[torch.Tensor]) -> None:
        copied, moving = {id(copy) for copy in copies}, {id(tensor) for tensor in moved}
        self._copies: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        for number, leaf in enumerate(tree_leaves((args, kwargs))):
            if id(leaf) in copied:
                self._copies[number] = leaf
            elif type(leaf) is torch.Tensor and not leaf.is_inference() and id(leaf) not in moving:
                self._versions[number] = leaf._version

    def given_again(self, args: Any, kwargs: Any, name: str) -> tuple[Any, Any]:
        """Return the arguments for another pass of the segment ``name``, given those that checkpointing has kept.

        Raises:
            ActivationError: one was changed in place, and its old values are gone.
        """
        leaves, structure = tree_flatten((args, kwargs))
        if any(leaves[number]._version != version for number, version in self._versions.items()):
            raise modified_in_place(f"an input of {name}")
        copies = {id(copy): copy.clone() for copy in self._copies.values()}  # there may be more passes
        for number, copy in self._copies.items():
            leaves[number] = copies[id(copy)]
        return tree_unflatten(leaves, structure)  # type: ignore[no-any-return]


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
