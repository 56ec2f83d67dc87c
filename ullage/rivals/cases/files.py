"""Files of cases: JSON with ``schema_version`` 1, a list ``cases`` and, if wanted, ``title`` and ``note``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwprofiles.files import read_json
from ullage.rivals.cases.base import Case, CaseError
from ullage.rivals.cases.layouts import read_case

_FIELDS = ("schema_version", "title", "note", "cases")


def load_cases(path: Path) -> tuple[Case, ...]:
    """Read a file of cases.

    Raises:
        CaseError: it cannot be read, is not such a file, a case has an unknown, missing or wrong field, or two have
            the same id.
    """
    data = read_json(path, CaseError, "give a file of cases")
    version = data.get("schema_version") if isinstance(data, dict) else None
    entries = data.get("cases") if isinstance(data, dict) else None
    if version != 1 or not isinstance(entries, list) or not entries:
        raise CaseError(
            f"{path} is no file of cases of schema_version 1 (found {version!r}); it needs that and a list 'cases'"
        )
    if unknown := sorted(set(data) - set(_FIELDS)):
        raise CaseError(f"{path}: {unknown[0]}: such a field is not known; it may have {', '.join(_FIELDS)}")
    cases = tuple(_parse(path, position, entry) for position, entry in enumerate(entries))
    if repeated := repeated_id(cases):
        raise CaseError(f"{path}: case {repeated}: id is that of two cases, but must be of one; give each its own")
    return cases


def repeated_id(cases: Sequence[Case]) -> str | None:
    """Return an id that several cases have, if there is one."""
    counts = Counter(case.id for case in cases)
    return next((name for name, count in counts.items() if count > 1), None)


def _parse(path: Path, position: int, entry: Any) -> Case:
    if not isinstance(entry, dict):
        raise CaseError(f"{path}: case number {position} must be an object with fields of its own; correct it")
    try:
        return read_case({"id": f"number {position}"} | entry)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from error
