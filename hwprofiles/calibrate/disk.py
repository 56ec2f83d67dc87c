"""Probe of a disk: large requests, past the page cache where the file system allows it."""

import contextlib
import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from hwprofiles.calibrate.options import CalibrationError
from hwprofiles.calibrate.sampling import Case, build_curve, quantity, sample, wall_clock
from hwprofiles.profile import Storage

_MARGIN = 1.2  # a disk filled to the brim disturbs everybody else
_DIRECT = getattr(os, "O_DIRECT", 0)


def probe_disk(directory: Path, budget_s: float, *, quick: bool) -> Storage:
    """Measure reading and writing in ``directory``, in place within one file that is never visible for long.

    The file is unlinked as soon as it is open, so an interrupted or killed calibration leaves nothing behind. It is
    written once beforehand: training rewrites its files over and over, it does not grow them.

    Raises:
        CalibrationError: no such directory, no permission, or too little space.
    """
    file_bytes = (256 if quick else 2048) * 2**20
    sizes = [2**i for i in range(20, 27 if quick else 29, 2)]
    with _explained(directory, file_bytes):
        usage = shutil.disk_usage(directory)
        if usage.free < file_bytes * _MARGIN:
            raise OSError(errno.ENOSPC, "too little space")
        memory = mmap.mmap(-1, sizes[-1])  # page-aligned, as direct I/O wants it; freed with its last view
        memory.write(os.urandom(2**20) * (sizes[-1] // 2**20))  # some disks store zeros for free
        with _scratch_file(directory) as (descriptor, direct):
            file = _File(descriptor, memoryview(memory), file_bytes, direct=direct)
            file.fill()
            writes = sample([Case(s, file.next_request(s, file.write)) for s in sizes], wall_clock, budget_s / 2)
            file.drop_cache()
            reads = sample([Case(s, file.next_request(s, file.read)) for s in sizes], wall_clock, budget_s / 2)
    how = "direct" if direct else "through the page cache, written back (fdatasync) and dropped (fadvise)"
    return Storage(
        capacity_bytes=quantity(float(usage.free), "bytes", "free space of the scratch directory's file system", 1),
        read=build_curve("bytes", sizes, reads, f"disk reads, {how}"),
        write=build_curve("bytes", sizes, writes, f"disk writes, {how}"),
    )


class _File:
    """A scratch file that is read and written in place."""

    def __init__(self, descriptor: int, memory: memoryview, num_bytes: int, *, direct: bool) -> None:
        self._descriptor, self._memory, self._num_bytes, self._direct = descriptor, memory, num_bytes, direct

    def fill(self) -> None:
        os.posix_fallocate(self._descriptor, 0, self._num_bytes)  # a full disk shows here, before anything is written
        for offset in range(0, self._num_bytes, len(self._memory)):
            self.write(offset, len(self._memory))

    def write(self, offset: int, num_bytes: int) -> None:
        _in_full(lambda part, at: os.pwrite(self._descriptor, part, at), self._memory[:num_bytes], offset)
        if not self._direct:
            os.fdatasync(self._descriptor)

    def read(self, offset: int, num_bytes: int) -> None:
        if not self._direct:
            os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        _in_full(lambda part, at: os.preadv(self._descriptor, [part], at), self._memory[:num_bytes], offset)

    def drop_cache(self) -> None:
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def next_request(self, num_bytes: int, request: Callable[[int, int], None]) -> Callable[[], None]:
        """Return a call that makes the request at the next place of the file."""
        offsets = _cycle(self._num_bytes, num_bytes)
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
            if error.errno != errno.EINVAL:  # what file systems without direct I/O answer, after creating the file
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
    """Turn what the operating system says about a directory into what the user can do about it."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            reason = f"needs {file_bytes * _MARGIN / 1e6:.0f} MB there; free some space"
        elif error.errno in {errno.ENOENT, errno.ENOTDIR}:
            reason = "needs an existing directory; create it"
        else:
            reason = f"could not write there ({error.strerror}); check permissions"
        raise CalibrationError(f"disk probe in {directory}: {reason}, or choose another scratch_dir") from error
