"""Workspace: memory that exists only inside one unit's backward.

A schedule's grain is the unit: saved activations count until the end of its backward, and its
gradients from the beginning. Inside the unit, operators run in reverse; each releases its saved tensors and makes its
gradients. The logits' conversions to fp32, for example, are gone before the head's weight has a gradient, and they were
up to a tenth of a small model's memory. So workspace is the most that an operator needs *beyond* the memory that counts
for the unit anyway.
"""

import functools
import itertools
from collections.abc import Mapping

from planner.graph import Unit


def backward_workspace_bytes(
    unit: Unit, num_params: Mapping[str, int], fresh: Mapping[str, float], weight_bytes: int, *, piled: bool = False
) -> int:
    """Return the most bytes that a unit's backward holds beyond its saved activations and its new gradients.

    Args:
        unit: the unit.
        num_params: the size of each parameter, by name.
        fresh: for each parameter whose gradient it makes, the share that is new; the rest is added to an existing
            gradient.
        weight_bytes: bytes of one value of a gradient.
        piled: whether gradients are copied into one block for the reduction over ranks; the first gradient allocates
            it.
    """
    if unit.operators[0].measured:
        return unit.workspace_bytes
    # The gradient of the residual around the unit waits for the gradient through the unit.
    around_bytes = unit.activation_output_bytes if unit.recompute else 0
    names = unit.gradient_names
    sizes, shares = tuple(map(num_params.get, names, itertools.repeat(0))), tuple(map(fresh.get, names))
    return around_bytes + _most_bytes(unit.steps, sizes, shares, -around_bytes, weight_bytes, piled)


def least_workspace_bytes(unit: Unit, weight_bytes: int) -> int:
    """Return a lower bound of :func:`backward_workspace_bytes` over all values of ``fresh``."""
    return backward_workspace_bytes(unit, unit.sizes, dict.fromkeys(unit.sizes, 1.0), weight_bytes)


@functools.lru_cache(4096)  # equal layers have equal steps, in every schedule of a search
def _most_bytes(
    steps: tuple[tuple[int, int, bool, int], ...],
    num_params: tuple[int, ...],
    shares: tuple[float | None, ...],
    least_bytes: int,
    weight_bytes: int,
    piled: bool,
) -> int:
    made = zip(num_params, shares, strict=True)  # of all operators, one after another
    gradients = [
        [(weight_bytes * count, share) for count, share in itertools.islice(made, num_gradients) if share is not None]
        for *_, num_gradients in steps
    ]
    fresh_bytes = [sum(int(num_bytes * share) for num_bytes, share in sizes) for sizes in gradients]
    most_bytes, gone_bytes, coming_bytes, begun = least_bytes, 0, sum(fresh_bytes), False
    for (saved_bytes, inside_bytes, experts, _), sizes, made_bytes in zip(
        reversed(steps), reversed(gradients), reversed(fresh_bytes), strict=True
    ):
        coming_bytes -= 0 if begun else made_bytes
        added_bytes = max((int(num_bytes * (1 - share)) for num_bytes, share in sizes), default=0)
        if experts:  # the most memory is between its two products, when only the second has a gradient
            first_bytes, share = sizes[0] if sizes else (0, 0.0)
            needed_bytes = max(inside_bytes - int(first_bytes * share), added_bytes)
        else:
            needed_bytes = inside_bytes + added_bytes
        if piled and made_bytes:  # it exists beside the block, which the first gradient allocates
            own_bytes = max(num_bytes for num_bytes, _ in sizes)
            needed_bytes = max(needed_bytes - coming_bytes, own_bytes + (inside_bytes if begun else 0))
            coming_bytes, begun = 0, True
        most_bytes = max(most_bytes, needed_bytes - gone_bytes - coming_bytes)
        gone_bytes += saved_bytes
    return most_bytes
