"""Text to train on: a file, or the English that comes with Python; one token per byte, in a resumable order."""

from pathlib import Path

import numpy as np
import torch


class TokenStream:
    """Deterministic batches of byte tokens.

    Sequences are the consecutive, non-overlapping windows of the text, visited in a random order that depends on the
    seed alone and is drawn anew for every pass. ``position`` counts the sequences already given; setting it resumes.

    Args:
        data: the text as bytes.
        seq_len: tokens per sequence.
        seed: of the order.

    Raises:
        ValueError: the text is shorter than one sequence.
    """

    def __init__(self, data: bytes, seq_len: int, seed: int = 0) -> None:
        tokens = np.frombuffer(data, np.uint8)
        self._num_windows = len(tokens) // seq_len
        if not self._num_windows:
            raise ValueError(f"the text has {len(tokens)} bytes, but one sequence needs {seq_len}; give a longer text")
        self._windows = tokens[: self._num_windows * seq_len].reshape(self._num_windows, seq_len)
        self._seed = seed
        self.position = 0

    def next(self, num_sequences: int) -> torch.Tensor:
        """Return the next sequences as int64[num_sequences, seq_len]."""
        rows = [self._row(self.position + i) for i in range(num_sequences)]
        self.position += num_sequences
        return torch.from_numpy(self._windows[rows].astype(np.int64))

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_windows)
        return int(np.random.default_rng([self._seed, epoch]).permutation(self._num_windows)[offset])


def read_text(path: Path | None) -> bytes:
    """Return the bytes of a text file, or of the topics of Python's own documentation (about 0.5 MB of English).

    Raises:
        OSError: the file cannot be read.
    """
    if path is not None:
        return path.read_bytes()
    from pydoc_data import topics  # noqa: PLC0415 - half a megabyte that only training needs

    return "\n\n".join(text for _, text in sorted(topics.topics.items())).encode()
