"""Megatron's kernels, where they differ from those of ``transformers``: fused ones, dropout, accumulated gradients.

Counted in the public source of Megatron-LM v2.6 to v3.0 (``megatron/model/transformer.py``, ``fused_softmax.py``,
``fused_bias_gelu.py``, ``mpu/cross_entropy.py``, ``pretrain_gpt.py``), with its default fusions. Dropout is that of its
GPT scripts; models like Llama are trained without. Gradients stay on the device, and the lists contain the kernels that
add each micro-batch's gradients to them. Arguments are those of :mod:`planner.models.formulas.work`.
"""

from planner.models.kernels import Attention, Elementwise, Gemm, Kernels, Work, all_reduce, each

# What ``get_batch`` (broadcast, masks, positions), ``loss_func`` and the loss scale launch for one micro-batch.
_BATCH_KERNELS = 27
# Megatron pads the vocabulary so that every rank has a multiple of this many rows.
VOCAB_MULTIPLE = 128


def accumulate(e: int, *sizes: int) -> Work:
    """Return the addition of fresh gradients to those of earlier micro-batches, one kernel per parameter tensor."""
    return Work((), tuple(kernel for size in sizes for kernel in each(size, 3 * e)))


def attention(core: Attention, query_elements: int, key_value_elements: int, e: int, *, dropout: bool) -> Work:
    """Return attention with a fused scaled, masked softmax, perhaps dropout on its output, and a copy of the context.

    The causal kernel reads the lower triangle only (``scaled_upper_triang_masked_softmax``). Saved: query, key, value,
    probabilities before and after dropout, its mask, and the context.
    """
    heads, seq_len, head_dim = core.batch * core.num_heads, core.seq_len, core.head_dim
    n = heads * seq_len**2
    scores = Gemm(seq_len, seq_len, head_dim, heads, batched=True)
    values = Gemm(seq_len, head_dim, seq_len, heads, batched=True)
    drop = [2 * e + 1] if dropout else []
    # Shared keys and values are repeated for every query head.
    groups = query_elements // key_value_elements
    repeat = each(key_value_elements, (1 + groups) * e, (1 + groups) * e) if groups > 1 else ()
    forward: Kernels = (*repeat, scores, *each(n, 1.5 * e, *drop), values, *each(query_elements, 2 * e))
    backward: Kernels = (
        scores,  # of the probabilities
        values,  # of the values
        *each(n, *drop, 2 * e),  # dropout; softmax, which reads two triangles and writes a square
        values,  # of the query
        values,  # of the key
        *repeat,
        *each(query_elements + 2 * key_value_elements, 2 * e),  # joined for the projection
    )
    saved_bytes = 2 * (query_elements + key_value_elements * groups) * e + n * (2 * e + 1 if dropout else e)
    return Work(forward, backward, saved_bytes, 2 * n * e)


def bias_dropout_add(rows: int, hidden: int, e: int) -> Work:
    """Return ``x + dropout(f(x) + bias)``, one fused kernel, and in backward dropout and the sum of two gradients."""
    n = rows * hidden
    return Work(each(n, 3 * e + 1), each(n, 2 * e + 1, 3 * e), n)


def embedding(rows: int, hidden: int, e: int, *, dropout: bool) -> Work:
    """Return the dropout after the look-up, and before it the kernels that a micro-batch launches outside the model."""
    n = rows * hidden if dropout else 0
    drop = each(n, 2 * e + 1) if dropout else ()
    return Work((Elementwise(8 * rows, _BATCH_KERNELS), *drop), drop, n)


def loss(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return vocabulary-parallel cross-entropy in fp32: maximum, difference, exponential, sum, quotient.

    Three small all-reduces join the ranks' shares: the maximum, the target's logit and the sum. The probabilities are
    saved; backward subtracts the target in place, scales and casts. While the difference is computed, the logits live
    in the training data type, in fp32, and as that difference.
    """
    n = rows * vocab
    forward = (*each(n, e + 4, 4, 8, 8, 4, 8), *all_reduce(4 * rows, num_ranks, 3))
    return Work(forward, each(n, 8, 4 + e), 4 * n + 8 * rows, n * (4 + e))


def core_loss(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return Megatron-Core's cross-entropy over a divided vocabulary with its fusions (``fused_cross_entropy.py``).

    To fp32; maximum; difference, exponential and sum; quotient. Backward subtracts the target, scales and casts. The
    logits live in the training data type and in fp32.
    """
    n = rows * vocab
    # The maximum; then the target's logit and the sum together.
    sums = (*all_reduce(4 * rows, num_ranks), *all_reduce(8 * rows, num_ranks))
    return Work((*each(n, e + 4, 4, 8, 8), *sums), each(n, 8, 4 + e), 4 * n + 8 * rows, n * (4 + e))
