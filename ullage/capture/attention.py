"""Attention in one kernel, for architectures of ``transformers`` that compute it step by step unless told otherwise.

Some architectures have attention that PyTorch's own kernel cannot compute (a sink beside the
keys, capped scores), so ``transformers`` makes all scores unless ``attn_implementation`` names a kernel that can.
Nobody trains long sequences so. A plan for a GPU that is made from a name therefore assumes the first such kernel that
the architecture lists, says so, and is executed with it. The capture has a stand-in of the same work: one attention,
over the keys of the window where there is one.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from ullage.capture.records import CaptureError, first_line

_STAND_IN: Final = "ullage-fused"


def assumed_attention(model: nn.Module) -> str | None:
    """Return the ``attn_implementation`` to assume on a GPU; ``None`` if the model's own will do."""
    config = getattr(model, "config", None)
    in_steps = getattr(config, "_attn_implementation", None) == "eager" and not getattr(model, "_supports_sdpa", True)
    if not (in_steps and getattr(model, "_supports_flash_attn", False)):
        return None
    return next(iter(getattr(model, "_compatible_flash_implementations", None) or ()), None)


@contextlib.contextmanager
def fused_attention(model: Any) -> Iterator[None]:
    """Let a model compute attention by the stand-in."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: PLC0415 - slow, as what follows
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    own = [(each, each._attn_implementation) for each in configs if hasattr(each, "_attn_implementation")]
    ALL_ATTENTION_FUNCTIONS[_STAND_IN] = _attend
    ALL_MASK_ATTENTION_FUNCTIONS[_STAND_IN] = lambda *_args, **_named: None  # these kernels take lengths
    try:
        for config, _ in own:
            config._attn_implementation = _STAND_IN
        yield
    finally:
        for config, name in own:
            config._attn_implementation = name
        del ALL_ATTENTION_FUNCTIONS[_STAND_IN], ALL_MASK_ATTENTION_FUNCTIONS[_STAND_IN]


def attention_in_words(attention: str) -> str:
    """Return the assumption, as a sentence for the user."""
    return (
        f"attention is assumed to be one kernel, attn_implementation={attention!r}, with which execute runs it; to "
        "plan scores that are made whole, name a function that returns the model: --model package.module:function"
    )


def use_attention(model: Any, attention: str) -> None:
    """Let a model compute attention as its plan assumes.

    Raises:
        CaptureError: this machine has no such kernel.
    """
    try:
        model.set_attn_implementation(attention)
    except (ImportError, OSError, ValueError) as error:
        raise CaptureError(
            f"the plan assumes attn_implementation={attention!r}, which is not here ({first_line(error)}); install it "
            "(pip install kernels, for kernels of the hub), or plan a function that returns the model with another one"
        ) from error


def _attend(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attend, ``[batch, heads, tokens, width]`` each, to as many keys as the kernel does. Values do not count."""
    if s_aux is not None:
        query = query + s_aux.to(query.dtype).view(1, -1, 1, 1)  # its gradient is a sum over tokens
    batch, heads, tokens, width = query.shape
    windows = tokens // sliding_window if sliding_window and tokens % sliding_window == 0 else 1
    if windows > 1:
        of_window = batch, -1, windows, tokens // windows, width
        query, key, value = (each.reshape(of_window).transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=windows == 1, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    if windows > 1:
        out = out.reshape(batch, windows, heads, -1, width).transpose(1, 2)
    return out.reshape(batch, heads, tokens, width).transpose(1, 2), None
