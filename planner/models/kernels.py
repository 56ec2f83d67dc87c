"""The kernels that an operator runs, with their sizes.

[Note: Kernel lists] The lists describe what eager PyTorch runs for the ``transformers`` implementation of a module with
``attn_implementation="sdpa"``, without dropout or cache: one entry per kernel, in the order of execution, derived by
tracing the dispatcher and checked against it in ``tests/planner/models/test_graph.py``. Kernels on less than one value
per token and head are left out, and so is the accumulation of gradients over micro-batches.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Gemm:
    """``count`` matrix products (m, k) x (k, n). In a forward, ``m`` is the number of tokens.

    Attributes:
        batched: all products are one kernel and fill the device together.
        grouped: the same, with as many rows for each product as tokens visit an expert (``grouped_mm``).
        accumulates: the result is added to an fp32 sum in device memory.
        fp8: both matrices are in fp8 (1 B a value), and the result is in the type of activations.
    """

    m: int
    n: int
    k: int
    count: int = 1
    batched: bool = False
    grouped: bool = False
    accumulates: bool = False
    fp8: bool = False

    @property
    def flop(self) -> int:
        """Floating-point operations of all ``count`` products."""
        return 2 * self.m * self.n * self.k * self.count


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """The core of attention: scores, softmax and their product with the values.

    Attributes:
        num_heads: query heads; shared key-value heads change bytes, not FLOP.
        shares_keys: several query heads share each key-value head.
        causal: a flash kernel skips the masked half.
        flash: one fused kernel. Otherwise this entry is only the two batched products, and elementwise kernels follow.
        backward: this is the backward of such a core.
        value_dim: width of a head's values; ``head_dim`` if it is not given.
        num_keys: keys of a sequence, as of an encoder's in a decoder; ``seq_len`` if it is not given.
        num_steps: ranks that share the sequence, and kernels that this rank runs, each on ``1 / num_steps`` of its
            share. ``seq_len`` is the whole sequence, the FLOP are this rank's.
    """

    batch: int
    num_heads: int
    seq_len: int
    head_dim: int
    causal: bool = True
    flash: bool = True
    backward: bool = False
    value_dim: int | None = None
    num_keys: int | None = None
    num_steps: int = 1
    shares_keys: bool = False

    @property
    def flop(self) -> int:
        """Floating-point operations.

        A forward has two products of 2 s k d each, of s queries and k keys. A backward has four, and a fifth to
        recompute the scores if fused (Dao et al., FlashAttention, appendix B). A fused causal kernel does half of each.
        """
        of_keys, of_values = ((3 if self.flash else 2), 2) if self.backward else (1, 1)
        widths = of_keys * self.head_dim + of_values * (self.value_dim or self.head_dim)
        scores = self.batch * self.num_heads * self.seq_len * (self.num_keys or self.seq_len)
        full = 2 * scores * widths // self.num_steps
        return full // 2 if self.causal and self.flash else full


@dataclasses.dataclass(frozen=True, slots=True)
class Elementwise:
    """``count`` kernels bound by memory, each of which reads and writes ``num_bytes`` in total.

    Attributes:
        num_meeting: rows that are added to the same row, one after another, if they are many: the gradient of a table
            with few rows, in which each token looks one up.
    """

    num_bytes: int
    count: int = 1
    num_meeting: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """A collective inside a unit, over the ranks that share its operators.

    Attributes:
        num_bytes: of the whole tensor that every rank has in the end; of an all-to-all or a pass, of each rank's
            tensor.
        num_ranks: ranks of the group.
        num_passes: rounds of the ring: 2 for an all-reduce, 1 for an all-gather.
        count: how often it runs.
        kind: over tensor-parallel ranks in a ``ring``; an ``all-to-all`` of ranks that share experts or sequences; or a
            ``pass``, in which each of the latter sends its tensor to the next one.
        over_tensor: the ranks of an all-to-all include those that share layers.
        behind: a product, or a step of attention, that a GPU runs meanwhile, so that only the rest of its time counts.
    """

    num_bytes: int
    num_ranks: int
    num_passes: int = 2
    count: int = 1
    kind: Literal["ring", "all-to-all", "pass"] = "ring"
    over_tensor: bool = False
    behind: Gemm | Attention | None = None


Kernel = Gemm | Attention | Elementwise | Collective
Kernels = tuple[Kernel, ...]


def each(num_elements: int, *bytes_per_element: float) -> Kernels:
    """Return elementwise kernels over ``num_elements``, one for every number of bytes read and written per element."""
    kernels: list[Elementwise] = []
    for width in bytes_per_element:
        num_bytes = round(num_elements * width)
        if kernels and kernels[-1].num_bytes == num_bytes:
            kernels[-1] = Elementwise(num_bytes, kernels[-1].count + 1)
        else:
            kernels.append(Elementwise(num_bytes))
    return tuple(kernels)


def flop(kernels: Iterable[Kernel]) -> int:
    """Return the FLOP of products and attention; other kernels do not count."""
    return sum(kernel.flop for kernel in kernels if isinstance(kernel, Gemm | Attention))


def all_reduce(num_bytes: int, num_ranks: int, count: int = 1) -> Kernels:
    """Return the all-reduce of a tensor; nothing if there is one rank."""
    return (Collective(num_bytes, num_ranks, count=count),) if num_ranks > 1 else ()


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The kernels of one operator, and the bytes that it holds.

    Attributes:
        forward, backward: kernels, see [Note: Kernel lists].
        saved_bytes: saved activations, each storage counted once, at the first operator that saves it.
        workspace_bytes: most temporary bytes inside its unit while it runs, in forward or backward. Saved activations,
            the hidden state, its gradient and gradients of parameters are counted elsewhere.
        copies_input: it saves a copy of its input in another type; otherwise it saves the input itself, if anything.
    """

    forward: Kernels = ()
    backward: Kernels = ()
    saved_bytes: int = 0
    workspace_bytes: int = 0
    copies_input: bool = False

    def __add__(self, other: "Work") -> "Work":
        """Return this work followed by ``other``; backward runs the other way round."""
        return Work(
            self.forward + other.forward,
            other.backward + self.backward,
            self.saved_bytes + other.saved_bytes,
            max(self.workspace_bytes, other.workspace_bytes),
            self.copies_input,
        )


def num_kernels(kernels: Kernels) -> int:
    """Return the number of kernels in a list, repetitions included."""
    return sum(_num_launched(kernel) for kernel in kernels)


def _num_launched(kernel: Kernel) -> int:
    match kernel:
        case Attention():
            return 1
        case Gemm():
            return 1 if kernel.batched or kernel.grouped else kernel.count
        case _:
            return kernel.count
