"""Checkpoints in one place: finds the one to resume from, and removes old ones."""

import abc
import collections
import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from executor.checkpoint.files.flusher import Buffer
from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint

MIN_CHECKPOINTS: Final = 2
"""Retention leaves at least this many verified checkpoints."""

_NUM_READERS: Final = 1  # reading threads beside training, which may need the drive too
_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?")


def checkpoint_name(step: int, nonce: int = 0) -> str:
    """Return the name of a checkpoint's folder; with a nonce in places without renames."""
    return f"step-{step:08d}" + (f"-{nonce:08x}" if nonce else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and nonce of what :func:`checkpoint_name` returned; ``None`` if it did not."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or "0", 16))


def in_use(folder: Folder) -> str:
    """Return the error text for another checkpoint of the same step."""
    return f"{folder} is there already, and whole; another run writes here: give every run a folder of its own"


class Copy(Protocol):
    """A checkpoint that is being copied to a place; readers ignore it there."""

    @property
    def folder(self) -> Folder:
        """Where its files go."""

    def write(self, record: FileRecord, chunks: Iterator[Buffer]) -> None:
        """Write a file and make it durable.

        Raises:
            CheckpointError: it cannot be written, or ``chunks`` cannot be read.
        """

    def commit(self, manifest: Manifest) -> Folder:
        """Make the checkpoint complete and durable, after all files; return its folder.

        Raises:
            CheckpointError: it cannot be written.
        """

    def abandon(self) -> None:
        """Remove what has been written. Abandoning twice is allowed."""


class AbstractStore(abc.ABC):
    """Checkpoints in one place.

    Attributes:
        place: the folder, or URL.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._lock = threading.Lock()  # guards what follows
        self._whole: set[str] = set()  # verified
        self._damaged: set[str] = set()
        self._reading: collections.Counter[str] = collections.Counter()

    @abc.abstractmethod
    def folders(self) -> list[Folder]:
        """Return the folders of all checkpoints, newest first, damaged or not.

        Raises:
            CheckpointError: the place cannot be reached.
        """

    @abc.abstractmethod
    def begin_copy(self, manifest: Manifest) -> Copy:
        """Begin to copy a checkpoint of another place to this one.

        Raises:
            CheckpointError: nothing can be written here.
        """

    @abc.abstractmethod
    def folder(self, step: int, nonce: int = 0) -> Folder:
        """Return the folder of a checkpoint."""

    @abc.abstractmethod
    def _remove(self, folder: Folder) -> None:
        """Remove a checkpoint; readers ignore it from the first moment. It may be gone already."""

    @abc.abstractmethod
    def remove_spares(self) -> None:
        """Remove spare files of old checkpoints.

        Raises:
            OSError: it cannot be removed.
        """

    @abc.abstractmethod
    def _remove_dead_drafts(self, last: int) -> None:
        """Remove files of dead writers; if these are not known, unfinished checkpoints of steps up to ``last``."""

    def newest(self, use: Callable[[Checkpoint], None] = Checkpoint.verify) -> "Found":
        """Return the newest whole checkpoint, see :func:`newest_of`."""
        return newest_of([self], use)

    def mark_whole(self, folder: Folder) -> None:
        """Record that a checkpoint is whole, because it was just verified."""
        with self._lock:
            self._whole.add(folder.name)

    @contextlib.contextmanager
    def reading(self, folder: Folder) -> Iterator[None]:
        """Keep a checkpoint from being removed by :meth:`prune` of this store, while it is read."""
        with self._lock:
            self._reading[folder.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[folder.name] -= 1

    @contextlib.contextmanager
    def _removing(self) -> Iterator[None]:
        """Turn errors during removal into :class:`CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.place}: {error.strerror}; remove it by hand") from error

    def read_again(self, folder: Folder) -> bool:
        """Verify a checkpoint; return and record whether it is whole."""
        found = is_whole(folder)
        with self._lock:
            (self._whole if found else self._damaged).add(folder.name)
        return found

    def remove_old(self, keep: int = MIN_CHECKPOINTS) -> list[Folder]:
        """Remove all but the newest ``keep`` (at least :data:`MIN_CHECKPOINTS`) verified checkpoints and the newest.

        It reads no checkpoint, and removes none before that many are verified. Checkpoints under :meth:`reading` stay.
        Damaged ones that are newer than those stay too, so that the damage can be examined. Files of dead writers are
        removed.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: something could not be removed.
        """
        with self._removing():
            return self._remove_old(self.folders(), keep)

    def prune(self, keep: int = MIN_CHECKPOINTS) -> list[Folder]:
        """Verify checkpoints, newest first, until ``keep`` are whole; then :meth:`remove_old`.

        Checkpoints that are written meanwhile stay.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: something could not be removed.
        """
        with self._removing():
            there, left = self.folders(), max(keep, MIN_CHECKPOINTS)
            for folder in there:
                left -= folder.name in self._whole or self.read_again(folder)
                if not left:
                    break
            return self._remove_old(there, keep)

    def _remove_old(self, there: Sequence[Folder], keep: int) -> list[Folder]:
        removed: list[Folder] = []
        wanted = max(keep, MIN_CHECKPOINTS)
        with self._lock:
            newest_whole = [folder for folder in there if folder.name in self._whole][:wanted]
            is_enough = len(newest_whole) == wanted
            last = there.index(newest_whole[-1]) if is_enough else 0
            stay = {folder.name for folder in (*newest_whole, *there[:1])}
            for number, folder in enumerate(there if is_enough else ()):
                damaged = number < last and folder.name in self._damaged
                if folder.name not in stay and not damaged and not self._reading[folder.name]:
                    self._remove(folder)
                    removed.append(folder)
        self._remove_dead_drafts(step_of(newest_whole[-1]) if is_enough else -1)
        return removed


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to resume from.

    Attributes:
        checkpoint: the newest whole one; ``None`` without any.
        refused: why each newer one was skipped, and which places could not be reached.
        level: index of its place.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    level: int = 0


def newest_of(stores: Sequence[AbstractStore], use: Callable[[Checkpoint], None] = Checkpoint.verify) -> Found:
    """Return the newest whole checkpoint of several places; of equal steps, that of the first place.

    Args:
        stores: the places.
        use: reads what is needed, and so checks it; left out, every byte is checked.

    Raises:
        Every error of ``use`` except :class:`DamagedError`.
    """
    there, refused = candidates(stores)
    for level, folder in there:
        try:
            with Checkpoint(folder) as checkpoint:
                use(checkpoint)
        except DamagedError as error:
            refused.append(str(error))
        else:
            return Found(checkpoint, tuple(refused), level)
    return Found(None, tuple(refused))


def candidates(stores: Sequence[AbstractStore]) -> tuple[list[tuple[int, Folder]], list[str]]:
    """Return all checkpoints of several places, newest first, each with its place's index; and errors of places."""
    refused: list[str] = []
    there: list[tuple[int, int, Folder]] = []
    for level, store in enumerate(stores):
        try:
            there += [(-step_of(folder), level, folder) for folder in store.folders()]
        except OSError as error:
            refused.append(str(error))
    return [(level, folder) for _, level, folder in sorted(there, key=lambda one: one[:2])], refused


def step_of(folder: Folder) -> int:
    """Return the step of a checkpoint's folder."""
    parsed = parse_name(folder.name)
    assert parsed is not None, f"{folder} is no folder of a checkpoint"
    return parsed[0]


def is_whole(folder: Folder) -> bool:
    """Return whether a checkpoint is whole; checks every byte with few threads, because training may need the drive."""
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.verify(_NUM_READERS)
    except DamagedError:
        return False
    return True
