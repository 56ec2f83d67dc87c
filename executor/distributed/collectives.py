"""Differentiable collectives for use inside a model's forward."""

from collections.abc import Sequence
from typing import Any

import torch

from executor.distributed.groups import Group


def copy_to_group(values: torch.Tensor, group: Group) -> torch.Tensor:
    """Return ``values``, the same on all ranks. Backward all-reduces the gradient (Megatron-LM's ``f``).

    Raises:
        RankError: a rank has failed, here or in backward. All functions of this module raise it.
    """
    result: torch.Tensor = _CopyToGroup.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def reduce_from_group(values: torch.Tensor, group: Group) -> torch.Tensor:
    """All-reduce ``values`` in place and return them. Backward returns the gradient as it is (Megatron-LM's ``g``)."""
    result: torch.Tensor = _ReduceFromGroup.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def gather_last_dim(values: torch.Tensor, group: Group, size: int) -> torch.Tensor:
    """All-gather along the last dimension, of which each rank has an equal part; return the first ``size`` values."""
    result: torch.Tensor = _GatherLastDim.apply(values, group, size)  # type: ignore[no-untyped-call]
    return result


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()  # a product has just made it, so the all-reduce may overwrite it
        ctx.group.all_reduce(gradient)
        return gradient, None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.mark_dirty(values)
        group.all_reduce(values)
        return values

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherLastDim(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Group, size: int) -> torch.Tensor:
        ctx.first, ctx.width = group.rank * values.shape[-1], values.shape[-1]
        whole = values.new_empty(group.size, *values.shape)
        group.all_gather(whole.view(-1), values.contiguous().view(-1))
        return whole.movedim(0, -2).flatten(-2)[..., :size].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mine = gradient[..., ctx.first : ctx.first + ctx.width]
        padded = mine.new_zeros(*mine.shape[:-1], ctx.width)
        padded[..., : mine.shape[-1]] = mine
        return padded, None, None


def all_to_all(
    values: torch.Tensor, group: Group, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    """Send each rank its rows of ``values``; return the received rows, in the order of ranks."""
    result: torch.Tensor = _AllToAll.apply(values, group, num_sent, num_received)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, group: Group, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> torch.Tensor:
        ctx.group, ctx.num_sent, ctx.num_received = group, num_sent, num_received
        received = values.new_empty(sum(num_received), *values.shape[1:])
        group.all_to_all(received, values.contiguous(), num_received, num_sent)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent = gradient.new_empty(sum(ctx.num_sent), *gradient.shape[1:])
        ctx.group.all_to_all(sent, gradient.contiguous(), ctx.num_sent, ctx.num_received)
        return sent, None, None, None
