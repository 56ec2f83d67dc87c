"""Check versions of packages against those that ``pyproject.toml`` states, wherever training begins."""

import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Final

_LOWER_BOUND: Final = re.compile(r"([\w-]+)(?:\[[\w,-]+\])?[^;]*?>=\s*([\d.]+)")


def check_versions(names: Iterable[str]) -> None:
    """Check that none of these packages, if it is there, is older than Ullage's metadata allow.

    Raises:
        ImportError: one is older; the message names both versions and the remedy.
    """
    try:
        required = requires("ullage") or []
    except PackageNotFoundError:  # a checkout on PYTHONPATH
        return
    oldest = {match[1]: match[2] for match in map(_LOWER_BOUND.match, required) if match}
    for name in names:
        try:
            found = version(name)
        except PackageNotFoundError:
            continue  # its import will say so
        if name in oldest and _release(found) < _release(oldest[name]):
            raise ImportError(
                f"{name} {found} is older than {oldest[name]}, the oldest that Ullage was tried with; "
                f"pip install '{name}>={oldest[name]}'"
            )


def _release(number: str) -> tuple[int, ...]:
    """Return the release of a version: 2.11.0+cpu is (2, 11, 0)."""
    match = re.match(r"[\d.]*\d", number)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
