"""Data of files as objects, and the errors of pydantic about them as one line."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

_Of = TypeVar("_Of", bound=BaseModel)


def validated(kind: type[_Of], data: Any, where: Path | str, whole: str, error: type[ValueError] = ValueError) -> _Of:
    """Return the object that data describes.

    Args:
        kind: the class of the object.
        data: from JSON.
        where: the file, for error messages.
        whole: name of the data, for an error that concerns no single field.
        error: the class of errors to raise.

    Raises:
        error: the data breaks a rule of the class. The message names the first one in one line.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as problem:
        raise error(f"{where}: {_complaint(problem, whole)}") from problem


def _complaint(error: ValidationError, whole: str) -> str:
    """Return pydantic's first complaint as one line: field, rule, value, remedy, and how many more there are."""
    details = error.errors(include_url=False)
    first = details[0]
    field = ".".join(str(part) for part in first["loc"]) or whole
    rule = first["msg"].removeprefix("Value error, ")
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    value = "" if isinstance(first["input"], dict | list) else f", not {str(first['input'])[:40]!r}"
    return f"{field}: {rule}{value}{_remedy(first)}{more}"


def _remedy(detail: ErrorDetails) -> str:
    """Return the remedy. Messages of the schema's own rules (``value_error``) contain theirs already."""
    match detail["type"]:
        case "value_error":
            return ""
        case "missing":
            return "; add it"
        case "extra_forbidden":
            return "; remove it, or correct its name"
        case _:
            return "; correct it in the file"
