"""Who wants to know where the model is."""

from typing import Protocol

import torch


class Marks(Protocol):
    """Who wants to know where the model is; see [Note: Marks] in :mod:`executor.binding`."""

    def at_forward(self, unit: str) -> None:
        """Forward, or recomputation, has come to a unit."""
        ...

    def at_backward(self, unit: str) -> None:
        """Backward has come to a unit."""
        ...

    def recomputed(self, unit: str) -> None:
        """Recomputation of the segment that ends with this unit has ended."""
        ...

    @property
    def unit(self) -> str:
        """The unit that computes now; empty if none does."""
        ...

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is one that the plan has."""
        ...


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
