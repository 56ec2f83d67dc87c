"""A captured model whose code loops over tokens, at a length that takes long to record: continued from short ones.

Some models compute a recurrence token by token (Mamba 1 in the code of ``transformers``).
Each token adds the same kernels to an operator, and all sizes are straight lines in the number of tokens. So two short
captures tell what a longer one has: the kernels that one more token adds, and the line of every size. A third, longer
than what chunks of a scan usually are, has to be exactly what the two say. If it is not, the model is recorded as it
is. The lengths are no powers of two, so that sizes are rarely equal by chance: equal neighbours are one entry.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from planner.models.captured import (
    CapturedBlock,
    CapturedInput,
    CapturedKernels,
    CapturedModel,
    CapturedOperator,
    can_be_resized,
    micro_batch_of,
    resized,
    tokens_of,
)
from planner.models.operators import Batch

_SHORT, _LONGER, _PROOF = 24, 40, 136
_UNLIKE: Final = "captures differ by more than their number of tokens"
_SIZES: Final = ("saved_bytes", "output_bytes", "workspace_bytes", "num_skipped", "product_bytes")


def can_be_continued(inputs: tuple[CapturedInput, ...], tiles: Batch) -> bool:
    """Return whether a capture may be continued from shorter ones: all inputs are whole sequences of tokens."""
    if not can_be_resized(inputs):
        return False
    of_tokens = all(spec.dtype.startswith("int") and len(spec.shape) == 2 and not spec.begins for spec in inputs)
    return of_tokens and not (tiles.loss_tile_tokens or tiles.layer_tile_tokens) and tokens_of(inputs) >= 2 * _PROOF


def continued(
    capture: Callable[[tuple[CapturedInput, ...]], CapturedModel], inputs: tuple[CapturedInput, ...]
) -> CapturedModel | None:
    """Return a model with inputs for which it is not captured, from captures of fewer tokens.

    Args:
        capture: captures the model with shorter inputs.
        inputs: see :func:`can_be_continued`.

    Returns:
        What a capture would be; ``None`` if the model does not grow as the module says.
    """
    num_tokens = tokens_of(inputs)
    short, longer, proof = (
        capture(resized(inputs, micro_batch_of(inputs), length)) for length in (_SHORT, _LONGER, _PROOF)
    )
    try:
        if _blocks(short, longer, _PROOF) != proof.blocks or proof.segments != short.segments:
            return None
        blocks = _blocks(short, longer, num_tokens)
    except ValueError:  # they do not differ by their number of tokens alone
        return None
    called = (
        known.model_copy(update={"shape": wanted.shape}) for known, wanted in zip(short.inputs, inputs, strict=True)
    )
    return short.model_copy(update={"blocks": blocks, "inputs": tuple(called), "seq_len": num_tokens})


def _number(short: int, longer: int, wanted: int) -> int:
    """Return a number that is known at two lengths at the wanted one, to which a line continues it."""
    slope, rest = divmod(longer - short, _LONGER - _SHORT)
    result = longer + slope * (wanted - _LONGER)
    if rest or result < 0:
        raise ValueError(_UNLIKE)
    return result


def _kernel(short: Any, longer: Any, wanted: int) -> Any:
    if type(short) is not type(longer):
        raise ValueError(_UNLIKE)
    values = {}
    for field in dataclasses.fields(short):
        before, after = getattr(short, field.name), getattr(longer, field.name)
        if type(before) is int and type(after) is int:
            after = _number(before, after, wanted)
        elif before != after:
            raise ValueError(_UNLIKE)
        values[field.name] = after
    return type(short)(**values)


def _kernels(short: CapturedKernels, longer: CapturedKernels, wanted: int) -> CapturedKernels:
    """Continue kernels: those of a token are put in where the longer list repeats itself."""
    growth, rest = divmod(len(longer) - len(short), _LONGER - _SHORT)
    if rest or growth < 0:
        raise ValueError(_UNLIKE)
    added = growth * (_LONGER - _SHORT)
    start = _repeats_from(longer, growth, added) if growth else 0
    pairs = zip(short, (*longer[:start], *longer[start + added :]), strict=True)
    made = tuple(_kernel(*pair, wanted) for pair in pairs)
    of_a_token = made[start : start + growth]
    return (*made[:start], *of_a_token * (wanted - _SHORT), *made[start:])


def _repeats_from(kernels: CapturedKernels, period: int, least: int) -> int:
    """Return where kernels begin that repeat with a period for at least so many."""
    start = 0
    for index in range(len(kernels) - period):
        if kernels[index] != kernels[index + period]:
            start = index + 1
        elif index + 1 - start >= least:
            return start
    raise ValueError(_UNLIKE)


def _blocks(short: CapturedModel, longer: CapturedModel, wanted: int) -> tuple[CapturedBlock, ...]:
    if short.segments != longer.segments or len(short.blocks) != len(longer.blocks):
        raise ValueError(_UNLIKE)
    return tuple(_block(*pair, wanted) for pair in zip(short.blocks, longer.blocks, strict=True))


def _block(short: CapturedBlock, longer: CapturedBlock, wanted: int) -> CapturedBlock:
    if len(short.operators) != len(longer.operators):
        raise ValueError(_UNLIKE)
    pairs = zip(short.operators, longer.operators, strict=True)
    return CapturedBlock.model_construct(operators=tuple(_operator(*pair, wanted) for pair in pairs))


def _operator(short: CapturedOperator, longer: CapturedOperator, wanted: int) -> CapturedOperator:
    sizes: dict[str, Any] = {name: _number(getattr(short, name), getattr(longer, name), wanted) for name in _SIZES}
    first, second = (len(operator.forward) - operator.num_skipped for operator in (short, longer))
    forward = (
        *_kernels(short.forward[:first], longer.forward[:second], wanted),
        *_kernels(short.forward[first:], longer.forward[second:], wanted),
    )
    sizes |= {"forward": forward, "backward": _kernels(short.backward, longer.backward, wanted)}
    made = longer.model_copy(update=sizes)
    if made != short.model_copy(update=sizes):
        raise ValueError(_UNLIKE)
    return made
