"""Records of instructions, and files of them as data to train on."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_objects import lines, make_tokenizer

import ullage

TOKENIZER = make_tokenizer()


def records(lengths: Iterable[int]) -> list[dict[str, Any]]:
    """Return instructions with prompts and answers of different lengths, each different from all others."""
    return [
        {"prompt": f"{number}" + "q" * (length % 5), "completion": f"{number:02d}" + "a" * length}
        for number, length in enumerate(lengths)
    ]


def data_of(
    folder: Path, rows: Iterable[dict[str, Any]], *args: Any, tokenizer: Any = TOKENIZER, **kw: Any
) -> ullage.Data:
    return ullage.Data(lines(folder / "data.jsonl", rows), tokenizer, *args, **kw)
