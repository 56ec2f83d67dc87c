"""Files of a plan's state on NVMe. Only this process reads and writes them, in whole records.

[Note: Two versions] The file of optimizer state has room for two versions of every record. An update writes the new
version beside the old one. The new version becomes current only when all of it has been written. So if a write fails or
is cut short, the old version stays whole, and a read never sees half of a new version. Data that lives within an
iteration (gradients, activations) has one version.

Records are read and written once an iteration, and together are larger than memory. The page cache would
only cost memory and a copy. So files are opened with ``O_DIRECT``, and offsets, lengths and addresses are multiples of
a block. If a file system does not support that (tmpfs, some network file systems), transfers go through the page cache,
which is advised to drop the data.
"""

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

import torch

from executor.direct_io import BLOCK_BYTES, DISK_FULL_ERRNOS, enable_direct_io, in_blocks
from executor.distributed.ranks import ALONE, Ranks
from executor.distributed.watchdog import RankError, this_machine
from planner.schedule.tasks import MemoryClass

_CHUNK_BYTES: Final = 8 << 20  # of one request; smaller requests are slower, and Linux truncates those above 2 GiB
_VERSIONS: Final = {1: "", 2: "two versions of "}


class StorageError(OSError):
    """A plan's storage cannot be allocated, read or written. The message says where and why."""


@final
class RecordFile:
    """A file of records of fixed sizes, with one or two versions of each. All its space is allocated at once.

    The file is removed when it is closed or garbage collected, because only this process needs it.

    Args:
        path: path of the file. Its folder is made if needed. A file that another process left there is overwritten.
        sizes_bytes: sizes of the records, by the keys that name them.
        num_versions: 2 if a write must leave the previous version whole, see [Note: Two versions].
        what: the file's content, in words, for errors.

    Attributes:
        num_bytes: bytes of all versions.

    Raises:
        StorageError: there is no room or no permission, or another process uses the file.
    """

    def __init__(
        self,
        path: Path,
        sizes_bytes: Mapping[Any, int],
        num_versions: Literal[1, 2] = 2,
        what: str = "the optimizer state",
    ) -> None:
        self.path = path
        self._num_versions = num_versions
        self._what = what
        self._room_bytes = {record: in_blocks(size) for record, size in sizes_bytes.items()}
        ends = itertools.accumulate((num_versions * room for room in self._room_bytes.values()), initial=0)
        self._starts = dict(zip(self._room_bytes, ends, strict=False))
        self.num_bytes = num_versions * sum(self._room_bytes.values())
        self._current: dict[Any, int] = {}
        self._fd = _create(path, self.num_bytes, f"{_VERSIONS[num_versions]}{what}")
        self._discard = weakref.finalize(self, _discard, self._fd, path)
        self._lock = threading.Lock()
        self._num_under_way = 0
        self.is_direct = enable_direct_io(self._fd)

    @property
    def description(self) -> str:
        """The file's folder, and whether transfers use the page cache, in words."""
        way = "past" if self.is_direct else "through (no O_DIRECT there)"
        return f"state in {self.path.parent}, {way} the page cache"

    def is_written(self, record: Any) -> bool:
        """Return whether a record has been written."""
        return record in self._current

    def read(self, record: Any, buffer: torch.Tensor, start: int = 0) -> None:
        """Read the current version of a record, from the block at ``start`` on, into ``buffer``.

        The buffer, uint8 on the host, has whole blocks and is aligned to a block. It is filled up to the end of the
        record.

        Raises:
            StorageError: not all of it could be read.
        """
        assert self.is_written(record), "read before it was written"
        self._transfer("read", os.preadv, record, self._current[record], buffer, start)

    def write(self, record: Any, buffer: torch.Tensor) -> None:
        """Write a record, and make this version the current one. If there are two versions, the other one stays.

        Raises:
            StorageError: not all of it could be written; with two versions, the current one is unchanged.
        """
        version = (1 - self._current.get(record, 0)) % self._num_versions
        self._transfer("write", os.pwritev, record, version, buffer, 0)
        self._current[record] = version

    def close(self) -> None:
        """Remove the file. Closing twice is allowed.

        If an abandoned transfer is still running, the descriptor stays open. Otherwise the rest of the transfer would
        go to the next file that gets the same descriptor.
        """
        with self._lock:
            if self._num_under_way and self._discard.detach() is not None:
                self.path.unlink(missing_ok=True)
        self._discard()

    def _transfer(
        self,
        verb: str,
        call: Callable[[int, list[memoryview], int], int],
        record: Any,
        version: int,
        room: torch.Tensor,
        skipped: int,
    ) -> None:
        start = self._starts[record] + version * self._room_bytes[record] + skipped
        buffer, done = room[: self._room_bytes[record] - skipped].numpy().data, 0
        num_bytes = len(buffer)
        assert not (start | num_bytes) % BLOCK_BYTES
        with self._lock:
            if not self._discard.alive:
                raise StorageError(f"{self.path} is closed")
            self._num_under_way += 1
        try:
            while (
                done < num_bytes and (count := call(self._fd, [buffer[done : done + _CHUNK_BYTES]], start + done)) > 0
            ):
                done += count
            if not self.is_direct:
                os.posix_fadvise(self._fd, start, num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StorageError(
                f"{self.path}: a {verb} of {num_bytes:,} B failed after {done:,} B: {error.strerror}; "
                f"{self._consequence}"
            ) from error
        finally:
            with self._lock:
                self._num_under_way -= 1
        if done < num_bytes:
            raise StorageError(
                f"{self.path} ends after {done:,} B of a {verb} of {num_bytes:,} B: another process has changed it; "
                "give every run a --storage-dir of its own"
            )

    @property
    def _consequence(self) -> str:
        whole = f"{self._what} of the last iteration is whole, but " if self._num_versions > 1 else ""
        return f"{whole}training cannot continue"


@final
class Storage:
    """A rank's memory on NVMe: its files, counted by class.

    Args:
        folder: folder of the files; ``None``: there is none, so no file can be taken.
        rank: the rank, whose number is in their names.

    Attributes:
        by_class: bytes of all versions by class, without rounding up to blocks.
        description: the folder, and how files are read and written there, in words; empty without files.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.by_class: dict[MemoryClass, int] = {}
        self.description = ""
        self._files: list[RecordFile] = []

    def take(
        self,
        name: str,
        sizes_bytes: Mapping[Any, int],
        num_bytes_of: Mapping[MemoryClass, int],
        what: str = "",
        num_versions: Literal[1, 2] = 1,
    ) -> RecordFile:
        """Return a new file.

        Args:
            name: the beginning of its name.
            sizes_bytes: see :class:`RecordFile`.
            num_bytes_of: bytes of one version, by class.
            what: its content in words, if not its name.
            num_versions: see :class:`RecordFile`.

        Raises:
            ValueError: there is no folder.
            StorageError: see :class:`RecordFile`.
        """
        what = what or name
        if self._folder is None:
            raise ValueError(
                f"the plan keeps {what} on NVMe, but no folder for it was given; set storage_dir to one on a fast "
                "drive (ullage execute --storage-dir DIR)"
            )
        file = RecordFile(self._folder / f"{name}-rank-{self._rank}.state", sizes_bytes, num_versions, what)
        self._files.append(file)
        self.description = file.description
        for memory_class, num_bytes in num_bytes_of.items():
            if num_bytes:
                self.by_class[memory_class] = self.by_class.get(memory_class, 0) + num_versions * num_bytes
        return file

    def close(self) -> None:
        """Remove the files. Closing twice is allowed."""
        for file in self._files:
            file.close()


def shared_file(folder: Path, num_bytes: int, ranks: Ranks | None) -> tuple[torch.Tensor, slice]:
    """Return the bytes of a new file that carries state from one plan to the next, and which parts this rank writes.

    Between the end of one session and the beginning of the next, only this file has weights and optimizer state, so
    only one plan at a time needs memory. It is memory-mapped, and the system may write its pages out. It has no name,
    so the system removes it when the process ends, even if the process crashes. It exists as long as any view of it.

    The ranks of one machine share one file that holds the whole state, because under the next plan a rank may need any
    part of it. One rank makes the file, and the others open it through that rank's process.

    Args:
        folder: folder of the file; it is made if needed. On a file system in memory (tmpfs) the file takes memory.
        num_bytes: its size, the same on all ranks.
        ranks: all ranks; ``None`` if there is only one.

    Returns:
        The bytes, uint8, and the share of this rank in any list of parts: which of them it is to write. After the next
        barrier, all ranks can read all of them.

    Raises:
        StorageError: there is no room, or no permission. If one rank fails, all raise.
    """
    mates, turn = [0], 0  # ranks of this machine that can open each other's files
    everybody = ALONE if ranks is None else ranks.all
    otherwise = OSError(errno.EIO, "another rank cannot make or open it")
    if ranks is not None:
        where = f"{this_machine()} {Path('/proc/self/ns/pid').readlink()}"
        mates = ranks.all.ranks_with_same(where.encode())
        turn = mates.index(ranks.rank)
    path = ""
    try:
        with contextlib.ExitStack() as files:
            with everybody.together(otherwise):
                if not turn:
                    folder.mkdir(parents=True, exist_ok=True)
                    number = files.enter_context(tempfile.TemporaryFile(dir=folder)).fileno()
                    os.posix_fallocate(number, 0, num_bytes)
                    path = f"/proc/{os.getpid()}/fd/{number}"
            if ranks is not None:
                path = ranks.all_gather_text(path)[mates[0]]
            # All map it before the rank that made the file closes it.
            with everybody.together(otherwise), Path(path).open("r+b") as file:
                flat = torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)
    except RankError:
        raise
    except OSError as error:
        raise StorageError(
            f"the state cannot move to the next plan through a file of {num_bytes:,} B in {folder}: {error.strerror}; "
            "make room, or choose another --storage-dir"
        ) from error
    return flat, slice(turn, None, len(mates))


def _create(path: Path, num_bytes: int, what: str) -> int:
    """Make a file, lock it and allocate its space; return its descriptor."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror}; choose another --storage-dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise StorageError(f"{path} is in use by another run; give every run a --storage-dir of its own") from error
    try:
        os.ftruncate(fd, 0)
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        _discard(fd, path)
        if error.errno not in DISK_FULL_ERRNOS:
            raise StorageError(
                f"{path}: no space can be taken: {error.strerror}; choose another --storage-dir"
            ) from error
        raise StorageError(_no_room(path, num_bytes, what, error)) from error
    return fd


def _no_room(path: Path, num_bytes: int, what: str, error: OSError) -> str:
    system = os.statvfs(path.parent)
    return (
        f"{path} needs {num_bytes:,} B for {what} that the plan has on NVMe, but "
        f"{system.f_bavail * system.f_frsize:,} B are free there ({error.strerror}); make room, choose another "
        "--storage-dir, or plan with less on NVMe"
    )


def _discard(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)  # first, so that no run locks a file that is about to be removed
    os.close(fd)


def whole_blocks(room: torch.Tensor) -> torch.Tensor:
    """Return the room of a record, extended to whole blocks."""
    return room.as_strided((in_blocks(len(room)),), (1,))
