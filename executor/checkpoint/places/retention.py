"""What there is in one place: which checkpoint to go on from, and which may go."""

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
"""Checkpoints that retention leaves at least: each read again and found whole."""

_BESIDE_TRAINING: Final = 1  # threads that read: training may want the drive too
_NAME = re.compile(r"step-(\d{8,})(?:-([0-9a-f]{8}))?")


def checkpoint_name(step: int, nonce: int = 0) -> str:
    """Return the name of a checkpoint's folder; with a nonce where a name cannot be given to a folder that is whole."""
    return f"step-{step:08d}" + (f"-{nonce:08x}" if nonce else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and nonce of what :func:`checkpoint_name` returned; ``None`` if it did not."""
    found = _NAME.fullmatch(name)
    return None if found is None else (int(found[1]), int(found[2] or "0", 16))


def in_use(folder: Folder) -> str:
    """Return what to say when there is another checkpoint of that step."""
    return f"{folder} is there already, and whole; another run writes here: give every run a folder of its own"


class Copy(Protocol):
    """A checkpoint that is being copied to a place, where nobody takes it for one."""

    @property
    def folder(self) -> Folder:
        """Where its files go."""
        ...

    def write(self, record: FileRecord, chunks: Iterator[Buffer]) -> None:
        """Write a file and make it durable.

        Raises:
            CheckpointError: it cannot be written, or ``chunks`` cannot be read.
        """
        ...

    def commit(self, manifest: Manifest) -> Folder:
        """Make the checkpoint whole and durable, after all files; return where it is.

        Raises:
            CheckpointError: it cannot be.
        """
        ...

    def abandon(self) -> None:
        """Remove what has been written. Abandoning twice is allowed."""
        ...


class AbstractStore(abc.ABC):
    """Checkpoints in one place.

    Attributes:
        place: the folder, or URL.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._lock = threading.Lock()  # guards what follows
        self._whole: set[str] = set()  # read again, and found so
        self._damaged: set[str] = set()
        self._held: collections.Counter[str] = collections.Counter()

    @abc.abstractmethod
    def folders(self) -> list[Folder]:
        """Return where all checkpoints are, newest first, damaged or not.

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
        """Return where the checkpoint of that name is."""

    @abc.abstractmethod
    def _remove(self, folder: Folder) -> None:
        """Remove a checkpoint, which is none from the first moment on. What somebody else removes is gone too."""

    @abc.abstractmethod
    def tidy(self) -> None:
        """Give up what is kept of removed checkpoints to be written over.

        Raises:
            OSError: it cannot be removed.
        """

    @abc.abstractmethod
    def _sweep(self, last: int) -> None:
        """Remove what writers have left that died; of steps up to ``last`` if it cannot be known whether they did."""

    def newest(self, use: Callable[[Checkpoint], None] = Checkpoint.verify) -> "Found":
        """Return the newest checkpoint that is whole, and why newer ones are not. See :func:`newest_of`."""
        return newest_of([self], use)

    def trust(self, folder: Folder) -> None:
        """Take it as known that a checkpoint is whole: it was just read."""
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
        """Say what could not be removed, as :class:`CheckpointError`."""
        try:
            yield
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.place}: {error.strerror}; remove it by hand") from error

    def read_again(self, folder: Folder) -> bool:
        """Return whether a checkpoint is whole, and remember that."""
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
    """What is there to go on from.

    Attributes:
        checkpoint: the newest that is whole; ``None`` if there is none.
        refused: why each newer one was passed over, and which places could not be reached.
        level: the place that it is in, by its index.
    """

    checkpoint: Checkpoint | None
    refused: tuple[str, ...]
    level: int = 0


def newest_of(stores: Sequence[AbstractStore], use: Callable[[Checkpoint], None] = Checkpoint.verify) -> Found:
    """Return the newest checkpoint of several places that is whole; of equals, that of the first place.

    Args:
        stores: the places.
        use: reads of it what is needed, which checks that; left out, every byte is read.

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
    """Return all checkpoints of several places, each with its place's index, newest first, and what is out of reach."""
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
    """Return whether a checkpoint is whole, every byte of it checked; beside training, which may want the drive too."""
    try:
        with Checkpoint(folder) as checkpoint:
            checkpoint.verify(_BESIDE_TRAINING)
    except DamagedError:
        return False
    return True
