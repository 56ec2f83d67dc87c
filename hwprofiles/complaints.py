"""Data of files as objects, and the errors of pydantic about them as one line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hwprofiles.files import read_json

_Of = TypeVar("_Of", bound=BaseModel)
_MARKS: Final[Mapping[str, str]] = {"run": "start_s", "plan": "decisions", "study": "request", "profile": "host_link"}


def kind_of(data: Any) -> str | None:
    """Return whether the data of a file are a run, a plan, a study or a profile, by a field that only these have."""
    return next((kind for kind, mark in _MARKS.items() if isinstance(data, dict) and mark in data), None)


def read_document(
    of: type[_Of], path: Path, kind: str, remedy: str, again: str, error: type[ValueError] = ValueError
) -> _Of:
    """Return the object in a file of a kind; see :func:`kind_of`.

    Args:
        of: the class of the object.
        path: the file.
        kind: its kind.
        remedy: what to do if it is missing, or of another kind.
        again: what to do if it has another schema version.
        error: the class of errors to raise.

    Raises:
        error: the file cannot be read, or is of another kind or version.
    """
    data = read_json(path, error, remedy)
    if (found := kind_of(data)) != kind:
        raise error(f"{path} is {f'a {found}, ' if found else ''}not a {kind}; {remedy}")
    own = of.model_fields["schema_version"].default
    if (version := data.get("schema_version", own)) != own:
        raise error(f"{path} has schema_version {version}, but this program reads {own}; {again}")
    return validated(of, data, path, kind, error)


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
