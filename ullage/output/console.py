"""The consoles of rich, and JSON."""

import dataclasses
import json
import os
import sys
from typing import Any, NoReturn

from rich.console import Console

_PIPED_WIDTH = 120


class _PipeConsole(Console):
    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError  # main() handles it


def console(*, stderr: bool = False) -> Console:
    """Return a console on stdout or stderr. Without a terminal, lines have 120 columns and no colour."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    # Do not interpret markup: a name like [x] or :key: must be printed unchanged.
    return _PipeConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def write_json(data: Any) -> None:
    """Write JSON to stdout. In it, dataclasses, models of pydantic and arrays are plain data."""
    sys.stdout.write(json.dumps(data, indent=1, sort_keys=True, allow_nan=False, default=_plain) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value.tolist()
