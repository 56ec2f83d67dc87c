"""What ranks do together while nothing is under way: agree on values, and put together what each has a share of."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt
import torch

from executor.checkpoint.source import Member
from executor.distributed.ranks import Ranks
from executor.distributed.shards import Share, whole_of
from executor.memory.handover import Handover


@final
class Together:
    """Collectives of a session at rest; all ranks call each of them at the same point, and one rank alone may too.

    Args:
        ranks: all of them; ``None`` if there is only one.
    """

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """Which of the ranks this is."""
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def size(self) -> int:
        """How many there are."""
        return 1 if self._ranks is None else self._ranks.size

    def member(self) -> Member:
        """Return which of the ranks this is, with a nonce that is the same on all."""
        if self._ranks is None:
            return Member()
        nonce = self._ranks.of_first(torch.frombuffer(bytearray(os.urandom(4)), dtype=torch.uint8))
        return Member(self._ranks.rank, self._ranks.size, bytes(nonce.tolist()).hex())

    def of_first(self, value: int) -> int:
        """Return rank 0's value."""
        return value if self._ranks is None else int(self._ranks.of_first(torch.tensor(value)))

    def text_of_first(self, make: Callable[[], str]) -> str:
        """Return the text that rank 0 makes, which is not empty, while the others wait."""
        if self._ranks is None:
            return make()
        is_first = self._ranks.rank == 0
        values = torch.frombuffer(bytearray(make().encode()), dtype=torch.uint8) if is_first else torch.empty(0)
        count = self.of_first(len(values))
        text = self._ranks.of_first(values if is_first else torch.empty(count, dtype=torch.uint8))
        return bytes(text.tolist()).decode()

    def mean(self, value: float) -> float:
        """Return the mean of a number, of which each rank has its own."""
        return float(self.means(np.array([value]))[0])

    def any(self, value: bool) -> bool:
        """Return whether it is so on any rank."""
        return self.mean(float(value)) > 0

    def means(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean of every value, all of the same shape."""
        if self._ranks is None:
            return values
        return np.array(self._ranks.sums(values.ravel().tolist())).reshape(values.shape) / self._ranks.size

    def whole(self, parts: Sequence[tuple[Share, torch.Tensor]]) -> torch.Tensor:
        """Return the whole of what ranks have shares of. See :func:`executor.distributed.shards.whole_of`."""
        return whole_of(parts, self._ranks)

    def handover(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Handover:
        """Return a file for what is to pass to the next session."""
        return Handover(folder, tensors, self._ranks)
