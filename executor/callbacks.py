"""Hooks on a model's modules: callbacks on their boundaries, and attributes that replace their own."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn


class HeadCallbacks(Protocol):
    """What a head calls whose logits are in tiles; see [Note: Tiled logits] in :mod:`executor.module.tiled_logits`."""

    def on_logits(self, unit: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Return a function that makes a context with the head's present weights, to compute logits.

        It raises OutOfOrderError if they are gone by then.
        """

    def on_backward(self, unit: str) -> None:
        """Backward has reached a unit."""


class ModuleCallbacks(HeadCallbacks, Protocol):
    """What hooks on a model call; see [Note: Module boundaries] in :mod:`executor.module.binding`."""

    def on_forward(self, unit: str) -> None:
        """Forward, or recomputation, has reached a unit."""

    def on_recomputed(self, unit: str) -> None:
        """Recomputation of the segment that ends with this unit has ended."""

    def on_model_begin(self) -> None:
        """The model's own forward begins."""

    def on_model_end(self) -> None:
        """The model's own forward has ended, or failed."""

    def on_loss(self) -> None:
        """Backward has reached a loss that the model's own forward has returned."""

    @property
    def unit(self) -> str:
        """The unit that computes now; empty if none does."""

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is one of the plan's."""


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def hook_target(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose gradient hook fires when backward reaches what made ``tensor``: itself, or its base.

    Autograd forgets the hooks of a view that is changed in place (by ``nn.ReLU(inplace=True)`` behind an ``nn.Linear``
    of three dimensions, say), but not those of its base. Making a view reads no weights, so the base serves as well.
    """
    base = tensor._base
    return tensor if base is None or base.grad_fn is None else base


def replace_attribute(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute of a module by a value of its own; return a function that undoes it."""
    own = vars(module)
    was_there, before = name in own, own.get(name)
    own[name] = value

    def undo() -> None:
        if was_there:
            own[name] = before
        else:
            own.pop(name, None)

    return undo
