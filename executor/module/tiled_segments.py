"""Segments that tiles of sequences pass one after another, within one call of the model.

[Note: Tiled segments] A plan in breadth order ([Note: Breadth order] in :mod:`planner.lowering.compute`) calls the
model as any other does: once for each micro-batch. A segment's module cuts what it is given along the batch, runs once
for each tile, and puts its outputs together. So code between segments, and the loss, see the whole micro-batch, and no
user's loop changes. Autograd takes nodes in the reverse order of their creation, so backward goes through all nodes of
a tile before it begins with the tile before. It adds up the tiles' gradients of a parameter, and hands over their sum
once.

Tensors whose first dimension is that of the model's input are cut; whole numbers in one dimension are positions. If a
module mixes sequences (batch norm), or a tensor has that dimension by chance, the audit tells ([Note: Audit] in
:mod:`executor.audit.audit`): it compares with a run of the whole micro-batch.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from executor.callbacks import (
    ModuleCallbacks,
    forward_of,
    hook_outputs,
    in_backward,
    replace_attribute,
    tensors_of,
)
from executor.distributed.shards import BindingError
from executor.module.batches import named_inputs
from executor.module.caches import drop_caches, layer_number

_REMEDY = "plan without --tiles segment"


def tile_segments(
    model: nn.Module, tiled: Mapping[nn.Module, tuple[Sequence[str], int]], callbacks: ModuleCallbacks
) -> Iterator[Callable[[], None]]:
    """Let tiles pass segments one after another; yield functions that undo this.

    Args:
        model: the bound model.
        tiled: the modules of segments, each with the names of its units and the number of tiles.
        callbacks: report where the model is.
    """
    num_sequences = 0  # of the model's call that is under way; 0 where only a part of the model is called

    def begin(_model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        nonlocal num_sequences
        num_sequences = next((len(tensor) for _, tensor in named_inputs(args, kwargs) if tensor.dim()), 0)

    def end(*_: object) -> None:  # the call has ended, or failed
        nonlocal num_sequences
        num_sequences = 0

    yield model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True).remove
    yield model.register_forward_hook(end, always_call=True).remove
    paths = {module: path for path, module in model.named_modules()}
    for module, (names, num_tiles) in tiled.items():
        segment = TiledSegment(module, paths[module], names, num_tiles, callbacks, lambda: num_sequences)
        yield replace_attribute(module, "forward", segment.forward)


@final
class TiledSegment:
    """Runs a segment's module once for each tile; see [Note: Tiled segments]."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        names: Sequence[str],
        num_tiles: int,
        callbacks: ModuleCallbacks,
        num_sequences: Callable[[], int],
    ) -> None:
        self._run: Callable[..., Any] = forward_of(module)
        self._signature = inspect.signature(module.forward)
        self._path, self._num_tiles, self._num_sequences = path, num_tiles, num_sequences
        self._first, self._last, self._callbacks = names[0], names[-1], callbacks
        self._layer = layer_number(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output for the whole micro-batch.

        Raises:
            BindingError: arguments or outputs cannot be cut into tiles.
        """
        floats = (leaf for leaf in tensors_of((args, kwargs)) if leaf.is_floating_point() and leaf.dim())
        num_sequences = self._num_sequences() or next(map(len, floats), 0)
        if not torch.is_grad_enabled() or in_backward() or num_sequences == 1:
            return self._run(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        if drop_caches(bound.arguments, self._layer):
            raise BindingError(
                f"{self._path} is given keys and values of a prefix, which tiles cannot share; {_REMEDY}"
            )
        leaves, structure = tree_flatten((bound.args, bound.kwargs))
        cut = {n: leaf for n, leaf in enumerate(leaves) if _has_sequences(leaf, num_sequences)}
        if not any(tensor.is_floating_point() for tensor in cut.values()):
            raise BindingError(
                f"{self._path} is given nothing whose first dimension is that of the {num_sequences} sequences of the "
                f"batch, so tiles of them cannot pass it; {_REMEDY}"
            )
        num_tiles = min(self._num_tiles, num_sequences)
        tiles = {n: torch.tensor_split(tensor, num_tiles) for n, tensor in cut.items()}
        found = []
        try:
            for tile in range(num_tiles):
                given = [tiles[n][tile] if n in tiles else leaf for n, leaf in enumerate(leaves)]
                found.append(self._pass(tile, *tree_unflatten(given, structure)))
                del given
        finally:
            self._callbacks.on_tile(0)
        sizes = [len(part) for part in next(iter(tiles.values()))]
        del leaves, cut, tiles, bound, args, kwargs
        return self._joined(found, sizes)

    def _pass(self, tile: int, args: Any, kwargs: Any) -> Any:
        callbacks, last = self._callbacks, self._last

        def reached() -> None:
            callbacks.on_tile(tile)
            callbacks.on_backward(last)

        callbacks.on_tile(tile)
        callbacks.on_forward(self._first)
        output = self._run(*args, **kwargs)
        hook_outputs(output, reached)
        return output

    def _joined(self, outputs: list[Any], sizes: list[int]) -> Any:
        """Return the outputs of all tiles, which have so many sequences, as one."""
        flat = [tree_flatten(output) for output in outputs]
        outputs.clear()
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return tree_unflatten([self._one(column, sizes) for column in columns], flat[0][1])

    def _one(self, column: tuple[Any, ...], sizes: list[int]) -> Any:
        first = column[0]
        if not isinstance(first, torch.Tensor):
            return first
        if not first.dim() or [len(tensor) for tensor in column] != sizes:
            raise BindingError(
                f"{self._path} returns a tensor of shape {list(first.shape)} for {sizes[0]} sequences, which tells "
                f"nothing about each of them, so tiles cannot be put together; {_REMEDY}"
            )
        return torch.cat(column)


def _has_sequences(leaf: Any, num_sequences: int) -> bool:
    """Return whether a tensor among a module's arguments has a row for each sequence."""
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, nn.Parameter) or leaf.shape[:1] != (num_sequences,):
        return False
    return leaf.dim() > 1 or leaf.is_floating_point()
