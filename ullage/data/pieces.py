"""Turn files into pieces: tokens with targets, at most a sequence long, cached by ``datasets``."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from ullage.data.batches import Piece
from ullage.data.files import TABLES, TEXTS, data_files, is_list, quiet, read
from ullage.data.tokenizers import Encoded, Encoder

_VERSION: Final = 2  # version of the cache; increase it when the same record gives other tokens
_BATCH: Final = 200  # lines to tokenize before their tokens are written


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Counts over the files.

    Attributes:
        documents: number of records or texts.
        tokens, targets: tokens and target tokens of the pieces for training and evaluation.
        cut_off: documents that were truncated, because they are longer than a sequence.
        without_targets: pieces that were left out, because they have no target tokens.
    """

    documents: int
    tokens: int
    targets: int
    cut_off: int
    without_targets: int


@final
class Pieces:
    """All pieces with targets, mapped from the cache.

    Args:
        path: a file or a folder.
        tokenizer: a tokenizer of ``transformers``.
        seq_len: maximum tokens of a piece. A longer text becomes several pieces; chat and instructions are truncated.

    Attributes:
        counts: counts over the files.
        lengths: int64[pieces], tokens of each piece.
        targets: int64[pieces], target tokens of each piece.

    Raises:
        ModuleNotFoundError: ``datasets`` or a library that it needs is missing.
        ValueError: a line is not a record (the message names it), or no document has targets.
        OSError: a file cannot be read.
    """

    def __init__(self, path: Path, tokenizer: Any, seq_len: int) -> None:
        encoder = Encoder(tokenizer)
        tables = [_encoded(file, encoder, seq_len) for file in data_files(path)]
        import datasets  # noqa: PLC0415 - takes a second; cannot be missing, because reading files needs it

        table = datasets.concatenate_datasets(tables)
        sums = table.remove_columns(["tokens", "targets"]).with_format("numpy")[:]
        length, num_targets = (np.asarray(sums[name], np.int64) for name in ("length", "num_targets"))
        self._with_targets = np.flatnonzero(num_targets)
        self._table = table.select_columns(["tokens", "targets"])
        self.lengths, self.targets = length[self._with_targets], num_targets[self._with_targets]
        self.counts = Counts(
            documents=int(np.sum(sums["begins"])),
            tokens=int(self.lengths.sum()),
            targets=int(self.targets.sum()),
            cut_off=int(np.sum(sums["is_cut_off"])),
            without_targets=len(length) - len(self._with_targets),
        )
        if not len(self._with_targets):
            raise ValueError(
                f"{path}: none of {self.counts.documents} documents has a target token within the first {seq_len} "
                "tokens; check that chats have answers (role assistant), or plan with a larger --seq-len"
            )

    def __len__(self) -> int:
        return len(self._with_targets)

    @functools.cached_property
    def digest(self) -> str:
        """Digest of all tokens and targets."""
        found = hashlib.blake2b(digest_size=8)
        found.update(self.lengths.tobytes() + self.targets.tobytes())
        for part in self._table.data.column("tokens").chunks:
            found.update(part.flatten().to_numpy())
        return found.hexdigest()

    def read(self, numbers: npt.NDArray[np.int64]) -> list[Piece]:
        """Return the tokens and targets of some pieces."""
        rows = self._table[self._with_targets[numbers].tolist()]
        return list(zip(rows["tokens"], rows["targets"], strict=True))


def _encoded(file: Path, encoder: Encoder, seq_len: int) -> Any:
    """Return a file's pieces as a ``datasets.Dataset``, from the cache if the file was tokenized before."""
    lines = read(file)
    import datasets  # noqa: PLC0415 - see above
    from datasets.fingerprint import Hasher  # noqa: PLC0415
    from filelock import FileLock  # noqa: PLC0415 - datasets uses it too

    columns = {
        "tokens": datasets.List(datasets.Value("int32")),
        "targets": datasets.List(datasets.Value("bool")),
        "length": datasets.Value("int64"),
        "num_targets": datasets.Value("int64"),
        "begins": datasets.Value("bool"),
        "is_cut_off": datasets.Value("bool"),
    }
    fingerprint = Hasher.hash((_VERSION, lines._fingerprint, encoder.digest(), seq_len))
    cache = Path(lines.cache_files[0]["filename"]).parent
    with quiet(), FileLock(cache / f"{fingerprint}.lock"):  # one rank tokenizes while the others wait
        return lines.map(
            partial(_pieces, place=_place(file), encoder=encoder, seq_len=seq_len),
            batched=True,
            batch_size=_BATCH,
            with_indices=True,
            remove_columns=["text"],
            features=datasets.Features(columns),
            new_fingerprint=fingerprint,
        )


def _place(file: Path) -> str | None:
    """Return the name of a position in a file of records, for errors; ``None`` for a text."""
    if file.suffix in TEXTS:
        return None
    return f"{file}, {'record' if file.suffix in TABLES or is_list(file) else 'line'}"


def _pieces(
    rows: Mapping[str, Sequence[str]], numbers: Sequence[int], *, place: str | None, encoder: Encoder, seq_len: int
) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "targets", "length", "num_targets", "begins", "is_cut_off")
    }
    for text, number in zip(rows["text"], numbers, strict=True):
        if place is None:
            document = encoder.text(text)
        elif text.strip():
            document = _of_line(text, f"{place} {number + 1}", encoder)
        else:
            continue
        end = len(document.tokens) if document.divisible else min(len(document.tokens), seq_len)
        for begin in range(0, end, seq_len):
            tokens, targets = (values[begin : begin + seq_len] for values in document[:2])
            targets = [False, *targets[1:]]  # no token precedes the first one
            found["tokens"].append(tokens)
            found["targets"].append(targets)
            found["length"].append(len(tokens))
            found["num_targets"].append(sum(targets))
            found["begins"].append(begin == 0)
            found["is_cut_off"].append(end < len(document.tokens))
    return found


def _of_line(line: str, place: str, encoder: Encoder) -> Encoded:
    try:
        record = json.loads(line)
        json.dumps(record, ensure_ascii=False).encode()  # which half of a surrogate pair cannot be
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.end].encode("unicode-escape", "backslashreplace").decode()
        raise ValueError(f"{place} has {half}, half of a character; write both halves, or none") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f'{place} is not JSON ({error}); write one record per line, as {{"text": ...}}') from error
    if not isinstance(record, dict):
        raise ValueError(  # noqa: TRY004 - the file is wrong, not a call
            f'{place} is {type(record).__name__}, not a record; write one record per line, as {{"text": ...}}'
        )
    try:
        return encoder.record(record)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
