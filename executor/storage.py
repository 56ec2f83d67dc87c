"""Optimizer state that lives in a file on NVMe, and the host buffers that it passes through.

[Note: Two versions] Every piece has room for its state twice. What an update has made is written beside what it was
made from, and only when all of it has been written is the new version the current one. A write that fails or is cut
short leaves the old version whole, and a read never meets half of a new one.

[Note: Direct] State is read and written once an iteration, and is larger than memory, so the page cache would only
take memory and a copy. Files are opened past it (``O_DIRECT``), with offsets, lengths and addresses that are multiples
of a block. Where a file system has no such thing (tmpfs, some network file systems) files are buffered, and the system
is told not to keep what has been read or written.
"""

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, final

import torch

from executor.memory import Arena
from planner.decisions import Decisions, Place
from planner.graph import Unit
from planner.optimizers import OPTIMIZERS
from planner.schedule import MemoryClass

BLOCK_BYTES: Final = 4096
"""Offsets, lengths and addresses of transfers are multiples of this: a page, and no drive has larger sectors."""

_CHUNK_BYTES: Final = 8 << 20  # one request; smaller ones are slower, and Linux cuts off what is beyond 2 GiB
_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

Key = tuple[str, int]
"""A piece: name of its unit, and index within the rank's shard."""


class StorageError(OSError):
    """State cannot be kept, read or written on storage; the message says where and why."""


@final
class StateFile:
    """A file of records of fixed sizes, all of its space taken at once, with two versions of each.

    It is removed when it is closed, or when nobody has it any more: it holds the state of this process alone.

    Args:
        path: where; its folder is made if it does not exist. What another process left there is overwritten.
        sizes_bytes: of the records.

    Raises:
        StorageError: there is no room, no permission, or another process is using it.
    """

    def __init__(self, path: Path, sizes_bytes: Sequence[int]) -> None:
        self.path = path
        self._room_bytes = [in_blocks(size) for size in sizes_bytes]
        self._starts = list(itertools.accumulate((2 * room for room in self._room_bytes), initial=0))
        self._current: list[int | None] = [None] * len(self._room_bytes)
        self._fd = _create(path, self.num_bytes)
        self._discard = weakref.finalize(self, _discard, self._fd, path)
        self.is_direct = _go_direct(self._fd)

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes: both versions."""
        return self._starts[-1]

    @property
    def words(self) -> str:
        """Where it is, and how it is read and written."""
        way = "past" if self.is_direct else "through (no O_DIRECT there)"
        return f"state in {self.path.parent}, {way} the page cache"

    def is_written(self, record: int) -> bool:
        """Return whether a record has a version."""
        return self._current[record] is not None

    def read(self, record: int, buffer: memoryview) -> None:
        """Read the current version of a record into ``buffer``, which has whole blocks and begins at one.

        Raises:
            StorageError: not all of it could be read.
        """
        version = self._current[record]
        assert version is not None, "read before it was written"
        self._transfer("read", os.preadv, record, version, buffer)

    def write(self, record: int, buffer: memoryview) -> None:
        """Write a record beside its current version, and make that the current one. See :meth:`read`.

        Raises:
            StorageError: not all of it could be written; the current version is what it was.
        """
        version = 1 - (self._current[record] or 0)
        self._transfer("write", os.pwritev, record, version, buffer)
        self._current[record] = version

    def close(self) -> None:
        """Remove it. Closing twice is allowed."""
        self._discard()

    def _transfer(
        self,
        verb: str,
        call: Callable[[int, list[memoryview], int], int],
        record: int,
        version: int,
        buffer: memoryview,
    ) -> None:
        room = self._room_bytes[record]
        start = self._starts[record] + version * room
        buffer, done = buffer[:room], 0
        try:
            while done < room and (count := call(self._fd, [buffer[done : done + _CHUNK_BYTES]], start + done)) > 0:
                done += count
            if not self.is_direct:
                os.posix_fadvise(self._fd, start, room, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StorageError(
                f"{self.path}: a {verb} of {room:,} B failed after {done:,} B: {error.strerror}; the state of the last "
                "iteration is whole, but training cannot go on"
            ) from error
        if done < room:
            raise StorageError(
                f"{self.path} ends amid a {verb} of {room:,} B, after {done:,} B: something else has changed it; give "
                "every run a --storage-dir of its own"
            )


def in_blocks(num_bytes: int) -> int:
    """Return bytes rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _create(path: Path, num_bytes: int) -> int:
    """Make a file with all of its space, which nobody else uses, and return its descriptor."""
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
        if error.errno not in _NO_ROOM:
            raise StorageError(
                f"{path}: no space can be taken: {error.strerror}; choose another --storage-dir"
            ) from error
        raise StorageError(_no_room(path, num_bytes, error)) from error
    return fd


def _no_room(path: Path, num_bytes: int, error: OSError) -> str:
    system = os.statvfs(path.parent)
    return (
        f"{path} needs {num_bytes:,} B, two versions of the optimizer state that the plan has on NVMe, but "
        f"{system.f_bavail * system.f_frsize:,} B are free there ({error.strerror}); make room, choose another "
        "--storage-dir, or plan with less on NVMe"
    )


def _discard(fd: int, path: Path) -> None:
    path.unlink(missing_ok=True)  # first: nobody else may lock what is about to go
    os.close(fd)


def _go_direct(fd: int) -> bool:
    """Leave the page cache out from now on, if that is possible; see [Note: Direct]."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK_BYTES) as page:  # some file systems refuse only the first transfer
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


@dataclasses.dataclass(slots=True)
class _Held:
    """A piece that has a host buffer now.

    Attributes:
        buffer: uint8, whole blocks.
        is_loaded: whether its state is in it.
        is_changed: whether that is newer than the file's.
    """

    buffer: torch.Tensor
    is_loaded: bool = False
    is_changed: bool = False


@final
class StoredState:
    """Optimizer state on NVMe, and the ring of host buffers [Note: Host buffers] in :mod:`planner.lowering.storage`.

    A buffer belongs to one piece from its :meth:`swap_in` to its :meth:`swap_out`, as the schedule orders them. Between
    iterations all buffers are free.

    Args:
        num_params: of every piece.
        num_tensors: float32 tensors of state: the master copy, and the optimizer's buffers.
        ring: uint8, whole blocks each.
        file: where state is, a record for every piece in their order.
    """

    def __init__(
        self, num_params: Mapping[Key, int], num_tensors: int, ring: Sequence[torch.Tensor], file: StateFile
    ) -> None:
        self.file = file
        self._num_params = num_params
        self._num_tensors = num_tensors
        self._ring = ring
        self._record = {key: record for record, key in enumerate(num_params)}
        self._held: dict[Key, _Held] = {}

    @classmethod
    def of(
        cls, units: tuple[Unit, ...], decisions: Decisions, folder: Path | None, rank: int, host: Arena
    ) -> Self | None:
        """Return room for what decisions have on NVMe, without values; ``None`` if that is nothing.

        Raises:
            ValueError: it is not said where.
            StorageError: see :class:`StateFile`.
            DeviceMemoryError: the host has no room for the ring.
        """
        num_params = {
            (unit.name, index): count
            for unit in units
            for index, (count, place) in enumerate(decisions.placed_pieces(unit))
            if place is Place.NVME
        }
        if not num_params:
            return None
        if folder is None:
            raise ValueError(
                "the plan keeps optimizer state on NVMe, but no folder for it was given; set storage_dir to one on a "
                "fast drive (ullage execute --storage-dir DIR)"
            )
        num_tensors = 1 + OPTIMIZERS[decisions.optimizer].num_buffers
        sizes_bytes = [4 * num_tensors * count for count in num_params.values()]
        ring = [
            host.take_blocks(f"nvme slot {i}", {MemoryClass.OPTIMIZER: max(sizes_bytes)}, BLOCK_BYTES)
            for i in range(min(decisions.num_nvme_slots, len(num_params)))
        ]
        return cls(num_params, num_tensors, ring, StateFile(folder / f"optimizer-rank-{rank}.state", sizes_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of all state in both versions, without what rounds pieces up to blocks."""
        return 2 * 4 * self._num_tensors * sum(self._num_params.values())

    @contextlib.contextmanager
    def begin(self, unit: str) -> Iterator[Callable[[int, int, torch.Tensor], None]]:
        """Write a unit's first state: yields what takes master copies, a stretch of a piece at a time, in order.

        All other state is 0. One piece at a time is in memory.
        """
        current: int | None = None
        master = self._ring[0]

        def settle() -> None:
            if current is not None:
                self._write((unit, current), self._ring[0])

        def keep(index: int, start: int, values: torch.Tensor) -> None:
            nonlocal current, master
            if index != current:
                settle()
                current = index
                master = self._tensors((unit, index), self._ring[0].zero_())[0]
            master[start : start + len(values)].copy_(values)

        yield keep
        settle()

    def swap_in(self, key: Key, slot: int, *, reads: bool) -> None:
        """Give a piece a buffer, and read its state into it, if that is needed."""
        assert key not in self._held
        self._held[key] = _Held(self._ring[slot])
        if reads:
            self.state(key)

    def state(self, key: Key) -> tuple[torch.Tensor, ...]:
        """Return the state of a piece that has a buffer, master copy first; read it if that has not been done."""
        held = self._held[key]
        if not held.is_loaded:
            self._read(key, held.buffer)
            held.is_loaded = True
        return self._tensors(key, held.buffer)

    def changed(self, key: Key) -> None:
        """Say that the state of a piece in its buffer is newer than that in the file."""
        self._held[key].is_changed = True

    def swap_out(self, key: Key) -> None:
        """Write what has changed, and give the buffer up."""
        held = self._held[key]
        if held.is_changed:
            self._write(key, held.buffer)
        del self._held[key]

    @contextlib.contextmanager
    def at_rest(self, key: Key, *, writes: bool = False) -> Iterator[tuple[torch.Tensor, ...]]:
        """Have the state of a piece between iterations, and write it afterwards if it is said to change."""
        assert not self._held, "buffers are in use"
        self._read(key, self._ring[0])
        yield self._tensors(key, self._ring[0])
        if writes:
            self._write(key, self._ring[0])

    def close(self) -> None:
        """Remove the file. Closing twice is allowed."""
        self.file.close()

    def _tensors(self, key: Key, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = self._num_tensors, self._num_params[key]
        return buffer[: 4 * shape[0] * shape[1]].view(torch.float32).view(shape).unbind()

    def _read(self, key: Key, buffer: torch.Tensor) -> None:
        if self.file.is_written(self._record[key]):
            self.file.read(self._record[key], _bytes(buffer))
        else:  # it has nothing but pads, see [Note: Shards] in executor.pieces
            buffer.zero_()

    def _write(self, key: Key, buffer: torch.Tensor) -> None:
        self.file.write(self._record[key], _bytes(buffer))


def _bytes(buffer: torch.Tensor) -> memoryview:
    return buffer.numpy().data
