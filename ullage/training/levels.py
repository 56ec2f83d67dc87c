"""Make levels of checkpoints from the places of the command line."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from executor.checkpoint.files.lock import run_lock
from executor.checkpoint.files.system_calls import CheckpointError
from executor.checkpoint.levels import Level, check_levels
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.locating import place_at
from planner.checkpoints.policy import LEAST_BUFFER_BYTES
from planner.plan.document import Plan
from planner.terms import MIN_CHECKPOINTS

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


def levels_of(plan: Plan, dirs: Sequence[Mapping[str, Any]]) -> tuple[Level, ...]:
    """Return a level for each ``--checkpoint-dir``.

    Args:
        plan: the plan of training.
        dirs: what each gives, fastest first: its place (named ``""``), ``every`` and ``keep``. Intervals that none
            gives are those of the plan, if ``ullage plan --mtbf`` chose them, or else 100.

    Raises:
        ValueError: the places do not match the levels of the plan.
    """
    places = [each[""] for each in dirs]
    if any("every" in each for each in dirs) or plan.checkpoints is None:
        return tuple(Level(place, **{k: v for k, v in of.items() if k}) for place, of in zip(places, dirs, strict=True))
    levels = [each.level for each in plan.checkpoints.levels]
    fit = all(place != MEMORY or level == "memory" for place, level in zip(places, levels, strict=False))
    if len(places) != len(levels) or not fit:
        raise ValueError(
            f"the plan makes checkpoints at {' and '.join(levels)}, but --checkpoint-dir gives "
            f"{' and '.join(places)}; give one place for each level, fastest first, or intervals, as in "
            f"--checkpoint-dir {places[0]},every=10"
        )
    return tuple(
        Level(place, each.every, of.get("keep", MIN_CHECKPOINTS))
        for place, each, of in zip(places, plan.checkpoints.levels, dirs, strict=True)
    )


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
        if is_first and isinstance(place, FolderPlace):  # the lasting lock is taken after the model is made
            with run_lock(place.root):
                pass
    return tuple(found)


def buffer_bytes(plan: Plan) -> int:
    """Return the host memory of each rank for snapshots that are not written yet: the plan's if it has checkpoints."""
    return LEAST_BUFFER_BYTES if plan.checkpoints is None else plan.checkpoints.buffer_bytes
