"""A model's state between two plans: in a file, so that never more than the memory of one plan is taken.

While one session has ended and the next has not begun, nothing but this file has weights and optimizer state. It has no
name, so that nothing is left of it when the process ends, in whatever way.
"""

import itertools
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, final

import torch

from executor.files import StorageError

_ALIGNMENT_BYTES: Final = 64


@final
class Handover:
    """Tensors in a file, mapped: pages that the system may write out, and not memory that is held.

    Args:
        folder: where; made if it does not exist. On a file system in memory (tmpfs) it takes memory.
        tensors: what will be kept, by name, of which only shapes and types are read.

    Attributes:
        num_bytes: of the file.

    Raises:
        StorageError: there is no room, or no permission.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        sizes = [-(-tensor.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for tensor in tensors.values()]
        self.num_bytes = max(sum(sizes), 1)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                flat = torch.frombuffer(mmap.mmap(file.fileno(), self.num_bytes), dtype=torch.uint8)
        except OSError as error:
            raise StorageError(
                f"the state cannot pass from plan to plan through a file of {self.num_bytes:,} B in {folder}: "
                f"{error.strerror}; make room, or choose another --storage-dir"
            ) from error
        starts = itertools.accumulate(sizes, initial=0)
        self._kept = {
            name: flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), start in zip(tensors.items(), starts, strict=False)
        }

    def keep(self, name: str, values: torch.Tensor) -> None:
        """Copy a tensor into the file."""
        self._kept[name].copy_(values)

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return what was kept: a view of the file, which stays as long as anything views it."""
        return self._kept[name]
