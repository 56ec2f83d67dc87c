"""Files of cases: JSON with ``schema_version`` 1, a list ``cases`` and, if wanted, ``title`` and ``note``."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hwprofiles.files import read_json
from ullage.rivals.cases.base import Case, CaseError
from ullage.rivals.cases.checkpoints import CheckpointCase
from ullage.rivals.cases.in_memory import InMemoryCase
from ullage.rivals.cases.reported import ReportedCase
from ullage.rivals.cases.streaming import StreamingCase
from ullage.rivals.cases.swapping import SwappingCase
from ullage.rivals.cases.training import TrainingCase

_KINDS: tuple[type[Case], ...] = (SwappingCase, CheckpointCase, StreamingCase, TrainingCase, InMemoryCase, ReportedCase)
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
    name = entry.get("id", f"number {position}") if isinstance(entry, dict) else f"number {position}"
    fields = set(entry) if isinstance(entry, dict) else set()
    # Of the kind with most of these fields: then the error names the field that is missing or misspelt.
    kind = max(_KINDS, key=lambda kind: len(fields & set(kind.model_fields)))
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        # An unknown field says more than the field that is missing instead of it.
        details = error.errors(include_url=False)
        first = min(details, key=lambda detail: (detail["type"] != "extra_forbidden", len(detail["loc"])))
        field = ".".join(str(part) for part in first["loc"]) or "the case"
        rule = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            rule = "such a field cannot be predicted from"
        elif first["type"] == "model_type":
            rule = "must be an object with fields of its own"
        elif isinstance(first["input"], (str, int, float)):
            rule += f", not {str(first['input'])[:40]!r}"
        raise CaseError(f"{path}: case {name}: {field}: {rule}; correct the case, or leave it out") from error
