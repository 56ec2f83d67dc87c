"""Packing: several short pieces in one sequence."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Pieces = list[npt.NDArray[np.int64]]
"""For each sequence, the numbers of its pieces in order."""


def packed(lengths: Sequence[int] | npt.NDArray[np.int64], seq_len: int) -> Pieces:
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
    return [np.array(pieces) for pieces in found]


def alone(num_pieces: int) -> Pieces:
    """Return each piece as a sequence of its own."""
    return list(np.arange(num_pieces)[:, None])
