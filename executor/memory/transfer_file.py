"""A file that carries a model's state from one plan to the next, so that only one plan at a time needs memory.

Between the end of one session and the beginning of the next, only this file has weights and optimizer state. It has no
name, so the system removes it when the process ends, even if the process crashes.

The ranks of one machine share one file that holds the whole state, because under the next plan a rank may need any part
of it. Each rank writes some of the tensors. One rank makes the file, and the others open it through that rank's
process.
"""

import contextlib
import itertools
import mmap
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, final

import torch

from executor.distributed.ranks import Ranks, this_machine
from executor.memory.nvme_files import StorageError

_ALIGNMENT_BYTES: Final = 64
_FAILED: Final = "failed"


@final
class TransferFile:
    """Tensors in a memory-mapped file, whose pages the system may write out.

    Args:
        folder: folder of the file; it is made if needed. On a file system in memory (tmpfs) the file takes memory.
        tensors: examples of the tensors to write, by name. Only shapes and types are read. The same on all ranks.
        ranks: all ranks, which make the file together; ``None`` if there is only one.

    Attributes:
        num_bytes: size of the file.

    Raises:
        StorageError: there is no room, or no permission. If one rank fails, all raise.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor], ranks: Ranks | None = None) -> None:
        sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors.values()]
        self.num_bytes = max(sum(sizes), 1)
        mates = [0]  # ranks of this machine that can open each other's files
        if ranks is not None:
            where = f"{this_machine()} {Path('/proc/self/ns/pid').readlink()}"
            mates = ranks.all.ranks_with_same(where.encode())
        turn = 0 if ranks is None else mates.index(ranks.rank)
        self._written_here = set(itertools.islice(tensors, turn, None, len(mates)))
        with contextlib.ExitStack() as files:
            made = self._step(ranks, folder, lambda: _make(folder, self.num_bytes, files) if not turn else "")
            path = made[0 if ranks is None else mates[0]]
            flat = torch.empty(0)

            def map_it() -> str:
                nonlocal flat
                with Path(path).open("r+b") as file:
                    flat = torch.frombuffer(mmap.mmap(file.fileno(), self.num_bytes), dtype=torch.uint8)
                return ""

            self._step(ranks, folder, map_it)  # before the rank that made the file closes it
        starts = itertools.accumulate(sizes, initial=0)
        self._tensors = {
            name: flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(tensors.items(), starts, strict=False)
        }

    def write(self, name: str, values: torch.Tensor) -> None:
        """Write a tensor that all ranks have. After their next barrier, all ranks can read it."""
        if name in self._written_here:
            self._tensors[name].copy_(values)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return a tensor, a view of the file. The file exists as long as any view of it."""
        return self._tensors[name]

    def _step(self, ranks: Ranks | None, folder: Path, do: Callable[[], str]) -> list[str]:
        """Call ``do`` on all ranks, where it may fail; return every rank's result."""
        failure, result = None, ""
        try:
            result = do()
        except OSError as error:
            failure = error
        every = [result] if ranks is None else ranks.all_gather_text(_FAILED if failure else result)
        if failure is None and _FAILED not in every:
            return every
        why = failure.strerror if failure else f"rank {every.index(_FAILED)} cannot make or open it"
        raise StorageError(
            f"the state cannot move to the next plan through a file of {self.num_bytes:,} B in {folder}: {why}; make "
            "room, or choose another --storage-dir"
        ) from failure


def _make(folder: Path, num_bytes: int, files: contextlib.ExitStack) -> str:
    """Make a file without a name that is open until ``files`` closes; return a path to open it in other processes."""
    folder.mkdir(parents=True, exist_ok=True)
    number = files.enter_context(tempfile.TemporaryFile(dir=folder)).fileno()  # noqa: SIM115 - others open it too
    os.posix_fallocate(number, 0, num_bytes)
    return f"/proc/{os.getpid()}/fd/{number}"
