"""Training tokens in a resumable order: a text with one token per byte, or memory-mapped files of tokens."""

import functools
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


def windows(tokens: Tokens, seq_len: int) -> Tokens:
    """Return tokens as consecutive sequences, ``[number, seq_len]``, without those after the last full one.

    Raises:
        ValueError: the tokens are not unsigned integers in one dimension, or fewer than one sequence needs.
    """
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise ValueError(f"tokens are {tokens.dtype}{list(tokens.shape)}; give unsigned integers in one dimension")
    if not (number := len(tokens) // seq_len):
        raise ValueError(f"there are {len(tokens)} tokens, but one sequence needs {seq_len}; give more of them")
    return tokens[: number * seq_len].reshape(number, seq_len)


def sequences(
    of: Tokens, position: int, num_sequences: int, *, seed: int = 0, vocab_size: int | None = None
) -> torch.Tensor:
    """Return the next sequences of a training run as int64[num_sequences, seq_len]. Only they are read.

    Each pass visits all sequences in a new random order, which depends only on the seed, and takes 8 bytes for each.

    Args:
        of: all sequences, see :func:`windows`.
        position: sequences that all ranks together have read since the first pass began.
        num_sequences: how many are wanted.
        seed: seed of the order.
        vocab_size: vocabulary size of the model; ``None``: tokens are not checked.

    Raises:
        ValueError: the model does not know one of the tokens.
    """
    places = (divmod(position + i, len(of)) for i in range(num_sequences))
    found = of[[_order(len(of), seed, epoch)[offset] for epoch, offset in places]].astype(np.int64)
    if vocab_size is not None and (most := int(found.max())) >= vocab_size:
        raise ValueError(
            f"token {most} is in the sequences from position {position} on, but the model knows tokens 0 to "
            f"{vocab_size - 1}; give the tokens of its own tokenizer, in the type that they were written in"
        )
    return torch.from_numpy(found)


@functools.lru_cache(maxsize=1)
def _order(num_sequences: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_sequences)


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
