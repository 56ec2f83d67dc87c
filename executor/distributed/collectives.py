"""Differentiable collectives for use inside a model's forward."""

from collections.abc import Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from executor.callbacks import with_gradient
from executor.distributed.groups import Group


def copy_to_group(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``values``, the same on all ranks. Backward all-reduces the gradient (Megatron-LM's ``f``).

    Raises:
        RankError: a rank has failed, here or in backward. All functions of this module raise it.
    """
    if has_torch_function_unary(values):
        return handle_torch_function(copy_to_group, (values,), values, group)

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()  # a product has just made it, so the all-reduce may overwrite it
        group.all_reduce(gradient)
        return gradient

    return with_gradient(values, lambda given: given.view_as(given), backward)


def reduce_from_group(values: torch.Tensor, group: Group) -> torch.Tensor:
    """All-reduce ``values`` in place and return them. Backward returns the gradient as it is (Megatron-LM's ``g``)."""

    def forward(values: torch.Tensor) -> torch.Tensor:
        group.all_reduce(values)
        return values

    return with_gradient(values, forward, lambda gradient: gradient)


def gather_last_dim(values: torch.Tensor, group: Group, size: int) -> torch.Tensor:
    """All-gather along the last dimension, of which each rank has an equal part; return the first ``size`` values."""
    width = values.shape[-1]
    first = group.rank * width

    def forward(values: torch.Tensor) -> torch.Tensor:
        whole = values.new_empty(group.size, *values.shape)
        group.all_gather(whole.view(-1), values.contiguous().view(-1))
        return whole.movedim(0, -2).flatten(-2)[..., :size].contiguous()

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        mine = gradient[..., first : first + width]
        padded = mine.new_zeros(*mine.shape[:-1], width)
        padded[..., : mine.shape[-1]] = mine
        return padded

    return with_gradient(values, forward, backward)


def gather_rows(values: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather rows, of which each rank has equally many. Backward sums their gradients over ranks."""

    def forward(values: torch.Tensor) -> torch.Tensor:
        whole = values.new_empty(group.size * len(values), *values.shape[1:])
        group.all_gather(whole.view(-1), values.contiguous().view(-1))
        return whole

    def backward(gradient: torch.Tensor) -> torch.Tensor:
        of_all = gradient.clone(memory_format=torch.contiguous_format)
        own = torch.empty_like(of_all[: len(of_all) // group.size])
        group.reduce_scatter(own.view(-1), of_all.view(-1))
        return own

    return with_gradient(values, forward, backward)


def all_to_all(
    values: torch.Tensor, group: Group, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    """Send each rank its rows of ``values``; return the received rows, in the order of ranks."""

    def exchange(sent: torch.Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> torch.Tensor:
        received = sent.new_empty(sum(num_received), *sent.shape[1:])
        group.all_to_all(received, sent.contiguous(), num_received, num_sent)
        return received

    return with_gradient(
        values,
        lambda sent: exchange(sent, num_sent, num_received),
        lambda gradient: exchange(gradient, num_received, num_sent),
    )
