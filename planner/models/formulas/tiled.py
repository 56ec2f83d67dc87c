"""Work that is done for a tile of tokens at a time.

See [Note: Tiled logits] and [Note: Tiled layers] in the executor. Here ``tile`` is the number of tokens of one tile. As
in :mod:`planner.models.formulas.work`, ``rows`` is a number of tokens and ``e`` the number of bytes of one value.
"""

import dataclasses
from collections.abc import Callable

from planner.models.formulas import work
from planner.models.formulas.kernel_sets import KERNEL_SETS
from planner.models.kernels import Attention, Elementwise, Kernels, Work, each


def repeated(rows: int, tile: int, kernels: Callable[[int], Kernels]) -> Kernels:
    """Return the kernels of all tiles; ``kernels`` gives those of one, which has so many tokens."""
    num_whole, rest = divmod(rows, tile)
    sizes = ({tile: num_whole} if num_whole else {}) | ({rest: 1} if rest else {})
    return tuple(
        dataclasses.replace(kernel, count=kernel.count * count)
        for size, count in sizes.items()
        for kernel in kernels(size)
        if not isinstance(kernel, Attention)
    )


def num_tiles(rows: int, tile: int) -> int:
    """Return the number of tiles."""
    return -(-rows // tile)


def added(num_values: int, value_bytes: int, count: int) -> Kernels:
    """Return the passes that add the gradient of every tile but the first to the sum; they move so much of a value."""
    return (Elementwise(num_values * value_bytes, count - 1),) if count > 1 else ()


def rms_norm(rows: int, hidden: int, e: int, tile: int) -> Work:
    """Return the RMS norm of ``transformers``, in tiles. Its input is saved, and backward first applies it again.

    Workspace: the gradients of its output and of its input, and what one tile saves and needs.
    """

    def of(size: int) -> Work:
        return work.rms_norm(size, hidden, e, around=False)

    n, inside = rows * hidden, of(tile)
    join = each(n, 2 * e)  # each tile's output, or gradient, is copied to its place
    forward = (*repeated(rows, tile, lambda size: of(size).forward), *join)
    again = (*repeated(rows, tile, lambda size: of(size).forward + of(size).backward), *join)
    return Work(forward, again, n * e, 2 * n * e + inside.saved_bytes + inside.workspace_bytes)


def swiglu_mlp(rows: int, hidden: int, ffn: int, e: int, tile: int, *, bias: bool) -> Work:
    """Return a gated MLP in tiles. Its input is saved, and backward first computes all but the last product again.

    Workspace: the gradient of its input, and the most that one tile needs. That is when the product of the two branches
    gets its gradients: what the activation saves, two gradients of the MLP's width, and the gradient of one weight,
    before it is added to the sum; or at the end, when all three weights have theirs.
    """

    def up(size: int) -> Work:
        one = work.linear(size, hidden, ffn, e, bias=bias)
        return Work((), each(size * hidden, 3 * e)) + one + one  # the sum of the input's two gradients

    def activate(size: int) -> Work:
        return KERNEL_SETS["transformers"].activations["swiglu"].work(size * ffn, e)

    def down(size: int) -> Work:
        return work.linear(size, ffn, hidden, e, bias=bias)

    num_params = 3 * hidden * ffn + (2 * ffn + hidden if bias else 0)
    count = num_tiles(rows, tile)
    join = each(rows * hidden, 2 * e)
    adding = added(num_params, 3 * e, count)
    forward = repeated(rows, tile, lambda size: up(size).forward + activate(size).forward + down(size).forward)
    backward = repeated(
        rows,
        tile,
        lambda size: (
            up(size).forward
            + activate(size).forward
            + down(size).backward
            + activate(size).backward
            + up(size).backward
        ),
    )
    inside, one_bytes = activate(tile), (hidden * ffn * e if count > 1 else 0)
    most_bytes = max(
        inside.saved_bytes + inside.workspace_bytes + one_bytes,
        3 * tile * ffn * e + 2 * one_bytes,
        tile * ffn * e + 3 * one_bytes,
    )
    num_bytes = rows * hidden * e
    return Work((*forward, *join), (*backward, *join, *adding), num_bytes, num_bytes + most_bytes)
