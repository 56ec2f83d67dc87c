"""Progress of long work: a bar on stderr if that is a terminal, else nothing."""

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar(*, time_left: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function of what is being done, steps done and steps in total (0: not known).

    Args:
        time_left: show how many steps are done, and how long the others will take.
    """
    from rich.progress import (  # noqa: PLC0415 - slow to import
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from ullage.console import console  # noqa: PLC0415

    out = console(stderr=True)
    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    if time_left:
        columns = (*columns, MofNCompleteColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=out, disable=not out.is_terminal, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(step: str, done: int, total: int) -> None:
            progress.update(task, description=step, completed=done, total=total or None)

        yield show
