"""Opens and reads files in folders and at URLs, such as in an object store, accessed by ``fsspec``.

Errors of ``fsspec`` and its drivers become a :class:`CheckpointError` of one line.
"""

import contextlib
import dataclasses
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, Self, final

from executor.checkpoint.files.system_calls import CheckpointError
from executor.direct_io import BLOCK_BYTES, alignment_bytes, in_blocks


@contextlib.contextmanager
def reaching(what: object) -> Iterator[None]:
    """Return a context that turns any error of a driver into a :class:`CheckpointError` that names ``what``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # drivers raise errors of their libraries
        raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):  # the message of some drivers is only the path
        return os.strerror(errno.ENOENT)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@final
@dataclasses.dataclass(frozen=True, slots=True)
class UrlPath:
    """A file or folder at a URL, with some methods of :class:`pathlib.Path`.

    Attributes:
        url: the URL with its protocol, as in ``s3://bucket/folder``.
        system: the ``fsspec`` file system.
        path: path within the file system.
        num_bytes: length of the file, once it is :meth:`opened`.
        alignment_bytes: 1, because values are copied into memory.
    """

    url: str
    system: Any = dataclasses.field(compare=False, repr=False)
    path: str
    num_bytes: int = dataclasses.field(default=0, compare=False, repr=False)
    alignment_bytes: ClassVar = 1

    @classmethod
    def at(cls, url: str) -> Self:
        """Connect to a URL.

        Raises:
            CheckpointError: ``fsspec`` or its driver for the protocol is not installed, or does not know the URL.
        """
        try:
            import fsspec  # noqa: PLC0415 - an extra
        except ImportError:
            raise CheckpointError(f"{url} needs fsspec; pip install 'ullage[remote]'") from None
        url = url.rstrip("/")
        try:
            system, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}: the driver that fsspec uses for it is not installed") from None
        except ValueError as error:
            raise CheckpointError(f"{url}: {error}; give a folder, or a URL that fsspec knows") from None
        return cls(url, system, path)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> "UrlPath":
        return UrlPath(f"{self.url}/{name}", self.system, f"{self.path}/{name}")

    def __str__(self) -> str:
        return self.url

    def read_bytes(self) -> bytes:
        """Return the whole file. Raises :class:`CheckpointError`, as all methods do."""
        with reaching(self):
            content: bytes = self.system.cat_file(self.path)
            return content

    def opened(self) -> "UrlPath":
        """Return the file with its length, to be read in ranges."""
        with reaching(self):
            self.system.invalidate_cache()
            return dataclasses.replace(self, num_bytes=int(self.system.size(self.path)))

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """See :class:`LocalFile`."""
        end = min(offset + sum(map(len, parts)), self.num_bytes)
        with reaching(self):
            found = memoryview(self.system.cat_file(self.path, start=offset, end=end))
        done = 0
        for part in parts:
            values = found[done : done + len(part)]
            part[: len(values)] = values
            done += len(values)
        return done

    def close(self) -> None:
        """Do nothing, because every range is a separate request."""

    def files(self) -> list[str]:
        """Return the paths of all files in this folder and its subfolders."""
        with reaching(self):
            self.system.invalidate_cache()
            try:
                found = self.system.find(self.path, detail=True)
            except FileNotFoundError:
                return []
            begin = len(self.path) + 1
            return [path[begin:] for path, info in found.items() if info["type"] == "file"]

    def modified(self) -> datetime | None:
        """Return when a file was written; ``None`` if the driver does not know."""
        with reaching(self), contextlib.suppress(NotImplementedError):
            found: datetime = self.system.modified(self.path)
            return found
        return None

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> None:
        """Abort unfinished multipart uploads in this folder, if the driver can list them.

        S3 keeps their parts otherwise.

        Args:
            is_dead: returns whether the file with a path is no longer written by any process.
        """
        if not hasattr(self.system, "list_multipart_uploads"):
            return
        bucket, _, folder = self.path.partition("/")
        begin = f"{folder}/" if folder else ""
        with reaching(self):
            for upload in self.system.list_multipart_uploads(bucket):
                if (key := upload["Key"]).startswith(begin) and is_dead(key.removeprefix(begin)):
                    self.system.abort_mpu(bucket, key, upload["UploadId"])

    def remove(self) -> None:
        """Remove a file that may be gone already."""
        with reaching(self), contextlib.suppress(FileNotFoundError):
            self.system.rm_file(self.path)


Folder = Path | UrlPath
"""The folder of a checkpoint: local, or at a URL."""


@final
class LocalFile:
    """A regular file within a folder, read with ``O_DIRECT`` if possible.

    It follows no links and opens no devices. So untrusted files can neither lead outside the folder nor block the
    reader.

    Args:
        folder: the folder, whose path may contain links.
        path: path of the file within the folder.

    Attributes:
        num_bytes: length of the file.
        alignment_bytes: addresses of memory for :meth:`read` must be multiples of this.

    Raises:
        OSError: there is no such file, or it is not a regular file.
    """

    def __init__(self, folder: Path, path: str) -> None:
        *folders, name = path.split("/")
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for inner in folders:
                outer, at = at, os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
                os.close(outer)
            self._fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        found = os.fstat(self._fd)
        self.num_bytes = found.st_size
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file")
        self.alignment_bytes = alignment_bytes(self._fd, writes=False)

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """Read whole blocks from ``offset`` on into ``parts``, one after another.

        Returns:
            The number of bytes read, which may be fewer.
        """
        try:
            return os.preadv(self._fd, parts, offset)
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # some file systems accept it without having it
            return os.preadv(self._fd, parts, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


OpenFile = LocalFile | UrlPath


def fill(file: OpenFile, parts: Sequence[memoryview], offset: int, num_bytes: int) -> None:
    """Read ``num_bytes`` into ``parts``, one after another. The parts have room for whole blocks.

    ``O_DIRECT`` needs whole blocks, so a read that was cut short continues at a block boundary.

    Raises:
        OSError: the file cannot be read, or ends early.
    """
    done = 0
    while done < num_bytes:
        count = file.read(list(_rest(parts, done)), offset + done)
        done += count if done + count >= num_bytes else count // BLOCK_BYTES * BLOCK_BYTES
        if count < BLOCK_BYTES and done < num_bytes:
            raise OSError(errno.EIO, "it ends early")


def _rest(parts: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """Yield parts without their first ``done`` bytes."""
    for part in parts:
        if done < len(part):
            yield part[done:]
        done = max(done - len(part), 0)


def modified(path: Folder) -> datetime | None:
    """Return when a file was written, in UTC; ``None`` if unknown.

    Raises:
        CheckpointError: the file cannot be found.
    """
    if isinstance(path, UrlPath):
        written = path.modified()
        return written and written.astimezone(UTC)
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error


def open_file(folder: Folder, path: str) -> OpenFile:
    """Open a file within a folder.

    Raises:
        OSError: there is no such file, or it cannot be reached.
    """
    return (folder / path).opened() if isinstance(folder, UrlPath) else LocalFile(folder, path)


def read_whole(folder: Folder, path: str, most_bytes: int) -> bytes:
    """Return the content of a small file.

    Raises:
        OSError: there is no such file, or it is longer than ``most_bytes``.
    """
    file = open_file(folder, path)
    try:
        if file.num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} B")
        content = mmap.mmap(-1, in_blocks(file.num_bytes + 1))  # whole blocks, at least one
        fill(file, [memoryview(content)], 0, file.num_bytes)
        return content[: file.num_bytes]
    finally:
        file.close()
