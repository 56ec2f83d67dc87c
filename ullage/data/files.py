"""Data files: text with one document per file, and JSON or Parquet with one record per document."""

import contextlib
import errno
import gzip
import json
import lzma
import zlib
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
    """Return the data files at a path: the file itself, or the files of a folder sorted by name.

    Raises:
        ValueError: there are no data files, or a file is empty, not regular, or a text that is too long.
        OSError: the path does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT, f"there is no such file or folder; give a file ({', '.join(_ALL)}), or a folder", str(path)
        )
    if not path.is_dir():
        if path.suffix not in _ALL:
            raise ValueError(
                f"{path}: data are read from {_KINDS}; give the file the ending of its format, or convert it"
            )
        files = [path]
    else:
        wanted = {*_ALL} - {".json"}  # folders have .json files for other purposes
        files = sorted(file for file in path.iterdir() if file.suffix in wanted and file.is_file())
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(sorted(wanted))}; give a folder of data")
    for file in files:
        num_bytes = check_regular(file)
        if not num_bytes:
            raise ValueError(f"{file} is empty; give a file with data")
        if (file.suffix in TEXTS or is_list(file)) and num_bytes > MOST_BYTES:
            raise ValueError(
                f"{file} has {num_bytes} bytes, but a text or a JSON list may have at most {MOST_BYTES}; divide it, "
                'or write one record per line, as {"text": ...}, to a .jsonl file'
            )
    return files


def is_list(file: Path) -> bool:
    """Return whether a file is one JSON list of records; otherwise it has one record per line."""
    if file.suffix != ".json":
        return False
    with file.open("rb") as opened:
        return opened.read(4096).lstrip()[:1] == b"["


def read(file: Path) -> Any:
    """Return a ``datasets.Dataset`` with a column ``text``. A row is one record as JSON, or one whole text.

    Raises:
        ModuleNotFoundError: ``datasets`` is missing.
        ValueError: the file is not UTF-8, or not of the format that its name says.
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
        except (
            datasets.exceptions.DatasetGenerationError,
            ValueError,
            EOFError,
            zlib.error,
            gzip.BadGzipFile,
        ) as error:
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())
            if isinstance(cause, UnicodeDecodeError):
                raise ValueError(f"{file} is not UTF-8 ({reason}); convert it first") from error  # noqa: TRY004
            if isinstance(cause, ValueError):  # errors of JSON and of Arrow are ValueErrors
                raise ValueError(f"{file} is not a {file.suffix} file ({reason}); write it again") from error  # noqa: TRY004
            if isinstance(cause, EOFError | zlib.error | lzma.LZMAError | gzip.BadGzipFile):
                reason = f"{file} is compressed, and not whole ({reason}); unpack it, or copy it again"
                raise ValueError(reason) from error  # noqa: TRY004
            raise


def _as_line(record: Mapping[str, Any]) -> dict[str, str]:
    return {"text": json.dumps(_without_nulls(record), default=str)}


def _without_nulls(value: Any) -> Any:
    """Return a row of a table without null fields, which exist only because other rows have them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _lines_of_list(file: Path, version: object) -> Iterator[dict[str, str]]:  # noqa: ARG001 - names the cache
    for record in json.loads(file.read_bytes()):
        yield {"text": json.dumps(record)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ``datasets`` from printing progress and errors: commands show their own progress, and errors are raised."""
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
