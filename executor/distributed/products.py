"""Matrix products that torch has no operator for, as custom operators.

Offloading saves the output of each operator that is a matrix product ([Note: Saved products] in
:mod:`executor.memory.recompute_cache`). A row-parallel product is one custom operator, so that only the all-reduced sum
is saved and backward needs no second all-reduce. The products of all experts are one operator, so that their outputs
are saved as one block.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from executor.callbacks import Saved

NUMBERED: Final = weakref.WeakValueDictionary[int, Any]()
"""What custom operators find by a number from :func:`number_of`: they take only numbers and tensors."""


def number_of(what: object) -> int:
    """Return a number by which custom operators find something in :data:`NUMBERED` while it exists."""
    NUMBERED[id(what)] = what
    return id(what)


Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""Returns the product of two matrices, the gradient of a weight; ``None``: it is made later."""


def summed_product(
    values: torch.Tensor,
    matrix: torch.Tensor,
    bias: torch.Tensor | None,
    group: int | None = None,
    multiply: Multiply | None = None,
) -> torch.Tensor:
    """Return ``values @ matrix``, all-reduced over a group, plus the bias: ``[..., outputs]``.

    Recomputation stops at the last tensor that backward needs. Autograd's own products save their factors before they
    run, but an ``autograd.Function`` saves tensors after its forward. So the last product of a layer, with its
    all-reduce, would be recomputed, although backward does not need its output. Therefore an earlier function saves the
    factors.

    Args:
        values: this rank's shard, ``[..., inputs]``.
        matrix: ``[inputs, outputs]``, with any strides.
        bias: ``[outputs]``, the same on all ranks.
        group: the group's :func:`number_of`; ``None``: ``values`` are whole.
        multiply: makes the gradient of the weight, whose shape its product has.

    Raises:
        RankError: a rank has failed.
    """
    factors = Saved.apply(values, matrix)  # type: ignore[no-untyped-call]
    result: torch.Tensor = _SummedProduct.apply(*factors, bias, group, multiply)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op("ullage::summed_product", mutates_args=())
def summed_product_operator(
    values: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, group: int
) -> torch.Tensor:
    """Compute :func:`summed_product`."""
    result = functional.linear(values, matrix.t())
    NUMBERED[group].all_reduce(result)
    if bias is not None:
        result += bias
    return result


class _SummedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        matrix: torch.Tensor,
        bias: torch.Tensor | None,
        group: int | None,
        multiply: Multiply | None,
    ) -> torch.Tensor:
        ctx.factors, ctx.multiply = values.grad_fn or matrix.grad_fn, multiply
        if group is None:
            return functional.linear(values, matrix.t(), bias)
        result: torch.Tensor = summed_product_operator(values, matrix, bias, group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = gradient.reshape(-1, gradient.shape[-1])
        of_values = of_matrix = of_bias = None
        if ctx.factors is not None:
            values, matrix = ctx.factors.saved_tensors
            rows = values.reshape(-1, values.shape[-1])
        if ctx.needs_input_grad[0]:
            of_values = (given @ matrix.t()).view(values.shape)
        if ctx.needs_input_grad[1]:  # with the weight's own strides; else autograd would copy it
            multiply = torch.mm if ctx.multiply is None or torch.is_grad_enabled() else ctx.multiply
            is_weight = matrix.is_contiguous()
            made = multiply(rows.t(), given) if is_weight else multiply(given.t(), rows)
            of_matrix = made if is_weight or made is None else made.t()
        if ctx.needs_input_grad[2]:
            of_bias = given.sum(0)
        return of_values, of_matrix, of_bias, None, None


@torch.library.custom_op("ullage::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    """Return each row times the transposed matrix of its group: ``[rows, n]``.

    Args:
        rows: ``[sum(sizes), k]``, group by group.
        matrices: ``[groups, n, k]``.
        sizes: rows of each group.
    """
    result = rows.new_empty(len(rows), matrices.shape[1])
    for matrix, (first, stop) in zip(matrices, _ranges(sizes), strict=True):
        torch.mm(rows[first:stop], matrix.t(), out=result[first:stop])
    return result


@grouped_product.register_fake
def _(rows: torch.Tensor, matrices: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:  # noqa: ARG001
    return rows.new_empty(len(rows), matrices.shape[1])


def _save_for_grouped_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - as torch calls it
    rows, matrices, ctx.sizes = inputs
    ctx.save_for_backward(rows, matrices)


def _grouped_backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows, matrices = ctx.saved_tensors
    of_rows = torch.empty_like(rows) if ctx.needs_input_grad[0] else None
    of_matrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
    for i, (first, stop) in enumerate(_ranges(ctx.sizes)):
        given = gradient[first:stop]
        if of_matrices is not None:
            torch.mm(given.t(), rows[first:stop], out=of_matrices[i])
        if of_rows is not None:
            torch.mm(given, matrices[i], out=of_rows[first:stop])
    return of_rows, of_matrices, None


grouped_product.register_autograd(_grouped_backward, setup_context=_save_for_grouped_backward)


def _ranges(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    return itertools.pairwise((0, *itertools.accumulate(sizes)))
