"""Progress of long work: a bar if stderr is a terminal, otherwise nothing."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.search import Candidate

Report = Callable[[str, int, int], None]
"""Takes the present step in words, the steps done, and all steps (0: unknown)."""


@contextlib.contextmanager
def progress_bar(*, time_left: bool = False) -> Iterator[Report]:
    """Yield a function that shows the present step. Other output to stderr appears above it.

    Args:
        time_left: show the steps done and the time for the remaining steps.
    """
    if not sys.stderr.isatty():
        yield lambda _step, _done, _total: None
        return
    from rich.progress import (  # noqa: PLC0415 - slow to import
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ullage.output.console import console  # noqa: PLC0415

    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if time_left:
        columns = (*columns, MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(step: str, done: int, total: int) -> None:
            progress.update(task, description=step, completed=done, total=total or None)

        yield show


@contextlib.contextmanager
def seconds_bar() -> Iterator[Callable[[str, float, float], None]]:
    """Yield a function that takes a new step, the budget's seconds before it, and all seconds of the budget."""
    with progress_bar() as show:
        yield lambda step, done_s, total_s: show(
            f"{step}, about {max(total_s - done_s, 1):.0f} s left", round(done_s), round(total_s)
        )


@contextlib.contextmanager
def search_progress() -> Iterator["Callable[[Candidate, int], None]"]:
    """Yield a function for the search that shows the best plan so far."""
    with progress_bar() as show:
        yield lambda best, num_simulations: show(search_words(best, num_simulations), 0, 0)


def search_words(best: "Candidate", num_simulations: int) -> str:
    """Return the state of a search in words."""
    found = "nothing fits yet" if best.missing_bytes else f"best so far {best.iteration_s:.3g} s per iteration"
    return f"{num_simulations} schedules simulated, {found}"
