"""Warns of batches that are larger than planned: they train as well, but take more memory."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""For each tensor that a model is called with, in order: its keyword, if any, and its planned shape."""


def bind_batches(model: nn.Module, planned: BatchShapes, trains: Callable[[], bool]) -> Callable[[], None]:
    """Warn once, at the first batch that is larger than planned; return what undoes it.

    Args:
        model: the bound model.
        planned: planned inputs.
        trains: returns whether a forward that begins now is one of the plan's.
    """

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not trains():
            return
        for position, (name, shape) in enumerate(planned):
            given = kwargs.get(name, args[position] if position < len(args) else None)
            if isinstance(given, torch.Tensor) and given.numel() > math.prod(shape):
                handle.remove()
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
