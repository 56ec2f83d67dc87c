"""Context parallelism: ranks that share the tokens of every sequence.

[Note: Context parallelism] Each of ``c`` data-parallel ranks computes with ``1 / c`` of the tokens of every sequence,
consecutive ones. Only attention looks from one token at another. Before it, ranks exchange their tokens' queries, keys
and values of all heads for those of all tokens of ``1 / c`` of the heads, and after it they exchange the outputs back
(Jacobs et al., *DeepSpeed Ulysses*, 2023). So masks, positions, windows and packed sequences are those of whole
sequences, and so is the kernel of attention. If ``c`` ranks share fewer heads of keys, each head goes to several ranks.

[Note: Ring] Or each rank attends with the queries of its own tokens, of all heads, and keys and values pass from rank
to rank: while a rank attends to those that it has, the next ones come (Liu et al., *Ring Attention*, 2023). Outputs are
merged by the logarithms of their sums, which flash kernels return. Backward passes the gradients of keys and values on
beside them. Sequences are cut into ``2 c`` parts, of which rank ``r`` has parts ``r`` and ``2 c - 1 - r``. So a causal
mask leaves all ranks equally much to do. The number of heads does not matter.

Each rank reads whole sequences and looks all their tokens up, so that what a model makes of them before its first layer
is what it is on one device: positions and masks. The loss of each token is computed where its hidden state is, and all
ranks get it, so each has the loss of the whole sequence.

The ranks hold the same weights, as other data-parallel ranks do. A gradient is the mean over all of them. The backward
of a loss that ``c`` ranks have computed, each of them all of it, is ``c`` times that of one, so this mean is right.
"""

import dataclasses
from typing import TYPE_CHECKING

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.kernels import Attention, Collective, Work, all_reduce, each

if TYPE_CHECKING:
    from planner.models.operators import Batch


def check(config: ModelConfig, batch: "Batch") -> None:
    """Check that ranks can share sequences.

    Args:
        config: a tensor-parallel rank's share of a model.
        batch: says how many ranks share sequences, and how long these are.

    Raises:
        ModelConfigError: naming the number, the rule and the remedy.
    """
    ranks, keys = batch.context_parallel, config.num_key_value_heads
    if batch.passes_keys and ranks > 1:
        if batch.seq_len % (2 * ranks):
            raise ModelConfigError(
                f"sequences of {batch.seq_len} tokens cannot be cut into two equal parts for each of {ranks} "
                "context-parallel ranks; choose a multiple, or --parallel exchange=all-to-all"
            )
        return
    if config.num_attention_heads % ranks or (keys % ranks and ranks % keys):
        raise ModelConfigError(
            f"{config.name} has {config.num_attention_heads} heads and {keys} of keys on a rank, which {ranks} "
            "context-parallel ranks cannot share equally; choose --parallel exchange=ring, or a context_parallel that "
            "divides both, or is a multiple of the latter"
        )
    if batch.seq_len % ranks:
        raise ModelConfigError(
            f"sequences of {batch.seq_len} tokens cannot be shared equally by {ranks} context-parallel ranks; choose "
            "a multiple"
        )


def copies_of_keys(config: ModelConfig, batch: "Batch") -> int:
    """Return how many ranks get each head of keys and values."""
    return 1 if batch.passes_keys else max(batch.context_parallel // config.num_key_value_heads, 1)


def exchange(batch: "Batch", *sizes: int, saves: bool = False) -> Work:
    """Return the all-to-all of tensors of so many bytes each, and of their gradients.

    A copy sorts what is sent by rank. What is received from each rank is a part of each sequence, so that several
    sequences are sorted by another. A tensor exists as it was, sorted, and received. With ``saves``,
    backward keeps what is received; otherwise the next operator counts it.
    """
    if batch.context_parallel == 1 or batch.passes_keys:
        return Work()
    num_copies = 1 + (batch.micro_batch > 1)
    swaps = tuple(
        kernel
        for size in sizes
        for kernel in (
            Collective(size, batch.context_parallel, kind="all-to-all"),
            *each(size, *[2.0] * num_copies),
        )
    )
    return Work(swaps, swaps, sum(sizes) if saves else 0, 3 * max(sizes))


def ring(batch: "Batch", core: Attention, query: int, key: int, scratch_bytes: int) -> Work:
    """Return what a ring adds to fused attention: what passes, and what is merged and added up in float32.

    Args:
        batch: says how many ranks there are.
        core: the forward kernel, of all steps.
        query: values of the rank's queries.
        key: values of its keys.
        scratch_bytes: memory inside the backward kernel.
    """
    ranks, e, passed = batch.context_parallel, batch.dtype_bytes, 2 * key * batch.dtype_bytes
    backward_core = dataclasses.replace(core, backward=True)

    def hop(num_bytes: int, count: int, behind: Attention | None = None) -> Collective:
        return Collective(num_bytes, ranks, count=count, kind="pass", behind=behind)

    widen = [e + 4] if e != 4 else []
    merged = query * 3 // 4 if core.causal else query  # in the mean over steps, of which some are for half of the rows
    forward = (
        *each(2 * key, 2 * e),
        hop(passed, ranks - 1, core),
        *each(query, *widen, *widen),
        *each(merged * (ranks - 1), *widen, 12),
    )
    backward = (
        hop(2 * passed, ranks - 1, backward_core),
        hop(passed, 1),
        *each(query * ranks, e + 8),
        *each(2 * key * ranks, 3 * e),
    )
    # Backward has the sum for queries, a step's gradients, that of the output, keys and values that come, and two sums
    # of their gradients.
    return Work(forward, backward, 0, 4 * query + (2 * query + 8 * key) * e + scratch_bytes)


def cut(batch: "Batch", width: int) -> Work:
    """Return the cut of a rank's tokens out of the hidden states of all, and backward the zeros around them."""
    if batch.context_parallel == 1:
        return Work()
    own, whole = batch.num_tokens * width, batch.num_read_tokens * width
    e = batch.dtype_bytes
    return Work(each(own, 2 * e), each(whole, e) + each(own, 2 * e))


def gather_losses(batch: "Batch") -> Work:
    """Return the all-gather of the tokens' losses in float32, and of their gradients; in tiles, their sum is shared."""
    if batch.context_parallel == 1:
        return Work()
    if batch.loss_tile_tokens is not None:
        return Work(all_reduce(4, batch.context_parallel), all_reduce(4, batch.context_parallel))
    gather = (Collective(4 * batch.num_read_tokens, batch.context_parallel, kind="all-to-all"),)
    return Work(gather, gather)
