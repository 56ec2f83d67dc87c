"""Optimizer state on its way between the forms in which it is kept, saved, and given to users.

On the way, each value of a parameter has each state's value beside it: a scale is repeated for all values of its block.
So shards, rows and whole parameters are cut and joined as values are. At the end, blocks are made again. If a block has
several scales then, because its values come from several blocks (of tensor-parallel shards), it is quantized anew.
"""

from collections.abc import Iterable, Mapping

import torch

from executor.optimizer.blocks import SCALES, VALUES, Table, encode, spread
from executor.optimizer.passes import BLOCK

State = Mapping[str, torch.Tensor]


def by_value(state: State) -> dict[str, torch.Tensor]:
    """Return a parameter's state with scales as those of each value; they may be so already."""
    found = dict(state)
    for key, scales_key in SCALES.items():
        scales = found.get(scales_key)
        if scales is not None and scales.shape != found[key].shape:
            found[scales_key] = spread(scales, found[key].numel()).view(found[key].shape)
    return found


def converted(state: State, keys: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return state with these keys.

    Args:
        state: by value, flat, from the beginning of a block on if there are to be scales.
        keys: with those of scales if moments are to be codes. All others stay as they are.

    Returns:
        Scales by block; moments that were codes and are no more are float32.
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
    return torch.from_numpy(table)[codes.int()].mul_(scales)


def _blocks(values: torch.Tensor, scales: torch.Tensor | None, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, and scales by block, of codes with these scales; or of values, without."""
    if scales is not None:
        first = scales[::BLOCK].clone()
        if torch.equal(spread(first, len(values)).view(torch.int32), scales.contiguous().view(torch.int32)):
            return values.to(torch.uint8), first
        values = _values(values, scales, table)
    codes, made = torch.empty(len(values), dtype=torch.uint8), torch.empty(-(-len(values) // BLOCK))
    encode(values.to(torch.float32, copy=True), codes, made, table)
    return codes, made
