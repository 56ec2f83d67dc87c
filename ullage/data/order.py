"""The order of sequences over steps, and each rank's part of a step."""

import dataclasses
from collections.abc import Iterator
from typing import final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
"""Numbers of sequences."""


@final
class Order:
    """The order of sequences over all epochs. Each epoch has a random order that depends only on seed and epoch.

    A position is the number of sequences that all ranks together have read since the first epoch began. A step never
    crosses the end of an epoch: the last step has the remaining sequences or, with ``drop_last``, is left out.

    Args:
        num_sequences: number of sequences of the data.
        per_step: sequences of one step over all ranks.
        seed: seed of the order.
        drop_last: whether to drop a smaller last step of an epoch.

    Attributes:
        per_epoch: sequences of an epoch.

    Raises:
        ValueError: an epoch has no full step, and smaller steps are dropped.
    """

    def __init__(self, num_sequences: int, per_step: int, seed: int, *, drop_last: bool) -> None:
        self._num_sequences = num_sequences
        self._per_step = per_step
        self._seed = seed
        self.per_epoch = num_sequences - num_sequences % per_step if drop_last else num_sequences
        if not self.per_epoch:
            raise ValueError(
                f"the data have {num_sequences} sequences, but a step takes {per_step}, and a smaller last step is "
                "dropped; leave --drop-last out (drop_last=False), or give more data or a smaller batch"
            )
        self._drawn: tuple[int, Rows] | None = None  # the order of one epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch."""
        return -(-self.per_epoch // self._per_step)

    def num_steps(self, epochs: int, position: int = 0) -> int:
        """Return the number of steps from a position to the end of epoch ``epochs``."""
        epoch, offset = divmod(position, self.per_epoch)
        if epoch >= epochs:
            return 0
        return -(-(self.per_epoch - offset) // self._per_step) + (epochs - epoch - 1) * self.steps_per_epoch

    def step(self, position: int) -> Rows:
        """Return the sequences of the step that begins at a position."""
        epoch, offset = divmod(position, self.per_epoch)
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, np.random.default_rng([self._seed, epoch]).permutation(self._num_sequences)
        return self._drawn[1][offset : min(offset + self._per_step, self.per_epoch)]


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a micro-batch.

    Attributes:
        rows: at least one sequence, because all ranks must call the model equally often.
        counts: whether the sequences count in the loss. If there are fewer sequences than ranks, some ranks' do not.
    """

    rows: Rows
    counts: bool = True


def shares(rows: Rows, micro_batch: int, rank: int, num_ranks: int) -> Iterator[Share]:
    """Yield a rank's part of each micro-batch. The last micro-batch is divided among ranks as evenly as possible.

    Args:
        rows: sequences of a step over all ranks.
        micro_batch: maximum number of sequences per call of the model on one rank.
        rank: the rank.
        num_ranks: ranks that share every micro-batch.
    """
    for begin in range(0, len(rows), micro_batch * num_ranks):
        of_all = rows[begin : begin + micro_batch * num_ranks]
        count, more = divmod(len(of_all), num_ranks)
        first = rank * count + min(rank, more)
        own = of_all[first : first + count + (rank < more)]
        yield Share(own) if len(own) else Share(of_all[:1], counts=False)
