"""Formulas of linear layers whose products are in fp8, with the bits of torchao's ``Float8Linear``.

Scales are dynamic, one for each tensor. To find one, a tensor is read; to cast it, it is read again, scaled, clamped
and written in fp8. ``torch._scaled_mm`` reads both matrices along their inner side, and each tensor is in two of the
three products, along another side in each. So, see [Note: Casts to fp8] in :mod:`executor.module.float8`:

- The output's gradient is cast once and written in both layouts.
- A weight is cast in rows for forward. Backward casts it in columns with the scale of forward.
- Layers that read one input share its cast (:func:`input_of`). It is written in both layouts: rows for forward, and
  columns, which backward keeps in place of the input. That of a captured layer is cast again in backward with the scale
  of forward, because the input may be kept anyway.
- SwiGLU on a GPU finds the largest values of its output and of its gradients while it writes them ([Note: Scales from
  SwiGLU], in the same file).

Run one by one, the operators of a cast move 33 bytes a value (``abs``, ``max``, ``to``, ``mul``, ``clamp``, ``to``),
and then casts take longer than products in fp8 save. Unlike in other lists, kernels on one value count: those that
begin a maximum and that make a scale of it.
"""

from typing import TYPE_CHECKING, Final, Literal

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.kernels import Elementwise, Gemm, Kernels, Work, each

if TYPE_CHECKING:
    from planner.models.operators import Batch

_GRAIN = 16
ZERO: Final = Elementwise(4)
"""Begins a maximum."""
_INVERSE: Kernels = (Elementwise(8),)  # of the scale of a weight that comes in fp8
Found = Literal["input", "gradient"] | None
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PARENTS = frozenset({"self_attn", "mlp"})


def input_of(path: str) -> str:
    """Return a name that is equal for all modules which read the same input as the module of a path.

    They are known by the names that ``transformers`` gives them. If one reads another tensor after all, it casts that.
    """
    parent, _, name = path.rpartition(".")
    siblings = next((names for names in _SIBLINGS if name in names), ())
    return f"{parent}.{siblings[0]}" if siblings and parent.rpartition(".")[2] in _PARENTS else path


def fits(inputs: int, outputs: int) -> bool:
    """Return whether a layer's products can be in fp8: ``torch._scaled_mm`` wants multiples of 16."""
    return inputs % _GRAIN == 0 == outputs % _GRAIN


def check(config: ModelConfig, batch: "Batch") -> None:
    """Check that a model has linear layers whose products can be in fp8, if a batch wants them.

    Raises:
        ModelConfigError: naming the rule and the remedy.
    """
    if not batch.fp8_products:
        return
    check_batch(batch)
    if config.family == "gpt2":
        raise ModelConfigError(
            f"{config.name} has Conv1D modules, whose products torchao leaves in the type of weights; leave out "
            "--precision products=fp8, or choose a model with torch.nn.Linear layers"
        )
    if not fits(config.hidden_size, config.query_size):
        raise ModelConfigError(
            f"{config.name} has products of {config.hidden_size} x {config.query_size}, but products in fp8 need "
            f"multiples of {_GRAIN}; leave out --precision products=fp8"
        )


def check_batch(batch: "Batch") -> None:
    """Check that a batch's products can be in fp8.

    Raises:
        ModelConfigError: naming the rule and the remedy.
    """
    if batch.kernels == "liger":
        raise ModelConfigError(f"products in fp8 are not known of {batch.kernels} kernels; leave them out")
    if batch.tensor_parallel > 1 or batch.layer_tile_tokens is not None:
        name, alone = ("layer_tile_tokens", "none") if batch.tensor_parallel == 1 else ("tensor_parallel", "1")
        raise ModelConfigError(
            f"{name} is {getattr(batch, name)}, but in fp8 each part of a tensor would have a scale of its own; choose "
            f"{alone}, or leave out --precision products=fp8"
        )


def check_rows(rows: int) -> None:
    """Check that the gradient of a weight can be a product in fp8, of which tokens are the inner side.

    Raises:
        ModelConfigError: the number of tokens is no multiple of 16.
    """
    if rows % _GRAIN:
        raise ModelConfigError(
            f"a product has {rows} tokens, but products in fp8 need a multiple of {_GRAIN}; choose another sequence "
            "length or micro-batch, or leave out --precision products=fp8"
        )


def cast(elements: int, e: int, num_layouts: int = 1, *, found: bool = False) -> Kernels:
    """Return the kernels that cast a tensor of ``e`` bytes a value to fp8.

    They find its largest value, unless what has written it ``found`` that; make the scale of it, and write.
    """
    largest = () if found else (ZERO, *each(elements, e))
    return (*largest, Elementwise(12), *each(elements, e + num_layouts))


def swiglu(elements: int, e: int) -> Work:
    """Return SwiGLU in one kernel each way, which finds the largest values of what it writes. It saves both inputs."""
    forward, backward = (ZERO, *each(elements, 3 * e)), (ZERO, ZERO, *each(elements, 5 * e))
    return Work(forward, backward, 2 * elements * e, 2 * elements * e)


def float8_linear(
    rows: int,
    inputs: int,
    outputs: int,
    e: int,
    *,
    bias: bool,
    emulated: bool = False,
    casts_weights: bool = True,
    shares: bool = False,
    found: Found = None,
) -> Work:
    """Return ``y = x W (+ b)`` with products in fp8, which keeps its input in columns.

    Workspace: see :func:`casts_bytes`. Without ``casts_weights`` the weight is there in fp8, with its scale. If it
    ``shares`` its input, another layer has cast that. Of what was ``found`` the largest value is known.

    Raises:
        ModelConfigError: the number of rows does not suit such products.
    """
    check_rows(rows)
    forward, to_input, to_weight = products(
        rows, inputs, outputs, e, bias=bias, casts_weights=casts_weights, shares=shares, keeps=True, found=found
    )
    backward = (*(each(rows * outputs, e) if bias else ()), *to_input, *to_weight)
    beside = casts_bytes(rows, inputs, outputs, e, emulated=emulated, casts_weights=casts_weights, keeps=True)
    return Work(forward, backward, workspace_bytes=e * rows * inputs + beside)


def products(  # noqa: PLR0913 - each is a fact of its own
    rows: int,
    inputs: int,
    outputs: int,
    e: int,
    *,
    bias: bool,
    casts_weights: bool,
    shares: bool = False,
    keeps: bool = False,
    trained: bool = True,
    found: Found = None,
) -> tuple[Kernels, Kernels, Kernels]:
    """Return the kernels of a layer's three products, casts included; see :func:`float8_linear`.

    Args:
        rows: number of tokens.
        inputs: width of the input.
        outputs: width of the output.
        e: bytes of a value that is not in fp8.
        bias: whether the output gets a bias.
        casts_weights: whether the weight is cast; otherwise it comes in fp8.
        shares: whether another layer has cast the input.
        keeps: whether backward has the input in columns.
        trained: whether there is a gradient of the weight.
        found: the tensor of which the largest value is known.

    Returns:
        Those of the output, of the gradient of the input, and of the gradient of the weight.
    """
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    to_output = (
        *(() if shares else cast(x, e, 1 + (keeps and trained), found=found == "input")),
        *(cast(w, e) if casts_weights else _INVERSE),
        Gemm(rows, outputs, inputs, fp8=True),
        *(each(y, 2 * e) if bias else ()),
    )
    to_input = (
        *cast(y, e, 1 + trained, found=found == "gradient"),
        *each(w, e + 1 if casts_weights else 2),  # in columns
        Gemm(rows, inputs, outputs, fp8=True),
    )
    to_weight = (
        *(() if keeps else each(x, e + 1)),  # in columns
        Gemm(outputs, inputs, rows, fp8=True),
    )
    return to_output, to_input, to_weight


def casts_bytes(
    rows: int, inputs: int, outputs: int, e: int, *, emulated: bool, casts_weights: bool = True, keeps: bool = False
) -> int:
    """Return the most bytes that casts and their products take in backward, beside the gradient of ``x``.

    They are the results of the casts. A product that is emulated takes more; forward's product may then take the most.
    ``keeps``: the input is there in columns.
    """
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    to_input, to_weight = 2 * y + w, y + (0 if keeps else x)
    if not emulated:
        return max(to_input, to_weight)
    return max(
        x + (w if casts_weights else 0) + _emulation_bytes(rows, outputs, inputs, e) - e * x,  # not there in forward
        to_input + _emulation_bytes(rows, inputs, outputs, e),
        to_weight + _emulation_bytes(outputs, inputs, rows, e),
    )


def _emulation_bytes(m: int, n: int, k: int, e: int) -> int:
    """Return the bytes that ``torch._scaled_mm`` takes on a CPU beside its result: it multiplies in fp32.

    It copies the second matrix, scales both in fp32, one after another, and converts the result
    (``aten/src/ATen/native/Blas.cpp``).
    """
    first, second, result = 4 * m * k, 4 * n * k, (4 + e if e != 4 else 4) * m * n
    return n * k + first + max(first, 2 * second, second + result)
