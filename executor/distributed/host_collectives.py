"""Collectives over host memory, between iterations."""

from collections.abc import Callable
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from executor.distributed.ranks import Ranks


@final
class HostCollectives:
    """All ranks call each method at the same point. If there is one rank (``ranks=None``), methods return its value."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self.rank, self.size = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def broadcast(self, value: int) -> int:
        """Return rank 0's value."""
        return value if self._ranks is None else int(self._ranks.all.broadcast(torch.tensor(value, device="cpu")))

    def broadcast_text(self, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes, while the others wait. The text must not be empty."""
        if self._ranks is None:
            return make()
        values = torch.frombuffer(bytearray(make().encode()), dtype=torch.uint8) if self.rank == 0 else torch.empty(0)
        count = self.broadcast(len(values))
        text = self._ranks.all.broadcast(
            values if self.rank == 0 else torch.empty(count, dtype=torch.uint8, device="cpu")
        )
        return bytes(text.tolist()).decode()

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values."""
        return float(self.means(np.array([value]))[0])

    def any(self, value: bool) -> bool:
        """Return whether ``value`` is true on any rank."""
        return self.mean(float(value)) > 0

    def means(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the elementwise mean of all ranks' arrays, which have the same shape."""
        if self._ranks is None:
            return values
        return np.array(self._ranks.all_reduce(values.ravel().tolist())).reshape(values.shape) / self.size
