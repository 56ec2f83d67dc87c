"""The layout of a safetensors file, computed before its first byte is written.

A file begins with the length of its header (eight bytes). The header follows (JSON, padded with spaces), then the
values, tensor after tensor without gaps (https://huggingface.co/docs/safetensors). Here the values begin at a block
boundary, so that they can be written with direct I/O, in any order. The header is written last, because every reader
rejects a file that begins with zeros.

[Note: Boxes] A rank has a contiguous, flat range of a unit's parameters. Readers of ``torch.distributed.checkpoint``
know only boxes: an offset and an extent in each dimension. A range of a matrix is up to three boxes: the rest of a row,
whole rows, and the start of a row. Names of tensors are unique in a file. So the first box of every tensor is in one
file, the second box in another file, and so on. With one rank, every range is a whole tensor, and there is one file.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from executor.direct_io import in_blocks

Dtype = Literal["F64", "F32", "BF16", "F16", "I64", "I32", "U8", "BOOL"]

ITEM_BYTES: Final[Mapping[Dtype, int]] = {
    "F64": 8,
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "I64": 8,
    "I32": 4,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one value, by safetensors' name of the data type."""

_SHARDING_KEY: Final = "DCP_SHARDING_INFO"  # read by torch.distributed.checkpoint


def boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[range]:
    """Cut values ``start`` to ``stop`` of a flat tensor into boxes, in order; see [Note: Boxes]."""
    if stop <= start:
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # all within one row
        yield from _within(shape, last * inner, start, stop)
        return
    yield from _within(shape, (first - 1) * inner, start, first * inner)
    if first < last:
        yield range(first * inner, last * inner)
    yield from _within(shape, last * inner, last * inner, stop)


def _within(shape: tuple[int, ...], row_start: int, start: int, stop: int) -> Iterator[range]:
    for box in boxes(shape[1:], start - row_start, stop - row_start):
        yield range(box.start + row_start, box.stop + row_start)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor in a file: a contiguous range with an offset and an extent in each dimension.

    Attributes:
        name: name of the tensor.
        dtype: its data type, see :data:`ITEM_BYTES`.
        shape: shape of the whole tensor.
        box: the part of the tensor in this file, in values of the flat tensor.
    """

    name: str
    dtype: Dtype
    shape: tuple[int, ...]
    box: range

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return len(self.box) * ITEM_BYTES[self.dtype]

    @property
    def offsets(self) -> list[int]:
        """The box's offset in each dimension."""
        return self._coordinates(self.box.start)

    @property
    def extents(self) -> list[int]:
        """The box's extent in each dimension."""
        if not self.box:
            return list(self.shape)
        ends = zip(self.offsets, self._coordinates(self.box.stop - 1), strict=True)
        return [last - first + 1 for first, last in ends]

    def _coordinates(self, value: int) -> list[int]:
        found: list[int] = []
        for extent in reversed(self.shape):
            value, index = divmod(value, max(extent, 1))
            found.insert(0, index)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class FileLayout:
    """The bytes of a file.

    Attributes:
        entries: its tensors, in the order of their values.
        header: the first bytes, whole blocks.
        starts: offset of each entry's values, in bytes from the start of the file.
        num_bytes: size of the whole file.
    """

    entries: tuple[TensorBox, ...]
    header: bytes
    starts: tuple[int, ...]
    num_bytes: int


def layout(entries: tuple[TensorBox, ...], *, known: Mapping[str, str] | None = None) -> FileLayout:
    """Lay out a file.

    Args:
        entries: in the order in which values will be written. Names must be unique.
        known: the file's metadata. By default, it lists the boxes.

    Raises:
        ValueError: two entries have the same name.
    """
    fields: dict[str, object] = {}
    starts, end = [], 0
    for entry in entries:
        if entry.name in fields:
            raise ValueError(f"{entry.name} is in one file twice, but names of tensors must be unique")
        starts.append(end)
        end += entry.num_bytes
        fields[entry.name] = {"dtype": entry.dtype, "shape": entry.extents, "data_offsets": [starts[-1], end]}
    sharding = {entry.name: {"saved_offsets": entry.offsets} for entry in entries}
    said = known or {"format": "pt", _SHARDING_KEY: json.dumps(sharding)}
    text = json.dumps({"__metadata__": said, **fields}, separators=(",", ":")).encode()
    room = in_blocks(8 + len(text))
    header = (room - 8).to_bytes(8, "little") + text.ljust(room - 8)
    return FileLayout(entries, header, tuple(room + start for start in starts), room + end)
