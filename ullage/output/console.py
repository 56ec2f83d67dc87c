"""Print tables through rich, and JSON unchanged."""

import json
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from rich.console import Console, JustifyMethod
from rich.table import Table

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


def table(title: str, *columns: str, num_text: int = 1, text: Collection[int] = ()) -> Table:
    """Return a plain table. The first ``num_text`` columns and those in ``text`` are text, the others numbers."""
    result = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        min_width=len(title),  # otherwise a narrow table folds its title
    )
    for position, column in enumerate(columns):
        # In a narrow terminal, fold a long word instead of truncating it, because truncated names are useless.
        justify: JustifyMethod = "left" if position < num_text or position in text else "right"
        result.add_column(column, justify=justify, header_style="dim", overflow="fold")
    return result


def facts(rows: Mapping[str, str]) -> Table:
    """Return a table of names and values."""
    result = Table.grid(padding=(0, 2, 0, 0))
    result.add_column(style="bold", no_wrap=True)
    result.add_column()
    for name, value in rows.items():
        result.add_row(name, value)
    return result


def write_json(data: Any) -> None:
    """Write JSON to stdout."""
    sys.stdout.write(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")
