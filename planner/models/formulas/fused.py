"""Kernels of engines that write a layer themselves: one kernel where ``transformers`` has several.

Counted in als244/dataflow (``docs/models/llama3/llama3_8b_16x4K.md``, tasks ``block_fwd``, ``block_bwd`` and
``head_loss``). The outputs of norms and of SwiGLU are not saved: backward makes them again. Residual sums, sums of
gradients and their accumulation are part of the products (``addmm``). Arguments are those of
:mod:`planner.models.formulas.work`.
"""

from planner.models.kernels import Work, each

# The head's product and the loss take so many tokens at a time, forward and backward, so logits are never whole.
LOSS_TOKENS = 4096


def rms_norm(rows: int, width: int, e: int) -> Work:
    """Return an RMS norm. Saved: its input, and one factor per row. Backward first applies it again."""
    n = rows * width
    return Work(each(n, 2 * e), each(n, 2 * e, 4 * e), n * e + 4 * rows, 2 * n * e)


def rotary(elements: int, e: int) -> Work:
    """Return the rotation of ``elements`` values in place."""
    return Work(each(elements, 2 * e), each(elements, 2 * e))


def swiglu(elements: int, e: int) -> Work:
    """Return SwiGLU on ``elements`` values of its width. Saved: its two inputs. Backward first applies it again."""
    return Work(each(elements, 3 * e), each(elements, 3 * e, 5 * e), 2 * elements * e, elements * e)


def loss(rows: int, vocab: int, e: int) -> Work:
    """Return cross-entropy, which replaces the logits by their gradient; ``LOSS_TOKENS`` of them exist at a time."""
    return Work(each(rows * vocab, 3 * e), (), 0, min(rows, LOSS_TOKENS) * vocab * e)
