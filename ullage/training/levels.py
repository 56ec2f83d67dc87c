"""Make levels of checkpoints from places, intervals and numbers of the command line."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.levels import DEFAULT_EVERY, Level, check_levels
from executor.checkpoint.places.locating import place_at
from planner.checkpoints.policy import LEAST_BUFFER_BYTES
from planner.plan.document import Plan

MEMORY: Final = "memory"
"""Place that means the folder of :func:`memory_folder`."""

_MEMORY_ROOT: Final = Path("/dev/shm")  # noqa: S108 - shared memory is intended


def memory_folder(plan: Plan) -> Path:
    """Return a folder for checkpoints in the host memory of this node. Only this user can read it.

    Its files survive the process, but not a failure of the node, and take memory until they are removed.

    Raises:
        CheckpointError: the folder cannot be made, or belongs to another user.
    """
    folder = _MEMORY_ROOT / f"{_prefix()}{plan.digest()[:12]}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}; give a folder instead of {MEMORY}") from error
    if owner != os.getuid():
        raise CheckpointError(f"{folder} belongs to user {owner}; remove it, or give a folder instead of {MEMORY}")
    return folder


def memory_folders() -> list[Path]:
    """Return the folders that this user has in the host memory of this node, one for each plan."""
    return sorted(_MEMORY_ROOT.glob(f"{_prefix()}*"))


def _prefix() -> str:
    return f"ullage-{os.getuid()}-"


def levels_of(plan: Plan, places: Sequence[str], every: Sequence[int], keep: Sequence[int]) -> tuple[Level, ...]:
    """Return a level for each place.

    Args:
        plan: the plan of training.
        places: places of checkpoints, fastest first.
        every: iterations between checkpoints, for each place or one for all; empty: those of the plan.
        keep: number of newest checkpoints to keep, for each place or one for all.

    Raises:
        ValueError: the number of intervals or of ``keep`` does not match the places, or the places do not match the
            plan's levels.
    """
    intervals_ = _each("--checkpoint-every", every, len(places)) if every else intervals(plan, places)
    num_kept = _each("--keep", keep, len(places))
    return tuple(map(Level, places, intervals_, num_kept))


def intervals(plan: Plan, places: Sequence[str]) -> tuple[int, ...]:
    """Return the plan's iterations between checkpoints for each place.

    Raises:
        ValueError: the places do not match the planned levels (``ullage plan --mtbf``).
    """
    if plan.checkpoints is None:
        return (DEFAULT_EVERY,) * len(places)
    planned = [each.level for each in plan.checkpoints.levels]
    fit = all(place != MEMORY or level == "memory" for place, level in zip(places, planned, strict=False))
    if len(places) != len(planned) or not fit:
        raise ValueError(
            f"the plan makes checkpoints at {' and '.join(planned)}, but --checkpoint-dir gives "
            f"{' and '.join(places)}; give one place for each level, fastest first, or give --checkpoint-every"
        )
    return tuple(each.every for each in plan.checkpoints.levels)


def usable(plan: Plan, levels: Sequence[Level], *, is_first: bool) -> tuple[Level, ...]:
    """Check levels before training, so that a bad place does not waste a run; return them with the folder of memory.

    Args:
        plan: the plan of training.
        levels: the levels.
        is_first: whether this is rank 0, which checks that no other run writes there.

    Raises:
        CheckpointError: a place cannot be used, or another run is writing there.
        ValueError: the levels are not consistent.
    """
    check_levels(levels)
    found = [
        dataclasses.replace(level, place=memory_folder(plan)) if level.place == MEMORY else level for level in levels
    ]
    for level in found:
        place = place_at(level.place)
        if is_first:  # the lasting lock is taken after the model is made
            with place.lock():
                pass
    return tuple(found)


def buffer_bytes(plan: Plan) -> int:
    """Return the host memory of each rank for snapshots that are not written yet: the plan's if it has checkpoints."""
    return LEAST_BUFFER_BYTES if plan.checkpoints is None else plan.checkpoints.buffer_bytes


def _each(option: str, numbers: Sequence[int], count: int) -> tuple[int, ...]:
    if len(numbers) not in {1, count}:
        raise ValueError(
            f"{option} {','.join(map(str, numbers))} has {len(numbers)} numbers for {count} place(s) of "
            "--checkpoint-dir; give one for each, or one for all"
        )
    return tuple(numbers) if len(numbers) == count else (numbers[0],) * count
