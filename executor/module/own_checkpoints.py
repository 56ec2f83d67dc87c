"""Lets ``torch.utils.checkpoint`` inside of a user's model pass through, and where a plan needs it, ``torch.compile``.

A plan decides what is recomputed. Recomputation of the model's own would run modules inside
backward where the plan does not expect them. So while the model is captured, and while its forward or the plan's own
recomputation runs, a call of ``torch.utils.checkpoint`` by the model is a plain call. The plan then knows all
activations, and may recompute them itself. Where a loop calls other methods of the model, checkpoints are as ever.

A function that ``torch.compile`` has compiled sees neither hooks nor where weights are. So while a model is captured,
and in sessions that ask for it, such a function is a plain call too (:func:`uncompiled`).
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils import checkpoint

from executor.callbacks import in_backward

_inside: Final = threading.local()
_OF_PLAN: Final = "checkpoint_of_plan"
_uncompiled: Final = [0]  # sessions, and captures, in which compiled functions pass through


def enter(number: int) -> None:
    """Let checkpoints of this thread pass through once more (1), or once less (-1): calls are nested."""
    _install()
    before = getattr(_inside, "depth", 0)
    _inside.depth = depth = max(before + number, 0)
    if not before and depth and _uncompiled[0]:
        _inside.stance = contextlib.ExitStack()
        _inside.stance.enter_context(_stance("force_eager"))
    elif before and not depth and (stance := vars(_inside).pop("stance", None)) is not None:
        stance.close()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Return a context in which compiled functions pass through where checkpoints do."""
    _uncompiled[0] += 1
    try:
        yield
    finally:
        _uncompiled[0] -= 1


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that the plan itself has compiled run compiled everywhere."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _stance("default") if "stance" in vars(_inside) else contextlib.nullcontext():
            return function(*args, **kwargs)

    return call


def is_compiled() -> bool:
    """Return whether a function that ``torch.compile`` has compiled is running, compiled or not."""
    if (dynamo := _dynamo()) is None:
        return False
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == dynamo.__file__:
            return True
    return False


def _dynamo() -> Any:
    """Return the module whose functions compile others; ``None`` while nobody has compiled anything."""
    return sys.modules.get("torch._dynamo.eval_frame")


def _stance(name: str) -> contextlib.AbstractContextManager[Any]:
    if _dynamo() is None:
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance(name)
    return stance


@contextlib.contextmanager
def passing_through() -> Iterator[None]:
    """Return a context in which checkpoints of this thread pass through."""
    enter(1)
    try:
        yield
    finally:
        enter(-1)


def is_checkpointed() -> bool:
    """Return whether a call of the model that begins now is inside a checkpoint of the loop's, and not in backward."""
    return not (getattr(_inside, "depth", 0) or in_backward()) and saved_tensors_hooks_of() == "checkpoint"


def saved_tensors_hooks_of() -> str:
    """Return whose hooks get what autograd saves now: a "checkpoint"'s, the "loop"'s, or nobody's: empty."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    by_checkpoint = hooks is not None and getattr(hooks[0], "__module__", "") == checkpoint.__name__
    return "" if hooks is None else "checkpoint" if by_checkpoint else "loop"


def of_plan(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose checkpoint is the plan's own, and does not pass through."""
    setattr(function, _OF_PLAN, True)
    return function


@functools.cache
def _install() -> None:
    torchs: Any = checkpoint
    generator, apply = torchs._checkpoint_without_reentrant_generator, torchs.CheckpointFunction.apply

    def passes(function: Any) -> bool:
        return bool(getattr(_inside, "depth", 0)) and not hasattr(function, _OF_PLAN)

    @functools.wraps(generator)
    def generated(function: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return (None for _ in range(1)) if passes(function) else generator(function, *args, **kwargs)

    def applied(function: Any, preserve: bool, *args: Any) -> Any:
        return function(*args) if passes(function) else apply(function, preserve, *args)

    torchs._checkpoint_without_reentrant_generator = generated
    torchs.CheckpointFunction.apply = staticmethod(applied)
