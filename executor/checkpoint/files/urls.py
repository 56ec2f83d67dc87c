"""Files at a URL: whatever ``fsspec`` reaches, an object store in particular.

What ``fsspec`` and its drivers raise becomes a :class:`CheckpointError` of one line.
"""

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any, Final, Self, final

from executor.checkpoint.files.system_calls import CheckpointError


@contextlib.contextmanager
def reaching(what: object) -> Iterator[None]:
    """Turn whatever a driver raises into an error that names what was to be reached."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # drivers raise what the libraries raise that they are made of
        raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):  # some say the path only
        return os.strerror(errno.ENOENT)
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


@final
@dataclasses.dataclass(frozen=True, slots=True)
class UrlPath:
    """A file or folder at a URL, with what is needed of :class:`pathlib.Path`.

    Attributes:
        url: with its protocol, as in ``s3://bucket/folder``.
        system: the ``fsspec`` file system that it is on.
        path: within that.
    """

    url: str
    system: Any = dataclasses.field(compare=False, repr=False)
    path: str

    @classmethod
    def at(cls, url: str) -> Self:
        """Connect to a URL.

        Raises:
            CheckpointError: ``fsspec`` or its driver for the protocol is not installed, or does not know the URL.
        """
        try:
            import fsspec  # noqa: PLC0415 - an extra
        except ImportError:
            raise CheckpointError(f"{url} is reached by fsspec; pip install 'ullage[remote]'") from None
        url = url.rstrip("/")
        try:
            system, path = fsspec.core.url_to_fs(url)
        except ImportError as error:
            raise CheckpointError(f"{url}: {error}: the driver that fsspec has for it is not installed") from None
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
        """Return all of a file. Raises :class:`CheckpointError`, as everything here does."""
        with reaching(self):
            content: bytes = self.system.cat_file(self.path)
            return content

    def files(self) -> list[str]:
        """Return the paths of all files below."""
        with reaching(self):
            self.system.invalidate_cache()
            try:
                found = self.system.find(self.path, detail=True)
            except FileNotFoundError:
                return []
            begin = len(self.path) + 1
            return [path[begin:] for path, info in found.items() if info["type"] == "file"]

    def modified(self) -> datetime | None:
        """Return when a file was written; ``None`` if the driver does not say."""
        with reaching(self), contextlib.suppress(NotImplementedError):
            found: datetime = self.system.modified(self.path)
            return found
        return None

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> None:
        """Give up files below that were begun and never ended, where a driver shows them: S3 keeps their parts.

        Args:
            is_dead: whether nobody writes a file any more, by its path.
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


@final
class UrlFile:
    """A file at a URL that is read in ranges.

    Attributes:
        num_bytes: its length.
        alignment_bytes: values are copied to anywhere.
    """

    alignment_bytes: Final = 1

    def __init__(self, path: UrlPath) -> None:
        self._path = path
        with reaching(path):
            path.system.invalidate_cache()
            self.num_bytes = int(path.system.size(path.path))

    def read(self, parts: Sequence[memoryview], offset: int) -> int:
        """Read from a byte on into ``parts``, one behind the other, and return how many there were."""
        end = min(offset + sum(map(len, parts)), self.num_bytes)
        with reaching(self._path):
            found = memoryview(self._path.system.cat_file(self._path.path, start=offset, end=end))
        done = 0
        for part in parts:
            values = found[done : done + len(part)]
            part[: len(values)] = values
            done += len(values)
        return done

    def close(self) -> None:
        """Do nothing: ranges are requests of their own."""
