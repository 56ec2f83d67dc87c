"""Moves optimizer state between the formats of memory, of checkpoints and of users.

Moments in 8 bits are codes, with one scale per block of values (:mod:`executor.optimizer.blocks`). Shards and rows of a
parameter may begin or end inside a block. So before state is cut or joined, each scale is repeated for all values of
its block: state is then *by value*, and all its tensors are cut in the same places. Afterwards, blocks are made again.
If the values of a new block come from several old blocks, their scales may differ. Such moments are converted to
float32 and quantized again.
"""

from collections.abc import Iterable, Mapping

import torch

from executor.optimizer.blocks import SCALES, VALUES, Table, encode, spread
from executor.optimizer.passes import BLOCK

State = Mapping[str, torch.Tensor]


def by_value(state: State) -> dict[str, torch.Tensor]:
    """Return a parameter's state by value. It may be so already."""
    found = dict(state)
    for key, scales_key in SCALES.items():
        scales = found.get(scales_key)
        if scales is not None and scales.shape != found[key].shape:
            found[scales_key] = spread(scales, found[key].numel()).view(found[key].shape)
    return found


def converted(state: State, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return state with moments as codes or as float32 values.

    Args:
        state: flat tensors, by value. If moments are to be codes, the first value is the first of a block.
        keys: the wanted keys. A moment becomes codes if the key of its scales is among them, and float32 otherwise.

    Returns:
        Codes with scales by block, or float32 moments. Moments that had no scales and get none keep their type, and so
        do tensors that are no moments.
    """
    found = dict(state)
    keys = frozenset(keys)
    for key, scales_key in SCALES.items():
        if key not in state:
            continue
        values, scales = state[key], found.pop(scales_key, None)
        if scales_key in keys:
            found[key], found[scales_key] = _blocks(values, scales, VALUES[key])
        elif scales is not None:
            found[key] = _values(values, scales, VALUES[key])
    return found


def _values(codes: torch.Tensor, scales: torch.Tensor, table: Table) -> torch.Tensor:
    """Return the float32 values of codes, with a scale for each."""
    return torch.from_numpy(table)[codes.int()].mul_(scales)


def _blocks(values: torch.Tensor, scales: torch.Tensor | None, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales by block.

    Args:
        values: codes, or float values if there are no ``scales``.
        scales: of each code.
        table: what each code stands for.
    """
    if scales is not None:
        first = scales[::BLOCK].clone()
        if torch.equal(spread(first, len(values)).view(torch.int32), scales.contiguous().view(torch.int32)):
            return values.to(torch.uint8), first
        values = _values(values, scales, table)
    codes, made = (
        torch.empty(len(values), dtype=torch.uint8, device="cpu"),
        torch.empty(-(-len(values) // BLOCK), device="cpu"),
    )
    encode(values.to(torch.float32, copy=True), codes, made, table)
    return codes, made
