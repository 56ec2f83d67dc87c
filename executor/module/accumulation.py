"""``model.no_sync()``: the context in which ``DistributedDataParallel`` loops run all micro-batches but the last.

The plan fixes the number of micro-batches of an iteration, so a loop trains the same without this context. If a loop
uses it, the context shows which micro-batch is the last one. If the plan has another number, that is an error.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import final

from torch import nn

from executor.callbacks import replace_attribute
from planner.schedule.loop import OutOfOrderError


@final
class Accumulation:
    """Compares a loop's use of ``no_sync()`` with the plan's number of micro-batches."""

    def __init__(self, num_micro_batches: int) -> None:
        self._count = num_micro_batches
        self._inside = False
        self._was_inside = False  # whether a backward of this iteration was inside no_sync()
        self._last_was_inside = False
        self._ended_at = 0  # number of micro-batches if the loop left no_sync() before the plan's last one

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for all micro-batches but the last before a step.

        It may be nested, and hold several of them.
        """
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer

    def bind(self, model: nn.Module) -> Callable[[], None]:
        """Add ``no_sync`` to a model; return a function that removes it."""
        return replace_attribute(model, "no_sync", self.no_sync)

    def begin_forward(self, micro_batch: int) -> None:
        """The forward of a micro-batch begins.

        Raises:
            OutOfOrderError: the plan's last micro-batch is inside no_sync(), or the loop left no_sync() for an earlier
                one.
        """
        if micro_batch == 0:
            self._was_inside, self._ended_at = False, 0
        if self._ended_at:
            raise OutOfOrderError(
                f"micro-batch {self._ended_at} ran backward outside no_sync(), and another forward came before "
                f"optimizer.step(), but the plan has {self._count} for every step; put the first {self._count - 1} "
                f"inside no_sync(), or plan with --accumulate {self._ended_at}"
            )
        if self._inside:
            self._check_inside(micro_batch)

    def begin_backward(self, micro_batch: int) -> None:
        """The backward of a micro-batch begins.

        Raises:
            OutOfOrderError: the plan's last micro-batch is inside no_sync().
        """
        self._last_was_inside = self._inside
        if self._inside:
            self._check_inside(micro_batch)
            self._was_inside = True
        elif self._was_inside and micro_batch < self._count - 1:
            self._ended_at = micro_batch + 1  # a short group, if a step follows

    def leave(self) -> None:
        """Forget this iteration's micro-batches, because they no longer follow the plan."""
        self._was_inside = self._last_was_inside = False
        self._ended_at = 0

    def check_step(self) -> None:
        """Check that ``optimizer.step()`` is allowed now.

        Raises:
            OutOfOrderError: the step or the last micro-batch is inside no_sync().
        """
        if self._inside or self._last_was_inside:
            where = "inside no_sync()" if self._inside else "right after a micro-batch inside no_sync()"
            raise OutOfOrderError(
                f"optimizer.step() (or clipping) came {where}, but no_sync() is for all micro-batches of a step "
                "except the last; leave it for the last micro-batch, and step after that"
            )

    def _check_inside(self, micro_batch: int) -> None:
        if micro_batch == self._count - 1:
            raise OutOfOrderError(
                f"micro-batch {micro_batch + 1} is inside no_sync(), but it is the last of the {self._count} that the "
                f"plan has for every step; leave no_sync() before it, or plan with --accumulate {micro_batch + 2} or "
                "more"
            )
