"""``model.no_sync()``: the context that loops of ``DistributedDataParallel`` put around micro-batches without a step.

A plan knows how many micro-batches an iteration has, so nothing depends on the context: a loop without it trains alike.
A loop that has it says which micro-batch it takes for the last one, and is told if the plan has another.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

from torch import nn

from planner.loop import OutOfOrderError


@final
class Accumulation:
    """Compares what a user's loop says of its micro-batches with the plan's.

    Args:
        num_micro_batches: forward and backward passes of an iteration.
    """

    def __init__(self, num_micro_batches: int) -> None:
        self._count = num_micro_batches
        self._inside = False
        self._was_inside = False  # in this iteration

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Be inside, for micro-batches that others follow before the step; may be nested, or around several of them."""
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer

    def bind(self, model: nn.Module) -> Callable[[], None]:
        """Give a model ``no_sync``, where loops look for it; return what undoes it."""
        model.no_sync = self.no_sync  # type: ignore[assignment]  # a function, not a module

        def undo() -> None:
            del model.no_sync

        return undo

    def begin_forward(self, micro_batch: int) -> None:
        """Take it that the forward of a micro-batch begins. Raises as :meth:`begin_backward`."""
        if micro_batch == 0:
            self._was_inside = False
        if self._inside:
            self._check_inside(micro_batch)

    def begin_backward(self, micro_batch: int) -> None:
        """Take it that the backward of a micro-batch begins.

        Raises:
            OutOfOrderError: it is the last and inside, or outside and not the last one though others were inside.
        """
        if self._inside:
            self._check_inside(micro_batch)
            self._was_inside = True
        elif self._was_inside and micro_batch < self._count - 1:
            raise OutOfOrderError(
                f"backward left no_sync() with micro-batch {micro_batch + 1}, but the plan has {self._count} for every "
                f"step; put the first {self._count - 1} inside, or plan with --accumulate {micro_batch + 1}"
            )

    def check_step(self) -> None:
        """Check that a step may come here.

        Raises:
            OutOfOrderError: it is inside.
        """
        if self._inside:
            raise OutOfOrderError(
                "optimizer.step() came inside no_sync(), which is for micro-batches without a step; leave it for the "
                "last micro-batch, and step after that"
            )

    def _check_inside(self, micro_batch: int) -> None:
        if micro_batch == self._count - 1:
            raise OutOfOrderError(
                f"no_sync() holds micro-batch {micro_batch + 1}, but the plan has {self._count} for every step, and "
                f"the last belongs outside; leave no_sync() for it, or plan with --accumulate {micro_batch + 2} or more"
            )
