"""Which sequences a step trains on, and which of them are one rank's."""

import dataclasses
from collections.abc import Iterator
from typing import final

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
"""Numbers of sequences."""


@final
class Order:
    """The order of sequences over all epochs: a new random one in each, which depends on the seed and the epoch alone.

    A position counts the sequences that were given since the first epoch began, to all ranks together. A step never
    crosses the end of an epoch: the last one has what is left, or, with ``drop_last``, is left out.

    Args:
        num_sequences: of the data.
        per_step: sequences of one step of all ranks.
        seed: of the order.
        drop_last: whether an epoch ends with its last whole step.

    Attributes:
        per_epoch: sequences that an epoch gives.

    Raises:
        ValueError: an epoch has no whole step, but only these are asked for.
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
        """Return how many steps are left from a position until so many epochs are over."""
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
    """What one rank has of a micro-batch.

    Attributes:
        rows: at least one sequence, because all ranks call the model equally often.
        counts: whether they are trained on: not where there are fewer sequences than ranks.
    """

    rows: Rows
    counts: bool = True


def shares(rows: Rows, micro_batch: int, rank: int, num_ranks: int) -> Iterator[Share]:
    """Yield a rank's part of each micro-batch; the last one is divided among ranks as evenly as possible.

    Args:
        rows: of all ranks together.
        micro_batch: most sequences that a rank calls the model with.
        rank: whose part.
        num_ranks: that share every micro-batch.
    """
    for begin in range(0, len(rows), micro_batch * num_ranks):
        of_all = rows[begin : begin + micro_batch * num_ranks]
        count, more = divmod(len(of_all), num_ranks)
        first = rank * count + min(rank, more)
        own = of_all[first : first + count + (rank < more)]
        yield Share(own) if len(own) else Share(of_all[:1], counts=False)
