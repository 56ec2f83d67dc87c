"""Files of data: text, one document per file, and JSON or Parquet with a record for each document."""

import contextlib
import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from hwprofiles.files import MOST_BYTES, check_regular

LINES: Final = (".jsonl", ".ndjson", ".json")
TABLES: Final = (".parquet",)
TEXTS: Final = (".txt", ".text", ".md")
_ALL: Final = (*LINES, *TABLES, *TEXTS)
_KINDS: Final = (
    f"{', '.join(LINES)} (one JSON record a line), {', '.join(TABLES)} (one a row) or {', '.join(TEXTS)} (one document)"
)


def data_files(path: Path) -> list[Path]:
    """Return the files of data at a path: itself, or those that a folder has, in order of names.

    Raises:
        ValueError: there are none, or one is empty, no regular file, or a text that is too long.
        OSError: there is no such path.
    """
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT, f"there is no such file or folder; give a file ({', '.join(_ALL)}), or a folder", str(path)
        )
    if not path.is_dir():
        if path.suffix not in _ALL:
            raise ValueError(f"{path}: data are read from {_KINDS}; rename the file as what it is, or convert it")
        files = [path]
    else:
        wanted = {*_ALL} - {".json"}  # which folders have for other purposes
        files = sorted(file for file in path.iterdir() if file.suffix in wanted and file.is_file())
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(sorted(wanted))}; give a folder of data")
    for file in files:
        num_bytes = check_regular(file)
        if not num_bytes:
            raise ValueError(f"{file} is empty; give a file with data")
        if (file.suffix in TEXTS or is_list(file)) and num_bytes > MOST_BYTES:
            raise ValueError(
                f"{file} has {num_bytes} bytes, but a text, or a list of records, has at most {MOST_BYTES}; divide it, "
                'or write one record a line, as {"text": ...}, to a .jsonl file'
            )
    return files


def is_list(file: Path) -> bool:
    """Return whether a file is one JSON list of records, not one record a line."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as opened:
        return opened.read(4096).lstrip()[:1] == b"["


def read(file: Path) -> Any:
    """Return a ``datasets.Dataset`` with a column ``text``: each record as a line of JSON, or a text as one row.

    Raises:
        ModuleNotFoundError: ``datasets`` is missing.
        ValueError: the file is no UTF-8, or not what its name says.
    """
    try:
        import datasets  # noqa: PLC0415 - takes a second, and may be missing
    except ImportError as error:
        raise ModuleNotFoundError(
            "reading data needs datasets; pip install 'ullage[finetune]'", name="datasets"
        ) from error
    path = str(file.resolve()).replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")
    with quiet():
        try:
            if file.suffix in TABLES:
                table = datasets.load_dataset("parquet", data_files=path, split="train", keep_in_memory=False)
                return table.map(_as_line, remove_columns=table.column_names)
            if is_list(file):
                state = file.stat()
                source = {"file": file.resolve(), "version": (state.st_mtime_ns, state.st_size)}
                return datasets.Dataset.from_generator(_lines_of_list, gen_kwargs=source)
            how = "document" if file.suffix in TEXTS else "line"
            return datasets.load_dataset("text", data_files=path, split="train", keep_in_memory=False, sample_by=how)
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())
            if isinstance(cause, UnicodeDecodeError):
                raise ValueError(f"{file} is not UTF-8 ({reason}); convert it first") from error  # noqa: TRY004
            if isinstance(cause, ValueError):  # those of JSON and of Arrow are
                raise ValueError(f"{file} is no {file.suffix} file ({reason}); write it again") from error  # noqa: TRY004
            raise


def _as_line(record: Mapping[str, Any]) -> dict[str, str]:
    return {"text": json.dumps(_without_nulls(record), default=str)}


def _without_nulls(value: Any) -> Any:
    """Return a row of a table without what only other rows have."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _lines_of_list(file: Path, version: object) -> Iterator[dict[str, str]]:  # noqa: ARG001 - names the cache
    for record in json.loads(file.read_bytes()):
        yield {"text": json.dumps(record)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ``datasets`` from printing its progress, as commands have their own, and its errors, which are raised."""
    import datasets  # noqa: PLC0415 - see above

    was_shown, log_level = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(log_level)
        if was_shown:
            datasets.enable_progress_bars()
