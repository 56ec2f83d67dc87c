"""Training tokens in a resumable order: a text with one token per byte, or memory-mapped files of tokens."""

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch

from hwprofiles.files import check_regular

Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""Token numbers in one dimension; may be a memory map."""

TokenDtype = Literal["uint16", "uint32"]
"""Types of the tokens of a raw file, little-endian."""

_SEEN_BYTES: Final = 4096  # of a file, to see whether it is text

NUM_BYTES: Final = 256
"""Vocabulary size of text, which has one token per byte."""


class TokenStream:
    """Deterministic batches of tokens.

    Sequences are consecutive, non-overlapping windows of the tokens. Each pass visits them in a new random order, which
    depends only on the seed. Tokens after the last full window are not used. Only the tokens of a batch are read. The
    order takes 8 bytes per window.

    Args:
        tokens: the tokens.
        seq_len: tokens per sequence.
        seed: seed of the order.
        vocab_size: vocabulary size of the model; ``None``: tokens are not checked.

    Attributes:
        position: sequences that all ranks together have read since the first pass began. Set it to resume. With the
            same tokens, ``seq_len`` and seed, a position means the same sequence.

    Raises:
        ValueError: the tokens are not unsigned integers in one dimension, or fewer than one sequence needs.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int = 0, vocab_size: int | None = None) -> None:
        if tokens.ndim != 1 or tokens.dtype.kind != "u":
            raise ValueError(f"tokens are {tokens.dtype}{list(tokens.shape)}; give unsigned integers in one dimension")
        self._num_windows = len(tokens) // seq_len
        if not self._num_windows:
            raise ValueError(f"there are {len(tokens)} tokens, but one sequence needs {seq_len}; give more of them")
        self._windows = tokens[: self._num_windows * seq_len].reshape(self._num_windows, seq_len)
        self._seed = seed
        self._vocab_size = vocab_size
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None  # of one pass
        self.position = 0

    def next(self, num_sequences: int) -> torch.Tensor:
        """Return the next sequences as int64[num_sequences, seq_len].

        Raises:
            ValueError: the model does not know one of the tokens.
        """
        rows = [self._row(self.position + i) for i in range(num_sequences)]
        found = self._windows[rows].astype(np.int64)
        if self._vocab_size is not None and (most := int(found.max())) >= self._vocab_size:
            raise ValueError(
                f"token {most} is in the sequences from position {self.position} on, but the model knows tokens 0 to "
                f"{self._vocab_size - 1}; give the tokens of its own tokenizer, in the type that they were written in"
            )
        self.position += num_sequences
        return torch.from_numpy(found)

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self._num_windows)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._num_windows)
        return int(self._order[1][offset])


def read_text(path: Path | None) -> Tokens:
    """Return a text, one token per byte: that of a file, or Python's documentation topics (0.5 MB of English).

    Raises:
        ValueError: the file is empty, or not regular, or begins with zero bytes, as tokens do and text does not.
        OSError: it cannot be read.
    """
    if path is not None:
        text = _mapped(path, np.dtype(np.uint8))
        if not text[:_SEEN_BYTES].all():
            raise ValueError(
                f"{path} is no text; if it holds tokens, give their type, as in --data {path},dtype=uint16"
            )
        return text
    from pydoc_data import topics  # noqa: PLC0415 - half a megabyte that only training needs

    return np.frombuffer("\n\n".join(text for _, text in sorted(topics.topics.items())).encode(), np.uint8)


def read_tokens(path: Path, dtype: TokenDtype | None = None) -> Tokens:
    """Memory-map a file of tokens: ``.npy`` with unsigned integers, or any other file as a raw array.

    Args:
        path: the file.
        dtype: type of the tokens in a raw file, little-endian. A ``.npy`` file has its own.

    Raises:
        ValueError: the file is empty, is not of the format of its name, or is raw without a type or with a wrong size.
        OSError: the file cannot be read.
    """
    if path.suffix != ".npy":
        if dtype is None:
            raise ValueError(f"{path} does not state the type of its tokens; give it, as in --data {path},dtype=uint16")
        return _mapped(path, np.dtype(dtype).newbyteorder("<"))
    if dtype is not None:
        raise ValueError(f"{path} states the type of its tokens; leave dtype={dtype} out")
    check_regular(path)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy file of numbers; write it with numpy.save") from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise ValueError(
            f"{path} holds {getattr(tokens, 'dtype', 'several arrays')}{list(getattr(tokens, 'shape', ()))}; save "
            "unsigned integers in one dimension, as in numpy.save(path, tokens.astype(numpy.uint16))"
        )
    return tokens


def _mapped(path: Path, dtype: np.dtype[Any]) -> Tokens:
    num_bytes = check_regular(path)
    if not num_bytes:
        raise ValueError(f"{path} is empty; give a file to train on")
    if num_bytes % dtype.itemsize:
        raise ValueError(
            f"{path} has {num_bytes} bytes, but must have a multiple of {dtype.itemsize} ({dtype.name}); give a "
            "complete file, and the type of its tokens"
        )
    return np.memmap(path, dtype, mode="r")
