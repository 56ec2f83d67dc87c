"""Places of checkpoints: finds the one to resume from, takes copies of others, and removes old ones."""

import abc
import collections
import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.format.manifest import FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint
from planner.terms import MIN_CHECKPOINTS

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


class Place(abc.ABC):
    """A folder of checkpoints, on a drive or in memory, or a URL.

    Attributes:
        place: the folder or URL, as text.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._lock = threading.Lock()  # guards the fields below
        self._whole: set[str] = set()  # names of verified checkpoints
        self._damaged: set[str] = set()
        self._reading: collections.Counter[str] = collections.Counter()

    @abc.abstractmethod
    def folders(self) -> Sequence[Folder]:
        """Return the folders of all checkpoints, newest first, damaged or not.

        Raises:
            CheckpointError: the place cannot be reached.
        """

    @abc.abstractmethod
    def folder(self, step: int, nonce: int = 0) -> Folder:
        """Return the folder of a checkpoint."""

    def put(
        self, source: Checkpoint, check: Callable[[], None] = lambda: None, copy: Callable[[str], None] | None = None
    ) -> Folder:
        """Copy a checkpoint of another place to this one and verify the copy; return its folder.

        Args:
            source: the checkpoint. If it is here already and whole, nothing is copied.
            check: called before every chunk. If it raises, the copy ends.
            copy: copies all files into the copy of this name, instead of :meth:`copy`: nodes do it together.

        Raises:
            CheckpointError: the source is damaged, this place cannot be written, or it has another checkpoint of that
                step. No file of the copy is left.
        """
        same_step = (folder for folder in self.folders() if step_of(folder) == source.manifest.step)
        found = next((folder for folder in same_step if self._has_copy(folder, source, check)), None)
        folder = self._put(source, check, copy) if found is None else found
        with self._lock:
            self._whole.add(folder.name)
        return folder

    def _has_copy(self, folder: Folder, source: Checkpoint, check: Callable[[], None]) -> bool:
        try:
            there = Checkpoint(folder)
            if folder.name not in self._whole:
                self._check_whole(folder, check)
        except CheckpointError:  # damaged; or raised by ``check``, which raises again below
            check()
            return False
        if there.manifest.digest != source.manifest.digest:
            raise CheckpointError(in_use(folder))
        return True

    def _put(self, source: Checkpoint, check: Callable[[], None], copy: Callable[[str], None] | None) -> Folder:
        manifest = source.manifest
        name = self.begin_copy(manifest)
        try:
            if copy is None:
                self.copy(name, source, manifest.files, check)
            else:
                copy(name)
            return self.complete(name, manifest)
        except BaseException:
            self.abandon(name)
            raise

    @abc.abstractmethod
    def begin_copy(self, manifest: Manifest) -> str:
        """Begin a copy of a checkpoint, which readers ignore until :meth:`complete`; return its name.

        Raises:
            CheckpointError: the place cannot be written. So do the next two methods.
        """

    @abc.abstractmethod
    def copy(self, name: str, source: Checkpoint, records: Sequence[FileRecord], check: Callable[[], None]) -> None:
        """Copy some files of a checkpoint and verify the copies. Another node may have begun it, and complete it."""

    @abc.abstractmethod
    def complete(self, name: str, manifest: Manifest) -> Folder:
        """Make a copy of all files durable and visible to readers; return its folder."""

    @abc.abstractmethod
    def abandon(self, name: str) -> None:
        """Remove what was copied. This never raises."""

    def _check_whole(self, folder: Folder, check: Callable[[], None]) -> None:
        """Check every byte of a checkpoint, and call ``check`` after every chunk.

        Raises:
            DamagedError: it is not whole.
        """
        Checkpoint(folder).verify_in_turn(check)

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

    def verify(self, folder: Folder) -> bool:
        """Read every byte of a checkpoint; return and record whether it is whole."""
        try:
            self._check_whole(folder, lambda: None)
            found = True
        except DamagedError:
            found = False
        with self._lock:
            (self._whole if found else self._damaged).add(folder.name)
        return found

    def prune(self, keep: int = MIN_CHECKPOINTS, *, reads: bool = True) -> list[Folder]:
        """Remove old checkpoints: all but the newest one and the newest ``keep`` verified ones.

        At least two verified checkpoints stay, and none is removed before enough are verified.
        Checkpoints under :meth:`reading` stay, and those that are being written. Damaged checkpoints stay too, if they
        are newer than the retained ones, so that the damage can be examined. Files of dead writers are removed.

        Args:
            keep: number of verified checkpoints to retain.
            reads: whether checkpoints are verified now, newest first, until enough are whole.

        Returns:
            The removed folders.

        Raises:
            CheckpointError: a file could not be removed.
        """
        wanted = max(keep, MIN_CHECKPOINTS)
        try:
            there, left = self.folders(), wanted
            for folder in there if reads else ():
                left -= folder.name in self._whole or self.verify(folder)
                if not left:
                    break
            return self._remove_old(there, wanted)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.place}: {error.strerror}; remove it by hand") from error

    def _remove_old(self, there: Sequence[Folder], wanted: int) -> list[Folder]:
        removed: list[Folder] = []
        with self._lock:
            newest_whole = [folder for folder in there if folder.name in self._whole][:wanted]
            is_enough = len(newest_whole) == wanted
            last = there.index(newest_whole[-1]) if is_enough else 0
            stay = {folder.name for folder in (*newest_whole, *there[:1])}
            for number, folder in enumerate(there if is_enough else ()):
                damaged = number < last and folder.name in self._damaged
                if folder.name not in stay and not damaged and not self._reading[folder.name]:
                    self.remove(folder)
                    removed.append(folder)
        self._remove_dead_drafts(step_of(newest_whole[-1]) if is_enough else -1)
        return removed

    @abc.abstractmethod
    def remove(self, folder: Folder) -> None:
        """Remove a checkpoint, so that readers ignore it at once. It may be gone already.

        Raises:
            OSError: a file cannot be removed.
        """

    @abc.abstractmethod
    def _remove_dead_drafts(self, last: int) -> None:
        """Remove files of dead writers.

        If dead writers are unknown, remove incomplete checkpoints up to step ``last``.
        """


def newest_of(
    places: Sequence[Place], use: Callable[[Checkpoint], None] = Checkpoint.verify
) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest whole checkpoint of several places, and why newer ones and places were skipped.

    If steps are equal, the first place wins.

    Args:
        places: folders and URLs.
        use: reads the needed values, which checks them. By default, every byte is checked.

    Raises:
        Every error that ``use`` raises, except :class:`DamagedError`.
    """
    there, refused = candidates(places)
    while True:
        for _, folder in there:
            try:
                with Checkpoint(folder) as checkpoint:
                    use(checkpoint)
            except DamagedError as error:
                refused.append(str(error))
            else:
                return checkpoint, refused
        before = there
        there, refused_again = candidates(places)
        if there[:1] == before[:1] or not there:
            return None, refused
        refused = refused_again  # while the old ones were read, a running training replaced them


def candidates(places: Sequence[Place]) -> tuple[list[tuple[int, Folder]], list[str]]:
    """Return all checkpoints of several places, newest first, with the index of the place; and errors of places."""
    refused: list[str] = []
    there: list[tuple[int, int, Folder]] = []
    for level, place in enumerate(places):
        try:
            there += [(-step_of(folder), level, folder) for folder in place.folders()]
        except OSError as error:
            refused.append(str(error))
    return [(level, folder) for _, level, folder in sorted(there, key=lambda one: one[:2])], refused


def step_of(folder: Folder) -> int:
    """Return the step of a checkpoint's folder."""
    parsed = parse_name(folder.name)
    assert parsed is not None, f"{folder} is not the folder of a checkpoint"
    return parsed[0]
