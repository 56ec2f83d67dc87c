"""Copies of prepared models: ordinary modules, without the session's hooks, with the weights of the last step."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from executor.callbacks import as_it_was

_PACKAGE = __name__.partition(".")[0]


def plain_copy(module: nn.Module, memo: dict[int, Any], values: Callable[[nn.Parameter], torch.Tensor]) -> nn.Module:
    """Return a deep copy of a prepared model, or of a part of it.

    Hooks and attributes of the user's are copied, as ``copy.deepcopy`` does.

    Args:
        module: the model or the part.
        memo: what has been copied, by ``id``; see ``copy.deepcopy``.
        values: returns the current values of a parameter.
    """
    made = {inner: object.__new__(type(inner)) for inner in module.modules()}
    for inner, new in made.items():
        memo[id(inner)] = new
        for parameter in inner.parameters(recurse=False):
            if id(parameter) not in memo:
                of_copy = values(parameter).detach().to(parameter.device, copy=True)
                memo[id(parameter)] = nn.Parameter(of_copy, parameter.requires_grad)
    for inner, new in made.items():
        own = as_it_was(inner)
        for name, held in own.items():
            if name.endswith("_hooks"):
                own[name] = type(held)((key, hook) for key, hook in held.items() if not _is_ours(hook))
        vars(new).update(copy.deepcopy(own, memo))
    return made[module]


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that load a state dict
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).partition(".")[0] == _PACKAGE
