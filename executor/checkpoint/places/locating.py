"""Places for checkpoints: folders and URLs, and checks that they are suitable."""

import contextlib
import shutil
import urllib.parse
from pathlib import Path
from typing import Final

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.urls import UrlPath
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.remote import RemoteStore
from executor.checkpoint.places.retention import MIN_CHECKPOINTS, AbstractStore, parse_name
from executor.checkpoint.places.store import Store
from hwprofiles.machine import available_memory_bytes

_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
_OF_ONE_NODE: Final = _MEMORY | {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "xfs", "zfs"}
_FOLDER_URL: Final = "file://"
_MOUNTS: Final = Path("/proc/self/mounts")


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


def store_at(place: str | Path, files: Files | None = None) -> AbstractStore:
    """Return the store of a place. A folder is made if needed.

    Raises:
        CheckpointError: the folder cannot be made, or no installed driver can reach the URL.
    """
    path = located(place)
    return RemoteStore(path) if isinstance(path, UrlPath) else Store(path, files)


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


def check_reachable(store: AbstractStore) -> None:
    """Check that a place is not on a file system that only this node has.

    Raises:
        CheckpointError: the place is in memory or on a drive of this node.
    """
    if isinstance(store, Store) and (kind := file_system(store.root)) in _OF_ONE_NODE:
        what = "memory" if kind in _MEMORY else f"a drive ({kind})"
        raise CheckpointError(
            f"{store.place} is {what} of one node, but the ranks are on several: give a folder on a file system that "
            "all nodes share, and after it such folders or URLs"
        )


def check_room(store: AbstractStore, num_checkpoints: int, num_bytes: int) -> None:
    """Remove dead writers' files, and check that a folder has room for checkpoints, including existing ones.

    Args:
        store: the place. URLs are not checked.
        num_checkpoints: number of checkpoints that exist at once.
        num_bytes: size of each.

    Raises:
        CheckpointError: the folder has too little room.
    """
    if not isinstance(store, Store):
        return
    with contextlib.suppress(OSError):  # the first write will report the error
        store.remove_dead_drafts()
    free_bytes = shutil.disk_usage(store.root).free
    is_memory = file_system(store.root) in _MEMORY
    if is_memory:
        free_bytes = min(free_bytes, available_memory_bytes())
    held_bytes = sum(_size(path) for path in store.root.iterdir() if parse_name(path.name) is not None)
    needed_bytes = num_checkpoints * num_bytes
    if needed_bytes > free_bytes + held_bytes:
        what = "host memory" if is_memory else "the drive"
        raise CheckpointError(
            f"{store.place}: {num_checkpoints} checkpoints at once, of {num_bytes:,} B each, take {needed_bytes:,} B "
            f"of {what}, but {free_bytes + held_bytes:,} B are free: keep fewer there (at least {MIN_CHECKPOINTS}), or "
            "give another place"
        )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def checkpoint_at(place: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder or at a URL.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    return Checkpoint(located(place))
