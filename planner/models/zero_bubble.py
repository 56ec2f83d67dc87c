"""Backward in two parts: gradients of inputs, for which another stage waits, and gradients of weights, for later.

[Note: Zero bubble] The gradient of a product's input is needed by the stage before. The gradient of its weight is
needed at the step. So a stage may leave the latter until it would wait otherwise (Qi et al., *Zero Bubble Pipeline
Parallelism*, 2024, whose schedule ZB-H1 this is): in stage ``s``, weights' gradients come ``s`` backwards later, each
after the forward that follows that backward. Until then, the product's input and the gradient of its output are kept.
With ``p - s`` forwards ahead, each stage thus has something of ``p`` micro-batches.

Products of layers with weights of their own are taken apart. All other gradients of such a unit are made in backward,
and wait with them, so that the unit's gradients go where they are used together. If those were more than half of them,
as of experts, the unit is left as it is. What is made later needs no weights. So a slot is free for the next unit as
early as without it.
"""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from planner.models.kernels import Gemm, Kernel
from planner.models.operators import Operator


def apart(operators: Collection[Operator], value_bytes: int) -> Iterator[Operator]:
    """Yield operators with the gradients of weights apart from backward, where they can be.

    Args:
        operators: of a model.
        value_bytes: bytes of a value of an activation, or of a gradient.
    """
    tied = {name for operator in operators for name in operator.shared_parameters}
    whole = {operator.unit for operator in operators if tied & {*operator.parameter_names}}
    products = [_products(o) if o.unit != o.segment and o.unit not in whole else ((), 0) for o in operators]
    waiting = Counter[str]()  # by unit, the values of gradients that wait as products, less those that wait made
    for operator, (later, _) in zip(operators, products, strict=True):
        waiting[operator.unit] += 2 * _num_made(later) - _num_trained(operator)
    split = {unit for unit, count in waiting.items() if count >= 0}
    split &= {operator.unit for operator, (later, _) in zip(operators, products, strict=True) if later}
    for operator, (later, num_values) in zip(operators, products, strict=True):
        yield _apart(operator, later, num_values, value_bytes) if operator.unit in split else operator


def _apart(operator: Operator, later: tuple[Gemm, ...], num_values: int, value_bytes: int) -> Operator:
    left = Counter[Kernel](later)
    backward = tuple(kernel for kernel in operator.backward if not _take(left, kernel))
    kept_bytes = value_bytes * (num_values + max(_num_trained(operator) - _num_made(later), 0))
    return dataclasses.replace(operator, backward=backward, weight_gradients=later, kept_bytes=kept_bytes)


def _num_made(products: Iterable[Gemm]) -> int:
    return sum(kernel.m * kernel.n * kernel.count for kernel in products)


def _num_trained(operator: Operator) -> int:
    return sum(spec.num_params for spec in operator.parameters if spec.is_trained)


def _products(operator: Operator) -> tuple[tuple[Gemm, ...], int]:
    """Return an operator's products that make gradients of weights, and the values that they need."""
    found, inputs, num_values = list[Gemm](), set[tuple[int, int]](), 0
    left = Counter[Kernel](operator.backward)
    trains = operator.kind != "experts" and any(spec.is_trained for spec in operator.parameters)
    for kernel in operator.forward if trains else ():  # an input's gradient may have the shape of a weight's
        if not isinstance(kernel, Gemm) or kernel.batched or kernel.grouped or kernel.fp8:
            continue
        sides = {(kernel.n, kernel.k), (kernel.k, kernel.n)}
        made = next((own for own in +left if isinstance(own, Gemm) and _makes(own, kernel, sides)), None)
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
