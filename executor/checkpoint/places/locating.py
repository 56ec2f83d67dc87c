"""Finds places and checkpoints by their folder or URL."""

import urllib.parse
from pathlib import Path
from typing import Final

from executor.checkpoint.files.opening import Folder
from executor.checkpoint.files.system_calls import CheckpointError, Files
from executor.checkpoint.files.urls import UrlPath
from executor.checkpoint.format.reader import Checkpoint
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import Place
from executor.checkpoint.places.url import UrlPlace

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
