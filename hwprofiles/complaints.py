"""Errors of pydantic as one line."""

from pydantic import ValidationError
from pydantic_core import ErrorDetails


def complaint(error: ValidationError, whole: str) -> str:
    """Return pydantic's first complaint as one line: field, rule, value, remedy, and how many more there are.

    Args:
        error: the error of the data that was read.
        whole: name of the data, for an error that concerns no single field.
    """
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
