"""Copies of data with other values."""

import copy
from collections.abc import Mapping
from typing import Any


def with_changes(data: Mapping[str, Any], changes: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy with some fields changed; ``engine__stride`` reaches into ``engine``."""
    changed = dict(copy.deepcopy(data))
    for path, value in changes.items():
        *outer, last = path.split("__")
        place = changed
        for key in outer:
            place = place[key]
        place[last] = value
    return changed
