"""Formulas of linear layers whose products are in fp8, as torchao's ``Float8Linear`` computes them.

Scales are dynamic, one for each tensor.

Each of the three products casts both of its matrices, even if an earlier one has cast the same
tensor (``torchao.float8.float8_linear.matmul_with_hp_or_float8_args``); but the executor casts the output's gradient
once for both products of backward, to the same bits. In a compiled block a tensor that several layers read is cast once
too, which is not counted. One cast reads the tensor to find its largest
value, and reads it again to scale it, clamp it and write it in fp8 (``hp_tensor_to_float8_dynamic``). The executor
compiles it to these two passes. Run one by one, its operators move 33 bytes a value (``abs``, ``max``, ``to``, ``mul``,
``clamp``, ``to``), and then casts take longer than products in fp8 save.

``torch._scaled_mm`` wants the first matrix in rows and the second in columns, so both products of backward copy what
they use transposed (``float8_ops.preprocess_addmm``). It takes the reciprocals of both scales. Unlike in other lists,
kernels on one value count, because there are 18 of them for each layer.
"""

from typing import TYPE_CHECKING

from planner.models.config import ModelConfig, ModelConfigError
from planner.models.kernels import Elementwise, Gemm, Kernels, Work, each

if TYPE_CHECKING:
    from planner.models.operators import Batch

_GRAIN = 16
_INVERSES: Kernels = (Elementwise(8, 2),)


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


def cast(elements: int, e: int) -> Kernels:
    """Return the kernels that cast a tensor of ``e`` bytes a value to fp8; see the module."""
    largest = (*each(elements, e), Elementwise(4 + e))  # of each block, then of all
    return (*largest, *each(elements, e + 1), Elementwise(4 + e))  # the last is the scale itself


def float8_linear(
    rows: int, inputs: int, outputs: int, e: int, *, bias: bool, emulated: bool = False, casts_weights: bool = True
) -> Work:
    """Return ``y = x W (+ b)`` with products in fp8; it saves the bytes that any linear layer saves.

    Workspace: see :func:`casts_bytes`. Without ``casts_weights`` the weight is there in fp8, with its scale.

    Raises:
        ModelConfigError: the number of rows does not suit such products.
    """
    check_rows(rows)
    forward, to_input, to_weight = products(rows, inputs, outputs, e, bias=bias, casts_weights=casts_weights)
    backward = (*(each(rows * outputs, e) if bias else ()), *to_input, *to_weight)
    beside = casts_bytes(rows, inputs, outputs, e, emulated=emulated, casts_weights=casts_weights)
    return Work(forward, backward, workspace_bytes=e * rows * inputs + beside)


def products(
    rows: int, inputs: int, outputs: int, e: int, *, bias: bool, casts_weights: bool
) -> tuple[Kernels, Kernels, Kernels]:
    """Return the kernels of a layer's three products, casts included; see :func:`float8_linear`.

    Returns:
        Those of the output, of the gradient of the input, and of the gradient of the weight.
    """
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    weight = cast(w, e) if casts_weights else ()
    to_output = (
        *cast(x, e),
        *weight,
        *_INVERSES,
        Gemm(rows, outputs, inputs, fp8=True),
        *(each(y, 2 * e) if bias else ()),
    )
    to_input = (
        *cast(y, e),
        *weight,
        *each(w, 2),  # in columns
        *_INVERSES,
        Gemm(rows, inputs, outputs, fp8=True),
    )
    to_weight = (
        *cast(x, e),
        *each(y, 2),  # in rows
        *each(x, 2),  # in columns
        *_INVERSES,
        Gemm(outputs, inputs, rows, fp8=True),
    )
    return to_output, to_input, to_weight


def casts_bytes(rows: int, inputs: int, outputs: int, e: int, *, emulated: bool, casts_weights: bool = True) -> int:
    """Return the most bytes that casts and their products take in backward, beside the gradient of ``x``.

    They are the results of the casts for one product, and its copies. A product that is emulated takes more; forward's
    product may then take the most.
    """
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    cast_w = w if casts_weights else 0
    to_input, to_weight = y + w + cast_w, 2 * (x + y)
    if not emulated:
        return max(to_input, to_weight)
    return max(
        x + cast_w + _emulation_bytes(rows, outputs, inputs, e),
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
