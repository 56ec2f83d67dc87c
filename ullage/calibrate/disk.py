"""Probe of a disk: large requests that bypass the page cache where the file system allows it."""

import contextlib
import errno
import itertools
import mmap
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from executor.direct_io import enable_direct_io
from hwprofiles.profile import Storage
from ullage.calibrate.sampling import Call, Case, build_curve, quantity, sample, sample_groups, seconds, wall_clock

_QUICK_FILE_BYTES = 2**28
_MARGIN = 1.2  # leave some space for other programs


@contextlib.contextmanager
def open_disk(directory: Path, *, quick: bool) -> Iterator["Disk"]:
    """Open a scratch file in ``directory`` and yield the disk for measurements.

    The file has no name, so an interrupted or killed calibration leaves nothing behind. It is filled first, because
    training overwrites its files and does not grow them.

    Raises:
        ValueError: the directory does not exist, may not be written, or has too little space.
    """
    file_bytes = _QUICK_FILE_BYTES if quick else 2**31
    sizes = tuple(2**i for i in range(20, 27 if quick else 29, 2))
    with contextlib.ExitStack() as stack:
        with _explained(directory, file_bytes):
            free_bytes = shutil.disk_usage(directory).free
            if free_bytes < file_bytes * _MARGIN:
                raise OSError(errno.ENOSPC, "too little space")
            descriptor = stack.enter_context(tempfile.TemporaryFile(dir=directory, buffering=0)).fileno()
            direct = enable_direct_io(descriptor)
            disk = Disk(directory, free_bytes, sizes, descriptor, file_bytes, direct=direct)
            disk.fill()
        yield disk


def _memory(num_bytes: int) -> memoryview:
    memory = mmap.mmap(-1, num_bytes)  # page-aligned, as direct I/O wants it; freed with its last view
    memory.write(os.urandom(2**20) * (num_bytes // 2**20))  # some disks store zeros for free
    return memoryview(memory)


class Disk:
    """A disk, and the scratch file for measuring it, which is read and written in place.

    Args:
        directory: folder of the scratch file.
        free_bytes: free space of its file system.
        sizes: sizes of the requests to measure, in bytes, ascending.
        descriptor: of the scratch file.
        file_bytes: its size.
        direct: whether requests bypass the page cache.
    """

    def __init__(
        self, directory: Path, free_bytes: int, sizes: Sequence[int], descriptor: int, file_bytes: int, *, direct: bool
    ) -> None:
        self._directory, self._free_bytes, self._sizes = directory, free_bytes, sizes
        self._descriptor, self._file_bytes, self._direct = descriptor, file_bytes, direct
        self._memory = _memory(sizes[-1])

    def fill(self) -> None:
        """Write the whole file."""
        os.posix_fallocate(self._descriptor, 0, self._file_bytes)  # a full disk fails here, before anything is written
        for offset in range(0, self._file_bytes, len(self._memory)):
            self._write(offset, self._memory)

    def probe(self, budget_s: float, *, shared: bool = False) -> Storage:
        """Measure reading, writing, and both at once; on a shared file system also the time to create a file.

        Raises:
            ValueError: the disk reports an error.
        """
        sizes = self._sizes
        with _explained(self._directory, self._file_bytes):
            calls = [self._calls(size, self._memory) for size in sizes]
            cases = {what: [Case(s, call[what]) for s, call in zip(sizes, calls, strict=True)] for what in calls[0]}
            writes = sample(cases["write"], wall_clock, budget_s * 0.4)
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            reads = sample(cases["read"], wall_clock, budget_s * 0.4)
            size = sizes[min(len(writes), len(reads)) - 1]
            (windows_s,) = sample_groups([list(self.requests(size).values())], budget_s * 0.2)
            created = sample([Case(1, self._create)], wall_clock, budget_s * 0.05)[0] if shared else None
        how = "direct" if self._direct else "through the page cache, written back (fdatasync) and dropped (fadvise)"
        read = build_curve("bytes", sizes, reads, f"disk reads, {how}")
        write = build_curve("bytes", sizes, writes, f"disk writes, {how}")
        both = np.minimum(np.sum(size / windows_s, axis=1), read.best_rate_per_s() + write.best_rate_per_s())
        source = f"disk reads and writes of {size / 2**20:.0f} MiB at once, sum, {how}"
        capacity = quantity(float(self._free_bytes), "bytes", "free space of the scratch directory's file system", 1)
        return Storage(
            capacity_bytes=capacity,
            read=read,
            write=write,
            both_bytes_per_s=quantity(float(np.median(both)), "bytes_per_s", source, len(both), both),
            create_s=seconds(created, "creating and closing an empty file") if created else None,
        )

    def requests(self, num_bytes: int) -> dict[str, Call]:
        """Return a read and a write of ``num_bytes`` (at most the largest size), which may run at the same time."""
        size = min(num_bytes, self._sizes[-1])
        return self._calls(size, self._memory) | {"write": self._calls(size, _memory(size))["write"]}

    def _calls(self, num_bytes: int, memory: memoryview) -> dict[str, Call]:
        """Return a read to memory and a write from it, each at the next place of the file."""

        def call(request: Callable[[int, memoryview], None]) -> Call:
            offsets = itertools.cycle(range(0, self._file_bytes - num_bytes + 1, num_bytes))
            return lambda: request(next(offsets), memory[:num_bytes])

        return {"read": call(self._read), "write": call(self._write)}

    def _write(self, offset: int, memory: memoryview) -> None:
        _in_full(lambda part, at: os.pwrite(self._descriptor, part, at), memory, offset)
        if not self._direct:
            os.fdatasync(self._descriptor)

    def _read(self, offset: int, memory: memoryview) -> None:
        if not self._direct:
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)
        _in_full(lambda part, at: os.preadv(self._descriptor, [part], at), memory, offset)

    def _create(self) -> None:
        path = self._directory / f".ullage-scratch-{uuid.uuid4().hex}"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        finally:
            path.unlink(missing_ok=True)


def _in_full(transfer: Callable[[memoryview, int], int], memory: memoryview, offset: int) -> None:
    done = 0
    while done < len(memory):
        moved = transfer(memory[done:], offset + done)
        if moved == 0:
            raise OSError(errno.EIO, "the scratch file ended early")
        done += moved


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
        raise ValueError(f"disk probe in {directory}: {reason}, or choose another folder") from error
