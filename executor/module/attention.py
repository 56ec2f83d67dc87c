"""Which of PyTorch's kernels computes attention."""

import re
from typing import Any, Final

from executor.callbacks import nodes, tensors_of

_FUSED: Final = re.compile("ScaledDotProduct(.+?)Attention")


def fused_attention(output: Any) -> tuple[str, ...]:
    """Return the fused kernels of attention that a forward has run, such as ``cudnn``, as autograd names them.

    Attention that is not fused, or inside a compiled graph, is in none of them.

    Args:
        output: what the model returned, with gradients.
    """
    behind = nodes(*(tensor.grad_fn for tensor in tensors_of(output)))
    found = {fused[1].lower() for node in behind if (fused := _FUSED.match(node.name()))}
    return tuple(sorted(found))
