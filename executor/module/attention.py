"""Which of PyTorch's kernels computes attention."""

import re
from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves

_FUSED: Final = re.compile("ScaledDotProduct(.+?)Attention")


def fused_attention(output: Any) -> tuple[str, ...]:
    """Return the fused kernels of attention that a forward has run, such as ``cudnn``, as autograd names them.

    Attention that is not fused, or inside a compiled graph, is in none of them.

    Args:
        output: what the model returned, with gradients.
    """
    waiting: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
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
