"""Files: written whole or not at all, and JSON that is read with errors that say what to do."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a file so that whoever reads it, now or after a crash, finds the old content or the new one, complete.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full; nothing is left behind.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("xb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:  # a full disk names no file, and the temporary one means nothing to anybody
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        partial.unlink(missing_ok=True)  # after the rename there is nothing to remove


def read_json(path: Path, error: type[ValueError], remedy: str) -> Any:
    """Return what a JSON file holds, in which no object has a field twice.

    Args:
        path: of the file.
        error: what is raised where that cannot be had.
        remedy: what the user can do then.

    Raises:
        error: the file cannot be read, or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or type(problem).__name__}; {remedy}") from problem
    except (ValueError, RecursionError) as problem:  # not UTF-8, not JSON, or nested without end
        raise error(f"{path} is not JSON ({problem}); {remedy}") from problem


def complaint(error: ValidationError, whole: str) -> str:
    """Return pydantic's first complaint as one line: field, rule, value, remedy, and how many more there are.

    Args:
        error: of what was read.
        whole: what to call it where no field of it is wrong, but all of it.
    """
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    rule = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    value = "" if isinstance(first["input"], dict | list) else f", not {str(first['input'])[:40]!r}"
    return f"{field}: {rule}{value}{_remedy(first)}{more}"


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, of which Python would keep only the last of two values."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} is given twice in one object")
    return fields


def _remedy(detail: ErrorDetails) -> str:
    """Return what to do; the schema's own rules (``value_error``) say it themselves."""
    match detail["type"]:
        case "value_error":
            return ""
        case "missing":
            return "; add it"
        case "extra_forbidden":
            return "; remove it, or correct its name"
        case _:
            return "; correct it in the file"
