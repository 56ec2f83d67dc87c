"""A head that never holds all logits: forward and backward compute the loss in tiles of tokens.

[Note: Tiled logits] Each token has one logit per entry of the vocabulary, and the loss takes several times that memory.
A :class:`TiledHead` returns :class:`TiledLogits`: a tensor subclass that is computed when it is used. It records the
operations that models apply to logits before the loss (conversion, scaling, soft capping, dropping the last position).
``torch.nn.functional.cross_entropy`` then computes a tile of logits at a time. Backward recomputes each tile, which is
one more product. So gradients have the same bits as with whole logits, except the gradient of the head's weight, which
is a sum over tiles. Any other operation computes all logits first.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.callbacks import replace_attribute, same_autocast
from executor.distributed.shards import BindingError
from executor.distributed.vocabulary import RowLosses

Reading = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context in which a head has the weights of one forward. Entering raises OutOfOrderError if they are gone."""


def find_head(model: nn.Module) -> nn.Linear | None:
    """Return the linear layer that computes a model's logits; ``None`` if another kind of layer does, or none."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else getattr(model, "lm_head", None)
    return head if type(head) is nn.Linear else None


def tile_head(
    model: nn.Module,
    num_tokens: int,
    on_backward: Callable[[nn.Module], None] = lambda _head: None,
    on_logits: Callable[[nn.Module], Reading] = lambda _head: contextlib.nullcontext,
) -> Callable[[], None]:
    """Make a model compute its loss in tiles; return a function that restores the model.

    Args:
        model: a model whose head :func:`find_head` finds.
        num_tokens: number of tokens in a tile.
        on_backward: called with the head when backward reaches it.
        on_logits: called with the head in each forward; returns what makes a context, in which it has these weights.

    Raises:
        BindingError: the model has no such head.
    """
    if (head := find_head(model)) is None:
        raise BindingError(
            f"the plan computes the loss in tiles of {num_tokens} tokens, but the model has no torch.nn.Linear as its "
            "output embeddings; plan with --tiles loss as large as the micro-batch"
        )
    return replace_attribute(head, "forward", TiledHead(head, num_tokens, on_backward, on_logits).forward)


Watcher = Callable[[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], Tensor], Tensor]
"""Computes with a head's input: it is given how the plan does, how plain PyTorch does, and the input."""


@final
@dataclasses.dataclass(eq=False)
class TiledHead:
    """Computes a head's logits, a tile at a time.

    Attributes:
        module, num_tokens, on_backward, on_logits: see :func:`tile_head`.
        watcher: computes what is needed of the logits; ``None``: nothing looks on.
    """

    module: nn.Linear
    num_tokens: int
    on_backward: Callable[[nn.Module], None]
    on_logits: Callable[[nn.Module], Reading]
    watcher: Watcher | None = None

    def linear(self, hidden: Tensor) -> Tensor:
        """Return whole logits."""
        return functional.linear(hidden, self.module.weight, self.module.bias)

    def compute(self, planned: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return what the plan computes, under the eyes of the watcher."""

        def reporting(hidden: Tensor) -> Tensor:
            return self._reporting(planned(hidden))

        return reporting(hidden) if self.watcher is None else self.watcher(reporting, plain, hidden)

    def forward(self, hidden: Tensor) -> "TiledLogits":
        """Return logits that are computed when they are used."""
        return TiledLogits(_Recipe(self, hidden, (), self.on_logits(self.module), torch.is_grad_enabled()))

    def _reporting(self, result: Tensor) -> Tensor:
        """Hook a result, so that the callback runs when backward reaches it; return the result."""
        if result.requires_grad:
            result.register_hook(lambda _gradient: self.on_backward(self.module))  # type: ignore[no-untyped-call]
        return result


class _Recipe(NamedTuple):
    """How to compute logits.

    Attributes:
        head: the head.
        hidden: its input, ``[..., width]``.
        steps: functions that follow the head, in order.
        reading: makes a context in which the head has the weights of this forward.
        trains: whether gradients are needed.
    """

    head: TiledHead
    hidden: Tensor
    steps: tuple[Callable[[Tensor], Tensor], ...]
    reading: Reading
    trains: bool

    @property
    def num_logits(self) -> int:
        return self.head.module.weight.shape[0]

    def of(self, hidden: Tensor) -> "TiledLogits":
        return TiledLogits(self._replace(hidden=hidden))

    def then(self, step: Callable[[Tensor], Tensor]) -> "TiledLogits":
        return TiledLogits(self._replace(steps=(*self.steps, step)))

    def after_head(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    def tiles(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield tiles of tensors whose first dimension is the rows."""
        return zip(*(torch.split(tensor, self.head.num_tokens) for tensor in rows), strict=True)


@final
class TiledLogits(Tensor):
    """Logits ``[..., vocabulary]`` that are computed when they are needed; see [Note: Tiled logits]."""

    _recipe: _Recipe
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> "TiledLogits":
        """Make the tensor, with the data type that the steps produce."""
        dtype = recipe.after_head(recipe.hidden.new_empty((0, 1))).dtype
        shape = (*recipe.hidden.shape[:-1], recipe.num_logits)
        self: TiledLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.hidden.device)
        self._recipe, self._whole = recipe, None
        return self

    def __init__(self, recipe: _Recipe) -> None:
        """Do nothing: :meth:`__new__` has initialised it."""

    @property
    def head(self) -> TiledHead:
        """The head that computes it."""
        return self._recipe.head

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        name = getattr(func, "__name__", "")
        if func in _KNOWN_WITHOUT_VALUES or (
            name == "__get__" and getattr(func, "__self__", None) in _KNOWN_WITHOUT_VALUES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if isinstance(first, cls) and first._whole is None and (handler := _HANDLERS.get(name)) is not None:
            result = handler(first, func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*_whole(args), **{key: _whole(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, _types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*_whole(args), **{key: _whole(value) for key, value in (kwargs or {}).items()})

    def whole(self) -> Tensor:
        """Compute all logits at once, and keep them; return them as an ordinary tensor.

        Raises:
            OutOfOrderError: the head's weights are gone.
        """
        if self._whole is None:
            head, recipe = self._recipe.head, self._recipe
            with recipe.reading(), torch.set_grad_enabled(recipe.trains and torch.is_grad_enabled()):
                self._whole = recipe.after_head(head.compute(head.linear, head.linear, recipe.hidden))
        return self._whole

    def row_losses(self, losses: RowLosses, targets: Tensor) -> Tensor:
        """Return the loss of each row of logits ``[rows, vocabulary]``, computed a tile at a time.

        Raises:
            OutOfOrderError: the head's weights are gone.
        """
        head, recipe = self._recipe.head, self._recipe
        with recipe.reading(), torch.set_grad_enabled(recipe.trains and torch.is_grad_enabled()):
            module, kept = head.module, recipe._replace(hidden=recipe.hidden.new_empty(0))

            def planned(hidden: Tensor) -> Tensor:
                result: Tensor = _RowLosses.apply(  # type: ignore[no-untyped-call]
                    hidden, module.weight, module.bias, targets, kept, losses
                )
                return result

            return head.compute(planned, lambda h: losses(kept.after_head(head.linear(h)), targets), recipe.hidden)


class _RowLosses(torch.autograd.Function):
    """The loss of each row, ``[rows]``. The head's weight and bias are arguments, so that they get gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        _bias: Tensor | None,
        targets: Tensor,
        recipe: _Recipe,
        losses: RowLosses,
    ) -> Tensor:
        ctx.recipe, ctx.losses = recipe, losses
        ctx.autocast = same_autocast(hidden)
        ctx.save_for_backward(hidden, targets)
        return torch.cat(
            [
                losses(recipe.after_head(recipe.head.linear(inputs)), wanted)
                for inputs, wanted in recipe.tiles(hidden, targets)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        module = ctx.recipe.head.module
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        parts = (hidden, targets, gradient, hidden if of_hidden is None else of_hidden)
        for inputs, wanted, outer, made in ctx.recipe.tiles(*parts):
            with torch.enable_grad(), ctx.autocast():
                logits = ctx.recipe.head.linear(inputs.detach()).detach().requires_grad_()
                rows = ctx.losses(ctx.recipe.after_head(logits), wanted)
            (of_logits,) = torch.autograd.grad(rows, logits, outer)
            del logits, rows
            if of_hidden is not None:
                torch.mm(of_logits, module.weight, out=made)
            if of_weight is not None:
                torch.addmm(of_weight, of_logits.t(), inputs, out=of_weight)
            elif wants_weight:
                of_weight = of_logits.t() @ inputs
            if wants_bias:
                of_bias = of_logits.sum(0) + (0 if of_bias is None else of_bias)
            del of_logits  # else two tiles would exist at once
        return of_hidden, of_weight, of_bias, None, None, None


def _whole(value: Any) -> Any:
    """Return a value with all tiled logits replaced by ordinary tensors."""
    if isinstance(value, TiledLogits):
        return value.whole()
    if isinstance(value, tuple | list):
        return type(value)(map(_whole, value))
    return value


_KNOWN_WITHOUT_VALUES: Final = frozenset(
    {
        *(torch.is_floating_point, torch.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device),
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
        *(Tensor.shape, Tensor.dtype, Tensor.device, Tensor.layout, Tensor.ndim, Tensor.is_cuda, Tensor.is_meta),
        *(Tensor.requires_grad, Tensor.grad_fn, Tensor.is_leaf),
    }
)
"""Attributes that are known before logits are computed."""


def _elementwise(logits: TiledLogits, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """Record an elementwise function."""
    others = args[1:]  # the step must not hold the logits, and through them the head's input
    if any(
        isinstance(other, Tensor) and (other.numel() != 1 or other.requires_grad)
        for other in (*others, *kwargs.values())
    ):
        return NotImplemented
    return logits._recipe.then(lambda values: func(values, *others, **kwargs))


def _to(logits: TiledLogits, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    where = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    if any(isinstance(value, Tensor) for value in args[1:]) or any(torch.device(d) != logits.device for d in where):
        return NotImplemented
    return _elementwise(logits, func, *args, **kwargs)


def _unchanged(logits: TiledLogits, *_args: Any, **_kwargs: Any) -> TiledLogits:
    return logits


def _detach(logits: TiledLogits, *_args: Any) -> TiledLogits:
    return TiledLogits(logits._recipe._replace(hidden=logits._recipe.hidden.detach(), trains=False))


def _reshape(logits: TiledLogits, _func: object, _self: object, *shape: Any, **kwargs: Any) -> Any:
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or not sizes or isinstance(sizes[0], torch.dtype) or sizes[-1] != logits.shape[-1]:
        return NotImplemented
    hidden = logits._recipe.hidden
    return logits._recipe.of(hidden.reshape(*sizes[:-1], hidden.shape[-1]))


def _flatten(logits: TiledLogits, _func: object, _self: object, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return logits._recipe.of(logits._recipe.hidden.flatten(start_dim, end_dim))


def _split(logits: TiledLogits, _func: object, _self: object, size: Any, dim: int = 0) -> Any:
    if dim % logits.ndim == logits.ndim - 1:
        return NotImplemented
    return tuple(map(logits._recipe.of, torch.split(logits._recipe.hidden, size, dim)))


def _index(logits: TiledLogits, _func: object, _self: object, index: Any) -> Any:
    """Select rows. The index must not change the last dimension."""
    items = index if isinstance(index, tuple) else (index,)
    if any(not (item is Ellipsis or isinstance(item, int | slice | Tensor)) for item in items):
        return NotImplemented
    num_dims = sum(item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1 for item in items)
    last = items[-1]
    reaches_last = num_dims == logits.ndim or any(item is Ellipsis for item in items)
    if reaches_last and (isinstance(last, Tensor) or last not in (Ellipsis, slice(None))):
        return NotImplemented
    return logits._recipe.of(logits._recipe.hidden[index])


def _argmax(logits: TiledLogits, _func: object, _self: object, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % logits.ndim != logits.ndim - 1:
        return NotImplemented
    recipe, head = logits._recipe, logits._recipe.head
    rows = recipe.hidden.detach().flatten(0, -2)
    with recipe.reading(), torch.no_grad():
        best = [recipe.after_head(head.linear(inputs)).argmax(-1) for (inputs,) in recipe.tiles(rows)]
    found = torch.cat(best).view(logits.shape[:-1])
    return found.unsqueeze(-1) if keepdim else found


_CROSS_ENTROPY: Final = inspect.signature(functional.cross_entropy)


def _cross_entropy(logits: TiledLogits, _func: object, *args: Any, **kwargs: Any) -> Any:
    """Compute cross-entropy with class indices as targets, in tiles."""
    bound = _CROSS_ENTROPY.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    targets = given["target"]
    plain = given["weight"] is None and given["size_average"] is given["reduce"] is None
    if not plain or logits.ndim != 2 or targets.ndim != 1 or targets.is_floating_point():
        return NotImplemented
    options = {"ignore_index": given["ignore_index"], "label_smoothing": given["label_smoothing"]}
    rows = logits.row_losses(functools.partial(functional.cross_entropy, reduction="none", **options), targets)
    if given["reduction"] == "none":
        return rows
    if given["reduction"] == "sum":
        return rows.sum()
    return rows.sum() / (targets != given["ignore_index"]).sum()


def _row_losses(logits: TiledLogits, _func: object, _self: object, targets: Tensor, losses: RowLosses) -> Tensor:
    """See :func:`executor.distributed.vocabulary.row_losses`."""
    return logits.row_losses(losses, targets)


_HANDLERS: Final[dict[str, Callable[..., Any]]] = {
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "mul", "div", "tanh", "__mul__", "__rmul__", "__truediv__"),
        _elementwise,
    ),
    "to": _to,
    "contiguous": _unchanged,
    "detach": _detach,
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "split": _split,
    "__getitem__": _index,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
    "row_losses": _row_losses,
}
"""Operations that do not compute all logits. If a handler returns ``NotImplemented``, all logits are computed."""
