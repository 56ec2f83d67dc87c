"""Reads a checkpoint, and checks every chunk.

[Note: Read ahead] The caller passes all read requests at once. A few threads read file by file and chunk by chunk, each
chunk once. Some threads read while others hash. A chunk is read in one call, straight into the requests' memory if
possible. If values share a block of the file with other values, or their memory is not aligned, they are copied through
a buffer. Each thread has one buffer of a chunk's size; reading needs no other memory. Data is hashed in the memory that
it was read into, so the caller gets exactly the values that were checked.
"""

import contextlib
import dataclasses
import itertools
import operator
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, final

import numpy as np
import xxhash

from executor.checkpoint.files.opening import Folder, OpenFile, fill, open_file, read_whole
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError
from executor.checkpoint.files.writer import Buffer
from executor.checkpoint.format.layout import ITEM_BYTES
from executor.checkpoint.format.manifest import MANIFEST_NAME, FileRecord, Manifest
from executor.direct_io import BLOCK_BYTES, in_blocks, pages
from planner.checkpoints.policy import NUM_THREADS

MAX_MANIFEST_BYTES: Final = 1 << 30  # the manifest of a thousand ranks has a tenth of that

_WORTH_A_THREAD_BYTES: Final = 1 << 20
_LEAST_DIRECT_BYTES: Final = 64 << 10  # shorter ranges are copied, because a call takes at most 1,024 ranges


_Target = tuple[int, Buffer]
"""Where a part begins in a chunk, and the memory for it."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReadRequest:
    """Values to read.

    Attributes:
        name: name of the tensor.
        start: index of the first value in the flat tensor.
        out: memory for the values, flat uint8, whole values.
    """

    name: str
    start: int
    out: Buffer


@final
class Checkpoint(contextlib.AbstractContextManager["Checkpoint"]):
    """A checkpoint in a folder or at a URL. Every chunk is checked when it is read, see [Note: Read ahead].

    Args:
        folder: the checkpoint's folder.
        manifest: the manifest that its files must match. By default, the folder's own manifest is read.

    Raises:
        DamagedError: there is no manifest, or it is damaged.
    """

    def __init__(self, folder: Folder, manifest: Manifest | None = None) -> None:
        self.folder = folder
        self._pool: ThreadPoolExecutor | None = None  # the calling thread reads too
        self._buffers: queue.SimpleQueue[Buffer] = queue.SimpleQueue()  # one for each thread
        self.manifest = manifest or _manifest(folder)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of values."""
        return sum(record.num_bytes for record in self.manifest.files)

    def verify(self) -> None:
        """Read and check every byte.

        Raises:
            DamagedError: a file is missing, has another length, or is damaged.
        """
        chunks: dict[int, dict[int, list[_Target]]] = {
            file: {chunk: [] for chunk in range(len(record.checksums))}
            for file, record in enumerate(self.manifest.files)
        }
        self._read(chunks)

    def verify_in_turn(
        self, check: Callable[[], None] = lambda: None, records: Sequence[FileRecord] | None = None
    ) -> None:
        """Do so in the calling thread alone, to spare the drive and memory; of all files, or of some.

        ``check`` is called after every chunk.

        Raises:
            DamagedError: see :meth:`verify`.
        """
        for record in self.manifest.files if records is None else records:
            for _ in self.chunks(record, check):
                pass

    def chunks(self, record: FileRecord, check: Callable[[], None] = lambda: None) -> Iterator[Buffer]:
        """Read a file, and yield its chunks, after calling ``check``. Each chunk is valid until the next one is read.

        Raises:
            DamagedError: see :meth:`verify`.
        """
        buffer = pages(in_blocks(record.buffer_bytes))
        with contextlib.closing(_File(self.folder, record, len(record.checksums))) as file:
            for chunk in range(len(record.checksums)):
                num_bytes = file.load(chunk, buffer, ())
                check()
                yield buffer[:num_bytes]

    def read(self, wanted: Iterable[ReadRequest]) -> None:
        """Read values into the requests' memory. After an error, the content of that memory is undefined.

        Raises:
            DamagedError: a needed part of a file is missing or damaged.
            CheckpointError: there is no such tensor, or it has too few values. Nothing has been read.
        """
        chunks: dict[int, dict[int, list[_Target]]] = {}
        for one in wanted:
            for file, offset, out in self._parts_of(one):
                chunk_bytes, done = self.manifest.files[file].chunk_bytes, 0
                while done < len(out):
                    chunk, at = divmod(offset + done, chunk_bytes)
                    part = out[done : done + chunk_bytes - at]
                    chunks.setdefault(file, {}).setdefault(chunk, []).append((at, part))
                    done += len(part)
        self._read(chunks)

    def close(self) -> None:
        """End the threads and free their buffers. Closing twice is allowed."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool, self._buffers = None, queue.SimpleQueue()

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _parts_of(self, wanted: ReadRequest) -> Iterator[tuple[int, int, Buffer]]:
        """Yield for each part of a request: index of its file, offset in the file, and memory."""
        record = self.manifest.tensors.get(wanted.name)
        if record is None:
            raise CheckpointError(
                f"{self.folder}: there is no tensor {wanted.name}; the checkpoint is of another model"
            )
        item_bytes = ITEM_BYTES[record.dtype]
        start, stop = wanted.start, wanted.start + len(wanted.out) // item_bytes
        if stop > record.num_values:
            raise CheckpointError(
                f"{self.folder}: {wanted.name} has {record.num_values:,} values, but the model needs {stop:,}; the "
                "checkpoint is of another model"
            )
        for fragment in record.fragments:
            begin, end = max(start, fragment.start), min(stop, fragment.stop)
            if begin < end:
                out = wanted.out[(begin - start) * item_bytes : (end - start) * item_bytes]
                yield fragment.file, fragment.offset + (begin - fragment.start) * item_bytes, out

    def _read(self, chunks: dict[int, dict[int, list[_Target]]]) -> None:
        tasks = [
            (opened, index, of_file[index])
            for file, of_file in sorted(chunks.items())
            for opened in [_File(self.folder, self.manifest.files[file], len(of_file))]
            for index in sorted(of_file)
        ]
        if not tasks:
            return
        buffer_bytes = max(in_blocks(record.buffer_bytes) for record in self.manifest.files)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(NUM_THREADS - 1, "checkpoint read")
            for _ in range(NUM_THREADS):
                self._buffers.put(pages(buffer_bytes))
        num_threads = min(NUM_THREADS, len(tasks), 1 + len(tasks) * buffer_bytes // _WORTH_A_THREAD_BYTES)
        try:
            self._load(self._pool, tasks, num_threads)
        finally:
            for file in {id(file): file for file, _, _ in tasks}.values():
                file.close()

    def _load(
        self, pool: ThreadPoolExecutor, tasks: Sequence[tuple["_File", int, list[_Target]]], num_threads: int
    ) -> None:
        """Read chunks in this order, in so many threads; raise the first failure in this order."""
        numbers = iter(range(len(tasks)))  # its next() is atomic
        failures: dict[int, Exception] = {}

        def work() -> None:
            buffer = self._buffers.get()
            try:
                for number in numbers:
                    file, chunk, targets = tasks[number]
                    try:
                        file.load(chunk, buffer, targets)
                    except OSError as error:
                        failures[number] = error
                    if failures:
                        break
            finally:
                self._buffers.put(buffer)

        jobs = [pool.submit(work) for _ in range(num_threads - 1)]
        try:
            work()
        finally:
            wait(jobs)
        for job in jobs:
            job.result()
        if failures:
            raise failures[min(failures)]


class _File:
    """A file that is opened for its first chunk, and closed after its last one."""

    def __init__(self, folder: Folder, record: FileRecord, num_chunks: int) -> None:
        self.record = record
        self._folder = folder
        self._path = folder / record.path
        self._left = num_chunks
        self._lock = threading.RLock()
        self._file: OpenFile | None = None

    def load(self, chunk: int, buffer: Buffer, targets: Sequence[_Target]) -> int:
        """Read a chunk, check it, and put its values into place, through ``buffer`` if necessary.

        Returns:
            Its length.

        Raises:
            DamagedError: its checksum does not match.
        """
        start = chunk * self.record.chunk_bytes
        length = min(self.record.chunk_bytes, self.record.num_bytes - start)
        file = self._open()
        parts, copies = _cut(buffer[: in_blocks(length)], targets, file.alignment_bytes)
        try:
            fill(file, [part.data for part in parts], start, length)
        except OSError as error:
            raise _damaged(self._path, error, f" at {start:,} B") from error
        digest = xxhash.xxh3_64()
        left = length
        for part in parts:
            digest.update(part[:left].data)
            left -= min(len(part), left)
        if digest.hexdigest() != self.record.checksums[chunk]:
            raise DamagedError(f"{self._path} is damaged between {start:,} and {start + length:,} B")
        for out, values in copies:
            np.copyto(out, values)
        with self._lock:
            self._left -= 1
            if not self._left:
                self.close()
        return length

    def close(self) -> None:
        """Close the file, if it is open."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _open(self) -> OpenFile:
        with self._lock:
            if self._file is None:
                try:
                    self._file = open_file(self._folder, self.record.path)
                except OSError as error:
                    raise _damaged(self._path, error) from error
                size = self._file.num_bytes
                if size != self.record.num_bytes:
                    raise DamagedError(f"{self._path} has {size:,} B, but was written with {self.record.num_bytes:,}")
            return self._file


def _cut(
    buffer: Buffer, targets: Sequence[_Target], alignment_bytes: int
) -> tuple[list[Buffer], list[tuple[Buffer, Buffer]]]:
    """Return the memory to read a chunk into, part by part, and the copies to make afterwards.

    Parts are the requests' memory if possible, with parts of ``buffer`` between them.
    """
    parts, copies, end = [], [], 0
    ordered = sorted(targets, key=operator.itemgetter(0))
    disjoint = all(at + len(out) <= after for (at, out), (after, _) in itertools.pairwise(ordered))  # else two overlap
    for at, out in ordered:
        stop = at + len(out)
        # Whole blocks are read straight into place, if that is aligned.
        first, last = in_blocks(at), stop // BLOCK_BYTES * BLOCK_BYTES
        is_aligned = (out.ctypes.data - at) % alignment_bytes == 0
        if disjoint and is_aligned and last - first >= _LEAST_DIRECT_BYTES:
            parts += [buffer[end:first], out[first - at : last - at]]
            end = last
        else:
            first = last = stop
        copies += [(out[a - at : b - at], buffer[a:b]) for a, b in ((at, first), (last, stop)) if a < b]
    return [part for part in (*parts, buffer[end:]) if len(part)], copies


def _manifest(folder: Folder) -> Manifest:
    try:
        return Manifest.read(read_whole(folder, MANIFEST_NAME, MAX_MANIFEST_BYTES))
    except DamagedError as error:
        raise DamagedError(f"{folder}: {error}") from None
    except OSError as error:
        raise _damaged(f"{folder}: {MANIFEST_NAME}", error) from error


def _damaged(what: object, error: OSError, where: str = "") -> DamagedError:
    """Return the error for something that cannot be read."""
    if isinstance(error, CheckpointError):  # error of a driver, with the path in its message
        return DamagedError(str(error))
    return DamagedError(f"{what}: {error.strerror}{where}")
