"""Scans over tokens in fused kernels: state spaces (Mamba), delta rules, and the short convolutions before them.

``transformers`` computes them by kernels of other packages where these are installed, and else by operators of PyTorch
that nobody trains with: a loop over tokens, or products whose states all stay in memory. A plan for a GPU that is made
from a name assumes the kernels, says so, and is executed with them. The capture has stand-ins, which take and return
the same tensors, keep what the kernels keep for backward, and tell the work that they do. A model of the user's own has
them where the package is installed: real kernels do not run without memory.

A scan of Mamba (``selective_scan``) reads its inputs once. Each channel of a token reads the values B and C of each
state through the cache, and backward adds their gradients to sums in fp32, one message each: this traffic takes longer
than the inputs', and counts as traffic of memory. Scans in chunks are batched products (Dao and Gu, arXiv:2405.21060,
section 6; Yang et al., arXiv:2412.06464, section 3.3), each with its operands in memory, as in the kernels of
``mamba-ssm`` and ``flash-linear-attention``; backward computes again what forward does not keep.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function

from planner.models.kernels import Elementwise, Gemm, Kernels
from ullage.capture.records import CaptureError

Product = tuple[int, int, int, int]  # rows, columns, inner size, and how many of them there are
_FP32: Final = 4
_STATES_EVERY: Final = 2048  # tokens: a scan of Mamba keeps the states between parts of this size
_CHUNK: Final = 64  # tokens of a chunk of delta rules


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a fused kernel does.

    Attributes:
        shape: of its output, whose type is that of its first input.
        products: of its forward.
        num_bytes: moved in forward beside the products' operands.
        again: products that backward computes once more.
        backward_bytes: moved in backward beside the products' operands.
        kept: shapes and types of what it keeps for backward beside its inputs.
        scratch_bytes: taken while it runs.
    """

    shape: Sequence[int]
    products: Sequence[Product] = ()
    num_bytes: int = 0
    again: Sequence[Product] = ()
    backward_bytes: int = 0
    kept: Sequence[tuple[Sequence[int], torch.dtype]] = ()
    scratch_bytes: int = 0


@contextlib.contextmanager
def fused_scans(model: nn.Module, *, assumed: bool) -> Iterator[set[str]]:
    """Let a model compute scans by stand-ins for kernels: of all packages if ``assumed``, else of installed ones.

    Yields the packages whose kernels forward has called.
    """
    called: set[str] = set()
    names = {type(each).__module__ for each in model.modules()}
    files = [sys.modules[name] for name in names if name.startswith("transformers.")]
    with contextlib.ExitStack() as stack:
        for file in files:
            for name, (package, stand_in) in _STAND_INS.items():
                if hasattr(file, name) and (assumed or importlib.util.find_spec(package)):
                    calls = functools.partial(_call, called, package, stand_in)
                    stack.enter_context(mock.patch.object(file, name, calls))
        yield called


def scans_in_words(packages: Sequence[str]) -> str:
    """Return the assumption, as a sentence for the user."""
    return (
        f"scans are assumed to be kernels of {' and '.join(packages)}, with which execute runs them; to plan PyTorch's "
        "own operators, name a function that returns the model: --model package.module:function"
    )


def check_scans(packages: Sequence[str]) -> None:
    """Check that the kernels are here that a plan assumes.

    Raises:
        CaptureError: a package is missing.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        names = " ".join(_DISTRIBUTIONS[package] for package in missing)
        raise CaptureError(
            f"the plan assumes kernels of {' and '.join(missing)}, not installed here; pip install {names}, or plan a "
            "function that returns the model: --model package.module:function"
        )


def kernels_of_work(products: Sequence[int], num_bytes: int) -> Kernels:
    """Return the kernels of a call of the operator ``ullage::fused`` with this work."""
    sizes = zip(*[iter(products)] * 4, strict=True)
    multiplied = (Gemm(m, n, k, count, batched=count > 1) for m, n, k, count in sizes)
    return *multiplied, *([Elementwise(num_bytes)] if num_bytes else [])


@torch.library.custom_op("ullage::fused", mutates_args=())
def _fused(given: list[Tensor], shape: list[int], products: list[int], num_bytes: int) -> Tensor:  # noqa: ARG001
    """Stand for kernels that read ``given`` and make a tensor of its first one's type."""
    return given[0].new_empty(shape)


@_fused.register_fake
def _(given: list[Tensor], shape: list[int], _products: list[int], _num_bytes: int) -> Tensor:
    return given[0].new_empty(shape)


class _Fused(Function):
    @staticmethod
    def forward(context: Any, work: _Work, *given: Tensor | None) -> Tensor:
        context.work, context.given = work, given
        tensors = [tensor for tensor in given if tensor is not None]
        scratch = tensors[0].new_empty(work.scratch_bytes, dtype=torch.uint8)
        made: Tensor = _fused(tensors, list(work.shape), _flat(work.products), work.num_bytes)
        del scratch
        context.save_for_backward(*tensors, *(made.new_empty(shape, dtype=dtype) for shape, dtype in work.kept))
        return made

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        work, first = context.work, context.given[0]
        scratch = gradient.new_empty(work.scratch_bytes, dtype=torch.uint8)
        read = [*context.saved_tensors, gradient]
        gradients = [each for product in work.products for each in _gradients(product)]
        made = _fused(read, list(first.shape), _flat([*work.again, *gradients]), work.backward_bytes)
        del scratch
        others = zip(context.given[1:], context.needs_input_grad[2:], strict=True)
        return None, made, *(torch.empty_like(each) if wanted else None for each, wanted in others)


def _call(called: set[str], package: str, stand_in: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    called.add(package)
    return stand_in(*args, **kwargs)


def _flat(products: Sequence[Product]) -> list[int]:
    return [size for product in products for size in product]


def _gradients(product: Product) -> tuple[Product, Product]:
    m, n, k, count = product
    return (m, k, n, count), (k, n, m, count)


def _num_bytes(*tensors: Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _tensors(named: dict[str, Any]) -> list[Tensor]:
    return [value for value in named.values() if isinstance(value, Tensor)]


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None = None, **_others: Any) -> Tensor:
    """Return a short causal convolution with its activation, ``[batch, channels, tokens]``."""
    work = _Work(x.shape, num_bytes=2 * x.nbytes, backward_bytes=3 * x.nbytes)
    return _Fused.apply(work, x, weight, bias)  # type: ignore[no-untyped-call, no-any-return]


def _scan(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor | None = None,  # noqa: N803 - names of mamba-ssm, here and below
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    return_last_state: bool = False,
    **_others: Any,
) -> Any:
    """Return a scan of Mamba, ``[batch, channels, tokens]``; see the module."""
    num_bytes, backward_bytes, states = _scan_traffic(u, a.shape[-1], b.element_size(), gated=z is not None)
    kept = [states] if z is None else [states, (u.shape, u.dtype)]  # the output before the gate
    work = _Work(u.shape, num_bytes=num_bytes, backward_bytes=backward_bytes, kept=kept)
    made = _Fused.apply(work, u, delta, a, b, c, D, z, delta_bias)  # type: ignore[no-untyped-call]
    return (made, u.new_empty(*u.shape[:2], a.shape[-1])) if return_last_state else made


def _scan_traffic(
    u: Tensor, num_states: int, value_bytes: int, *, gated: bool
) -> tuple[int, int, tuple[Sequence[int], torch.dtype]]:
    """Return bytes of forward and of backward, and what stays of the states; see the module."""
    batch, channels, tokens = u.shape
    through_cache = u.numel() * num_states
    moved = (3 if gated else 2) * u.nbytes  # inputs, and their gradients
    made = (2 if gated else 1) * u.nbytes
    forward = moved + made + 2 * value_bytes * through_cache
    backward = 2 * moved + made + u.nbytes + 2 * (value_bytes + _FP32) * through_cache
    states = (batch, channels, math.ceil(tokens / _STATES_EVERY), 2 * num_states), torch.float32
    return forward, backward, states


def _mix(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    *others: Tensor | None,
    **named: Any,
) -> Tensor:
    """Return a layer of Mamba behind its first projection, ``[batch, tokens, hidden]``."""
    batch, _, tokens = xz.shape
    wide, rank = delta_proj_weight.shape
    hidden, num_small, num_tokens = out_proj_weight.shape[0], x_proj_weight.shape[0], batch * tokens
    x = xz[:, :wide]
    num_states = (num_small - rank) // 2
    num_bytes, backward_bytes, states = _scan_traffic(x, num_states, xz.element_size(), gated=True)
    one = num_tokens * wide * xz.element_size()
    widened = wide, num_tokens, rank, 1
    work = _Work(
        (batch, tokens, hidden),
        [(num_tokens, num_small, wide, 1), widened, (num_tokens, hidden, wide, 1)],
        num_bytes=num_bytes + 2 * one,
        again=[widened],
        backward_bytes=backward_bytes + (2 + 3) * one,
        kept=[((num_tokens, num_small), xz.dtype), states, (x.shape, xz.dtype)],
        scratch_bytes=3 * one,  # behind the convolution, the steps, and the output behind the gate
    )
    read = conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, *others
    return _Fused.apply(work, xz, *read, *_tensors(named))  # type: ignore[no-untyped-call, no-any-return]


def _scan_chunks(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    *,
    return_final_states: bool = False,
    **_others: Any,
) -> Any:
    """Return a scan of Mamba-2, ``[batch, tokens, heads, width]``."""
    batch, tokens, heads, width = x.shape
    groups, num_states = b.shape[2:]
    work = _Work(
        x.shape,
        kept=[(x.shape, x.dtype), (dt.shape, torch.float32)],  # the output, and the sums of steps
        **_in_chunks(batch, tokens, chunk_size, heads, groups, width, num_states),
    )
    made = _Fused.apply(work, x, dt, a, b, c, D, dt_bias)  # type: ignore[no-untyped-call]
    return (made, x.new_empty(batch, heads, width, num_states)) if return_final_states else made


def _in_chunks(
    batch: int, tokens: int, chunk: int, heads: int, groups: int, width: int, num_states: int
) -> dict[str, Any]:
    """Return products and scratch memory of a scan of Mamba-2."""
    chunks = batch * math.ceil(tokens / chunk)
    pairs = chunk, chunk, num_states, chunks * groups
    states = num_states, width, chunk, chunks * heads
    within, across = (chunk, width, chunk, chunks * heads), (chunk, width, num_states, chunks * heads)
    return {
        "products": [pairs, states, within, across],
        "again": [pairs, states],
        "scratch_bytes": _FP32 * chunks * (heads * num_states * width + groups * chunk * chunk),
    }


def _mix_in_chunks(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    a: Tensor,
    *,
    chunk_size: int,
    outproj_weight: Tensor,
    headdim: int,
    ngroups: int = 1,
    **named: Any,
) -> Tensor:
    """Return a layer of Mamba-2 behind its first projection, ``[batch, tokens, hidden]``."""
    batch, tokens, _ = zxbcdt.shape
    heads, hidden = a.numel(), outproj_weight.shape[0]
    wide, convolved = heads * headdim, conv1d_weight.shape[0]
    scan = _in_chunks(
        batch, tokens, chunk_size, heads, ngroups, headdim, num_states=(convolved - wide) // (2 * ngroups)
    )
    per_channel = batch * tokens * zxbcdt.element_size()
    scan["products"].append((batch * tokens, hidden, wide, 1))
    scan["scratch_bytes"] += (convolved + wide) * per_channel  # behind the convolution, and before the projection
    work = _Work(
        (batch, tokens, hidden),
        num_bytes=(2 * convolved + 3 * wide) * per_channel,  # convolution, and norm with its gate
        backward_bytes=((2 + 3) * convolved + 5 * wide) * per_channel,
        kept=[((batch, tokens, wide), zxbcdt.dtype), ((batch, tokens, ngroups), torch.float32)],
        **scan,
    )
    read = conv1d_weight, conv1d_bias, dt_bias, a, outproj_weight, *_tensors(named)
    return _Fused.apply(work, zxbcdt, *read)  # type: ignore[no-untyped-call, no-any-return]


def _apply_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    output_final_state: bool = False,
    **_others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return a gated delta rule, ``[batch, tokens, heads, width]``."""
    batch, tokens, heads, of_values = value.shape
    of_keys, size = key.shape[-1], _CHUNK
    chunks = batch * heads * math.ceil(tokens / size)
    erased, written = (size, of_keys, size, chunks), (size, of_values, size, chunks)
    recalled, states = (size, of_values, of_keys, chunks), (of_keys, of_values, size, chunks)
    pairs = size, size, of_keys, chunks
    moved = _num_bytes(query, key, g)  # norms of queries and keys, and sums of decays
    work = _Work(
        value.shape,
        # Pairs of keys, solved for both; what is new of the values; states; then queries with states and with keys.
        [pairs, erased, written, recalled, states, recalled, pairs, written],
        num_bytes=2 * moved,
        again=[erased, written, recalled, states],
        backward_bytes=3 * moved,
        kept=[((batch, tokens, heads, size), value.dtype), (g.shape, torch.float32), (key.shape, key.dtype)],
        scratch_bytes=(2 * batch * tokens * heads * (of_keys + of_values) + chunks * of_keys * of_values)
        * value.element_size(),
    )
    made = _Fused.apply(work, value, query, key, g, beta)  # type: ignore[no-untyped-call]
    return made, value.new_empty(batch, heads, of_keys, of_values) if output_final_state else None


# Functions of the modelling files of ``transformers`` that call kernels where there are some: the package of the
# kernels, and the stand-in.
_STAND_INS: Final[dict[str, tuple[str, Callable[..., Any]]]] = {
    "causal_conv1d_fn": ("causal_conv1d", _convolve),
    "mamba_selective_scan": ("mamba_ssm", _scan),
    "mamba_inner_fn": ("mamba_ssm", _mix),
    "mamba2_chunk_scan": ("mamba_ssm", _scan_chunks),
    "mamba2_split_conv1d_scan_combined": ("mamba_ssm", _mix_in_chunks),
    "torch_chunk_gated_delta_rule": ("fla", _apply_delta_rule),
    "chunk_kimi_delta_attention": ("fla", _apply_delta_rule),
}
_DISTRIBUTIONS: Final = {
    "causal_conv1d": "causal-conv1d",
    "mamba_ssm": "mamba-ssm",
    "fla": "flash-linear-attention",
}
