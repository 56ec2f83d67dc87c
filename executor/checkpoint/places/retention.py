"""Checkpoints in one place: which one to resume from, and which ones to remove."""

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

LEAST_KEPT: Final = 2
"""Least number of checkpoints that retention leaves, each verified."""

_BESIDE_TRAINING: Final = 1  # reading threads; training may need the drive too
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
            CheckpointError: it cannot be.
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
        self._held: collections.Counter[str] = collections.Counter()

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
    def tidy(self) -> None:
        """Remove spare files of old checkpoints.

        Raises:
            OSError: it cannot be removed.
        """

    @abc.abstractmethod
    def _sweep(self, last: int) -> None:
        """Remove files of dead writers; if that cannot be known, those of steps up to ``last``."""

    def newest(self, use: Callable[[Checkpoint], None] = Checkpoint.verify) -> "Found":
        """Return the newest checkpoint that is whole, and why newer ones are not. See :func:`newest_of`."""
        return newest_of([self], use)

    def trust(self, folder: Folder) -> None:
        """Record that a checkpoint is whole, because it was just verified."""
        with self._lock:
            self._whole.add(folder.name)

    @contextlib.contextmanager
    def held(self, folder: Folder) -> Iterator[None]:
        """Keep a checkpoint from being removed by :meth:`prune` of this store, while it is read."""
        with self._lock:
            self._held[folder.name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._held[folder.name] -= 1

    @contextlib.contextmanager
    def _removing(self) -> Iterator[None]:
        """Turn errors of removing into :class:`CheckpointError`."""
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

    def thin(self, keep: int = LEAST_KEPT) -> list[Folder]:
        """Remove checkpoints, reading none: all but the newest ``keep`` known to be whole, and the newest of all.

        None goes before so many are known to be whole, :data:`LEAST_KEPT` at least. What is :meth:`held` stays, and
        what is damaged and newer than those, for who wants to know why. What writers that died have left goes.

        Returns:
            What was removed.

        Raises:
            CheckpointError: something could not be removed.
        """
        with self._removing():
            return self._thin(self.folders(), keep)

    def prune(self, keep: int = LEAST_KEPT) -> list[Folder]:
        """Read again what is there, newest first, until ``keep`` are known to be whole; then :meth:`thin`.

        What comes meanwhile stays.

        Returns:
            What was removed.

        Raises:
            CheckpointError: something could not be removed.
        """
        with self._removing():
            there, left = self.folders(), max(keep, LEAST_KEPT)
            for folder in there:
                left -= folder.name in self._whole or self.read_again(folder)
                if not left:
                    break
            return self._thin(there, keep)

    def _thin(self, there: Sequence[Folder], keep: int) -> list[Folder]:
        removed: list[Folder] = []
        wanted = max(keep, LEAST_KEPT)
        with self._lock:
            kept = [folder for folder in there if folder.name in self._whole][:wanted]
            is_enough = len(kept) == wanted
            last = there.index(kept[-1]) if is_enough else 0
            stay = {folder.name for folder in (*kept, *there[:1])}
            for number, folder in enumerate(there if is_enough else ()):
                damaged = number < last and folder.name in self._damaged
                if folder.name not in stay and not damaged and not self._held[folder.name]:
                    self._remove(folder)
                    removed.append(folder)
        self._sweep(step_of(kept[-1]) if is_enough else -1)
        return removed


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The checkpoint to resume from.

    Attributes:
        checkpoint: the newest that is whole; ``None`` if there is none.
        refused: why each newer one was skipped, and which places could not be reached.
        level: index of its place.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    level: int = 0


def newest_of(stores: Sequence[AbstractStore], use: Callable[[Checkpoint], None] = Checkpoint.verify) -> Found:
    """Return the newest checkpoint of several places that is whole; of equals, that of the first place.

    Args:
        stores: the places.
        use: reads, and so checks, what is needed; left out, every byte is checked.

    Raises:
        What ``use`` does, but :class:`DamagedError`.
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
    """Return whether a checkpoint is whole; every byte is checked, slowly, because training may need the drive."""
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.verify(_BESIDE_TRAINING)
    except DamagedError:
        return False
    return True
