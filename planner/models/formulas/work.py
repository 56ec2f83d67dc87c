"""Formulas: kernels, saved bytes and workspace of each operator.

See [Note: Kernel lists] in :mod:`planner.models.kernels`. Here ``e`` is the number of bytes of one value of the
training data type and ``rows`` a number of tokens. In ``each(n, 2 * e, 3 * e)`` every argument after the first is one
kernel: ``2 * e`` reads one tensor and writes one, ``3 * e`` reads two and writes one, ``e + 4`` converts to fp32.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from planner.models.kernels import Attention, Gemm, Kernels, Work, all_reduce, each


def linear(rows: int, inputs: int, outputs: int, e: int, *, bias: bool) -> Work:
    """Return ``y = x W (+ b)``, without saved bytes and workspace.

    The caller counts the saved input, because neighbours may share it. The caller also counts the gradient of ``y``
    while that of ``x`` is computed, unless a residual connection keeps that gradient anyway.
    """
    reduce_bias = each(rows * outputs, e) if bias else ()
    backward = (Gemm(rows, inputs, outputs), Gemm(outputs, inputs, rows), *reduce_bias)
    return Work((Gemm(rows, outputs, inputs),), backward, workspace_bytes=rows * inputs * e)


def with_memory(work: Work, saved_bytes: int, workspace_bytes: int = 0) -> Work:
    """Return ``work`` with more saved bytes and workspace."""
    return dataclasses.replace(
        work,
        saved_bytes=work.saved_bytes + saved_bytes,
        workspace_bytes=max(work.workspace_bytes, workspace_bytes),
    )


def rms_norm(rows: int, width: int, e: int, *, around: bool = True) -> Work:
    """Return the RMS norm of ``transformers``: in fp32, eager, scaled in the training data type.

    Saved: the fp32 input (its own storage in fp32 training), the normalised values and one factor per row.

    Workspace: backward peaks in the gradient of the square, ``grad * (2 * x.pow(1))``. Five fp32 tensors are alive: the
    gradient from the mean, the temporaries of both factors, their product, and the gradient through the scale. The
    normalised values are freed by then. CUDA runs the same kernels, one by one; a fused norm would need less.

    Args:
        rows: number of vectors.
        width: values in each vector.
        e: bytes per value.
        around: a residual connection goes around it. In fp32 training the scale's gradient is added to that of the
            residual in place.
    """
    n = rows * width
    convert = [e + 4] if e != 4 else []
    forward = (
        *each(n, *convert, 8, 4),  # pow, mean
        *each(rows, 8, 8),  # add, rsqrt
        *each(n, 8, *convert, 2 * e),  # by the factor, by the weight
    )
    backward = (
        *each(n, 2 * e, 3 * e, e, *convert, 12, 8, 4),
        *each(rows, 8, 8, 12),
        *each(n, 4, 8, 8, 12, 12, *convert),
    )
    workspace_bytes = (20 - e - (4 if around and e == 4 else 0)) * n
    return Work(forward, backward, n * (4 + e) + 4 * rows, workspace_bytes, copies_input=e != 4)


def layer_norm(rows: int, width: int, e: int) -> Work:
    """Return a layer norm, one fused kernel; backward reads its inputs again for the weight and bias.

    Workspace: the gradients of its output and of its input. The kernel itself takes only the partial sums of a few rows
    per thread or block, on CPUs and on CUDA.
    """
    n = rows * width
    return Work(each(n, 2 * e), each(n, 3 * e, 2 * e), n * e + 2 * rows * e, 2 * n * e)


def flash_attention(
    core: Attention,
    query_elements: int,
    key_value_elements: int,
    e: int,
    *,
    merged_gradient: bool,
    scratch_bytes: int = 0,
) -> Work:
    """Return fused attention: query, key, value, output and one fp32 logarithm per row and head are saved.

    Args:
        core: its forward kernel.
        query_elements: values of the query.
        key_value_elements: values of the key, and of the value.
        e: bytes per value.
        merged_gradient: the three gradients are concatenated, as for GPT-2's joint projection.
        scratch_bytes: memory inside the backward kernel. That of CPUs is left out: a block of scores per thread.

    Workspace: the three gradients, and the gradient of the output with the kernel's own memory, or the tensor in which
    they are concatenated.
    """
    logsumexp_bytes = 4 * core.batch * core.num_heads * core.seq_len // core.num_steps
    gradient = query_elements + 2 * key_value_elements
    backward: Kernels = (dataclasses.replace(core, backward=True),)
    if merged_gradient:
        backward += each(gradient, 2 * e)
    return Work(
        (core,),
        backward,
        (2 * query_elements + 2 * key_value_elements) * e + logsumexp_bytes,
        max(2 * gradient * e if merged_gradient else 0, (gradient + query_elements) * e + scratch_bytes),
    )


def attention_scratch_bytes(core: Attention, *, grouped: bool, e: int) -> int:
    """Return the memory that the backward kernel of fused attention takes for itself on CUDA.

    It is that of FlashAttention (``mha_bwd`` in PyTorch's ``aten/src/ATen/native/transformers/cuda/flash_attn/``
    ``flash_api.cpp``): an fp32 sum of the query's gradient, one fp32 factor per row and head, and, if heads share keys
    and values, a gradient of these for each head. cuDNN does not say what its plans take; this stands for it too. In
    fp32 another kernel runs, which adds in place.

    Args:
        core: its forward kernel.
        grouped: several heads share a key and value.
        e: bytes per value.
    """
    if e == 4:
        return 0
    rows = core.batch * core.num_heads * (-(-core.seq_len // core.num_steps // 128) * 128)
    grain = 32 if core.head_dim <= 128 else 64
    sums_bytes = 4 * rows * (-(-core.head_dim // grain) * grain + 1)
    keys = core.num_keys or core.seq_len // core.num_steps
    return sums_bytes + 2 * core.batch * core.num_heads * keys * core.head_dim * e * grouped


def eager_attention(core: Attention, query_elements: int, key_value_elements: int, e: int, *, upcast: bool) -> Work:
    """Return attention as separate kernels (``attn_implementation="eager"``).

    Args:
        core: the two batched products, not fused.
        query_elements: values of the query.
        key_value_elements: values of the key, and of the value; repeated to the query's size where they differ.
        e: bytes per value.
        upcast: softmax in fp32.
    """
    n = core.batch * core.num_heads * core.seq_len**2
    soft = 4 if upcast else e
    convert = [soft + e] if soft != e else []
    groups = query_elements // key_value_elements
    repeat = each(key_value_elements, (1 + groups) * e, (1 + groups) * e) if groups > 1 else ()
    forward = (*repeat, core, *each(n, 2 * e, 2 * e, *convert, 2 * soft, *convert))  # scale, mask, softmax
    backward = (dataclasses.replace(core, backward=True), *each(n, *convert, 3 * soft, *convert, 2 * e), *repeat)
    saved_scores = n * (soft + e if convert else e)
    return Work(forward, backward, 4 * query_elements * e + saved_scores, 2 * n * soft)


def router(rows: int, hidden: int, num_experts: int, top: int, e: int, *, normalize: bool) -> Work:
    """Return the choice of ``top`` experts per token: projection, fp32 softmax, top-k, normalisation."""
    scores, chosen = rows * num_experts, rows * top
    project = linear(rows, hidden, num_experts, e, bias=False)
    convert = [4 + e] if e != 4 else []
    scale = (each(chosen, 4, 8, 12), each(chosen, 12, 12, 8, 12, 12, 4, 12)) if normalize else ((), ())
    choose = Work(
        (*each(scores, *convert, 8), *each(scores + 3 * chosen, 4), *scale[0]),
        (*scale[1], *each(scores, 4, 12, 12, *convert)),
        4 * scores + chosen * (16 if normalize else 8),
    )
    return project + choose


def dispatch(rows: int, hidden: int, top: int, e: int) -> Work:
    """Return the dispatch of tokens to experts, sorted by expert: each token's values are copied ``top`` times."""
    visits = rows * top
    widths = visits * hidden
    forward = (*each(visits, 24, 16, 12), *each(widths, 2 * e))  # sort, token of each visit, histogram; gather
    backward = (*each(rows * hidden, e), *each(widths + 2 * rows * hidden, e), *each(rows * hidden, 3 * e))
    return Work(forward, backward, 8 * visits)


def experts(sizes: Iterable[int], hidden: int, ffn: int, e: int, *, one_kernel: bool) -> Work:
    """Return gated experts: grouped products over tokens sorted by expert.

    Args:
        sizes: tokens that visit each of them.
        hidden: width of a token.
        ffn: width of one expert.
        e: bytes per value.
        one_kernel: see :func:`grouped`. Experts that are units of their own are computed one after another.
    """
    counts = Counter(size for size in sizes if size)
    visits = sum(size * count for size, count in counts.items())
    inner = visits * ffn
    if not visits:
        return Work()
    product, gradient = (functools.partial(make, counts, one_kernel=one_kernel) for make in (grouped, _grouped_wgrad))
    forward = (*product(2 * ffn, hidden), *each(inner, 2 * e, 3 * e), *product(hidden, ffn))
    backward = (
        *gradient(hidden, ffn),
        *product(ffn, hidden),
        *each(inner, 3 * e, 3 * e, 3 * e, 4 * e),
        *gradient(2 * ffn, hidden),
        *product(hidden, 2 * ffn),
    )
    return Work(forward, backward, (visits * hidden + 4 * inner) * e, 2 * inner * e)


def combine(rows: int, hidden: int, top: int, e: int, weight_bytes: int) -> Work:
    """Return the sum of the experts' outputs for each token, weighted with routing weights of ``weight_bytes``.

    If the weights are fp32, so is the sum.
    """
    visits, w = rows * top, weight_bytes
    widths = visits * hidden
    convert = each(rows * hidden, w + e) if w != e else ()
    forward = (
        *each(widths, e + w),  # routing weights
        *each(visits, 8, 24),  # inverse order
        *each(widths, 2 * w),
        *each(widths + rows * hidden, w),
        *convert,
    )
    backward = (
        *convert,
        *each(widths, 2 * w, w, 3 * w, 2 * w + e, 2 * w, *([w + e] if w != e else []), w),
    )
    return Work(forward, backward, widths * e + visits * (8 + w), 3 * widths * w)


def grouped(counts: Mapping[int, int], n: int, k: int, *, one_kernel: bool = True) -> tuple[Gemm, ...]:
    """Return products with one (k, n) matrix per group.

    Args:
        counts: maps a number of rows to the number of groups that have it.
        n: columns.
        k: the inner size.
        one_kernel: ``grouped_mm``, which ``transformers`` runs; otherwise one kernel per group.
    """
    return tuple(Gemm(m, n, k, count, grouped=one_kernel) for m, count in counts.items())


def equal_shares(rows: int, num_groups: int) -> dict[int, int]:
    """Divide ``rows`` tokens among groups as equally as integers allow; return the number of groups by their rows."""
    share, rest = divmod(rows, num_groups)
    return {size: count for size, count in ((share + 1, rest), (share, num_groups - rest)) if size and count}


def _grouped_wgrad(counts: Mapping[int, int], n: int, k: int, *, one_kernel: bool) -> Kernels:
    return tuple(Gemm(n, k, m, count, grouped=one_kernel) for m, count in counts.items())


def embedding(rows: int, vocab: int, width: int, e: int) -> Work:
    """Return a look-up; the gradient is dense, so backward fills ``vocab`` rows before it adds ``rows``.

    Workspace: the gradient of what was looked up.
    """
    backward = (*each(vocab * width, e), *each(rows * width, 3 * e))
    return Work(each(rows * width, 2 * e), backward, 8 * rows, rows * width * e)


def loss(rows: int, vocab: int, e: int, num_ranks: int = 1) -> Work:
    """Return fp32 cross-entropy: cast, log-softmax (saved), mean of the targets'.

    With ranks that share the vocabulary, three all-reduces: the maximum, the target's logit and the sum of
    exponentials. They give the log-probabilities. Backward turns these into the gradient in place, where autograd would
    make two tensors. So it holds the gradient and, unless that is float32, a copy in the logits' type.
    """
    n = rows * vocab
    convert = [e + 4] if e != 4 else []
    sums = (*each(n, 4, 8), *all_reduce(4 * rows, num_ranks, 3)) if num_ranks > 1 else ()
    forward = (*each(n, *convert, 8), *each(rows, 12), *sums)
    inside_bytes = 8 if num_ranks == 1 else 4 + (e if convert else 0)
    return Work(forward, each(n, 4, 12, *convert), 4 * n + 8 * rows, inside_bytes * n)


@functools.cache  # prices know kernels by identity
def newton_schulz(rows: int, columns: int) -> Kernels:
    """Return Muon's orthogonalization of a matrix: five iterations of ``X <- a X + (b A + c A A) X``, ``A = X X^T``.

    The smaller side comes first, as in ``torch.optim.Muon``.
    """
    short, long = sorted((rows, columns))
    return (Gemm(short, short, long, 5), Gemm(short, short, short, 5), Gemm(short, long, short, 5))


def orthogonalization_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes that Muon's update of a matrix needs: its scaled gradient in fp32, then bf16 operands.

    They are the matrix before and after an iteration, and two products of the smaller side.
    """
    short, long = sorted(shape)
    return 4 * short * long + operand_bytes(shape)


def operand_bytes(shape: tuple[int, int]) -> int:
    """Return the bytes of the bf16 operands among :func:`orthogonalization_bytes`."""
    short, long = sorted(shape)
    return 2 * (2 * short * long + 2 * short**2)


def shared_orthogonalization_bytes(sizes: Sequence[int], of_ranks: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Return the most bytes that Muon's update of matrices needs on a rank that has parts of them.

    These are the parts in bf16 that it sends; then its scaled gradients in fp32, one after another, or the matrices
    that it receives, and the operands of one of them.

    Args:
        sizes: of the rank's part of each matrix, ``[n]``.
        of_ranks: shapes of the matrices that each rank orthogonalizes.
    """
    received = (
        sum(2 * math.prod(shape) for shape in shapes) + max(map(operand_bytes, shapes), default=0)
        for shapes in of_ranks
    )
    return 2 * sum(sizes) + max(4 * max(sizes), *received)
