"""The part that all optimizer steps on the host have in common: a team that divides their arrays.

[Note: Rounding]
Kernels are compiled without any fast-math flag. Each flag that would change the code lets LLVM round the vectorised
body, its remainder loop, and another machine's vectors differently: ``contract`` fuses a multiply and an add where
that pays, ``reassoc`` regroups, ``arcp`` and ``afn`` may take estimates in vectors but not in scalars. Without them
every operation is the IEEE float32 one, so that a parameter's new bits do not depend on the piece, thread or machine
that updates it (the payload of a NaN aside). Memory bounds the loops, so the flags would gain nothing.

New weights may overwrite the gradient ([Note: In place] in :mod:`planner.decisions`). If a kernel got both as two
arrays, LLVM's code would notice at run time that they overlap and take a loop without vector instructions, three times
slower. So it gets one array, for which numba compiles another version of the kernel.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import overload

from executor.optimizer.bf16 import bf16_to_float32, float32_to_bf16, float32_to_bf16_by
from executor.optimizer.split import SplitMaster
from executor.optimizer.workers import WorkerTeam
from planner.optimizers import OPTIMIZERS

Float32Array = npt.NDArray[np.float32]
Bf16Array = npt.NDArray[np.uint16]
GradientArray = Bf16Array | Float32Array
BufferArray = npt.NDArray[np.uint8] | Bf16Array | Float32Array
_Params = TypeVar("_Params")

_NOT_IN_GROUPS: Final = frozenset({"decoupled_weight_decay", "seed", "parameter", "start", "limit", "shape"})

BLOCK: Final = OPTIMIZERS["adamw-8bit"].block_params
"""Parameters that share a scale, see [Note: Blocks] in :mod:`planner.optimizers`."""

IN_PLACE: Final = ()
"""Passed to a kernel as ``weight_out`` if the weights overwrite the gradient."""


def host_step(
    kernel: Callable[..., object],
    kernel_args: Callable[[_Params, int, float], tuple[object, ...]],
    has_buffers: Callable[[_Params], bool] = lambda _: True,
    *,
    in_blocks: bool = False,
    seeded: bool = False,
) -> Callable[..., None]:
    """Return a step of one optimizer in host memory: one pass over flat arrays of equal length, in place.

    Factors of the whole step are worked out in double precision and rounded to float32 once; the rest is float32. NaN
    and infinite gradients go through. The bits do not depend on how a team cuts the range: see [Note: Rounding].

    Args:
        kernel: compiled; called with pieces of the state, of ``grad`` and of ``weight_out`` or :data:`IN_PLACE`, then
            with the result of ``kernel_args``; see also :func:`executor.optimizer.split.chunks`.
        kernel_args: returns flags and factors for ``(params, step, grad_scale)``.
        has_buffers: whether an optimizer with these hyper-parameters has the buffers.
        in_blocks: whether some state has one value for each :data:`BLOCK` parameters.
        seeded: whether hyper-parameters may have a seed. With one the master copy may be bf16 bits, which is the weight
            itself. A kernel of such a step also takes, last, where its piece begins.

    Returns:
        The step, a function of these arguments:

        - ``state``: weights, float32, split or rounded to bf16 bits (uint16), and then buffers, each ``[num_params]``,
          updated; no other arrays may overlap. Scales are ``[blocks]``. Nobody else uses blocks of split weights
          meanwhile.
        - ``grad``: gradient, float32 or bf16 bits (uint16), ``[num_params]``; only read, unless it is ``weight_out``.
        - ``weight_out``: where the new weights go as bf16 bits (uint16), ``[num_params]``; ``None`` where the master
          copy is the weight.
        - ``params``: hyper-parameters.
        - ``step``: which step this is, from 1.
        - ``grad_scale``: multiplies the gradient in float32: the clip factor, one over a loss scale, or their product.
        - ``team``: threads to run on; ``None`` means the calling thread.
    """
    cached_args = functools.lru_cache(maxsize=4)(kernel_args)  # an iteration's pieces have the same

    def take(
        state: Sequence[BufferArray | SplitMaster | None],
        grad: GradientArray,
        weight_out: Bf16Array | None,
        params: _Params,
        step: int,
        grad_scale: float = 1.0,
        team: WorkerTeam | None = None,
    ) -> None:
        assert step >= 1, step
        master, *buffers = state
        held = (master, *(buffers if has_buffers(params) else [None] * len(buffers)))
        lengths = {len(grad), -(-len(grad) // BLOCK)} if in_blocks else {len(grad)}
        assert all(each is None or len(each) in lengths for each in (*held, weight_out)), "a kernel checks nothing"
        args = cached_args(params, step, grad_scale)
        in_place = weight_out is not None and np.may_share_memory(weight_out, grad)  # then they are the same
        arrays = (*held, grad, IN_PLACE if in_place else weight_out)
        halves = master.halves() if isinstance(master, SplitMaster) else None
        first, last = (master.start, master.stop) if isinstance(master, SplitMaster) else (0, len(grad))
        grain = BLOCK if in_blocks or halves else 1  # threads have whole blocks
        before = first // grain

        def update(start: int, stop: int) -> None:
            begin, end = max(grain * (before + start), first), min(grain * (before + stop), last)
            whole, *others = cut(arrays, begin - first, end - first)
            position = (begin - first,) if seeded else ()
            kernel((*halves, begin, end) if halves else whole, *others, *args, *position)

        num_grains = -(-last // grain) - before
        if team is None:
            update(0, num_grains)
        else:
            team.run(update, num_grains)

    return take


def cut(arrays: Sequence[Any], start: int, stop: int) -> tuple[Any, ...]:
    """Return ``[start, stop)`` of the first array and the same of all others, of which some may be ``None`` or empty.

    Those that are shorter than the first have one value for each :data:`BLOCK` of its. Then ``start`` is a multiple.
    """
    num_params = len(arrays[0])
    if start == 0 and stop >= num_params:
        return tuple(arrays)
    blocks = slice(start // BLOCK, -(-stop // BLOCK))
    return tuple(
        each if each is None or not len(each) else each[start:stop] if len(each) == num_params else each[blocks]
        for each in arrays
    )


def check_params(params: object, *, not_negative: tuple[str, ...], fractions: tuple[str, ...] = ()) -> None:
    """Check hyper-parameters.

    Raises:
        ValueError: one of ``not_negative`` is negative or not finite, or one of ``fractions`` is not in [0, 1).
    """
    for name in not_negative:
        value = getattr(params, name)
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, but must be finite and at least 0")
    for name in fractions:
        value = getattr(params, name)
        if not 0 <= value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 0 and less than 1")


def read(kind: type[_Params], group: Mapping[str, Any], **given: Any) -> _Params:
    """Return hyper-parameters of a parameter group of ``torch.optim``, whose keys are their names; and of ``given``.

    Raises:
        KeyError: the group has not all of them.
        TypeError: one is no number.
    """
    fields: tuple[Any, ...] = dataclasses.fields(kind)  # type: ignore[arg-type]
    known = {**group, **given}
    if any(field.name == "beta1" for field in fields):
        known["beta1"], known["beta2"] = group["betas"]
    found = [field for field in fields if field.name in known or field.name not in _NOT_IN_GROUPS]
    # Of the default's type: a group may have tensors.
    values = ((f.name, known[f.name] if f.default is None else type(f.default)(known[f.name])) for f in found)
    return kind(**dict(values))


def float32s(*factors: float) -> tuple[np.float32, ...]:
    """Return a step's factors, computed in double precision, each rounded to float32 once."""
    return tuple(np.float32(factor) for factor in factors)


def as_float32(bits: Any) -> Any:
    """Return a value, bf16 bits or float32, as float32. Kernels only: numba takes the overload below."""
    raise NotImplementedError


def store_weight(weight_out: Any, grad: Any, i: int, weight: Any) -> None:
    """Write a new weight as bf16 bits: to ``weight_out``, over the gradient if that is :data:`IN_PLACE`, or skip.

    Kernels only, as above.
    """
    raise NotImplementedError


def store_rounded(target: Any, i: int, value: Any, noise: Any) -> None:
    """Write a value: as it is to float32, or rounded to bf16 bits by 16 random bits. Kernels only, as above."""
    raise NotImplementedError


@overload(store_rounded)
def _store_rounded(target: Any, i: Any, value: Any, noise: Any) -> Any:  # noqa: ARG001 - as it is called
    def plain(target: Any, i: Any, value: Any, noise: Any) -> None:  # noqa: ARG001
        target[i] = value

    def rounded(target: Any, i: Any, value: Any, noise: Any) -> None:
        target[i] = float32_to_bf16_by(value, noise)

    return rounded if target.dtype == types.uint16 else plain


@overload(store_weight)
def _store_weight(weight_out: Any, grad: Any, i: Any, weight: Any) -> Any:  # noqa: ARG001 - as it is called
    def skip(weight_out: Any, grad: Any, i: Any, weight: Any) -> None:
        pass

    def separately(weight_out: Any, grad: Any, i: Any, weight: Any) -> None:  # noqa: ARG001
        weight_out[i] = float32_to_bf16(weight)

    def in_place(weight_out: Any, grad: Any, i: Any, weight: Any) -> None:  # noqa: ARG001
        grad[i] = float32_to_bf16(weight)

    if isinstance(weight_out, types.Array):
        return separately
    return in_place if isinstance(weight_out, types.BaseTuple) else skip


@overload(as_float32)
def _as_float32_of(bits: Any) -> Any:
    def same(bits: Any) -> Any:
        return bits

    return bf16_to_float32.py_func if bits == types.uint16 else same
