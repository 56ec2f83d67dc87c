"""The tensor in ``parameter.grad`` while the gradient itself is not on the device."""

import math
import weakref
from typing import Any, Protocol, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

UPDATES_AT_STEP = "let gradients be clipped (clip=True, --clip) and leave speculate out: then updates wait for the step"
"""What makes loops possible that need updates to begin at the step."""

_NORMS = frozenset({"aten::linalg_vector_norm", "aten::_foreach_norm"})
_SCALES = frozenset({"aten::mul_", "aten::_foreach_mul_"})
_DIVIDES = frozenset({"aten::div_", "aten::_foreach_div_"})
_ZEROS = frozenset({"aten::zero_", "aten::_foreach_zero_"})
_ADDS = frozenset({"aten::add", "aten::add_"})


class GradientError(RuntimeError):
    """An operation on a gradient that is impossible, because the executor has offloaded the gradient."""


class GradientOwner(Protocol):
    """Computes norms of offloaded gradients, and scales them."""

    def gradient_norm(self, name: str) -> torch.Tensor:
        """Return the 2-norm of a parameter's gradient, a float32 scalar on the parameter's device."""

    def scale_gradient(self, name: str, factor: float) -> None:
        """Record a factor for a parameter's gradient. Its update applies it."""

    def zero_used(self, name: str) -> bool:
        """Set a parameter's gradient to zero if a step has used it up, and return whether it has."""

    def open_gradient(self, name: str) -> torch.Tensor:
        """Return the values of a parameter's gradient, until :meth:`close_gradient`."""

    def close_gradient(self, name: str, *, written: bool, held: bool) -> None:
        """End the use of :meth:`open_gradient`.

        Args:
            name: the parameter.
            written: whether the values have changed.
            held: whether views of them may be written to later, before the step.
        """


class OffloadedGradient(torch.Tensor):
    """A stand-in for an offloaded gradient. It has a norm and can be scaled, as clipping by norm needs.

    ``torch.nn.utils.clip_grad_norm_`` works on it unchanged. The norm comes from recorded sums of squares, and the
    update applies the factor. The norm is float32 even if the gradient is bf16. Division multiplies by the inverse:
    this is exact for powers of two, and may differ in the last bit otherwise. Any other operation is performed on the
    gradient's values, which are brought for it, one gradient at a time.

    Attributes:
        added: what autograd has added since, alone: the collector takes it.
    """

    def __new__(cls, like: torch.Tensor, name: str, owner: GradientOwner) -> Self:  # noqa: ARG004
        """Make a tensor without storage."""
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: torch.Tensor, name: str, owner: GradientOwner) -> None:
        super().__init__()
        assert self.shape == like.shape
        self.name_of_parameter = name
        self.owner = owner
        self.added: torch.Tensor | None = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"OffloadedGradient({self.name_of_parameter}, {tuple(self.shape)}, {self.dtype})"

    @property
    def data(self) -> Any:
        """The same gradient; setting it copies values, which must have its shape, in its type."""
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.shape != self.shape:
            raise GradientError(
                f"the gradient of {self.name_of_parameter} has the shape {list(self.shape)}, but its data were set to "
                f"{list(values.shape)}; set values of its shape"
            )
        name = self.name_of_parameter
        if isinstance(values, OffloadedGradient) and values.name_of_parameter == name and values.owner is self.owner:
            return  # what module.to() gives back where nothing changes
        with torch.no_grad():
            self.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array that cannot be written to."""
        values = self.detach().clone().numpy(force=force)
        values.flags.writeable = False
        return values

    def tolist(self) -> Any:
        """Return the values as numbers, in lists."""
        return self.detach().clone().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Perform the operations of clipping by norm, and others on the gradients' values.

        Raises:
            GradientError: the values cannot be had.
        """
        operation: str = func._schema.name
        if operation == "aten::detach":
            return OffloadedGradient(args[0], args[0].name_of_parameter, args[0].owner)
        several = "_foreach_" in operation
        own = list(args[0]) if several else [args[0]]
        if operation in _ZEROS:  # zero_grad(set_to_none=False), after a step
            left = [g for g in own if not (isinstance(g, OffloadedGradient) and g.owner.zero_used(g.name_of_parameter))]
            if not left:
                return None if several else own[0]
            args, own = (left if several else left[0], *args[1:]), left
        others = [*args[1:], *(kwargs or {}).values()]
        if any(isinstance(other, (list, tuple)) for other in others):
            others = tree_leaves(others)
        if all(isinstance(g, OffloadedGradient) for g in own) and not any(
            isinstance(other, OffloadedGradient) for other in others
        ):
            if operation in _NORMS and _is_plain_norm(others):
                norms = [g.owner.gradient_norm(g.name_of_parameter) for g in own]
                return norms if several else norms[0]
            if operation in _SCALES | _DIVIDES and len(others) == 1 and _is_number(others[0]):
                factor = _factor(others[0])
                if operation in _DIVIDES:
                    factor = 1 / factor if factor else math.copysign(math.inf, factor)
                for gradient in own:
                    gradient.owner.scale_gradient(gradient.name_of_parameter, factor)
                return None if several else own[0]
        return _on_values(func, args, kwargs or {})


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Perform an operation on the values of gradients, and keep what it writes to them."""
    if func._schema.name in _ADDS and isinstance(args[0], OffloadedGradient) and _accumulates():
        sum_so_far: Any = args[0] if func._schema.name == "aten::add_" else args[0].detach()
        sum_so_far.added = args[1]
        return sum_so_far
    opened: dict[str, tuple[OffloadedGradient, torch.Tensor]] = {}

    def values_of(gradient: OffloadedGradient) -> torch.Tensor:
        name, owner = gradient.name_of_parameter, gradient.owner
        if name not in opened:
            opened[name] = gradient, owner.open_gradient(name)
        return opened[name][1]

    given, named = tree_map_only(OffloadedGradient, values_of, (args, kwargs))
    result = func(*given, **named)
    arguments = zip(func._schema.arguments, (*args, *[None] * len(func._schema.arguments)), strict=False)
    written = {
        leaf.name_of_parameter
        for argument, value in arguments
        if argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write)
        for leaf in tree_leaves(kwargs.get(argument.name, value))
        if isinstance(leaf, OffloadedGradient)
    }
    of_values = {id(values): gradient for gradient, values in opened.values()}
    memory = {
        leaf.untyped_storage()._cdata
        for leaf in tree_leaves(result)
        if isinstance(leaf, torch.Tensor) and id(leaf) not in of_values
    }
    for name, (gradient, values) in opened.items():
        gradient.owner.close_gradient(name, written=name in written, held=values.untyped_storage()._cdata in memory)
    return tree_map_only(torch.Tensor, lambda tensor: of_values.get(id(tensor), tensor), result)


_last_factor: tuple[weakref.ref[torch.Tensor], int, float] | None = None  # a tensor, its version and its value


def _factor(given: Any) -> float:
    """Return a factor as a number. Reading a tensor waits for the device, so the last one read is cached.

    That is until the step, because a write to ``tensor.data`` leaves its version as it is.
    """
    global _last_factor  # noqa: PLW0603 - a cache of one
    if not isinstance(given, torch.Tensor) or given.device.type == "cpu" or given.is_inference():
        return float(given)
    if _last_factor is None or _last_factor[0]() is not given or _last_factor[1] != given._version:
        _last_factor = weakref.ref(given), given._version, float(given)
    return _last_factor[2]


def forget_factor() -> None:
    """Read the next factor anew."""
    global _last_factor  # noqa: PLW0603 - a cache of one
    _last_factor = None


def _accumulates() -> bool:
    """Return whether autograd is adding to the gradient of a parameter."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def _is_number(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return given.numel() == 1 and not given.is_complex()
    return isinstance(given, int | float)


def _is_plain_norm(others: list[Any]) -> bool:
    """Return whether arguments of a norm, without the tensor, mean the 2-norm of all elements."""
    return not others or (
        not isinstance(others[0], torch.dtype)
        and float(others[0]) == 2
        and all(o is None or o is False for o in others[1:])
    )
