"""Reads a checkpoint, and believes nothing that it has not checked."""

import concurrent.futures
import contextlib
import errno
import mmap
from collections.abc import Iterator
from typing import Self, final

import numpy as np

from executor.checkpoint.files import CheckpointError
from executor.checkpoint.flusher import Buffer, checksum
from executor.checkpoint.layout import ITEM_BYTES
from executor.checkpoint.manifest import MANIFEST_NAME, FileRecord, Manifest
from executor.checkpoint.opening import Folder, Opened, open_file
from executor.direct import BLOCK_BYTES, in_blocks

_NUM_READERS = 4  # files that are read at once: while one is hashed others are read


@final
class Checkpoint:
    """A checkpoint in a folder or at a URL; every chunk is checked when it is read.

    Args:
        folder: of the checkpoint.
        manifest: what it shall have; left out, what it says itself.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """

    def __init__(self, folder: Folder, manifest: Manifest | None = None) -> None:
        self.folder = folder
        try:
            self.manifest = manifest or Manifest.read((folder / MANIFEST_NAME).read_bytes())
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        except OSError as error:
            raise CheckpointError(f"{folder}: {MANIFEST_NAME}: {error.strerror}") from error
        self._open: dict[int, _OpenFile] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of values."""
        return sum(record.num_bytes for record in self.manifest.files)

    def verify(self, first: int = 0, every: int = 1) -> None:
        """Read every byte of the files ``first``, ``first + every`` and so on.

        Raises:
            CheckpointError: a file is missing, of another length, or damaged; says which, and where.
        """
        records = self.manifest.files[first::every]
        with concurrent.futures.ThreadPoolExecutor(_NUM_READERS, "checkpoint read") as readers:
            list(readers.map(self._verify, records))  # in order: the first failure is raised

    def chunks(self, record: FileRecord) -> Iterator[Buffer]:
        """Read all of a file, and yield chunk after chunk; each is there until the next one is asked for.

        Raises:
            CheckpointError: as :meth:`verify`.
        """
        with contextlib.closing(_OpenFile(self.folder, record)) as file:
            for chunk in range(len(record.checksums)):
                yield file.load(chunk)

    def _verify(self, record: FileRecord) -> None:
        for _ in self.chunks(record):
            pass

    def read(self, name: str, start: int, out: Buffer) -> None:
        """Read values of a tensor, from the ``start``-th of its flat values on, into ``out``, uint8, whole values.

        Reading in the order in which values were written reads every chunk once.

        Raises:
            CheckpointError: there is no such tensor, it is shorter, or what is needed of a file is damaged.
        """
        record = self.manifest.tensors.get(name)
        if record is None:
            raise CheckpointError(f"{self.folder}: there is no tensor {name}; the checkpoint is of another model")
        item_bytes = ITEM_BYTES[record.dtype]
        stop = start + len(out) // item_bytes
        size = record.fragments[-1].stop if record.fragments else 0
        if stop > size:
            raise CheckpointError(f"{self.folder}: {name} has {size:,} values; the checkpoint is of another model")
        for fragment in record.fragments:
            begin, end = max(start, fragment.start), min(stop, fragment.stop)
            if begin < end:
                target = out[(begin - start) * item_bytes : (end - start) * item_bytes]
                self._file(fragment.file).read(fragment.offset + (begin - fragment.start) * item_bytes, target)

    def close(self) -> None:
        """Close the files. Closing twice is allowed."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _file(self, index: int) -> "_OpenFile":
        if index not in self._open:
            self._open[index] = _OpenFile(self.folder, self.manifest.files[index])
        return self._open[index]


class _OpenFile:
    """A file with the last chunk that was read of it."""

    def __init__(self, folder: Folder, record: FileRecord) -> None:
        self.record = record
        self._path = folder / record.path
        self._file: Opened | None = open_file(self._path)
        self._memory = mmap.mmap(-1, in_blocks(record.chunk_bytes))
        self._buffer = np.frombuffer(self._memory, np.uint8)
        self._chunk = -1
        size = self._file.num_bytes
        if size != record.num_bytes or -(-size // record.chunk_bytes) != len(record.checksums):
            self.close()
            raise CheckpointError(f"{self._path} has {size:,} B, but was written with {record.num_bytes:,}")

    def read(self, offset: int, out: Buffer) -> None:
        while len(out):
            chunk, at = divmod(offset, self.record.chunk_bytes)
            values = self.load(chunk)
            count = min(len(values) - at, len(out))
            np.copyto(out[:count], values[at : at + count])
            offset, out = offset + count, out[count:]

    def load(self, chunk: int) -> Buffer:
        """Return a chunk, checked."""
        start = chunk * self.record.chunk_bytes
        length = min(self.record.chunk_bytes, self.record.num_bytes - start)
        if chunk != self._chunk:
            self._chunk = -1
            try:
                self._fill(start, length)
            except CheckpointError:
                raise
            except OSError as error:
                raise CheckpointError(f"{self._path}: {error.strerror} at {start:,} B") from error
            if checksum(self._buffer[:length]) != self.record.checksums[chunk]:
                raise CheckpointError(f"{self._path} is damaged between {start:,} and {start + length:,} B")
            self._chunk = chunk
        return self._buffer[:length]

    def _fill(self, start: int, length: int) -> None:
        assert self._file is not None
        done = 0
        while done < length:
            # The whole of the last block is asked for: past the page cache less is refused.
            count = self._file.read(self._buffer[done : in_blocks(length)], start + done)
            done += count if done + count >= length else count // BLOCK_BYTES * BLOCK_BYTES
            if count < BLOCK_BYTES and done < length:
                raise OSError(errno.EIO, "it ends early")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
