"""Probe of a disk: large requests that bypass the page cache where the file system allows it."""

import contextlib
import dataclasses
import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from hwprofiles.calibrate.options import CalibrationError
from hwprofiles.calibrate.sampling import Case, build_curve, quantity, sample, sample_groups, seconds, wall_clock
from hwprofiles.profile import Storage

_QUICK_FILE_BYTES = 2**28
_MARGIN = 1.2  # leave some space for other programs
_DIRECT = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def open_disk(directory: Path, *, quick: bool) -> Iterator["Disk"]:
    """Open a scratch file in ``directory`` and yield the disk for measurements.

    The file is unlinked as soon as it is open, so an interrupted or killed calibration leaves nothing behind. It is
    filled first, because training overwrites its files and does not grow them.

    Raises:
        CalibrationError: the directory does not exist, may not be written, or has too little space.
    """
    file_bytes = _QUICK_FILE_BYTES if quick else 2**31
    sizes = tuple(2**i for i in range(20, 27 if quick else 29, 2))
    with contextlib.ExitStack() as stack:
        with _explained(directory, file_bytes):
            free_bytes = shutil.disk_usage(directory).free
            if free_bytes < file_bytes * _MARGIN:
                raise OSError(errno.ENOSPC, "too little space")
            descriptor, direct = stack.enter_context(_scratch_file(directory))
            disk = Disk(directory, free_bytes, sizes, _File(descriptor, _memory(sizes[-1]), file_bytes, direct=direct))
            disk.file.fill()
        yield disk


def _memory(num_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, num_bytes)  # page-aligned, as direct I/O wants it; freed with its last view
    memory.write(os.urandom(2**20) * (num_bytes // 2**20))  # some disks store zeros for free
    return memoryview(memory)


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk, and the scratch file for measuring it.

    Attributes:
        directory: folder of the scratch file.
        free_bytes: free space of its file system.
        sizes: sizes of the requests to measure, in bytes.
        file: the scratch file.
    """

    directory: Path
    free_bytes: int
    sizes: tuple[int, ...]
    file: "_File"

    def probe(self, budget_s: float, *, shared: bool = False) -> Storage:
        """Measure reading, writing, and both at once; on a shared file system also the time to create a file.

        Raises:
            CalibrationError: the disk reports an error.
        """
        file, sizes = self.file, self.sizes
        with _explained(self.directory, file.num_bytes):
            writes = sample([Case(s, file.next_request(s, file.write)) for s in sizes], wall_clock, budget_s * 0.4)
            file.drop_cache()
            reads = sample([Case(s, file.next_request(s, file.read)) for s in sizes], wall_clock, budget_s * 0.4)
            size = sizes[min(len(writes), len(reads)) - 1]
            (group,) = sample_groups([list(self.requests(size).values())], budget_s * 0.2)
            created = sample([Case(1, self._create)], wall_clock, budget_s * 0.05)[0] if shared else None
        how = "direct" if file.direct else "through the page cache, written back (fdatasync) and dropped (fadvise)"
        read = build_curve("bytes", sizes, reads, f"disk reads, {how}")
        write = build_curve("bytes", sizes, writes, f"disk writes, {how}")
        both = np.minimum(np.sum(size / group.windows_s, axis=1), read.best_rate_per_s() + write.best_rate_per_s())
        source = f"disk reads and writes of {size / 2**20:.0f} MiB at once, sum, {how}"
        capacity = quantity(float(self.free_bytes), "bytes", "free space of the scratch directory's file system", 1)
        return Storage(
            capacity_bytes=capacity,
            read=read,
            write=write,
            both_bytes_per_s=quantity(float(np.median(both)), "bytes_per_s", source, len(both), both),
            create_s=seconds(created, 1, "creating and closing an empty file") if created else None,
        )

    def requests(self, num_bytes: int) -> dict[str, Callable[[], None]]:
        """Return a read and a write of ``num_bytes`` (at most the largest size), at different places of the file."""
        size = min(num_bytes, self.sizes[-1])
        own = self.file.beside()  # the two requests run at once, so each has its own memory
        return {"read": self.file.next_request(size, self.file.read), "write": own.next_request(size, own.write)}

    def _create(self) -> None:
        path = self.directory / f".ullage-scratch-{uuid.uuid4().hex}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        finally:
            path.unlink(missing_ok=True)


class _File:
    """A scratch file that is read and written in place."""

    def __init__(self, descriptor: int, memory: memoryview, num_bytes: int, *, direct: bool) -> None:
        self._descriptor, self._memory, self.num_bytes, self.direct = descriptor, memory, num_bytes, direct

    def beside(self) -> "_File":
        """Return the same file with its own memory, for concurrent requests."""
        return _File(self._descriptor, _memory(len(self._memory)), self.num_bytes, direct=self.direct)

    def fill(self) -> None:
        os.posix_fallocate(self._descriptor, 0, self.num_bytes)  # a full disk fails here, before anything is written
        for offset in range(0, self.num_bytes, len(self._memory)):
            self.write(offset, len(self._memory))

    def write(self, offset: int, num_bytes: int) -> None:
        _in_full(lambda part, at: os.pwrite(self._descriptor, part, at), self._memory[:num_bytes], offset)
        if not self.direct:
            os.fdatasync(self._descriptor)

    def read(self, offset: int, num_bytes: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        _in_full(lambda part, at: os.preadv(self._descriptor, [part], at), self._memory[:num_bytes], offset)

    def drop_cache(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def next_request(self, num_bytes: int, request: Callable[[int, int], None]) -> Callable[[], None]:
        """Return a call that makes a request at the next place of the file."""
        offsets = _cycle(self.num_bytes, num_bytes)
        return lambda: request(next(offsets), num_bytes)


def _cycle(total: int, step: int) -> Iterator[int]:
    while True:
        yield from range(0, total - step + 1, step)


def _in_full(transfer: Callable[[memoryview, int], int], memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        moved = transfer(memory[done:], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the scratch file ended early")
        done += moved


@contextlib.contextmanager
def _scratch_file(directory: Path) -> Iterator[tuple[int, bool]]:
    path = directory / f".ullage-scratch-{uuid.uuid4().hex}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        try:
            descriptor, direct = os.open(path, flags | _DIRECT, 0o600), bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:  # file systems without direct I/O create the file, then fail with EINVAL
                raise
            path.unlink(missing_ok=True)
            descriptor, direct = os.open(path, flags, 0o600), False
    finally:
        path.unlink(missing_ok=True)
    try:
        yield descriptor, direct
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(directory: Path, file_bytes: int) -> Iterator[None]:
    """Turn the operating system's errors about a directory into errors with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            reason = f"needs {file_bytes * _MARGIN / 1e6:.0f} MB there; free some space"
        elif error.errno in {errno.ENOENT, errno.ENOTDIR}:
            reason = "needs an existing directory; create it"
        else:
            reason = f"could not write there ({error.strerror}); check permissions"
        raise CalibrationError(f"disk probe in {directory}: {reason}, or choose another folder") from error
