"""Levels of checkpoints, as a command line gives them."""

from collections.abc import Sequence

from executor.checkpoint import Level
from executor.checkpoint.levels import DEFAULT_EVERY
from planner.plan import Plan


def levels_of(plan: Plan, places: Sequence[str], every: Sequence[int], keep: Sequence[int]) -> tuple[Level, ...]:
    """Return a level for each place.

    Args:
        plan: that is trained under.
        places: fastest first.
        every: iterations from one checkpoint to the next, for each place, or one for all; empty: see :func:`intervals`.
        keep: the newest that stay, likewise.

    Raises:
        ValueError: there are more or fewer numbers than places.
    """
    intervals_ = _each("--checkpoint-every", every, len(places)) if every else intervals(plan, len(places))
    kept = _each("--keep", keep, len(places))
    return tuple(map(Level, places, intervals_, kept))


def intervals(plan: Plan, num_places: int) -> tuple[int, ...]:  # noqa: ARG001 - plans say nothing of it so far
    """Return the iterations from one checkpoint to the next, for each of so many places, where none are asked for."""
    return (DEFAULT_EVERY,) * num_places


def _each(option: str, numbers: Sequence[int], count: int) -> tuple[int, ...]:
    if len(numbers) not in {1, count}:
        raise ValueError(
            f"{option} {','.join(map(str, numbers))} has {len(numbers)} numbers for {count} place(s) of "
            "--checkpoint-dir; give one for each, or one for all"
        )
    return tuple(numbers) if len(numbers) == count else (numbers[0],) * count
