"""What is trained on: order, position, and files that are mapped."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ullage.training.text import read_text, read_tokens, sequences, windows

TOKENS = np.arange(10 * 8 + 3, dtype=np.uint16)
WINDOWS = windows(TOKENS, 8)


def read(counts: list[int], seed: int = 0) -> list[list[int]]:
    """Read so many sequences at a time, from the first one on."""
    ends = itertools.accumulate(counts)
    return [r for n, end in zip(counts, ends, strict=True) for r in sequences(WINDOWS, end - n, n, seed=seed).tolist()]


def test_a_pass_gives_every_window_once_in_another_order_each_time() -> None:
    first, second = (read([10, 10], seed=3)[i : i + 10] for i in (0, 10))
    in_order = TOKENS[:80].reshape(10, 8).tolist()
    assert sorted(first) == sorted(second) == in_order
    assert len({str(first), str(second), str(in_order)}) == 3
    assert read([10], seed=4) != first


@pytest.mark.parametrize("counts", [[1] * 24, [24], [6, 6, 12], [5, 7, 11, 1]])
def test_the_order_does_not_depend_on_the_size_of_batches(counts: list[int]) -> None:
    assert read(counts) == read([3] * 8)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_hold_what_was_written(tmp_path: Path, dtype: str) -> None:
    tokens = TOKENS.astype(dtype)
    np.save(tmp_path / "t.npy", tokens)
    tokens.tofile(tmp_path / "t.bin")
    for found in (read_tokens(tmp_path / "t.npy"), read_tokens(tmp_path / "t.bin", dtype)):  # type: ignore[arg-type]
        assert isinstance(found, np.memmap)
        assert found.tolist() == tokens.tolist()
    (tmp_path / "t.txt").write_bytes(b"some text")
    assert bytes(read_text(tmp_path / "t.txt")) == b"some text"
    assert isinstance(read_text(tmp_path / "t.txt"), np.memmap)


def test_a_file_larger_than_memory_may_be_is_never_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: 1 TiB that takes no room
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from ullage.training.text import read_tokens, sequences, windows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "of = windows(read_tokens(Path(sys.argv[1]), 'uint16'), 2**20)\n"
        "assert [sequences(of, position, 2).shape for position in (0, 2, 4, 6)] == [(2, 2**20)] * 4\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 200e6  # ru_maxrss is in kB


def test_tokens_that_the_model_does_not_know_are_refused() -> None:
    assert len(sequences(WINDOWS, 0, 10, vocab_size=82)) == 10  # tokens 0 to 79
    with pytest.raises(ValueError, match=r"token \d+ is in .* position 0 on, but the model knows tokens 0 to 39"):
        sequences(WINDOWS, 0, 10, vocab_size=40)


@pytest.mark.parametrize(
    ("name", "content", "dtype", "message"),
    [
        ("a.bin", b"", "uint16", "a.bin is empty; give a file to train on"),
        ("a.bin", b"12345", "uint16", "has 5 bytes, but must have a multiple of 2"),
        ("a.bin", b"123456", "uint32", "has 6 bytes, but must have a multiple of 4"),
        ("a.bin", b"1234", None, "give it, as in --data"),
        ("a.npy", b"", None, "is not a whole .npy file of numbers; write it with numpy.save$"),
        ("a.npy", b"1234", None, "is not a whole .npy file of numbers; write it with numpy.save$"),
        ("a.npy", np.zeros(8, np.int64), None, r"holds int64\[8\]; save unsigned"),
        ("a.npy", np.zeros((2, 4), np.uint16), None, r"holds uint16\[2, 4\]; save unsigned"),
        ("a.npy", np.zeros(4, np.uint16), "uint16", "leave dtype=uint16 out"),
    ],
)
def test_strange_files_are_refused(
    tmp_path: Path, name: str, content: "bytes | np.ndarray", dtype: str | None, message: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ValueError, match=message):
        read_tokens(path, dtype)  # type: ignore[arg-type]


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", TOKENS)
    whole = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(whole[:-4])
    with pytest.raises(ValueError, match="is not a whole"):
        read_tokens(tmp_path / "a.npy")


def test_too_few_tokens_and_signed_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 3 tokens, but one sequence needs 8"):
        windows(TOKENS[:3], 8)
    with pytest.raises(ValueError, match=r"tokens are int64\[83\]; give unsigned integers"):
        windows(TOKENS.astype(np.int64), 8)  # type: ignore[arg-type]
