"""Context parallelism: ranks that share the tokens of every sequence.

[Note: Context parallelism] Each of ``c`` data-parallel ranks computes with ``1 / c`` of the tokens of every sequence,
consecutive ones. Only attention looks from one token at another. Before it, ranks exchange their tokens' queries, keys
and values of all heads for those of all tokens of ``1 / c`` of the heads, and after it they exchange the outputs back
(Jacobs et al., *DeepSpeed Ulysses*, 2023). So masks, positions, windows and packed sequences are those of whole
sequences, and so is the kernel of attention. If ``c`` ranks share fewer heads of keys, each head goes to several ranks.

Each rank reads whole sequences and looks all their tokens up, so that what a model makes of them before its first layer
is what it is on one device: positions and masks. The loss of each token is computed where its hidden state is, and all
ranks get it, so each has the loss of the whole sequence.

The ranks hold the same weights, as other data-parallel ranks do. A gradient is the mean over all of them. The backward
of a loss that ``c`` ranks have computed, each of them all of it, is ``c`` times that of one, so this mean is right.
"""

from typing import TYPE_CHECKING

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.kernels import Collective, Work, all_reduce, each

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
    if config.num_attention_heads % ranks or (keys % ranks and ranks % keys):
        raise ModelConfigError(
            f"{config.name} has {config.num_attention_heads} heads and {keys} of keys on a rank, which {ranks} "
            "context-parallel ranks cannot share equally; choose a context_parallel that divides both, or is a "
            "multiple of the latter"
        )
    if batch.seq_len % ranks:
        raise ModelConfigError(
            f"sequences of {batch.seq_len} tokens cannot be shared equally by {ranks} context-parallel ranks; choose "
            "a multiple"
        )


def copies_of_keys(config: ModelConfig, batch: "Batch") -> int:
    """Return how many ranks get each head of keys and values."""
    return max(batch.context_parallel // config.num_key_value_heads, 1)


def exchange(batch: "Batch", *sizes: int, saves: bool = False) -> Work:
    """Return the all-to-all of tensors of so many bytes each, and of their gradients.

    A copy sorts what is sent by rank. What is received from each rank is a part of each sequence, so that several
    sequences are sorted by another. A tensor exists as it was, sorted, and received. With ``saves``,
    backward keeps what is received; otherwise the next operator counts it.
    """
    if batch.context_parallel == 1:
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
