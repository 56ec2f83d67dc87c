"""Which of PyTorch's kernels computes attention."""

import re
from typing import Any, Final

from executor.callbacks import tensors_of

_FUSED: Final = re.compile("ScaledDotProduct(.+?)Attention")


def fused_attention(output: Any) -> tuple[str, ...]:
    """Return the fused kernels of attention that a forward has run, such as ``cudnn``, as autograd names them.

    Attention that is not fused, or inside a compiled graph, is in none of them.

    Args:
        output: what the model returned, with gradients.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_of(output)]
    seen: set[Any] = {None}
    found = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += [behind for behind, _ in node.next_functions]
            if fused := _FUSED.match(node.name()):
                found.add(fused[1].lower())
    return tuple(sorted(found))
