"""A folder of checkpoints, and the writing of a checkpoint into it.

A checkpoint is written into a folder ``tmp-...``. Every file is synced, the manifest last, then the folder. Then the
folder is renamed to ``step-00000012``, and the name is synced too. Only then is the checkpoint acknowledged. So if a
folder has such a name, and a manifest that matches its own digest, the checkpoint was whole when it was written.
Checksums reveal any later damage.

[Note: Spares] An old checkpoint is not deleted but renamed to ``spare-...``. The next checkpoint renames it to
``tmp-...`` and overwrites its files. The reason: with the mount option ``discard``, drives need a second to free a
gigabyte, and writes wait for that. Spares are as safe as new files. A crash may restore the old name with new bytes, or
old bytes under a name without a manifest, but checksums reveal that, and newer checkpoints are whole. Spares are
removed when training ends. If a process dies, the next run uses its spares.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, final

import numpy as np

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError, Files, remove_tree, write_all
from executor.checkpoint.files.timeouts import waiting
from executor.checkpoint.files.writer import Buffer, Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import FileLayout
from executor.checkpoint.format.manifest import MANIFEST_NAME, FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.place import Place, checkpoint_name, in_use, parse_name
from hwprofiles.machine import available_memory_bytes
from planner.terms import MIN_CHECKPOINTS

_NUM_BUFFERS: Final = 3  # of a copy: one is being read, one hashed and one written
_JOINED_S: Final = 30.0  # longest until a folder that another node has made is seen
_SPARE: Final = "spare-"
_MAX_SPARES: Final = 2
_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_OF_NODE: Final = _MEMORY | {"ext4", "ext3", "xfs", "btrfs", "zfs", "f2fs", "overlay"}  # of no other node's drives
_MOUNTS: Final = Path("/proc/self/mounts")
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})


def joined_folder(
    root: Path,
    step: int,
    folders: Iterable[str],
    nonce: str,
    patience_s: float,
    is_lost: Callable[[], bool] = lambda: False,
) -> Path:
    """Return the folder of the draft that rank 0 has begun, for another rank.

    Raises:
        CheckpointError: rank 0 has not begun the checkpoint in time.
    """
    folder = draft_folder(root, step, nonce)
    waits = waiting(patience_s, is_lost)
    while not all((folder / name).is_dir() for name in folders):
        if not next(waits, False):
            raise CheckpointError(
                f"{folder}: rank 0 has not made this folder, and is lost"
                if is_lost()
                else f"{folder}: rank 0 has not made this folder within {patience_s:g} s; give all ranks the same "
                "folder for checkpoints"
            )
    return folder


def write_file(files: Files, folder: Path, record: FileRecord, chunks: Iterator[Buffer]) -> None:
    """Copy a file into the folder of a checkpoint and make it durable; its header is written last.

    Raises:
        CheckpointError: the file cannot be written, or ``chunks`` cannot be read or are not those of the record.
    """
    with Flusher(files, ring_of(_NUM_BUFFERS, record.chunk_bytes), _NUM_BUFFERS - 1) as flusher:
        data = next(chunks).tobytes()
        while len(data) < (header_bytes := 8 + int.from_bytes(data[:8], "little")):
            data += next(chunks).tobytes()
        layout = FileLayout((), data[:header_bytes], (), record.num_bytes)
        writer = ShardWriter(flusher, folder, record.path, layout)
        try:
            writer.append(np.frombuffer(data, np.uint8)[header_bytes:])
            for values in chunks:
                writer.append(values)
            written = writer.finish()
        except BaseException:
            writer.abandon()
            raise
    if written != record:
        raise CheckpointError(f"{folder / record.path}: the copy differs from the source")


def draft_folder(root: Path, step: int, nonce: str) -> Path:
    """Return the folder of a checkpoint that is being written."""
    return root / f"tmp-{step:08d}-{nonce}"


@final
class FolderPlace(Place):
    """A folder of checkpoints. It is made if needed.

    Raises:
        CheckpointError: the folder cannot be made.
    """

    def __init__(self, root: Path, files: Files | None = None) -> None:
        super().__init__(str(root))
        self.root = root
        self.files = files or Files()
        self._locks: dict[str, int] = {}  # descriptors, of what is being written, by the names of folders
        if not root.is_dir():
            try:
                root.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another rank was faster
                    self.files.make_folder(root)
                self.files.sync_folder(root.parent)
            except OSError as error:
                raise CheckpointError(f"{root}: {error.strerror}; choose another folder for checkpoints") from error
            if not root.is_dir():
                raise CheckpointError(f"{root} is not a folder; give a folder for checkpoints")

    def begin(self, step: int, folders: Iterable[str] = (), nonce: str = "") -> Path:
        """Begin the checkpoint of a step; return its folder, which readers ignore until :meth:`complete`.

        Args:
            step: of the checkpoint.
            folders: subfolders to make.
            nonce: by which other ranks find the folder.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        folder = draft_folder(self.root, step, nonce or secrets.token_hex(4))
        try:
            is_reused = self._takes_spare(folder)
            for again in itertools.count():
                if again or not is_reused:
                    with contextlib.suppress(*((FileExistsError,) if again else ())):
                        self.files.make_folder(folder)
                with contextlib.suppress(FileNotFoundError, BlockingIOError):  # removed before it was locked
                    self._locks[folder.name] = _locked(folder)
                    break
            for name in folders:
                if not (folder / name).is_dir():
                    self.files.make_folder(folder / name)
        except OSError as error:
            self.abandon(folder.name)
            raise CheckpointError(f"{folder}: {error.strerror}; choose another folder for checkpoints") from error
        return folder

    def _takes_spare(self, folder: Path) -> bool:
        """Reuse the files of an old checkpoint, if there is one; see [Note: Spares]."""
        for spare in _spares(self.root):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                self.files.rename(spare, folder)
                with contextlib.suppress(FileNotFoundError):
                    self.files.remove(folder / MANIFEST_NAME)
                return True
        return False

    def begin_copy(self, manifest: Manifest, nonce: str = "") -> str:
        """See :class:`Place`."""
        return self.begin(manifest.step, _folders_of(manifest), nonce).name

    def copy(self, name: str, source: Checkpoint, records: Sequence[FileRecord], check: Callable[[], None]) -> None:
        """See :class:`Place`."""
        manifest, folder = source.manifest, self.root / name
        if name not in self._locks:  # another node has begun it
            nonce = name.rpartition("-")[2]
            folder = joined_folder(self.root, manifest.step, _folders_of(manifest), nonce, _JOINED_S)
        for record in records:
            write_file(self.files, folder, record, source.chunks(record, check))
        Checkpoint(folder, manifest).verify_in_turn(check, records)

    def complete(self, name: str, manifest: Manifest, records: Sequence[FileRecord] | None = None) -> Path:
        """See :class:`Place`. If the folder has not all files, ``records`` are those that it has.

        Raises:
            CheckpointError: a file cannot be written, or a whole checkpoint of this step exists. The checkpoint does
                not count as written.
        """
        folder, path = self.root / name, self.folder(manifest.step)
        try:
            self._clear(folder, manifest.files if records is None else records)
            self._write_manifest(folder, manifest)
            for inner in sorted(inner for inner in folder.rglob("*") if inner.is_dir()):
                self.files.sync_folder(inner)
            self.files.sync_folder(folder)
            self._rename(folder, path)
            self.files.sync_folder(self.root)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}; this checkpoint is abandoned") from error
        finally:
            self._unlock(name)
        return path

    def abandon(self, name: str) -> None:
        """See :class:`Place`. Abandoning twice is allowed."""
        with contextlib.suppress(OSError):
            remove_tree(self.files, self.root / name)
        self._unlock(name)

    def _unlock(self, name: str) -> None:
        if (lock := self._locks.pop(name, None)) is not None:
            os.close(lock)

    def _clear(self, folder: Path, records: Sequence[FileRecord]) -> None:
        """Remove files of a reused old checkpoint that the new one does not have."""
        known = {MANIFEST_NAME, *(record.path for record in records)}
        for path in folder.rglob("*"):
            if not path.is_dir() and str(path.relative_to(folder)) not in known:
                self.files.remove(path)

    def _write_manifest(self, folder: Path, manifest: Manifest) -> None:
        fd = self.files.create(folder / MANIFEST_NAME)
        try:
            write_all(self.files, fd, memoryview(manifest.to_json()), 0)
            self.files.sync(fd)
        finally:
            self.files.close(fd)

    def _rename(self, folder: Path, path: Path) -> None:
        try:
            self.files.rename(folder, path)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            with contextlib.suppress(DamagedError):
                Checkpoint(path).verify_in_turn()
                raise CheckpointError(in_use(path)) from error
            _rename_and_remove(self.files, path)
            self.files.rename(folder, path)

    def add(self, folder: Path, manifest: Manifest, record: FileRecord, chunks: Iterator[Buffer]) -> None:
        """Add a missing file to a draft, or to a checkpoint of which this folder may have no other file yet.

        If the checkpoint is another of this step, or damaged, it goes first.

        Raises:
            CheckpointError: see :func:`write_file`.
        """
        is_draft = folder.name in self._locks
        if folder.is_dir() and not is_draft and not _is_of(folder, manifest):
            self.remove(folder)
        if not folder.is_dir():
            self.complete(self.begin_copy(manifest), manifest, ())
        write_file(self.files, folder, record, chunks)

    def folder(self, step: int, nonce: int = 0) -> Path:
        """See :class:`Place`."""
        return self.root / checkpoint_name(step, nonce)

    def folders(self) -> list[Path]:
        """See :class:`Place`."""
        try:
            named = [(parse_name(path.name), path) for path in self.root.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{self.root}: {error.strerror}") from error
        found = [(parsed, path) for parsed, path in named if parsed is not None]
        return [path for _, path in sorted(found, reverse=True)]

    def remove_spares(self) -> None:
        """Remove spare files of old checkpoints; see [Note: Spares].

        Raises:
            OSError: a file cannot be removed.
        """
        for spare in _spares(self.root):
            with contextlib.suppress(FileNotFoundError):
                _rename_and_remove(self.files, spare)

    def remove(self, folder: Folder) -> None:
        """See :class:`Place`."""
        assert isinstance(folder, Path)
        with contextlib.suppress(FileNotFoundError):
            if len(_spares(self.root)) < _MAX_SPARES:
                self.files.rename(folder, self.root / f"{_SPARE}{secrets.token_hex(4)}")
            else:
                _rename_and_remove(self.files, folder)

    def _remove_dead_drafts(self, last: int) -> None:  # noqa: ARG002 - locks show which writers died
        for path in self.root.glob("tmp-*"):
            try:
                lock = _locked(path)
            except OSError:
                continue  # its writer lives, or another process is removing it
            try:
                remove_tree(self.files, path)
            finally:
                os.close(lock)

    @contextlib.contextmanager
    def marked(self, mark: str) -> Iterator[None]:
        """Return a context in which a mark is there, by which other nodes see whether they share the folder.

        Raises:
            CheckpointError: the mark cannot be written.
        """
        path = self._mark(mark)
        try:
            path.touch()
        except OSError as error:
            raise CheckpointError(f"{self.place}: {error.strerror}; give another place") from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)

    def has_mark(self, mark: str) -> bool:
        """Return whether this node sees a mark."""
        return self._mark(mark).exists()

    @property
    def may_be_shared(self) -> bool:
        """Whether its file system may be that of another node too, where new files are seen later."""
        return file_system(self.root) not in _OF_NODE

    def _mark(self, mark: str) -> Path:
        return self.root / f"run-{mark}.mark"

    def check_room(self, num_checkpoints: int, num_bytes: int) -> None:
        """Remove dead writers' files, and check that there is room for checkpoints, including existing ones.

        Args:
            num_checkpoints: number of checkpoints that exist at once.
            num_bytes: size of each.

        Raises:
            CheckpointError: the folder has too little room.
        """
        with contextlib.suppress(OSError):  # the first write will report the error
            self._remove_dead_drafts(-1)
        free_bytes = shutil.disk_usage(self.root).free
        is_memory = file_system(self.root) in _MEMORY
        if is_memory:
            free_bytes = min(free_bytes, available_memory_bytes())
        files = (path for folder in self.folders() for path in folder.rglob("*") if path.is_file())
        held_bytes = sum(path.stat().st_size for path in files)
        needed_bytes = num_checkpoints * num_bytes
        if needed_bytes > free_bytes + held_bytes:
            what = "host memory" if is_memory else "the drive"
            raise CheckpointError(
                f"{self.place}: {num_checkpoints} checkpoints at once, of {num_bytes:,} B each, take "
                f"{needed_bytes:,} B of {what}, but {free_bytes + held_bytes:,} B are free: keep fewer there (at least "
                f"{MIN_CHECKPOINTS}), or give another place"
            )


def file_system(folder: Path) -> str:
    """Return the type of a folder's file system, as Linux names it; empty if unknown."""
    try:
        mounts = [line.split()[1:3] for line in _MOUNTS.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    path = folder.resolve()
    found = ("", "")
    for escaped, kind in mounts:  # later mounts cover earlier ones
        where = escaped.encode().decode("unicode_escape")
        if path.is_relative_to(where) and len(where) >= len(found[0]):
            found = (where, kind)
    return found[1]


def _folders_of(manifest: Manifest) -> list[str]:
    parents = {str(parent) for record in manifest.files for parent in PurePosixPath(record.path).parents}
    return sorted(parents - {"."})


def _is_of(folder: Path, manifest: Manifest) -> bool:
    try:
        return Checkpoint(folder).manifest.digest == manifest.digest
    except DamagedError:
        return False


def _spares(root: Path) -> list[Path]:
    return list(root.glob(f"{_SPARE}*"))


def _rename_and_remove(files: Files, path: Path) -> None:
    """Rename a checkpoint, which is atomic, and then remove its files."""
    aside = path.with_name(f"tmp-{path.name}-{secrets.token_hex(4)}")
    files.rename(path, aside)
    remove_tree(files, aside)


def _locked(folder: Path) -> int:
    """Lock a folder; return the descriptor that holds the lock. The lock ends with the process.

    Raises:
        BlockingIOError: another process holds the lock.
        FileNotFoundError: the folder has been removed.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()  # the last holder may have removed it
    except OSError:
        os.close(fd)
        raise
    return fd
