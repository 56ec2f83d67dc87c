"""Values in 8 bits, with one scale for each block of them, as ``bitsandbytes`` keeps optimizer state.

The format is that of ``bitsandbytes.functional.create_dynamic_map`` (Dettmers, *8-Bit Approximations for Parallelism in
Deep Learning*, arXiv:1511.04561): a code stands for one of 256 values between -1 and 1, which lie closer together near
0. The scale of a block is its largest magnitude, and what is kept is ``values[code] * scale``. A value that is not
finite makes its whole block NaN. Where blocks begin, [Note: Blocks] in :mod:`planner.optimizers` says.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from executor.optimizer.adamw import MOMENTS
from executor.optimizer.passes import BLOCK

Table = npt.NDArray[np.float32]

LEAST_SCALE: Final = np.float32(1e-38)
"""Smaller scales are kept, but not divided by: one over them could be infinite."""


def _dynamic(*, signed: bool) -> Table:
    """Return the 256 values in order: means of intervals that divide seven decades, 0 and 1."""
    found = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float32)
        means = 10 ** (decade - 6) * ((ends[:-1] + ends[1:]) / 2)
        found += means.tolist() + ((-means).tolist() if signed else [])
    return np.sort(np.array(found, np.float32))


SIGNED: Final = _dynamic(signed=True)
"""The values of codes of first moments, ascending, float32 ``[256]``."""

UNSIGNED: Final = _dynamic(signed=False)
"""The values of codes of second moments, likewise."""

VALUES: Final[Mapping[str, Table]] = dict(zip(MOMENTS, (SIGNED, UNSIGNED), strict=True))
"""By the key of codes in a parameter's state."""

SCALES: Final[Mapping[str, str]] = {key: f"{key}_scale" for key in MOMENTS}
"""The key of scales, by that of their codes."""


def borders(values: Table) -> Table:
    """Return what lies between the values of neighbouring codes; a border itself has the lower code."""
    return (values[:-1] + values[1:]) / np.float32(2)


def decoded(codes: torch.Tensor, scales: torch.Tensor, values: Table) -> torch.Tensor:
    """Return float32 values, ``[num_values]``, of codes of any type and scales ``[blocks]``."""
    found = torch.from_numpy(values).to(codes.device)[codes.int()]
    for rows, of_rows in _rows(found, scales):
        rows.mul_(of_rows)
    return found


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, table: Table) -> None:
    """Quantize values to the nearest.

    Args:
        values: float32, ``[num_values]``, from the beginning of a block on; overwritten.
        codes: where codes go, ``[num_values]``, of any type.
        scales: where scales go, float32 ``[blocks]``.
        table: the values of codes.
    """
    for rows, of_rows in _rows(values, scales):
        torch.amax(rows.abs(), 1, keepdim=True, out=of_rows)
        rows.mul_(of_rows.clamp_min(float(LEAST_SCALE)).reciprocal_())
    codes.copy_(torch.bucketize(values, torch.from_numpy(borders(table)).to(values.device), out_int32=True))


def spread(scales: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return scales ``[blocks]`` as those of each value, ``[num_values]``."""
    return scales.repeat_interleave(BLOCK)[:num_values]


def _rows(values: torch.Tensor, scales: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield whole blocks, ``[blocks, BLOCK]`` with scales ``[blocks, 1]``, and then a shorter one."""
    count = len(values) // BLOCK
    if count:
        yield values[: count * BLOCK].view(count, BLOCK), scales[:count].view(count, 1)
    if len(values) > count * BLOCK:
        yield values[count * BLOCK :].view(1, -1), scales[count:].view(1, 1)
