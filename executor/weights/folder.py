"""Writes a folder of weights that ``transformers`` can read, tensor by tensor. It appears complete or not at all."""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, final

import torch
from safetensors import SafetensorError

from executor.checkpoint.files.system_calls import Files, remove_tree, write_all
from executor.checkpoint.format.layout import TensorBox, layout
from executor.memory.stream import NAMES
from executor.weights.files import CHUNK_BYTES, INDEX, WEIGHTS

MAX_SHARD_BYTES: Final = 5_000_000_000
"""Limit of bytes of one file. A larger tensor has a file of its own."""
_REMEDY: Final = "give a new folder on a drive with room that this user may write"


@final
class WeightsFolder(contextlib.AbstractContextManager["WeightsFolder"]):
    """A new folder of weights. Use it in a ``with`` statement, and call :meth:`commit` at the end.

    Until :meth:`commit`, it has another name. So if the process is killed or the drive is full, no folder has the final
    name. The next process that writes there removes the files of a killed one.

    Args:
        folder: final path. It must not exist.
        files: system calls.

    Attributes:
        path: the folder to write files to before :meth:`commit`.

    Raises:
        ValueError: the folder exists.
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        check_new(folder)
        self._folder = folder.absolute()
        self._files = files or Files()
        self.path = self._folder.with_name(f".{folder.name}.new")
        with self.naming():
            remove_tree(self._files, self.path)
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._files.make_folder(self.path)

    def write_tensors(
        self,
        shapes: Mapping[str, torch.Tensor],
        values: Iterable[tuple[str, torch.Tensor]],
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> None:
        """Write safetensors files, and an index if there are several.

        Args:
            shapes: all tensors, of which values are not read.
            values: all tensors, in the same order, of any type and on any device. Each tensor is written before the
                next is taken.
            max_shard_bytes: limit of bytes of one file. A larger tensor has a file of its own.

        Raises:
            OSError: a file cannot be written.
        """
        shards = list(_shards(shapes, max_shard_bytes))
        index: dict[str, str] = {}
        remaining = iter(values)
        for number, held in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else WEIGHTS
            self._write_file(file, {name: shapes[name] for name in held}, remaining)
            index |= dict.fromkeys(held, file)
        if len(shards) > 1:
            sizes = {"total_parameters": sum(shape.numel() for shape in shapes.values())}
            sizes["total_size"] = sum(shape.nbytes for shape in shapes.values())
            text = json.dumps({"metadata": sizes, "weight_map": index}, indent=2)
            (self.path / INDEX).write_text(text + "\n", encoding="utf-8")

    def commit(self) -> None:
        """Make everything durable, and give the folder its name.

        Raises:
            OSError: the files cannot be made durable, or the folder cannot be renamed.
        """
        with self.naming():
            for path in self.path.rglob("*"):
                if path.is_file():
                    descriptor = os.open(path, os.O_RDONLY)
                    try:
                        self._files.sync(descriptor)
                    finally:
                        self._files.close(descriptor)
                else:
                    self._files.sync_folder(path)
            self._files.sync_folder(self.path)
            self._files.rename(self.path, self._folder)
            self._files.sync_folder(self._folder.parent)

    def __exit__(self, *_exc_info: object) -> None:
        remove_tree(self._files, self.path)  # after the rename, there is nothing to remove

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Return a context that names the folder in errors, which name no file or only a temporary one."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {_REMEDY}", str(self._folder)) from error
        except SafetensorError as error:  # peft's writer raises no OSError
            raise OSError(errno.EIO, f"{error}; {_REMEDY}", str(self._folder)) from error

    def _write_file(
        self, file: str, shapes: Mapping[str, torch.Tensor], values: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        entries = (_entry(name, shape) for name, shape in shapes.items())
        planned = layout(tuple(entries), known={"format": "pt"})
        with self.naming():
            descriptor = self._files.create(self.path / file)
            try:
                self._files.allocate(descriptor, planned.num_bytes)
                write_all(self._files, descriptor, memoryview(planned.header), 0)
                for entry, start in zip(planned.entries, planned.starts, strict=True):
                    name, tensor = next(values)
                    assert (name, tuple(tensor.shape)) == (entry.name, entry.shape), (name, tensor.shape, entry)
                    self._write(descriptor, tensor, shapes[name].dtype, start)
                    del tensor
            finally:
                self._files.close(descriptor)

    def _write(self, descriptor: int, tensor: torch.Tensor, dtype: torch.dtype, start: int) -> None:
        for values in torch.split(tensor.detach().reshape(-1), CHUNK_BYTES // dtype.itemsize):
            held = values.to("cpu", dtype).contiguous()
            write_all(self._files, descriptor, memoryview(held.view(torch.uint8).numpy().data), start)
            start += held.nbytes


def check_new(folder: Path) -> None:
    """Check that a path does not exist.

    Raises:
        ValueError: it exists.
    """
    if os.path.lexists(folder):  # a dangling link counts too: a folder cannot replace it
        raise ValueError(f"{folder} is there already; give a new folder")


def _entry(name: str, like: torch.Tensor) -> TensorBox:
    return TensorBox(name, NAMES[like.dtype], tuple(like.shape), range(like.numel()))


def _shards(shapes: Mapping[str, torch.Tensor], most_bytes: int) -> Iterator[list[str]]:
    held: list[str] = []
    num_bytes = 0
    for name, shape in shapes.items():
        if held and num_bytes + shape.nbytes > most_bytes:
            yield held
            held, num_bytes = [], 0
        held.append(name)
        num_bytes += shape.nbytes
    yield held
