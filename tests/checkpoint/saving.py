"""A small checkpoint of two files, whose values follow from its step, and kinds of files that go wrong."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from executor.checkpoint.files.system_calls import Files
from executor.checkpoint.files.writer import Flusher, ShardWriter, ring_of
from executor.checkpoint.format.layout import FileLayout, TensorBox, boxes, layout
from executor.checkpoint.format.manifest import FileRecord, Manifest, tensors_of
from executor.checkpoint.format.reader import ReadRequest
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.place import newest_of

CHUNK_BYTES = 4096
FOLDERS = ("model", "optimizer")
SHAPES = {"model": {"w": (37, 41), "b": (41,)}, "optimizer": {"exp_avg.w": (37, 41), "exp_avg.b": (41,)}}
TENSORS = {name: shape for shapes in SHAPES.values() for name, shape in shapes.items()}


def values(name: str, step: int) -> np.ndarray:
    """Return the values of a tensor at a step: no two have one in common."""
    size = int(np.prod(TENSORS[name]))
    return (np.arange(size) + 10_000 * (step * len(TENSORS) + list(TENSORS).index(name))).astype(np.float32)


def entries(folder: str) -> tuple[TensorBox, ...]:
    """Return all of a folder's tensors, whole."""
    shapes = SHAPES[folder].items()
    return tuple(
        TensorBox(name, "F32", shape, box) for name, shape in shapes for box in boxes(shape, 0, int(np.prod(shape)))
    )


def part_of(written: Sequence[tuple[FileLayout, FileRecord]]) -> Manifest:
    """Return what a rank has written, as an engine says it."""
    return Manifest(
        step=0, files=tuple(record for _, record in written), tensors=tensors_of([made for made, _ in written])
    )


def save(store: FolderPlace, step: int, files: Files | None = None) -> Path:
    """Write a checkpoint as an engine does; what goes wrong is raised after everything has been given up."""
    draft = store.begin(step, FOLDERS)
    writers: list[ShardWriter] = []
    with Flusher(files or store.files, ring_of(3, CHUNK_BYTES), num_threads=1, patience_s=20) as flusher:
        try:
            for folder in FOLDERS:
                writer = ShardWriter(flusher, draft, f"{folder}/values.safetensors", layout(entries(folder)))
                writers.append(writer)
                for entry in writer.layout.entries:
                    writer.append(values(entry.name, step).view(np.uint8))
            written = [(writer.layout, writer.finish()) for writer in writers]
            return store.complete(draft.name, Manifest.of(step, [part_of(written)], {"seed": step}))
        except BaseException:
            for writer in writers:
                writer.abandon()
            store.abandon(draft.name)
            raise


def step_of(store: FolderPlace) -> int | None:
    """Return the newest whole checkpoint's step, after checking that every value of it is that step's."""
    checkpoint = newest_of([store])[0]
    if checkpoint is None:
        return None
    step = checkpoint.manifest.step
    with checkpoint:
        assert checkpoint.manifest.extra == {"seed": step}
        assert set(checkpoint.manifest.tensors) == set(TENSORS)
        found = {name: np.empty(int(np.prod(shape)), np.float32) for name, shape in TENSORS.items()}
        checkpoint.read(ReadRequest(name, 0, of.view(np.uint8)) for name, of in found.items())
        for name in TENSORS:
            assert np.array_equal(found[name], values(name, step)), f"{name} is not that of step {step}"
    return step


class CountingFiles(Files):
    """Files that call :meth:`at` before every operation with its number, from 0."""

    def __init__(self) -> None:
        self.num_operations = 0
        self._lock = threading.RLock()  # writes come from another thread

    def at(self, number: int, name: str) -> None:
        """Do something at an operation."""


def _counted(name):
    plain = getattr(Files, name)

    def method(self, *args):
        with self._lock:
            number, self.num_operations = self.num_operations, self.num_operations + 1
            self.at(number, name)
            return self.do(number, name, plain, args)

    return method


def _do(self, number, name, plain, args):  # noqa: ARG001 - others need them
    return plain(self, *args)


OPERATIONS = [name for name in vars(Files) if not name.startswith("_")]
for operation in OPERATIONS:
    setattr(CountingFiles, operation, _counted(operation))
CountingFiles.do = _do


class KillingFiles(CountingFiles):
    """Files whose process is killed before, in the middle of, or after an operation."""

    def __init__(self, number: int, phase: str) -> None:
        super().__init__()
        self._number, self._phase = number, phase

    def do(self, number, name, plain, args):
        mine = number == self._number
        if mine and self._phase == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if mine and self._phase == "middle" and name == "write":
            fd, data, offset = args
            Files.write(self, fd, data[: len(data) // 2 // 512 * 512 or 1], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        result = plain(self, *args)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class FailingFiles(CountingFiles):
    """Files of which one operation fails, before or after it has been done; or a write is cut short."""

    def __init__(self, number: int, error: int | None, *, after: bool = False) -> None:
        super().__init__()
        self._number, self._error, self._after = number, error, after
        self.failed = ""

    def do(self, number, name, plain, args):
        if number != self._number:
            return plain(self, *args)
        self.failed = name
        if self._error is None:
            if name != "write":
                return plain(self, *args)
            fd, data, offset = args
            return Files.write(self, fd, data[: max(len(data) // 2 // 4096 * 4096, 4096)], offset)
        if self._after:
            try:
                result = plain(self, *args)
            except OSError:  # as it does without us
                self.failed = ""
                raise
            if name in {"create", "reuse"}:
                os.close(result)
        raise OSError(self._error, os.strerror(self._error))
