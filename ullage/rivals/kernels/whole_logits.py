"""The head and the loss beside layers with other kernels.

A trainer that compiles layers, or takes Liger's, may leave both to ``transformers``: all logits, cast to fp32, and one
kernel for each operation. Liger's own ``cross_entropy`` of whole logits replaces the loss alone: one kernel reads the
fp32 logits twice and writes their gradient in their place (``liger_kernel/ops/cross_entropy.py``).
"""

from collections.abc import Sequence

from planner.models.kernels import Gemm, Work, each
from planner.models.operators import Operator


def with_head_of(plain: Sequence[Operator], operators: Sequence[Operator], vocab: int) -> tuple[Operator, ...]:
    """Return a model's operators with the head and the loss of ``plain``, the same model's of ``transformers``.

    Args:
        plain: one for each operator.
        operators: with other kernels.
        vocab: logits of a token.
    """
    head, _ = _head(plain, vocab)
    return (*operators[:head], *plain[head : head + 2], *operators[head + 2 :])


def with_loss_in_place(operators: Sequence[Operator], vocab: int, e: int) -> tuple[Operator, ...]:
    """Return a model's operators, whose head makes whole logits of ``e`` bytes, with Liger's loss."""
    head, rows = _head(operators, vocab)
    n = rows * vocab
    loss = Work(each(n, e + 4, 12), each(n, 4 + e), 4 * n, e * n)
    return (*operators[: head + 1], operators[head + 1].doing(loss), *operators[head + 2 :])


def _head(operators: Sequence[Operator], vocab: int) -> tuple[int, int]:
    """Return the position of the head, and the rows of logits that it makes."""
    return max(
        (index, kernel.m)
        for index, operator in enumerate(operators)
        for kernel in operator.forward
        if isinstance(kernel, Gemm) and kernel.n == vocab
    )
