"""The tensor in ``parameter.grad`` while the gradient itself is not on the device."""

import math
import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

Norm = Callable[[], torch.Tensor]
Scale = Callable[[float], None]

_NORMS = frozenset({"aten::linalg_vector_norm", "aten::_foreach_norm"})
_SCALES = frozenset({"aten::mul_", "aten::_foreach_mul_"})
_DIVIDES = frozenset({"aten::div_", "aten::_foreach_div_"})


class GradientError(RuntimeError):
    """An operation on a gradient that is impossible, because the executor has offloaded the gradient."""


class OffloadedGradient(torch.Tensor):
    """A stand-in for an offloaded gradient. It has a norm and can be scaled, as clipping by norm needs.

    ``torch.nn.utils.clip_grad_norm_`` works on it unchanged. The norm comes from recorded sums of squares, and the
    update applies the factor. The norm is float32 even if the gradient is bf16. Division multiplies by the inverse:
    this is exact for powers of two, and may differ in the last bit otherwise.

    Args:
        like: the parameter.
        name: its name.
        norm: returns the 2-norm of its gradient, a float32 scalar on its device.
        scale: records a factor for its gradient. Its update applies it.
    """

    def __new__(cls, like: torch.Tensor, name: str, norm: Norm, scale: Scale) -> Self:  # noqa: ARG004
        """Make a tensor without storage."""
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: torch.Tensor, name: str, norm: Norm, scale: Scale) -> None:
        super().__init__()
        assert self.shape == like.shape
        self.name_of_parameter = name
        self.norm_of_gradient, self.scale_gradient = norm, scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedGradient({self.name_of_parameter}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Perform the operations of clipping by norm.

        Raises:
            GradientError: the operation is another one.
        """
        operation: str = func._schema.name
        if operation == "aten::detach":
            given = args[0]
            return OffloadedGradient(given, given.name_of_parameter, given.norm_of_gradient, given.scale_gradient)
        several = "_foreach_" in operation
        own = list(args[0]) if several else [args[0]]
        others = [*args[1:], *(kwargs or {}).values()]
        if any(isinstance(other, (list, tuple)) for other in others):
            others = tree_leaves(others)
        are_ours = [[isinstance(one, OffloadedGradient) for one in given] for given in (own, others)]
        if all(are_ours[0]) and not any(are_ours[1]):
            if operation in _NORMS and _is_plain_norm(others):
                norms = [gradient.norm_of_gradient() for gradient in own]
                return norms if several else norms[0]
            if operation in _SCALES | _DIVIDES and len(others) == 1:
                factor = _factor(others[0])
                if operation in _DIVIDES:
                    factor = 1 / factor if factor else math.copysign(math.inf, factor)
                for gradient in own:
                    gradient.scale_gradient(factor)
                return None if several else own[0]
        if "_amp_" in operation:
            raise GradientError(
                "GradScaler cannot unscale gradients that have left the device; leave it out: gradients in bf16 and "
                "fp32 need no loss scaling"
            )
        raise GradientError(
            f"{operation} on the gradient of {_first_name(args)}: it has left the device and awaits its update; only "
            "its 2-norm (torch.nn.utils.clip_grad_norm_) and scaling in place by a number (mul_, div_) are possible; "
            "use a hook on the parameter (parameter.register_hook) to see or change the gradient itself"
        )


_last_factor: tuple[weakref.ref[torch.Tensor], int, float] | None = None  # a tensor, its version and its value


def _factor(given: Any) -> float:
    """Return a factor as a number. Reading a tensor waits for the device, so the last one read is cached."""
    global _last_factor  # noqa: PLW0603 - a cache of one
    if not isinstance(given, torch.Tensor):
        return float(given)
    last = _last_factor
    if last is None or last[0]() is not given or last[1] != given._version:
        last = _last_factor = weakref.ref(given), given._version, float(given)
    return last[2]


def _is_plain_norm(others: list[Any]) -> bool:
    """Return whether arguments of a norm, without the tensor, mean the 2-norm of all elements, in any type."""
    return not others or (
        float(others[0]) == 2 and all(o in {None, False} or isinstance(o, torch.dtype) for o in others[1:])
    )


def _first_name(args: tuple[Any, ...]) -> str:
    return next((g.name_of_parameter for g in tree_leaves(args) if isinstance(g, OffloadedGradient)), "a parameter")
