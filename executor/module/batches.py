"""Detects batches of other shapes than planned. They train too, but their compute tasks take less or more time.

[Note: Other shapes] Only forward, backward and activations depend on the shape of a batch. The result is the same as
without a plan. Saved activations are offloaded as far as they fit into the memory that the plan has for them; the rest
is recomputed ([Note: Room] in :mod:`executor.memory.activations`). So a smaller batch takes less time and memory, and a
larger one takes more device memory. The times of such an iteration are not compared with the prediction.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""For each tensor that a model is called with, in order: its keyword, if any, and its planned shape."""


def bind_batches(
    model: nn.Module, planned: BatchShapes, trains: Callable[[], bool], on_other: Callable[[torch.Size], None]
) -> Callable[[], None]:
    """Report batches of other shapes, and warn once of a larger one; return a function that removes the hook.

    Args:
        model: the bound model.
        planned: planned inputs.
        trains: returns whether a forward that begins now is one of the plan's.
        on_other: called with the shape before the forward of a batch of another one; see [Note: Other shapes].
    """
    has_warned = False

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        nonlocal has_warned
        if not trains():
            return
        for position, (name, shape) in enumerate(planned):
            given = kwargs.get(name, args[position] if position < len(args) else None)
            if not isinstance(given, torch.Tensor) or given.shape == shape:
                continue
            on_other(given.shape)
            if given.numel() > math.prod(shape) and not has_warned:
                has_warned = True
                warnings.warn(
                    f"{name or f'input {position + 1}'} is {_words(given.shape)}, but the plan is for {_words(shape)}; "
                    "training goes on, but may take more memory and time than planned: give smaller batches, or plan "
                    "for these (--micro-batch and --seq-len, or --input-shape)",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    return handle.remove


def _words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
