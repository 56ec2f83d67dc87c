"""Write files, and read whole input files.

A regular file is replaced in one step: a reader finds the complete old content or the complete new
content, also after a crash. A link to a regular file stays a link. A character device, a pipe or an open descriptor
(``/dev/fd/63``) is never replaced: bytes are written into it. Anything else (a folder, a socket, a block device) is
refused. Commands call :func:`check_output` before long work, so that a bad path does not waste that work.
"""

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

MOST_BYTES: Final = 1 << 28
"""Maximum size of a file that is read whole. The largest real files are runs of large models, about 10 MB."""

_CHUNK_BYTES: Final = 1 << 20
_MOST_LINKS: Final = 40  # as many as Linux follows
_STANDARD: Final[dict[int | None, str]] = {0: "standard input", 1: "standard output, where this command prints"}
_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
    stat.S_IFIFO: "a pipe",
}


def write_whole(path: Path, data: str | bytes, *, durable: bool = True) -> None:
    """Write a file. A regular file is replaced in one step, a device or pipe is written into; see the module.

    Args:
        path: path of the file.
        data: the whole content; text is written as UTF-8.
        durable: wait until the file would survive a power failure, which is slower.

    Raises:
        OSError: the folder does not exist or cannot be written, or the disk is full; nothing is left behind.
        ValueError: it is a folder, a socket or a block device.
    """
    encoded = data.encode() if isinstance(data, str) else data
    try:
        if _is_stream(path, str(path)):
            _write_into(path, encoded)
        else:
            _replace(path.resolve(), encoded, durable=durable)
    except OSError as error:  # name the file, not the temporary one
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, for reading a file and writing it again. It ends with the process, and leaves no file."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def check_output(option: str, path: Path | None, *, only_regular: bool = False) -> None:
    """Check that a file can be written. Call it before the work whose result the file will hold.

    Args:
        option: the option that names the file, for the message.
        path: path of the file; ``None``: nothing is written, so nothing is checked.
        only_regular: refuse devices and pipes, because the file is rewritten repeatedly or has files beside it.

    Raises:
        ValueError: the file cannot be written; the message has one line and says what to do.
    """
    if path is None:
        return
    if str(path) == "-":
        raise ValueError(f"{option} - is not a file; give the name of a file (for a file named '-', its whole path)")
    try:
        if (standard := _STANDARD.get(_descriptor(path))) is not None:
            raise ValueError(f"{option} {path} is {standard}; give the name of a file, or a pipe")
        if not _is_stream(path, f"{option} {path}"):
            _check_folder(option, path, path.resolve().parent)
        elif only_regular:
            raise ValueError(f"{option} {path} is {_kind(path.stat().st_mode)}; give the name of a regular file")
        elif not os.access(path, os.W_OK):
            raise ValueError(f"{option} {path} must not be written by this user; give the name of another file")
    except OSError as error:  # a loop of links, a name that is too long, a folder without permission
        raise ValueError(f"{option} {path}: {error.strerror}; give the name of a file that can be written") from error


def make_folder(option: str, path: Path) -> None:
    """Make a folder for outputs and its parents, and check that files can be made in it.

    Args:
        option: the option that names the folder, for the message.
        path: path of the folder, which may exist.

    Raises:
        ValueError: the folder cannot be made or written; the message has one line and says what to do.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_writable(path)
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(f"{option} {path}: there is a file of that name, not a folder; give another one") from error
    except OSError as error:
        raise ValueError(
            f"{option} {path}: no file can be made there ({error.strerror}); give another folder"
        ) from error


def check_regular(path: Path) -> int:
    """Return the size in bytes of a regular file, for example before mapping it.

    Raises:
        ValueError: the path is a folder, a device, a pipe or a socket.
        OSError: the file does not exist.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is {_kind(found.st_mode)}; give a regular file")
    return found.st_size


def read_whole(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return all bytes of a regular file or of a pipe.

    Raises:
        ValueError: the path is a folder, a device or a socket, or the file is empty or over ``most_bytes``.
        OSError: the file cannot be read.
    """
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        raise ValueError(f"{path} is {_kind(found.st_mode)}")
    if stat.S_ISREG(found.st_mode) and not found.st_size:  # files of /proc have size 0 too, and some never end
        raise ValueError(f"{path} is empty")
    chunks, num_bytes = [], 0
    with path.open("rb") as file:  # a pipe has no size, so it must be read to the end
        while max(found.st_size, num_bytes) <= most_bytes and (chunk := file.read(_CHUNK_BYTES)):
            chunks.append(chunk)
            num_bytes += len(chunk)
    if max(found.st_size, num_bytes) > most_bytes:
        raise ValueError(f"{path} has more than {most_bytes:,} B, which no file of that kind has")
    return b"".join(chunks)


def read_json(path: Path, error: type[ValueError], remedy: str) -> Any:
    """Return the content of a JSON file. A field that an object has twice is an error.

    Args:
        path: path of the file.
        error: the class of errors to raise.
        remedy: the end of an error message: what the user can do.

    Raises:
        error: the file cannot be read, or is not JSON.
    """
    try:
        content = read_whole(path)
    except ValueError as problem:
        raise error(f"{problem}; {remedy}") from problem
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or type(problem).__name__}; {remedy}") from problem
    try:
        return json.loads(content.decode(), object_pairs_hook=_with_unique_fields)
    except (ValueError, RecursionError) as problem:  # not UTF-8, not JSON, or nested too deeply
        raise error(f"{path} is not JSON ({problem}); {remedy}") from problem


def _with_unique_fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate fields, of which Python would keep the last value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"field {twice!r} is given twice in one object")
    return fields


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no regular file")


def _is_stream(path: Path, words: str) -> bool:
    """Return whether a path, in words, names a device or pipe, which is written into; see the module.

    Raises:
        ValueError: the path names something that is never written, such as a folder.
        OSError: the path cannot be examined.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISREG(mode):
        return _descriptor(path) is not None
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return True
    raise ValueError(f"{words} is {_kind(mode)}; give the name of a file{' in it' * stat.S_ISDIR(mode)}")


def _descriptor(path: Path) -> int | None:
    """Return this process's descriptor if a path such as ``/dev/stdout`` or ``/dev/fd/63``, or a link, names one."""
    own = {Path("/proc/self/fd").resolve(), Path("/proc/thread-self/fd").resolve()}
    for _ in range(_MOST_LINKS):
        folder = path.parent.resolve()
        if folder in own and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            break
        path = folder / path.readlink()
    return None


def _write_into(path: Path, data: bytes) -> None:
    """Write into a device or pipe. Like a shell's ``>``, wait until a pipe has a reader."""
    descriptor = _descriptor(path)
    # Duplicate a descriptor instead of opening its name: opening would write a regular file from its start.
    target = os.open(path, os.O_WRONLY | os.O_NOCTTY) if descriptor is None else os.dup(descriptor)
    with os.fdopen(target, "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes, *, durable: bool) -> None:
    partial = _temporary_path(path.parent)
    try:
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # after the rename, the temporary file no longer exists


def _temporary_path(folder: Path) -> Path:
    """Return a new temporary name. It is random, because the file's own name may already have the maximum length."""
    return folder / f".ullage-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _check_writable(folder: Path) -> None:
    """Make a file in a folder and remove it. This finds missing permissions, read-only file systems and quotas."""
    partial = _temporary_path(folder)
    try:
        partial.open("xb").close()
    finally:
        partial.unlink(missing_ok=True)


def _check_folder(option: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{option} {path}: there is no such folder; make it first")
    try:
        _check_writable(folder)
    except OSError as error:
        raise ValueError(
            f"{option} {path}: its folder cannot be written ({error.strerror}); give a file in another one"
        ) from error
