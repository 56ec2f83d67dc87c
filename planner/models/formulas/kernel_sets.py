"""What each implementation of a model runs beside its products and attention: one table, a row per kernel set.

[Note: Kernel sets] The kernels between products decide how many bytes move, how many kernels the host launches, and
which activations are saved. :data:`KERNEL_SETS` has them for each implementation:

- ``transformers``: its modules as they are, one kernel for each operation in their source ([Note: Kernel lists] in
  :mod:`planner.models.kernels`).
- ``compiled``: the same with attention, MLP and norms compiled, each by itself, as the executor does ([Note: Compiled
  modules] in :mod:`executor.module.compilation`). Inductor makes one kernel of the elementwise operations between two
  products. A norm's backward is two, as the sum over rows for its weight goes another way than that over columns; with
  many rows it is one (:func:`_sums_both_ways`). The loss reads the logits once for maximum and sum
  (``prepare_softmax_online`` in ``torch/_inductor/fx_passes/post_grad.py``). The sum of an input's gradients is one.
  Residual sums, the last norm and the head are outside; the loss of whole logits is compiled too. What backward reads
  in products is saved. What only its elementwise kernels read is made again in them, if that takes no product: silu and
  normalised values are (``min_cut_rematerialization_partition`` in ``torch/_functorch/partitioners.py``, with
  ``ban_if_materialized_backward``). A compiled graph saves its tensors when it ends, so recomputation runs its last
  product again. It takes the host as long as four kernels of PyTorch in forward and eight in backward, whatever it has:
  on an H200's host, a layer of Llama-3.1-8B takes 7.6 ms with 149 kernels, and 6.3 ms with 55 in 12 graphs
  (``benchmarks/results/gpu_probe.json``).
- ``compiled-layers``: the same with each layer as one unit and one graph. The sum after attention is made where the
  second norm reads it. The gradients of a norm's output, one from each product that reads it, and that of the residual
  are added up in the kernel of the norm's backward. The output projection's result is saved, and not the sum.
- ``liger``: Liger-Kernel 0.8.5 (``liger_kernel/ops``: ``rms_norm.py``, ``swiglu.py``, ``rope.py``,
  ``fused_linear_cross_entropy.py``), as ``apply_liger_kernel_to_llama`` and its like do by default. Norms and SwiGLU
  write gradients over what they read. One kernel turns queries and keys in place. The head makes the gradients of its
  input and weight while it computes the loss, a tile of tokens at a time.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.formulas import work
from planner.models.kernels import Attention, Elementwise, Kernel, Kernels, Work, each

if TYPE_CHECKING:
    from planner.models.operators import Batch, Operator


class Passes(NamedTuple):
    """One operator between products.

    Attributes:
        forward, backward: one number for each kernel: the values that it reads and writes for each value of the result.
        saved, workspace: as in :class:`planner.models.kernels.Work`, in values for each value of the result.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    saved: int = 0
    workspace: int = 0

    def work(self, elements: int, e: int) -> Work:
        """Return the work on ``elements`` values of ``e`` bytes."""
        forward, backward = (each(elements, *(width * e for width in way)) for way in (self.forward, self.backward))
        return Work(forward, backward, self.saved * elements * e, self.workspace * elements * e)


# mul, neg of a half, cat, mul, add; backward: mul, neg, two slices put into zeros (fill, then copy), add, mul, add
_ROTARY: Final = Passes((2, 1, 2, 2, 3), (2, 1, 1, 1, 1, 1, 3, 2, 3), 0, 4)
RESIDUAL: Final = Passes((3,), (3,))  # in backward, the sum of the two gradients of its input
# Of two products' outputs, a gate and a value: silu and a product. gelu_new is 0.5 x (1 + tanh(c (x + 0.044715 x^3))),
# operation by operation. Backward of relu needs only its output, that of gelu its input, and gelu's output is of no
# more use by then.
_ACTIVATIONS: Final[Mapping[str, Passes]] = {
    "relu": Passes((2,), (3,), 1, 2),
    "gelu": Passes((2,), (3,), 2, 1),
    "gelu_new": Passes((2, 2, 2, 3, 2, 2, 2, 3), (3, 3, 3, 2, 2, 2, 2, 3, 3, 2, 3), 5, 2),
    "swiglu": Passes((2, 3), (3, 3, 3), 4, 2),
}
_JOINS: Final[Mapping[int, Passes]] = {2: Passes((), (3,)), 3: Passes((), (3, 3))}


_NO_CALL: Final = Work()


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSet:
    """The kernels of one implementation; the defaults are those of ``transformers``. See [Note: Kernel sets].

    Attributes:
        rms_norm: an RMS norm, which also saves a factor for each row; ``None``: in fp32, as :func:`work.rms_norm`.
        rotary: the rotation of queries and keys.
        joint_rotary: one kernel rotates both.
        turned_back: in backward, their gradients are copied into the projection's layout.
        activations: the MLP's activation. Its output is saved for the product after it, or made again in backward.
        joins: in backward, the sum of the gradients of an input that several products read, by their number.
        loss: cross-entropy, from (rows, vocabulary, e, tensor-parallel ranks).
        loss_tile: tokens whose logits exist at a time, from (rows, width, vocabulary): the head's products take these
            tiles one by one, and add to the gradient of its weight; ``None``: all at once.
        call: what the call of an attention, an MLP or a norm costs beside its kernels, forward and backward.
        runs_last: whether recomputation runs the last product of an MLP.
        residuals: the sums after attention and after the MLP.
        whole_layers: a layer is one unit and one graph; see :func:`norms_of_layer`.
        outside: the name of the set that the norm after the layers has; ``None``: this one.
    """

    rms_norm: Passes | None = None
    rotary: Passes = _ROTARY
    joint_rotary: bool = False
    turned_back: bool = True
    activations: Mapping[str, Passes] = dataclasses.field(default_factory=lambda: _ACTIVATIONS)
    joins: Mapping[int, Passes] = dataclasses.field(default_factory=lambda: _JOINS)
    loss: Callable[[int, int, int, int], Work] = work.loss
    loss_tile: Callable[[int, int, int], int] | None = None
    call: Work = _NO_CALL
    runs_last: bool = False
    residuals: tuple[Passes, Passes] = (RESIDUAL, RESIDUAL)
    whole_layers: bool = False
    outside: str | None = None

    def norm(self, rows: int, width: int, e: int, *, around: bool = True) -> Work:
        """Return an RMS norm; see :func:`planner.models.formulas.work.rms_norm`."""
        if self.rms_norm is None:
            return work.rms_norm(rows, width, e, around=around)
        return _normalize(self.rms_norm, rows, width, e)

    def turn(self, query: int, key: int, e: int) -> Work:
        """Return the rotation of so many values of queries and of keys."""
        if self.joint_rotary:
            return self.rotary.work(query + key, e)
        return self.rotary.work(query, e) + self.rotary.work(key, e)


def _normalize(passes: Passes, rows: int, width: int, e: int) -> Work:
    if _sums_both_ways(rows, width):
        passes = passes._replace(backward=passes.backward[-1:])
    return work.with_memory(passes.work(rows * width, e), 4 * rows)


def norms_of_layer(rows: int, width: int, e: int) -> tuple[Work, Work]:
    """Return both RMS norms of a layer that is one graph, with the sums of its residual connections beside them.

    Backward, the first reads the gradients from three products, what it had normalised and the residual's gradient; the
    second those from two products, both terms of the sum after attention, and the residual's. The layer ends with a sum
    of these terms and the MLP's output.
    """
    return tuple(_normalize(passes, rows, width, e) for passes in _LAYER_NORMS)  # type: ignore[return-value]


_LAYER_NORMS: Final = Passes((2,), (4, 6), 1, 2), Passes((3,), (4, 6), 1, 2)


def _sums_both_ways(rows: int, width: int) -> bool:
    """Return whether Inductor sums over rows and over columns in one kernel.

    So it does from PyTorch 2.10 on (``MixOrderReduction.can_fuse`` in ``torch/_inductor/scheduler.py``).
    """
    return rows >= max(4096, 2 * width) and rows * width >= 5 << 20 and width <= 1 << 14


def loss_with_gradient(rows: int, vocab: int, e: int, _ranks: int = 1) -> Work:
    """Return cross-entropy that replaces the logits by their gradient; it reads them twice."""
    return Work(each(rows * vocab, 3 * e))


def compiled_loss(rows: int, vocab: int, e: int, num_ranks: int) -> Work:
    """Return cross-entropy as Inductor makes it: one kernel reads the logits for maximum and sum, one makes gradients.

    The first makes both in one pass. Ranks that share the vocabulary exchange these, outside of any graph.
    """
    if num_ranks > 1:
        return work.loss(rows, vocab, e, num_ranks)
    n = rows * vocab
    return Work(each(n, e), each(n, 2 * e), e * n + 8 * rows, e * n)


def liger_tile(rows: int, width: int, vocab: int) -> int:
    """Return the tokens whose logits take about as much as all inputs of the head."""
    return min(rows, 1 << (-(-rows // -(-vocab // width)) - 1).bit_length())


_COMPILED_SET: Final = KernelSet(
    rms_norm=Passes((2,), (2, 3), 1, 2),
    rotary=Passes((2,), (2,), 0, 2),
    turned_back=False,
    activations={**_ACTIVATIONS, "gelu_new": Passes((2,), (3,), 2, 1), "swiglu": Passes((3,), (5,), 3, 2)},
    joins={**_JOINS, 3: Passes((), (4,))},
    loss=compiled_loss,
    call=Work((Elementwise(8, 4),), (Elementwise(8, 8),)),
    runs_last=True,
    outside="transformers",
)

KERNEL_SETS: Final[Mapping[str, KernelSet]] = {
    "transformers": KernelSet(),
    "compiled": _COMPILED_SET,
    "compiled-layers": dataclasses.replace(
        _COMPILED_SET,
        joins={2: Passes(), 3: Passes()},
        residuals=(Passes(), Passes((4,))),
        call=_NO_CALL,
        whole_layers=True,
    ),
    "liger": KernelSet(
        rms_norm=Passes((2,), (3,), 1, 1),
        rotary=Passes((2,), (2,)),
        joint_rotary=True,
        turned_back=False,
        activations={"swiglu": Passes((3,), (5,), 3, 1)},
        loss=loss_with_gradient,
        loss_tile=liger_tile,
    ),
}


NARROW: Final = frozenset({"compiled-layers", "liger"})
"""Sets for models with RMS norms, SwiGLU and no experts, and for layers that no tensor-parallel ranks share."""


def check(config: ModelConfig, batch: "Batch") -> None:
    """Check that a batch's kernels can run a model.

    Raises:
        ModelConfigError: naming the rule and the remedy.
    """
    name = batch.kernels
    is_narrow = name in NARROW
    if is_narrow and (config.is_expert_model or (config.norm, config.mlp) != ("rmsnorm", "swiglu")):
        raise ModelConfigError(
            f"kernels {name} are known of models with RMS norms, SwiGLU and no experts, not of {config.name}; leave "
            f"out --kernels {name}"
        )
    for field, alone, known in (
        ("tensor_parallel", 1, not is_narrow),
        ("loss_tile_tokens", None, name != "liger"),
        ("layer_tile_tokens", None, name == "transformers"),
    ):
        if (value := getattr(batch, field)) != alone and not known:
            raise ModelConfigError(f"{field} is {value}, which is not known of {name} kernels; leave out one of them")


def kernel_set(batch: "Batch", *, outside: bool = False) -> KernelSet:
    """Return the set that runs a batch: inside the layers, or outside of them."""
    found = KERNEL_SETS[batch.kernels]
    return KERNEL_SETS[found.outside] if outside and found.outside else found


def in_compiled_blocks(operators: Iterable["Operator"]) -> tuple["Operator", ...]:
    """Return a captured model's operators if the blocks of its layers are compiled.

    In each unit of a layer, elementwise kernels with no other kernel between them become one, which moves as many bytes
    as the one of them that moves most. Recomputation runs a unit to its end. Saved activations remain those of the
    capture, which is an upper limit: what is made again in backward instead is not known. Neither is the number of
    graphs; one in each unit is counted.
    """
    call = KERNEL_SETS["compiled"].call
    result: list[Operator] = []
    for (unit, segment), group in itertools.groupby(operators, lambda operator: (operator.unit, operator.segment)):
        members = list(group)
        if unit != segment:
            forward = _in_runs([operator.forward for operator in members])
            backward = _in_runs([operator.backward for operator in reversed(members)])[::-1]
            forward[0] = call.forward + forward[0]
            if any(backward):
                backward[0] += call.backward
            ways = zip(members, forward, backward, strict=True)
            members = [dataclasses.replace(o, forward=f, backward=b, num_skipped=0) for o, f, b in ways]
        result += members
    return tuple(result)


def in_liger_modules(operators: Iterable["Operator"], e: int) -> Iterator["Operator"]:
    """Yield a captured model's operators if Liger's modules take the places of those with their names.

    These are RMS norms, gated MLPs and rotations. Values have ``e`` bytes.
    """
    ours = KERNEL_SETS["liger"]
    for operator in operators:
        size, made = operator.output_bytes // e, operator
        if operator.kind.endswith("RMSNorm"):
            norm = ours.norm(size, 1, e)
            made = operator.doing(dataclasses.replace(norm, saved_bytes=norm.saved_bytes or operator.saved_bytes))
        elif operator.kind.endswith(("SiLU", "SiLUActivation")):
            made = dataclasses.replace(operator, forward=(), backward=())  # part of the MLP's kernel; the gate is saved
        elif operator.kind.endswith("MLP") and any(isinstance(kernel, Elementwise) for kernel in operator.forward):
            gated = ours.activations["swiglu"].work(size, e)
            saved_bytes = max(operator.saved_bytes - operator.output_bytes, 0)
            made = operator.doing(dataclasses.replace(gated, saved_bytes=saved_bytes))
        elif any(isinstance(kernel, Attention) for kernel in operator.forward):
            (forward,), (backward,) = _in_runs([operator.forward]), _in_runs([operator.backward])
            made = dataclasses.replace(operator, forward=forward, backward=backward)
        yield dataclasses.replace(made, copies_input=operator.copies_input)


def _in_runs(lists: Sequence[Kernels]) -> list[Kernels]:
    """Join the elementwise kernels of each run, which may span several lists, where it begins."""
    joined: list[list[Kernel]] = []
    start: tuple[int, int] | None = None
    for kernels in lists:
        joined.append([])
        for kernel in kernels:
            if not isinstance(kernel, Elementwise):
                start = None
                joined[-1].append(kernel)
            elif start is None:
                start = len(joined) - 1, len(joined[-1])
                joined[-1].append(Elementwise(kernel.num_bytes))
            else:
                place, index = start
                before = joined[place][index]
                assert isinstance(before, Elementwise)
                joined[place][index] = Elementwise(max(before.num_bytes, kernel.num_bytes))
    return [tuple(kernels) for kernels in joined]
