"""The state that a checkpoint takes on one rank: slices of parameters, and the files that they go to."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from executor.checkpoint.files.writer import CopyChunk
from executor.checkpoint.format.layout import Dtype, TensorBox, boxes

Key = tuple[str, int]
"""Identifies a piece: the name of its unit, and its index within the rank's shard."""

MODEL_FOLDER: Final = "model"
OPTIMIZER_FOLDER: Final = "optimizer"
MASTER: Final = "master"
"""The first tensor of every piece's state: the weights, as the optimizer keeps them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """A piece's part of a parameter.

    Attributes:
        name: name of the parameter.
        shape: shape of the whole parameter.
        start, stop: the range, in values of the flat parameter.
        offset: its beginning in the piece, in values.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    def of_blocks(self, grain: int) -> "Slice":
        """Return the same slice of a tensor with one value for each ``grain`` values of the parameter."""
        if grain == 1:
            return self
        blocks = -(-math.prod(self.shape) // grain)
        return Slice(self.name, (blocks,), self.start // grain, -(-self.stop // grain), self.offset // grain)


class Source(Protocol):
    """State that checkpoints take."""

    @property
    def slices(self) -> Mapping[Key, Sequence[Slice]]:
        """The slices of each of the rank's pieces, in the order in which pieces are taken."""

    def keys(self, key: Key) -> tuple[str, ...]:
        """Return the names of a piece's tensors, :data:`MASTER` first."""

    def dtype(self, state: str) -> Dtype:
        """Return the data type of all tensors with this name."""

    def grain(self, state: str) -> int:
        """Return how many values of a parameter share one of a state's, by its name; pieces have whole grains."""

    def tensors(self, key: Key) -> Sequence[Any]:
        """Return a piece's tensors between updates, flat, as bytes.

        Numpy arrays are leased. Slices of other tensors go to ``copy``.
        """

    @property
    def copy(self) -> CopyChunk:
        """Copies a slice of a tensor into a buffer, and returns when the copy has ended."""


def _path(state: str, rank: int, index: int) -> str:
    """Return the path of the file for boxes with this index, see [Note: Boxes]."""
    more = f"-{index}" if index else ""
    if state == MASTER:
        return f"{MODEL_FOLDER}/model-{rank:05d}{more}.safetensors"
    return f"{OPTIMIZER_FOLDER}/{state}-{rank:05d}{more}.safetensors"


def rank_of(path: str) -> int:
    """Return the rank that has written a file of a checkpoint; -1 if its path does not tell."""
    found = re.search(r"-(\d{5,})(-\d+)?\.safetensors$", path)
    return int(found[1]) if found else -1


def files_of(source: Source, rank: int) -> dict[str, list[TensorBox]]:
    """Return the entries of each file of a rank. The flusher needs one buffer per file, and one more."""
    found: dict[str, list[TensorBox]] = {}
    keys = {piece.name: source.keys(key) for key, pieces in source.slices.items() for piece in pieces}
    for state in dict.fromkeys(itertools.chain.from_iterable(keys.values())):
        grain = source.grain(state)
        shapes = {piece.name: piece.of_blocks(grain).shape for pieces in source.slices.values() for piece in pieces}
        for name, held in boxes_of(source, grain).items():
            for index, box in enumerate(held if state in keys[name] else ()):
                entry = TensorBox(
                    name if state == MASTER else f"{state}.{name}", source.dtype(state), shapes[name], box
                )
                found.setdefault(_path(state, rank, index), []).append(entry)
    return found


def boxes_of(source: Source, grain: int) -> dict[str, tuple[range, ...]]:
    """Return the boxes of the rank's part of each parameter, in order, in a state with this grain."""
    ranges: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for pieces in source.slices.values():
        for piece in (whole.of_blocks(grain) for whole in pieces):
            shape, start, stop = ranges.get(piece.name, (piece.shape, piece.start, piece.start))
            assert stop == piece.start, f"slices of {piece.name} come in order"
            ranges[piece.name] = shape, start, piece.stop
    return {name: tuple(boxes(*held)) for name, held in ranges.items()}


def runs_of(slices: Iterable[Slice], held: Mapping[str, Sequence[range]]) -> list[tuple[int, int, int]]:
    """Return the runs of a piece, each as index of the file, start and stop, in values of the piece.

    Parameters that are adjacent in both piece and file form one run, so that whole chunks of it can be leased.
    """
    runs: list[tuple[int, int, int]] = []
    for piece in slices:
        for index, box in enumerate(held[piece.name]):
            start, stop = max(piece.start, box.start), min(piece.stop, box.stop)
            if start >= stop:
                continue
            begin, end = piece.offset - piece.start + start, piece.offset - piece.start + stop
            if runs and (runs[-1][0], runs[-1][2]) == (index, begin):
                begin = runs.pop()[1]
            runs.append((index, begin, end))
    return runs
