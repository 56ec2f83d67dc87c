"""Files of data: text, one document per file, and JSON lines, one record per line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from hwprofiles.files import MOST_BYTES, check_regular

LINES: Final = (".jsonl", ".ndjson", ".json")
TEXTS: Final = (".txt", ".text", ".md")


def data_files(path: Path) -> list[Path]:
    """Return the files of data at a path: itself, or those that a folder has, in order of names.

    Raises:
        ValueError: there are none, or one is empty, no regular file, or a text that is too long.
        OSError: there is no such path.
    """
    if not path.is_dir():
        if path.exists() and path.suffix not in {*LINES, *TEXTS}:
            raise ValueError(
                f"{path}: data are read from {', '.join(LINES)} (one JSON record a line) and {', '.join(TEXTS)}; "
                "rename the file as what it is"
            )
        files = [path]
    else:
        wanted = {*LINES, *TEXTS} - {".json"}  # which folders have for other purposes
        files = sorted(file for file in path.iterdir() if file.suffix in wanted and file.is_file())
        if not files:
            raise ValueError(f"{path} has no file that ends in {', '.join(sorted(wanted))}; give a folder of data")
    for file in files:
        num_bytes = check_regular(file)
        if not num_bytes:
            raise ValueError(f"{file} is empty; give a file with data")
        if file.suffix in TEXTS and num_bytes > MOST_BYTES:
            raise ValueError(
                f"{file} has {num_bytes} bytes, but a text is one document of at most {MOST_BYTES}; divide it, "
                'or write lines {"text": ...} to a .jsonl file'
            )
    return files


def read(file: Path) -> Any:
    """Return a ``datasets.Dataset`` with a column ``text``: the lines of a file of records, or a text as one row.

    Raises:
        ModuleNotFoundError: ``datasets`` is missing.
        ValueError: the file is no UTF-8.
    """
    try:
        import datasets  # noqa: PLC0415 - takes a second, and may be missing
    except ImportError as error:
        raise ModuleNotFoundError(
            "reading data needs datasets; pip install 'ullage[finetune]'", name="datasets"
        ) from error
    with quiet():
        try:
            return datasets.load_dataset(
                "text",
                data_files=str(file.resolve()).replace("[", "[[]").replace("*", "[*]").replace("?", "[?]"),
                split="train",
                keep_in_memory=False,
                sample_by="document" if file.suffix in TEXTS else "line",
            )
        except datasets.exceptions.DatasetGenerationError as error:
            if isinstance(error.__cause__, UnicodeDecodeError):
                raise ValueError(f"{file} is not UTF-8 ({error.__cause__}); convert it first") from error  # noqa: TRY004
            raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep ``datasets`` from printing its progress: commands have their own."""
    import datasets  # noqa: PLC0415 - see above

    was_shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_shown:
            datasets.enable_progress_bars()
