"""Files of cases: JSON with ``schema_version`` 1, a list ``cases`` and, if wanted, ``title`` and ``note``.

A collection also has ``hardware``, its machines in words, and ``capacity``, a list of longest sequences; see
:mod:`ullage.rivals.cases.collected`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hwprofiles.files import read_json
from ullage.rivals.cases.base import Case, CaseError
from ullage.rivals.cases.collected import LeftOutError, read_capacity, read_collected
from ullage.rivals.cases.layouts import read_case

_FIELDS = ("schema_version", "title", "note", "cases")
_OF_COLLECTIONS = ("hardware", "capacity")


@dataclasses.dataclass(frozen=True)
class CaseFile:
    """The cases of a file.

    Attributes:
        path: the file.
        cases: those that can be expressed.
        left_out: why others are left out, by their ids; of a collection alone.
        is_collection: whether what cannot be predicted is left out.
    """

    path: Path
    cases: tuple[Case, ...]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_collection: bool = False


def load_cases(path: Path) -> tuple[Case, ...]:
    """Return the cases of a file; arguments and errors are those of :func:`read_file`."""
    return read_file(path).cases


def read_file(path: Path) -> CaseFile:
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
    is_collection = isinstance(data.get("hardware"), dict)
    known = (*_FIELDS, *(_OF_COLLECTIONS if is_collection else ()))
    if unknown := sorted(set(data) - set(known)):
        raise CaseError(f"{path}: {unknown[0]}: such a field is not known; it may have {', '.join(known)}")
    found = _collected(path, data) if is_collection else CaseFile(path, _parsed(path, entries))
    if repeated := repeated_id(found.cases):
        raise CaseError(f"{path}: case {repeated}: id is that of two cases, but must be of one; give each its own")
    return found


def repeated_id(cases: Sequence[Case]) -> str | None:
    """Return an id that several cases have, if there is one."""
    counts = Counter(case.id for case in cases)
    return next((name for name, count in counts.items() if count > 1), None)


def _parsed(path: Path, entries: Sequence[Any]) -> tuple[Case, ...]:
    return tuple(_parse(path, position, entry) for position, entry in enumerate(entries))


def _parse(path: Path, position: int, entry: Any) -> Case:
    if not isinstance(entry, dict):
        raise CaseError(f"{path}: case number {position} must be an object with fields of its own; correct it")
    try:
        return read_case({"id": f"number {position}"} | entry)
    except CaseError as error:
        raise CaseError(f"{path}: {error}") from error


def _collected(path: Path, data: Mapping[str, Any]) -> CaseFile:
    cases: list[Case] = []
    left_out: dict[str, str] = {}
    readers = {"cases": read_collected, "capacity": read_capacity}
    for kind, read in readers.items():
        for position, entry in enumerate(data.get(kind, ())):
            if not isinstance(entry, dict) or not isinstance(name := entry.get("id"), str):
                raise CaseError(f"{path}: {kind} number {position} must be an object with an id; correct it")
            try:
                cases.append(read(entry, data["hardware"]))
            except LeftOutError as error:
                left_out[name] = str(error)
    if not cases:
        reason = next(iter(left_out.values()), "there is none")
        raise CaseError(f"{path}: none of its runs can be predicted: {reason}")
    return CaseFile(path, tuple(cases), left_out, is_collection=True)
