"""Detects batches of other shapes than planned. They train too, but their compute tasks take less or more time.

Only forward, backward and activations depend on the shape of a batch. The result is the same as without a plan. Saved
activations are offloaded as far as they fit into the memory that the plan has for them; the rest is recomputed
(:mod:`executor.memory.activations`). So a smaller batch takes less time and memory, and a larger one takes more device
memory. The times of such an iteration are not compared with the prediction.
"""

import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

BatchShapes = tuple[tuple[str, tuple[int, ...]], ...]
"""For each tensor that a model is called with, in order: its name, as in :func:`tensors_in`, and its planned shape."""

_DEEPEST: Final = 5
_LEAVES: Final = (str, bytes, int, float, type, type(None), nn.Module, types.ModuleType, types.FunctionType)


def tensors_in(value: object, path: str = "", depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in containers and objects (such as dataclasses), each with the path to it, as in ``cond.0``."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif depth < _DEEPEST and not isinstance(value, _LEAVES):
        items: Any = vars(value).items() if hasattr(value, "__dict__") else ()
        if isinstance(value, Mapping):
            items = value.items()
        elif isinstance(value, Sequence):
            items = enumerate(value)
        for key, held in tuple(items):
            yield from tensors_in(held, f"{path}.{key}" if path else str(key), depth + 1)


def named_inputs(args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call as :func:`tensors_in` does; the first positional ones have no name."""
    num_plain = next((number for number, value in enumerate(args) if not isinstance(value, torch.Tensor)), len(args))
    yield from (("", value) for value in args[:num_plain] if isinstance(value, torch.Tensor))
    for number, value in enumerate(args[num_plain:], num_plain):
        yield from tensors_in(value, str(number))
    yield from tensors_in(kwargs)


def bind_batches(
    model: nn.Module, planned: BatchShapes, begins: Callable[[], bool], on_other: Callable[[torch.Size], None]
) -> Callable[[], None]:
    """Report batches of other shapes, and warn once of a larger one; return a function that removes the hook.

    Args:
        model: the bound model, or the part of it that a planned step calls first.
        planned: planned inputs.
        begins: returns whether a forward that begins now is the first one of the plan's in a micro-batch.
        on_other: called with the shape before the forward of a batch of another one; see the module.
    """
    has_warned = False

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        nonlocal has_warned
        if not begins():
            return
        given_by = dict(tensors_in(tuple(args))) | dict(tensors_in(kwargs))
        for position, (name, shape) in enumerate(planned):
            given = given_by.get(name, given_by.get(str(position)))
            if given is None or given.shape == shape:
                continue
            on_other(given.shape)
            if given.numel() > math.prod(shape) and not has_warned:
                has_warned = True
                warnings.warn(
                    f"{name or f'input {position + 1}'} is {_words(given.shape)}, but the plan is for {_words(shape)}; "
                    "training goes on, but may take more memory and time than planned: give smaller batches, or plan "
                    "for the largest",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return

    return model.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove


def _words(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
