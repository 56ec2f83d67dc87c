"""Attention in which keys and values pass from rank to rank.

See [Note: Ring] in :mod:`planner.models.formulas.context`. An attention module computes with the rank's own tokens: it
is given their hidden states, and their rows of whatever else has one for each token, as rotations. The function of
PyTorch that it calls, ``scaled_dot_product_attention``, is replaced while it runs. With a mask that is not causal alone
(padding, packed sequences, windows), with dropout, or without a kernel that returns the logarithms of its sums, each
rank gathers all keys and values instead, and PyTorch's function gets the rank's rows of the mask.

Backward recomputes nothing: given the output and the logarithms for all keys, the kernel returns the gradients of those
that a rank has. Sums for keys and values pass on beside them, in their type, and are home after one more step.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from executor.distributed.collectives import gather_rows
from executor.distributed.groups import Group
from executor.distributed.products import NUMBERED, number_of

_WIDEST: Final = 256  # of heads that flash kernels of CUDA take
_OLDEST: Final = 8, 0  # of devices that have them: Ampere

Beside = Callable[[Callable[[], None]], Callable[[], None]]
"""Calls a function beside what is computed, and returns another one that waits for it."""
Parts = Sequence[tuple[int, int]]
"""The parts of a sequence that a rank has: the first token of each, and how many."""


def halves(num_tokens: int, num_ranks: int) -> list[Parts]:
    """Return each rank's parts of a sequence, see [Note: Ring]."""
    half = num_tokens // (2 * num_ranks)
    return [[(rank * half, half), ((2 * num_ranks - 1 - rank) * half, half)] for rank in range(num_ranks)]


def own_tokens(values: Tensor, parts: Parts, dim: int) -> Tensor:
    """Return this rank's tokens of all."""
    return torch.cat([values.narrow(dim, first, count) for first, count in parts], dim)


@final
class Ring:
    """The ranks of a group, among which keys and values pass; for ``beside``, see :data:`Beside`."""

    def __init__(self, group: Group, beside: Beside) -> None:
        self.group, self._beside = group, beside
        self._is_next = [int(rank == (group.rank + 1) % group.size) for rank in range(group.size)]
        self._is_previous = [int(rank == (group.rank - 1) % group.size) for rank in range(group.size)]

    def source(self, step: int) -> int:
        """Return the rank whose keys this one has at a step."""
        return (self.group.rank - step) % self.group.size

    def begin(self, sent: Tensor) -> Callable[[], Tensor]:
        """Begin to pass a contiguous tensor on. Return a function that waits for the one of the rank before."""
        received = torch.empty_like(sent)
        counts = self._is_previous, self._is_next
        wait = self._beside(lambda: self.group.all_to_all(received.unsqueeze(0), sent.unsqueeze(0), *counts))

        def arrived() -> Tensor:
            wait()
            return received

        return arrived


@final
class Redirected(TorchFunctionMode):
    """Lets ``scaled_dot_product_attention`` attend to the tokens of all ranks, wherever it is called meanwhile.

    Args:
        ring: the ranks.
        num_tokens: of a sequence.

    Attributes:
        has_attended: whether it has been called.
    """

    def __init__(self, ring: Ring, num_tokens: int) -> None:
        super().__init__()
        self._ring, self._num_tokens = ring, num_tokens
        self._parts = halves(num_tokens, ring.group.size)
        self.has_attended = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the function, or replace it."""
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.has_attended = True
        return self._attend(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is None and not dropout_p and _has_kernel(query, value):
            # In the layout that the projection behind it takes, and without what is saved beside it (a joint tensor).
            query, passed = query.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((key, value))
            made: Tensor = _Attention.apply(query, passed, is_causal, scale, self._ring)  # type: ignore[no-untyped-call]
            return made
        tokens = torch.arange(self._num_tokens, device=query.device)
        parts = self._parts[self._ring.group.rank]
        if is_causal:
            attn_mask = own_tokens(tokens.unsqueeze(1), parts, 0) >= tokens
        elif attn_mask is not None and attn_mask.shape[-2] == self._num_tokens:
            attn_mask = own_tokens(attn_mask, parts, -2)
        key, value = (self._all_tokens(each) for each in (key, value))
        return nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, scale=scale, enable_gqa=enable_gqa
        )

    def _all_tokens(self, own: Tensor) -> Tensor:
        """Gather keys or values, ``[batch, heads, tokens, width]``, of all tokens, in order."""
        of_all = gather_rows(own.movedim(2, 0), self._ring.group)
        of_ranks = itertools.chain.from_iterable(self._parts)
        at = torch.cat([torch.arange(first, first + count, device="cpu") for first, count in of_ranks])
        return of_all[at.argsort().to(own.device)].movedim(0, 2)


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether a fused kernel returns the logarithms of its sums."""
    width = query.shape[-1]
    if value.shape[-1] != width or query.shape[2] % 2:
        return False
    if query.is_cuda:
        fits = width % 8 == 0 and width <= _WIDEST and query.dtype in {torch.bfloat16, torch.float16}
        return fits and torch.cuda.get_device_capability(query.device) >= _OLDEST
    return query.is_cpu


def _forward(query: Tensor, passed: Tensor, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the output of a kernel, and the logarithms of its sums, ``[batch, heads, tokens]``, in float32."""
    if query.is_cuda:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, *passed, 0.0, is_causal, scale=scale)
        return found[0], found[1]
    made, logarithms = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *passed, 0.0, is_causal, scale=scale
    )
    return made, logarithms


def _backward(
    gradient: Tensor,
    query: Tensor,
    passed: Tensor,
    made: Tensor,
    logarithms: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the query, key and value."""
    if query.is_cuda:
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
        lengths = query.shape[2], passed.shape[3]
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            gradient, query, *passed, made, logarithms, None, None, *lengths, 0.0, is_causal, seed, seed, scale=scale
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        gradient, query, *passed, made, logarithms, 0.0, is_causal, scale=scale
    )


def _parts_of(ring: Ring, step: int, num_tokens: int, *, is_causal: bool) -> tuple[slice, slice]:
    """Return which of its queries, and of the keys that it has, a rank computes with at a step; see [Note: Ring].

    Of each rank's two halves, the second one lies behind all first ones. Only the first step is causal.
    """
    every, half = slice(0, num_tokens), num_tokens // 2
    if not is_causal or step == 0:
        return every, every
    return (every, slice(0, half)) if ring.source(step) < ring.group.rank else (slice(half, num_tokens), every)


@torch.library.custom_op("ullage::attend_in_ring", mutates_args=())
def attend_in_ring(
    query: Tensor, passed: Tensor, is_causal: bool, scale: float | None, ring: int
) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithms of its sums; see :class:`_Attention`.

    It is one operator, so that offloading saves what it returns (:mod:`executor.memory.recompute_cache`).
    """
    found, here = NUMBERED[ring], passed
    total, sums = query.new_empty(0), query.new_empty(0)
    for step in range(found.group.size):
        coming = found.begin(here) if step < found.group.size - 1 else None
        queries, keys = _parts_of(found, step, query.shape[2], is_causal=is_causal)
        made, its = _forward(query[:, :, queries], here[..., keys, :], is_causal and step == 0, scale)
        if step == 0:
            total, sums = made.float(), its
        else:
            rows = sums[:, :, queries]
            total[:, :, queries].lerp_(made.float(), torch.sigmoid(its - rows).unsqueeze(-1))
            rows.copy_(torch.logaddexp(rows, its))
        here = coming() if coming else here
    return total.to(query.dtype), sums


def gradients_in_ring(
    ring: Ring, gradient: Tensor, saved: Sequence[Tensor], is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``query`` and ``passed``.

    Args:
        ring: the ranks.
        gradient: of the output.
        saved: what :func:`attend_in_ring` was given and has returned: ``query``, ``passed``, the output and the sums.
        is_causal: as given there.
        scale: likewise.
    """
    query, passed, result, sums = saved
    gradient = gradient if gradient.stride(-1) == 1 else gradient.contiguous()  # as kernels need
    total, here = torch.zeros_like(query, dtype=torch.float32), passed
    coming_sum: Callable[[], Tensor] | None = None
    for step in range(ring.group.size):
        coming = ring.begin(here) if step < ring.group.size - 1 else None
        queries, keys = _parts_of(ring, step, query.shape[2], is_causal=is_causal)
        own_gradient, own_query, own_result, own_sums = (
            each[:, :, queries] for each in (gradient, query, result, sums)
        )
        of_query, *of_keys = _backward(
            *(own_gradient, own_query, here[..., keys, :], own_result, own_sums.contiguous()),
            *(is_causal and step == 0, scale),
        )
        total[:, :, queries] += of_query
        added = coming_sum() if coming_sum else torch.zeros_like(passed)
        for sum_, its in zip(added, of_keys, strict=True):
            sum_[:, :, keys] += its
        coming_sum = ring.begin(added)
        here = coming() if coming else here
    assert coming_sum is not None
    return total.to(query.dtype), coming_sum()


class _Attention(torch.autograd.Function):
    """Attention of a rank's queries, ``[batch, heads, tokens, width]``, to all keys and values.

    Its own are ``passed``, ``[2, batch, heads of keys, tokens, width]``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, passed: Tensor, is_causal: bool, scale: float | None, ring: Ring) -> Tensor:
        result: Tensor
        result, sums = attend_in_ring(query, passed, is_causal, scale, number_of(ring))
        ctx.save_for_backward(query, passed, result, sums)
        ctx.is_causal, ctx.scale, ctx.ring = is_causal, scale, ring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *gradients_in_ring(ctx.ring, gradient, ctx.saved_tensors, ctx.is_causal, ctx.scale), None, None, None
