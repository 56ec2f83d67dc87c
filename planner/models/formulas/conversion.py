"""Linear layers of captured models with their products in fp8, as if torchao had converted them."""

import dataclasses
import functools
from collections.abc import Iterable

from planner.models.config import ModelConfigError
from planner.models.formulas import float8
from planner.models.kernels import Gemm, Kernel, Kernels
from planner.models.operators import Batch, Operator, weight_of
from planner.models.parameters import ParameterSpec

_STAY = ("gate", "router")
"""Modules that choose experts stay in the type of weights: a small error chooses other experts."""
_ADAPTER = "lora_"


def with_fp8_products(name: str, operators: Iterable[Operator], batch: Batch) -> tuple[Operator, ...]:
    """Return a captured model's operators with products in fp8 in the linear layers of hidden layers.

    These are ``torch.nn.Linear`` modules whose sides and rows are multiples of 16, without routers and adapters.

    Raises:
        ModelConfigError: there is no such layer, or a batch wants tiles of layers.
    """
    float8.check_batch(batch)
    found = tuple(operators)
    owners = {spec.name: (operator.unit, spec) for operator in found for spec in operator.parameters}
    calls: dict[str, list[Operator]] = {}
    for operator in found:
        calls.setdefault(weight_of(operator), []).append(operator)
    chosen = {
        weight: owners[weight][1]
        for weight, users in calls.items()
        if weight in owners
        and users[0].unit == owners[weight][0]
        and all(_can_convert(user, owners[weight][1]) for user in users)
    }
    if not chosen:
        raise ModelConfigError(
            f"{name} has no torch.nn.Linear in a hidden layer whose sides, and tokens of a micro-batch, are multiples "
            "of 16, as products in fp8 need; choose another --micro-batch or --seq-len, or leave out --precision "
            "products=fp8"
        )
    result = []
    cast: set[str] = set()  # inputs
    for operator in found:
        if (spec := chosen.get(weight_of(operator))) is None:
            result.append(operator)
            continue
        given = float8.input_of(operator.path) + operator.name.removeprefix(operator.path)
        convert = functools.partial(_converted, operator, spec, batch, shares=given in cast)
        cast.add(given)
        has_bias = f"{spec.name.rpartition('.')[0]}.bias" in owners
        with_casts, twin = (convert(has_bias=has_bias, casts_weights=casts) for casts in (True, False))
        result.append(dataclasses.replace(with_casts, fp8_twin=twin))
    return tuple(result)


def _can_convert(operator: Operator, weight: ParameterSpec) -> bool:
    path = weight.name.split(".")
    in_hidden_layer = any(part.isdigit() for part in path)
    if operator.kind != "Linear" or weight.frozen not in {None, "plain"} or not in_hidden_layer:
        return False
    if any(part in _STAY for part in path) or _ADAPTER in weight.name:
        return False
    outputs, inputs = weight.shape
    products = [kernel for kernel in operator.forward if isinstance(kernel, Gemm)]
    return (
        len(products) == 1
        and (products[0].n, products[0].k, products[0].count) == (outputs, inputs, 1)
        and float8.fits(inputs, outputs)
        and float8.fits(products[0].m, outputs)
    )


def _converted(
    operator: Operator, weight: ParameterSpec, batch: Batch, *, shares: bool, has_bias: bool, casts_weights: bool
) -> Operator:
    """Return an operator with casts and products in fp8.

    Args:
        operator: a linear layer.
        weight: its weight.
        batch: the batch.
        shares: whether another layer has cast its input.
        has_bias: whether it has a bias.
        casts_weights: whether it casts its weight, which comes in fp8 otherwise.
    """
    (outputs, inputs), e = weight.shape, batch.dtype_bytes
    place, product = next((i, kernel) for i, kernel in enumerate(operator.forward) if isinstance(kernel, Gemm))
    rows = product.m
    output, input_gradient, weight_gradient = float8.products(
        rows,
        inputs,
        outputs,
        e,
        bias=has_bias,
        casts_weights=casts_weights,
        shares=shares,
        trained=weight.is_trained,
    )
    to_weight = [((outputs, inputs, rows), weight_gradient)] if weight.is_trained else []
    emulated = batch.fp8_products == "emulated"
    beside = float8.casts_bytes(rows, inputs, outputs, e, emulated=emulated, casts_weights=casts_weights)
    # A recomputation leaves out what is at the end; but a product in fp8 keeps what it has cast when it ends.
    behind = len(operator.forward) - place - 1
    num_skipped = min(operator.num_skipped, behind) + (has_bias and operator.num_skipped > behind)
    return dataclasses.replace(
        operator,
        forward=_replaced(operator.forward, [((rows, outputs, inputs), output)]),
        backward=_replaced(operator.backward, [*to_weight, ((rows, inputs, outputs), input_gradient)]),
        num_skipped=num_skipped,
        workspace_bytes=operator.workspace_bytes + beside,
    )


def _replaced(kernels: Kernels, by_shape: Iterable[tuple[tuple[int, int, int], Kernels]]) -> Kernels:
    """Return kernels where the first product of each shape, (m, n, k), is replaced by others."""
    left, result = list(by_shape), list[Kernel]()
    for kernel in kernels:
        shape = (kernel.m, kernel.n, kernel.k) if isinstance(kernel, Gemm) and kernel.count == 1 else None
        place = next((i for i, (wanted, _) in enumerate(left) if wanted == shape), None)
        result += [kernel] if place is None else left.pop(place)[1]
    return tuple(result)
