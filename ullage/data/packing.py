"""Packing: several short pieces in one sequence."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Sequences:
    """Which pieces each sequence has, in flat arrays: there may be many millions.

    Attributes:
        pieces: of all sequences, one after another.
        bounds: int64[sequences + 1], where the pieces of each begin, and the end.
    """

    pieces: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> npt.NDArray[np.int64]:
        return self.pieces[self.bounds[number] : self.bounds[number + 1]]


def packed(lengths: Sequence[int] | npt.NDArray[np.int64], seq_len: int) -> Sequences:
    """Return pieces in as few sequences as best-fit decreasing finds: it wastes little, and depends on lengths alone.

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
            space = length + (fitting & -fitting).bit_length() - 1  # the smallest that is enough
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
