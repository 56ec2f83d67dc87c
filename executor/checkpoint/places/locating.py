"""Finds places and checkpoints by their folder or URL, and has the place at a URL.

An object store has neither folders nor renames. So every checkpoint there gets a new name, such as
``step-00000012-9f3c21ab``. Its files are uploaded first and read again, then the manifest is uploaded. Readers ignore
folders without a manifest. So an interrupted copy is never used, and copies of two processes never mix. Removal
deletes the manifest first. Files of a dead process cannot be distinguished from files that another process is still
uploading. They are removed like old checkpoints: when enough whole checkpoints have the same step or a later one. On
S3, this includes parts of unfinished uploads.
"""

import contextlib
import secrets
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, final

from executor.checkpoint.files.opening import Folder, UrlPath, reaching
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.writer import Buffer
from executor.checkpoint.format.manifest import MANIFEST_NAME, FileRecord, Manifest
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import Place, checkpoint_name, parse_name

_PART_BYTES: Final = 64 << 20  # bytes of one request
_MOST_PARTS: Final = 9_000  # parts of one file; S3 allows 10,000


@final
class UrlPlace(Place):
    """Checkpoints at a URL."""

    def __init__(self, root: UrlPath) -> None:
        super().__init__(root.url)
        self.root = root

    def folder(self, step: int, nonce: int = 0) -> UrlPath:
        """See :class:`Place`."""
        return self.root / checkpoint_name(step, nonce)

    def folders(self) -> Sequence[Folder]:
        """See :class:`Place`."""
        found = [(parse_name(name), name) for name, files in self._files().items() if MANIFEST_NAME in files]
        return [self.root / name for _, name in sorted(found, reverse=True)]

    def begin_copy(self, manifest: Manifest) -> str:
        """See :class:`Place`."""
        return checkpoint_name(manifest.step, secrets.randbelow((1 << 32) - 1) + 1)

    def copy(self, name: str, source: Checkpoint, records: Sequence[FileRecord], check: Callable[[], None]) -> None:
        """See :class:`Place`."""
        for record in records:
            _upload(self.root / name / record.path, record.num_bytes, source.chunks(record, check))
        Checkpoint(self.root / name, source.manifest).verify_in_turn(check, records)

    def complete(self, name: str, manifest: Manifest) -> UrlPath:
        """See :class:`Place`."""
        path = self.root / name / MANIFEST_NAME
        with reaching(path):
            path.system.pipe_file(path.path, manifest.to_json())
        if Manifest.read(path.read_bytes()).digest != manifest.digest:
            raise CheckpointError(f"{path}: the manifest that was read back differs from what was written")
        return self.root / name

    def abandon(self, name: str) -> None:
        """See :class:`Place`."""
        with contextlib.suppress(CheckpointError):  # retention removes it later
            self.remove(self.root / name)

    def remove(self, folder: Folder) -> None:
        """See :class:`Place`."""
        files = self._files().get(folder.name, ())
        for path in sorted(files, key=lambda path: path != MANIFEST_NAME):
            (self.root / folder.name / path).remove()

    def _remove_dead_drafts(self, last: int) -> None:
        def is_dead(path: str) -> bool:
            parsed = parse_name(path.partition("/")[0])
            return parsed is not None and parsed[0] <= last

        for name, files in self._files().items():
            if MANIFEST_NAME not in files and is_dead(name):
                self.remove(self.root / name)
        with contextlib.suppress(CheckpointError):  # some users lack the permission, and leftover parts cost little
            self.root.abort_uploads(is_dead)

    def _files(self) -> dict[str, list[str]]:
        """Return the files of every checkpoint, complete or not."""
        found: dict[str, list[str]] = {}
        for path in self.root.files():
            name, _, rest = path.partition("/")
            if rest and parse_name(name) is not None:
                found.setdefault(name, []).append(rest)
        return found


def _upload(path: UrlPath, num_bytes: int, chunks: Iterable[Buffer]) -> None:
    part_bytes = max(_PART_BYTES, -(-num_bytes // _MOST_PARTS))
    with reaching(path):
        try:
            file = path.system.open(path.path, "wb", block_size=part_bytes)
        except FileNotFoundError:  # the driver has folders
            path.system.makedirs(path.path.rpartition("/")[0], exist_ok=True)
            file = path.system.open(path.path, "wb", block_size=part_bytes)
        with file:
            for chunk in chunks:
                file.write(chunk.data)


_FOLDER_URL: Final = "file://"


def is_remote(place: str | Path) -> bool:
    """Return whether a place is a URL other than ``file://``."""
    return "://" in str(place) and not str(place).startswith(_FOLDER_URL)


def located(place: str | Path) -> Folder:
    """Return a place as a path. A ``file://`` URL is a folder.

    Raises:
        CheckpointError: the place is empty, or the driver for its URL is not installed.
    """
    text = str(place)
    if not text.strip():
        raise CheckpointError(
            f"{text!r} is not a place for checkpoints; give a folder, or a URL such as s3://bucket/run"
        )
    if text.startswith(_FOLDER_URL):
        return Path(urllib.parse.unquote(urllib.parse.urlsplit(text).path))
    return UrlPath.at(text) if is_remote(text) else Path(text)


def place_at(place: str | Path, files: Files | None = None) -> Place:
    """Return a place. A folder is made if needed.

    Raises:
        CheckpointError: the folder cannot be made, or no installed driver can reach the URL.
    """
    path = located(place)
    return UrlPlace(path) if isinstance(path, UrlPath) else FolderPlace(path, files)


def checkpoint_at(place: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder or at a URL.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    return Checkpoint(located(place))
