"""Liger's kernels with the cross-entropy of whole logits in place of its fused head.

Its ``cross_entropy`` replaces that of ``transformers``, which has cast the logits to fp32: one kernel reads them twice
and writes their gradient in their place (``liger_kernel/ops/cross_entropy.py``). The head is that of ``transformers``.
"""

from collections.abc import Sequence

from planner.models.kernels import Gemm, Work, each
from planner.models.operators import Operator


def with_whole_logits(
    operators: Sequence[Operator], plain: Sequence[Operator], vocab: int, e: int
) -> tuple[Operator, ...]:
    """Return a model's operators with the head of ``plain``, the same model's of ``transformers``, and Liger's loss.

    Args:
        operators: with Liger's kernels.
        plain: one for each of them.
        vocab: logits of a token.
        e: bytes of a value.
    """
    head, rows = max(
        (index, kernel.m)
        for index, operator in enumerate(plain)
        for kernel in operator.forward
        if isinstance(kernel, Gemm) and kernel.n == vocab
    )
    n = rows * vocab
    loss = Work(each(n, e + 4, 12), each(n, 4 + e), 4 * n, e * n)
    return (*operators[:head], plain[head], operators[head + 1].doing(loss), *operators[head + 2 :])
