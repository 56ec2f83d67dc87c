"""Packing: several short pieces in one sequence."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Sequences:
    """The pieces of each sequence, in flat arrays, because there may be many millions.

    Attributes:
        pieces: numbers of the pieces of all sequences, concatenated.
        bounds: int64[sequences + 1], offsets into ``pieces``.
    """

    pieces: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        return self.pieces[self.bounds[number] : self.bounds[number + 1]]


def packed(lengths: Sequence[int] | npt.NDArray[np.int64], seq_len: int) -> Sequences:
    """Pack pieces into sequences by best-fit decreasing, which wastes little space. The result depends only on lengths.

    Args:
        lengths: tokens of each piece, 1 to ``seq_len``.
        seq_len: most tokens of a sequence.
    """
    found: list[list[int]] = []
    open_by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
    spaces = 0  # bit n: some sequence has room for n tokens
    for piece in np.argsort(-np.asarray(lengths, np.int64), kind="stable"):
        length = int(lengths[piece])
        if fitting := spaces >> length:
            space = length + (fitting & -fitting).bit_length() - 1  # the smallest space that is large enough
            sequence = open_by_space[space].pop()
            if not open_by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, sequence = seq_len, len(found)
            found.append([])
        found[sequence].append(int(piece))
        if rest := space - length:
            open_by_space[rest].append(sequence)
            spaces |= 1 << rest
    bounds = np.cumsum([0, *map(len, found)])
    return Sequences(np.fromiter(itertools.chain.from_iterable(found), np.int64, int(bounds[-1])), bounds)
