"""Backward in two parts: gradients of inputs, for which another stage waits, and gradients of weights, for later.

[Note: Zero bubble] The gradient of a product's input is needed by the stage before. The gradient of its weight is
needed at the step. So a stage may leave the latter until it would wait otherwise (Qi et al., *Zero Bubble Pipeline
Parallelism*, 2024, whose schedule ZB-H1 this is): in stage ``s``, weights' gradients come ``s`` backwards later, each
after the forward that follows that backward. Until then, the product's input and the gradient of its output are kept.
With ``p - s`` forwards ahead, each stage thus has something of ``p`` micro-batches.

Products of layers with weights of their own are taken apart. All other gradients of such a unit are made in backward,
and wait with them, so that the unit's gradients go where they are used together. What is made later needs no weights.
So a slot is free for the next unit as early as without it.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection

from planner.graph import Gemm, Kernel, Operator, Unit


def apart(units: Collection[Unit], value_bytes: int) -> tuple[Unit, ...]:
    """Return the units with the gradients of weights apart from backward, where they can be.

    Args:
        units: of a stage.
        value_bytes: bytes of a value of an activation, or of a gradient.
    """
    tied = {name for unit in units for name in unit.shared_parameters}
    return tuple(
        _apart(unit, value_bytes) if unit.in_layer and not tied & {*unit.sizes, *unit.shared_parameters} else unit
        for unit in units
    )


def _apart(unit: Unit, value_bytes: int) -> Unit:
    operators, made = [], 0
    for operator, (later, kept) in zip(unit.operators, map(_products, unit.operators), strict=True):
        left = Counter[Kernel](later)
        backward = tuple(kernel for kernel in operator.backward if not _take(left, kernel))
        made += sum(kernel.m * kernel.n * kernel.count for kernel in later)
        operators.append(
            dataclasses.replace(operator, backward=backward, weight_gradients=later, kept_bytes=value_bytes * kept)
        )
    if not made:
        return unit
    waiting_bytes = value_bytes * max(unit.num_params - made, 0)
    operators[0] = dataclasses.replace(operators[0], kept_bytes=operators[0].kept_bytes + waiting_bytes)
    return dataclasses.replace(unit, operators=tuple(operators))


def _products(operator: Operator) -> tuple[tuple[Gemm, ...], int]:
    """Return an operator's products that make gradients of weights, and the values that they need."""
    found, inputs, num_values = list[Gemm](), set[tuple[int, int]](), 0
    left = Counter[Kernel](operator.backward)
    for kernel in operator.forward:
        if not isinstance(kernel, Gemm) or kernel.batched or kernel.grouped or kernel.fp8:
            continue
        sides = {(kernel.n, kernel.k), (kernel.k, kernel.n)}
        made = next((own for own in left if isinstance(own, Gemm) and _makes(own, kernel, sides)), None)
        if made is not None:
            _take(left, made)
            found.append(made)
            num_values += kernel.m * kernel.n * kernel.count
            inputs.add((kernel.m, kernel.k))
    return tuple(reversed(found)), num_values + sum(rows * width for rows, width in inputs)


def _makes(kernel: Gemm, forward: Gemm, sides: Collection[tuple[int, int]]) -> bool:
    """Return whether a product of backward makes the gradient of the weight of one of forward."""
    return (kernel.m, kernel.n) in sides and kernel.k == forward.m and kernel.count == forward.count


def _take(left: Counter[Kernel], kernel: Kernel) -> bool:
    """Take one of equal kernels, if there is one."""
    found = left[kernel] > 0
    if found:
        left[kernel] -= 1
    return found
