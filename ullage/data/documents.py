"""Test whether a model keeps the documents of a packed sequence apart."""

import inspect
import warnings
import weakref
from typing import Any, Final

import torch
from torch import nn

_CHECKED: Final = weakref.WeakSet[nn.Module]()
_ROUNDING: Final = 4  # units of rounding: products of other tokens may be summed in another order


def inner(model: Any) -> Any:
    """Return the model of ``transformers`` inside a model of ``peft``."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def takes_positions(model: nn.Module) -> bool:
    """Return whether a model takes ``position_ids``, which mark the beginnings of documents."""
    return "position_ids" in inspect.signature(type(inner(model)).forward).parameters


def check_documents(model: nn.Module) -> None:
    """Warn, once per model, if tokens of a packed sequence attend to earlier documents.

    The test evaluates two documents of two tokens, then again with another first document. All ranks call it together.
    """
    if model in _CHECKED:
        return
    _CHECKED.add(model)
    if not takes_positions(model) or not _separates_sequences(model):
        warnings.warn(
            f"{type(inner(model)).__name__} does not keep the documents of a packed sequence apart: tokens attend to "
            "earlier documents; if that matters, leave --pack out (pack=False)",
            RuntimeWarning,
            stacklevel=4,
        )


def _separates_sequences(model: nn.Module) -> bool:
    device, was_training = next(model.parameters()).device, model.training
    positions = torch.tensor([[0, 1, 0, 1]], device=device)
    model.eval()
    try:
        with torch.no_grad():
            seen = [
                model(
                    input_ids=torch.tensor([[*first, 0, 1]], device=device),
                    position_ids=positions,
                    **without_cache(model),
                ).logits[0, 2:]
                for first in ((0, 1), (2, 3))
            ]
    finally:
        model.train(was_training)
    most = _ROUNDING * torch.finfo(seen[0].dtype).eps * float(seen[0].abs().max())
    return float((seen[0] - seen[1]).abs().max()) <= most


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Return the argument that disables a model's key/value cache, which takes memory and hides document boundaries."""
    return {"use_cache": False} if hasattr(getattr(inner(model), "config", None), "use_cache") else {}
