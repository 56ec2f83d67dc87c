"""Retention of checkpoints in one place: finds the one to resume from, and removes old ones."""

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
"""Retention keeps at least this many verified checkpoints."""

_NUM_READERS: Final = 1  # few, because training may need the drive too
_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?")


def checkpoint_name(step: int, nonce: int = 0) -> str:
    """Return the name of a checkpoint's folder. Places without renames need a nonce."""
    return f"step-{step:08d}" + (f"-{nonce:08x}" if nonce else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and nonce of a name from :func:`checkpoint_name`; ``None`` for other names."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or "0", 16))


def in_use(folder: Folder) -> str:
    """Return the error text for another checkpoint of the same step."""
    return f"{folder} is there already, and whole; another run writes here: give every run a folder of its own"


class Copy(Protocol):
    """A checkpoint that is being copied to a place. Readers ignore it."""

    @property
    def folder(self) -> Folder:
        """The folder of its files."""

    def write(self, record: FileRecord, chunks: Iterator[Buffer]) -> None:
        """Write a file and make it durable.

        Raises:
            CheckpointError: the file cannot be written, or ``chunks`` cannot be read.
        """

    def commit(self, manifest: Manifest) -> Folder:
        """Complete the checkpoint after all files, and make it durable; return its folder.

        Raises:
            CheckpointError: it cannot be written.
        """

    def abandon(self) -> None:
        """Remove what has been written. Abandoning twice is allowed."""


class AbstractStore(abc.ABC):
    """Checkpoints in one place.

    Attributes:
        place: the folder or URL.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._lock = threading.Lock()  # guards the fields below
        self._whole: set[str] = set()  # names of verified checkpoints
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
            CheckpointError: the place cannot be written.
        """

    @abc.abstractmethod
    def folder(self, step: int, nonce: int = 0) -> Folder:
        """Return the folder of a checkpoint."""

    @abc.abstractmethod
    def _remove(self, folder: Folder) -> None:
        """Remove a checkpoint, so that readers ignore it at once. It may be gone already."""

    @abc.abstractmethod
    def remove_spares(self) -> None:
        """Remove spare files of old checkpoints.

        Raises:
            OSError: a file cannot be removed.
        """

    @abc.abstractmethod
    def _remove_dead_drafts(self, last: int) -> None:
        """Remove files of dead writers.

        If dead writers are unknown, remove incomplete checkpoints up to step ``last``.
        """

    def newest(self, use: Callable[[Checkpoint], None] = Checkpoint.verify) -> "Found":
        """Return the newest whole checkpoint, see :func:`newest_of`."""
        return newest_of([self], use)

    def mark_whole(self, folder: Folder) -> None:
        """Record that a checkpoint has been verified and is whole."""
        with self._lock:
            self._whole.add(folder.name)

    @contextlib.contextmanager
    def reading(self, folder: Folder) -> Iterator[None]:
        """Return a context in which :meth:`prune` does not remove a checkpoint, because it is being read."""
        with self._lock:
            self._reading[folder.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._reading[folder.name] -= 1

    @contextlib.contextmanager
    def _removing(self) -> Iterator[None]:
        """Return a context that turns errors of removal into :class:`CheckpointError`."""
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
        """Remove old checkpoints: all but the newest one and the newest ``keep`` verified ones.

        At least :data:`MIN_CHECKPOINTS` verified checkpoints stay. It reads no checkpoint, and removes none until so
        many are verified. Checkpoints under :meth:`reading` stay. Damaged checkpoints stay too, if they are newer than
        the retained ones, so that the damage can be examined. Files of dead writers are removed.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: a file could not be removed.
        """
        with self._removing():
            return self._remove_old(self.folders(), keep)

    def prune(self, keep: int = MIN_CHECKPOINTS) -> list[Folder]:
        """Verify checkpoints, newest first, until ``keep`` are whole; then :meth:`remove_old`.

        Checkpoints that are being written stay.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: a file could not be removed.
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
        checkpoint: the newest whole checkpoint; ``None`` if there is none.
        refused: why each newer checkpoint was skipped, and which places could not be reached.
        level: index of its place.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    level: int = 0


def newest_of(stores: Sequence[AbstractStore], use: Callable[[Checkpoint], None] = Checkpoint.verify) -> Found:
    """Return the newest whole checkpoint of several places. If steps are equal, the first place wins.

    Args:
        stores: the places.
        use: reads the needed values, which checks them. By default, every byte is checked.

    Raises:
        Every error that ``use`` raises, except :class:`DamagedError`.
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
    """Return all checkpoints of several places, newest first, with the index of the place; and errors of places."""
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
    assert parsed is not None, f"{folder} is not the folder of a checkpoint"
    return parsed[0]


def is_whole(folder: Folder) -> bool:
    """Check every byte of a checkpoint, with few threads, to spare the drive; return whether it is whole."""
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.verify(_NUM_READERS)
    except DamagedError:
        return False
    return True
