"""Files of cases: JSON with ``schema_version`` 1 and a list ``cases``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from planner.cases.base import Case, CaseError
from planner.cases.checkpoints import CheckpointCase
from planner.cases.swapping import SwappingCase
from planner.cases.training import TrainingCase

# The field that tells a kind of case from the others.
_KINDS: Mapping[str, type[Case]] = {"checkpoint": CheckpointCase, "ssds": SwappingCase}


def load_cases(path: Path) -> tuple[Case, ...]:
    """Read a file of cases.

    Raises:
        CaseError: it is not such a file, or a case has an unknown, missing or wrong field.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CaseError(f"{path} is not JSON ({error}); give a file of cases") from error
    version = data.get("schema_version") if isinstance(data, dict) else None
    entries = data.get("cases") if isinstance(data, dict) else None
    if version != 1 or not isinstance(entries, list) or not entries:
        raise CaseError(
            f"{path} is no file of cases of schema_version 1 (found {version!r}); it needs that and a list 'cases'"
        )
    return tuple(_parse(path, position, entry) for position, entry in enumerate(entries))


def _parse(path: Path, position: int, entry: Any) -> Case:
    name = entry.get("id", f"number {position}") if isinstance(entry, dict) else f"number {position}"
    kind = next((kind for field, kind in _KINDS.items() if isinstance(entry, dict) and field in entry), TrainingCase)
    try:
        return kind.model_validate(entry)
    except ValidationError as error:
        # A field that is not known tells more than those that are missing in its place.
        details = error.errors(include_url=False)
        first = min(details, key=lambda detail: (detail["type"] != "extra_forbidden", len(detail["loc"])))
        field = ".".join(str(part) for part in first["loc"]) or "the case"
        rule = "such a field cannot be predicted from" if first["type"] == "extra_forbidden" else first["msg"]
        raise CaseError(f"{path}: case {name}: {field}: {rule}; correct the case, or leave it out") from error
