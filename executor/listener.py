"""Who wants to know where the model is."""

from typing import Protocol

import torch


class Marks(Protocol):
    """Who wants to know where the model is; see [Note: Marks] in :mod:`executor.module.binding`."""

    def at_forward(self, unit: str) -> None:
        """Forward, or recomputation, has come to a unit."""
        ...

    def at_backward(self, unit: str) -> None:
        """Backward has come to a unit."""
        ...

    def recomputed(self, unit: str) -> None:
        """Recomputation of the segment that ends with this unit has ended."""
        ...

    def model_begins(self) -> None:
        """The model's own forward begins."""
        ...

    def model_ends(self) -> None:
        """The model's own forward has ended, or failed."""
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


def made_by_computing(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or what it is a view of: where a hook sees backward come to what made it.

    Views are made by no weights. Autograd forgets the hooks of a view that is changed in place (by
    ``nn.ReLU(inplace=True)`` behind an ``nn.Linear`` of three dimensions, say), but not those of its base.
    """
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base
