"""Formulas of linear layers whose products are in fp8, as torchao's ``Float8Linear`` computes them eagerly.

Scales are dynamic, one for each tensor.

[Note: Casts to fp8] Each of the three products casts both of its matrices, even if an earlier product has cast the same
tensor (``torchao.float8.float8_linear.matmul_with_hp_or_float8_args``). One cast (``hp_tensor_to_float8_dynamic``) runs

- ``abs`` and ``max`` (``float8_utils.tensor_to_amax``),
- five kernels on one value that make the scale (``amax_to_scale``): unlike in other lists, they count, because there
  are 36 of them for each layer, those of products included,
- a cast to fp32 if the tensor is not, its product with the scale, ``clamp``, a cast to fp8
  (``float8_training_tensor._ToFloat8ConstrFunc``, ``float8_utils.to_fp8_saturated``).

``torch._scaled_mm`` wants the first matrix in rows and the second in columns, so both products of backward copy what
they use transposed (``float8_ops.preprocess_addmm``). It takes the scales' reciprocals: two more kernels on one value.

The list is checked against a traced layer in ``tests/planner/models/test_float8.py``.
"""

from planner.models.kernels import Elementwise, Gemm, Kernels, Work, each

GRAIN = 16
"""``torch._scaled_mm`` needs matrices of which both sides are multiples of this."""

_INVERSES: Kernels = (Elementwise(8, 2),)
# Live bytes per element at the peak of a cast: the fp32 value times the scale, its clamped copy, the result.
_CAST_PEAK_BYTES = 9


def cast(elements: int, e: int) -> Kernels:
    """Return the kernels that cast a tensor of ``e`` bytes a value to fp8; see [Note: Casts to fp8]."""
    convert = [e + 4] if e != 4 else []
    # amax to fp64, clamp, reciprocal, times the largest fp8 value, to fp32
    scale = (Elementwise(e + 8), Elementwise(16, 3), Elementwise(12))
    return (*each(elements, 2 * e, e), *scale, *each(elements, *convert, 8, 8, 5))


def float8_linear(rows: int, inputs: int, outputs: int, e: int, *, bias: bool) -> Work:
    """Return ``y = x W (+ b)`` with products in fp8; saved bytes are those of :func:`.work.linear`.

    Workspace: of a cast, its temporaries beside what is cast before. In backward, the cast gradient of ``y`` and weight
    are kept until the end, and so is the gradient of ``x``.
    """
    x, w, y = rows * inputs, inputs * outputs, rows * outputs
    forward = (
        *cast(x, e),
        *cast(w, e),
        *_INVERSES,
        Gemm(rows, outputs, inputs, fp8=True),
        *(each(y, 2 * e) if bias else ()),
    )
    backward = (
        *(each(y, e) if bias else ()),
        *cast(y, e),
        *cast(w, e),
        *each(w, 2),  # in columns
        *_INVERSES,
        Gemm(rows, inputs, outputs, fp8=True),
        *cast(y, e),
        *cast(x, e),
        *each(y, 2),  # in rows
        *each(x, 2),  # in columns
        *_INVERSES,
        Gemm(outputs, inputs, rows, fp8=True),
    )
    kept_bytes = e * x + y + w
    workspace_bytes = max(
        _CAST_PEAK_BYTES * y,
        y + _CAST_PEAK_BYTES * w,
        kept_bytes + _CAST_PEAK_BYTES * y,
        kept_bytes + y + _CAST_PEAK_BYTES * x,
    )
    return Work(forward, backward, workspace_bytes=workspace_bytes)
