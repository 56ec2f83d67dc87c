"""Turn an operator of PyTorch's dispatcher, with its tensors, into the planner's kernels.

FLOP are those of ``torch.utils.flop_counter`` (a test compares them), except for causal attention, of which a fused
kernel computes half. Bytes are those of the tensors read and written; an expanded dimension counts once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.models.formulas.work import equal_shares, grouped
from planner.models.kernels import Attention, Elementwise, Gemm, Kernels
from ullage.capture.records import strided
from ullage.capture.scans import kernels_of_work

# Operators that move no data, beside views (is_view).
_FREE = frozenset(
    {"detach", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_reshape_alias", "alias", "lift_fresh", "resize_", "set_", "_local_scalar_dense", "_linalg_check_errors"}
)
# Operators that write in place without reading the old values.
_OVERWRITE = frozenset({"fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_", "exponential_"})
# Operators that read as many bytes of their first tensor as they write.
_LOOK_UP = frozenset({"embedding", "index", "_unsafe_index", "index_select", "gather", "take"})
# Operators that fill their output and then copy their first tensor into it.
_INTO_ZEROS = frozenset({"slice_backward", "select_backward"})
# Operators that add rows to chosen rows of their first tensor, which they read and write there only; those without "_"
# at the end copy it first. But ``index_put`` does not: it stands for that of an index's gradient, which is in place
# (``index_backward`` in FunctionsManual.cpp), but not with fake tensors.
_PUT = frozenset({"index_put", "_index_put_impl"})
_INTO_ROWS = _PUT | {"index_add", "scatter_add"}
# Fewer rows that meet take less time than their bytes.
_MANY_MEET = 32
# Operators of bitsandbytes that are bound by memory.
_DEQUANTIZE = frozenset({"bitsandbytes.dequantize_4bit", "bitsandbytes.dequantize_blockwise"})
# Beginnings of names of operators whose time is determined neither by FLOP nor by bytes.
_UNPRICED = (
    *("mkldnn_rnn", "_cudnn_rnn", "miopen_rnn", "_thnn_fused"),
    *("linalg_", "_linalg_", "_fft_", "_cdist", "_trilinear"),
)
# Operators with similar names that are bound by memory.
_PRICED = frozenset({"linalg_vector_norm", "linalg_cross"})


def kernels_of(function: Any, args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Kernels:
    """Return the kernels of a device for one call of an operator.

    An operator whose cost is not known (see :func:`has_known_cost`) counts as one that is bound by memory.
    """
    name = function.overloadpacket.__name__
    if function.namespace == "prim" or name in _FREE or (function.is_view and not _is_copy(args, output)):
        return ()
    if (rule := _PRODUCTS.get(name)) is not None and not _is_sparse(args):
        return rule(args, kwargs, output)
    read, written = list(map(_num_bytes, strided((args, kwargs)))), list(map(_num_bytes, strided(output)))
    meeting = _num_meeting(name, args, kwargs)
    return tuple(
        Elementwise(num_bytes, num_meeting=meeting) for num_bytes in _passes(name, args, read, written) if num_bytes
    )


def _num_meeting(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """Return how many rows are added to the same row of a table, if all of its rows are chosen equally often; or 1."""
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if name.rstrip("_") not in _PUT or not accumulates:
        return 1
    table, chosen = args[:2]
    pairs = [(size, index) for size, index in zip(table.shape, chosen, strict=False) if index is not None]
    num_chosen = math.prod(torch.broadcast_shapes(*(index.shape for _, index in pairs)))  # type: ignore[no-untyped-call]
    num_meeting = num_chosen // max(math.prod(size for size, _ in pairs), 1)
    return num_meeting if num_meeting >= _MANY_MEET else 1


def has_known_cost(function: Any, args: Sequence[Any]) -> bool:
    """Return whether the time of a call of an operator follows from its FLOP or its bytes."""
    name = function.overloadpacket.__name__
    if function.namespace == "prim" or name in _FREE or function.is_view:
        return True
    if _is_sparse(args):
        return False
    unpriced = (name.startswith(_UNPRICED) and name not in _PRICED) or function.overloadpacket in flop_registry
    known = function.namespace == "aten" or str(function.overloadpacket) in _DEQUANTIZE
    return name in _PRODUCTS or (known and not unpriced)


def _is_sparse(args: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tree_leaves(args))


def _is_copy(args: Sequence[Any], output: Any) -> bool:
    """Return whether an operator that makes a view where it can, such as ``contiguous``, has copied its argument."""
    storages = {part.untyped_storage()._cdata for part in strided(args)}
    return any(part.untyped_storage()._cdata not in storages for part in strided(output))


def _passes(name: str, args: Sequence[Any], read: list[int], written: list[int]) -> list[int]:
    """Return the bytes of each kernel of an operator that is bound by memory."""
    passes = [sum(read) + sum(written)]
    if name in _OVERWRITE:
        passes = [sum(written)]
    elif name == "copy_":
        passes = [sum(written) + sum(read[1:])]
    elif name.startswith("nll_loss"):  # forward reads one value per target; backward writes zeros except for one
        passes = [args[1].numel() * (8 + args[0].element_size()) if name.endswith("forward") else written[0]]
    elif name in _LOOK_UP:
        passes = [2 * written[0] + sum(read[1:])]
    elif name.rstrip("_") in _INTO_ROWS:
        rows = sum(read[1:]) + 2 * min(read[-1], read[0])
        passes = [rows] if name == "index_put" or name.endswith("_") else [read[0] + written[0], rows]
    elif name in _INTO_ZEROS:
        passes = [written[0], 2 * read[0]]
    elif name == "embedding_dense_backward":
        passes = [written[0], 3 * read[0]]
    elif name == "native_layer_norm_backward":  # once for the input, once for weight and bias
        passes = [read[0] + read[1] + written[0], read[0] + read[1]]
    return passes


def _num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor in memory; an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(n for n, stride in sizes if stride) * tensor.element_size()


def _product(args: Sequence[Any], _kwargs: dict[str, Any], _output: Any) -> Kernels:
    a, b = [each for each in args if isinstance(each, Tensor)][-2:]  # before them, what is added to the product
    if a.dim() == 2:
        return (Gemm(a.shape[0], b.shape[1], a.shape[1]),)
    return (Gemm(a.shape[1], b.shape[2], a.shape[2], a.shape[0], batched=True),)


def _grouped_product(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Kernels:
    """Return one product per group, with equal groups, because the real sizes depend on data."""
    a, b = args[:2]
    if a.dim() == 2 and b.dim() == 3:
        return grouped(equal_shares(a.shape[0], b.shape[0]), b.shape[2], a.shape[1])
    if a.dim() == 2:  # the inner dimension is in groups, as for gradients of weights
        shares = equal_shares(a.shape[1], output.shape[0])
        return tuple(Gemm(a.shape[0], b.shape[1], size, count, grouped=True) for size, count in shares.items())
    if b.dim() == 2:
        return grouped(equal_shares(b.shape[1], a.shape[0]), a.shape[1], a.shape[2])
    return _product((a, b), kwargs, output)


def _triangular_solve(args: Sequence[Any], _kwargs: dict[str, Any], output: Any) -> Kernels:
    """Return half of a product, because half of the matrix is zero."""
    *batch, rows, columns = output.shape
    size = args[0].shape[-1]
    return (Gemm(rows, columns, max(size // 2, 1), math.prod(batch), batched=len(batch) > 0),)


def _solve(args: Sequence[Any], kwargs: dict[str, Any], output: Any) -> Kernels:
    """Return a third of a product of the matrix with itself for its factors, and two triangular solves."""
    *batch, size, _ = args[0].shape
    factors = Gemm(size, size, max(size // 3, 1), math.prod(batch), batched=len(batch) > 0)
    return factors, *_solve_factored(args, kwargs, output[0])


def _solve_factored(args: Sequence[Any], _kwargs: dict[str, Any], output: Any) -> Kernels:
    """Return two triangular solves, each half of a product."""
    *batch, size, _ = args[0].shape
    columns = max(output.numel() // max(math.prod(batch) * size, 1), 1)
    return (Gemm(size, columns, size, math.prod(batch), batched=len(batch) > 0),)


def _convolution(args: Sequence[Any], _kwargs: dict[str, Any], output: Any) -> Kernels:
    source, weight, transposed, groups = args[0], args[1], args[6], args[8]
    return (_convolution_gemm(source, output, weight, groups, transposed=transposed),)


def _convolution_backward(args: Sequence[Any], _kwargs: dict[str, Any], _output: Any) -> Kernels:
    gradient, source, weight, transposed, groups, mask = args[0], args[1], args[2], args[7], args[9], args[10]
    forward = _convolution_gemm(source, gradient, weight, groups, transposed=transposed)
    m, n, k = forward.m, forward.n, forward.k
    shapes = [shape for shape, wanted in zip(((m, k, n), (n, k, m)), mask, strict=False) if wanted]
    kernels: Kernels = tuple(Gemm(*shape, forward.count, batched=forward.batched) for shape in shapes)
    return (*kernels, Elementwise(_num_bytes(gradient))) if mask[2] else kernels


def _convolution_gemm(source: Tensor, output: Tensor, weight: Tensor, groups: int, *, transposed: bool) -> Gemm:
    """Return a convolution as implicit GEMM (cuDNN): one product per group."""
    window = math.prod(weight.shape[2:])
    rows = source.shape[0] * math.prod((source if transposed else output).shape[2:])
    if transposed:
        return Gemm(rows, weight.shape[1] * window, weight.shape[0] // groups, groups, batched=groups > 1)
    return Gemm(rows, weight.shape[0] // groups, weight.shape[1] * window, groups, batched=groups > 1)


def _attention(args: Sequence[Any], kwargs: dict[str, Any], _output: Any, *, backward: bool = False) -> Kernels:
    """Return fused attention."""
    (query, key), position = (args[1:3], 7) if backward else (args[:2], 4)
    causal = bool(args[position] if len(args) > position else kwargs.get("is_causal", False))
    batch, num_heads, num_queries, head_dim = query.shape
    num_keys = None if key.shape[2] == num_queries else key.shape[2]
    return (
        Attention(
            batch,
            num_heads,
            num_queries,
            head_dim,
            causal=causal and num_keys is None,
            backward=backward,
            num_keys=num_keys,
            shares_keys=key.shape[1] < num_heads,
        ),
    )


_PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any], Any], Kernels]] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _product,
    "baddbmm": _product,
    "_scaled_mm": lambda args, *_: (Gemm(args[0].shape[0], args[1].shape[1], args[0].shape[1], fp8=True),),
    "_grouped_mm": _grouped_product,
    "linalg_solve_triangular": _triangular_solve,
    "_linalg_solve_ex": _solve,
    "linalg_lu_solve": _solve_factored,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": functools.partial(_attention, backward=True),
}
assert all(hasattr(torch.ops.aten, name) for name in _PRODUCTS)
_PRODUCTS["fused"] = lambda args, _kwargs, _output: kernels_of_work(*args[2:])  # of ``ullage``
