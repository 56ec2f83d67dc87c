"""What a prepared model refuses, because it would go wrong later, or without a word."""

import weakref
from collections.abc import Callable
from typing import Any, Final

from torch import nn

_ANOTHER: Final = "for another model of the same weights, make one and load_state_dict(model.state_dict())"

_prepared: Final = weakref.WeakSet[nn.Module]()
"""All modules of all models whose sessions are open."""


def check_unprepared(model: nn.Module) -> None:
    """Check that no other session has a model, or a part of it.

    Raises:
        ValueError: one has, whose hooks would answer to both.
    """
    if any(module in _prepared for module in model.modules()):
        raise ValueError(
            "the model is prepared already, and one session only can have it; close the first one (session.close() of "
            "the optimizer that prepare() returned), or make the model again"
        )


def bind_guards(model: nn.Module) -> list[Callable[[], None]]:
    """Make a model, and all modules of it, refuse to be copied and to be prepared again; return what undoes it."""
    undo = []
    for module in model.modules():
        undo += [_shadow(module, "__deepcopy__", _refuse_copy), _shadow(module, "__reduce_ex__", _refuse_pickle)]
        _prepared.add(module)
        undo.append(lambda module=module: _prepared.discard(module))
    return undo


def _refuse_copy(_memo: object) -> None:
    raise TypeError(
        "a prepared model cannot be copied: its weights are in the memory of its session, which the copy would share "
        f"and has no part in; {_ANOTHER}"
    )


def _refuse_pickle(_protocol: object) -> None:
    raise TypeError(
        f"a prepared model cannot be pickled or copied: its session is part of it; save model.state_dict(); {_ANOTHER}"
    )


def _shadow(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Give a module an attribute of its own, over that of its class; return what undoes it."""
    own = vars(module)
    there, before = name in own, own.get(name)
    own[name] = value

    def undo() -> None:
        if there:
            own[name] = before
        else:
            own.pop(name, None)

    return undo
