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
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from executor.callbacks import replace_attribute, same_autocast
from executor.distributed.lazy_rows import CHOOSING, LazyRows, in_values
from executor.distributed.sequences import SharedHidden
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
    num_tokens: int | None,
    on_backward: Callable[[nn.Module], None] = lambda _head: None,
    on_logits: Callable[[nn.Module], Reading] = lambda _head: contextlib.nullcontext,
) -> Callable[[], None]:
    """Make a model compute its loss in tiles; return a function that restores the model.

    Args:
        model: a model whose head :func:`find_head` finds.
        num_tokens: number of tokens in a tile; ``None``: all that the head is given. Then the logits are kept for
            backward, as without tiles.
        on_backward: called with the head when backward reaches it.
        on_logits: called with the head in each forward; returns what makes a context, in which it has these weights.

    Raises:
        BindingError: the model has no such head.
    """
    if (head := find_head(model)) is None:
        way, remedy = f"in tiles of {num_tokens} tokens", "--tiles loss as large as the micro-batch"
        if num_tokens is None:
            way, remedy = "where ranks share sequences", "--parallel context=1"
        raise BindingError(
            f"the plan computes the loss {way}, but the model has no torch.nn.Linear as its output embeddings; plan "
            f"with {remedy}"
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
    num_tokens: int | None
    on_backward: Callable[[nn.Module], None]
    on_logits: Callable[[nn.Module], Reading]
    watcher: Watcher | None = None

    def linear(self, hidden: Tensor) -> Tensor:
        """Return whole logits."""
        return functional.linear(hidden, self.module.weight, self.module.bias)

    def compute(self, planned: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Return what the plan computes, under the eyes of the watcher."""

        def reporting(hidden: Tensor) -> Tensor:
            result = planned(hidden)
            if result.requires_grad:
                result.register_hook(lambda _gradient: self.on_backward(self.module))  # type: ignore[no-untyped-call]
            return result

        return reporting(hidden) if self.watcher is None else self.watcher(reporting, plain, hidden)

    def forward(self, hidden: Tensor) -> "TiledLogits":
        """Return logits that are computed when they are used."""
        return TiledLogits(_Recipe(self, hidden, (), self.on_logits(self.module), torch.is_grad_enabled()))


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

    def then(self, step: Callable[[Tensor], Tensor]) -> "TiledLogits":
        return TiledLogits(self._replace(steps=(*self.steps, step)))

    def after_head(self, logits: Tensor) -> Tensor:
        for step in self.steps:
            logits = step(logits)
        return logits

    def tiles(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield tiles of tensors whose first dimension is the rows."""
        return zip(*(torch.split(tensor, self.head.num_tokens or max(len(tensor), 1)) for tensor in rows), strict=True)


@final
class TiledLogits(LazyRows):
    """Logits ``[..., vocabulary]`` that are computed when they are needed; see [Note: Tiled logits]."""

    _recipe: _Recipe
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> "TiledLogits":
        """Make the tensor, with the data type that the steps produce."""
        dtype = recipe.after_head(recipe.hidden.new_empty((0, 1))).dtype
        shape = (*recipe.hidden.shape[:-1], recipe.head.module.weight.shape[0])
        self: TiledLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.hidden.device)
        self._recipe, self._whole = recipe, None
        return self

    def __init__(self, recipe: _Recipe) -> None:
        """Do nothing: :meth:`__new__` has initialised it."""

    @property
    def head(self) -> TiledHead:
        """The head that computes it."""
        return self._recipe.head

    @property
    def stand_in(self) -> Tensor:
        """The input of the head."""
        return self._recipe.hidden

    def of(self, stand_in: Tensor) -> "TiledLogits":
        """Return the logits of other rows of that input."""
        return TiledLogits(self._recipe._replace(hidden=stand_in))

    @property
    def is_computed(self) -> bool:
        """Whether they are kept whole."""
        return self._whole is not None

    def whole(self) -> Tensor:
        """Compute all logits at once, and keep them, with their gradients: who looks first may want none.

        Returns:
            An ordinary tensor.

        Raises:
            OutOfOrderError: the head's weights are gone.
        """
        if self._whole is None:
            head, recipe = self._recipe.head, self._recipe
            with recipe.reading(), torch.set_grad_enabled(recipe.trains):
                self._whole = recipe.after_head(head.compute(head.linear, head.linear, in_values(recipe.hidden)))
        return self._whole

    def row_losses(self, losses: RowLosses, targets: Tensor) -> Tensor:
        """Return the loss of each row of logits ``[rows, vocabulary]``, computed a tile at a time.

        Raises:
            OutOfOrderError: the head's weights are gone.
        """
        head, recipe = self._recipe.head, self._recipe
        with recipe.reading(), torch.set_grad_enabled(recipe.trains and torch.is_grad_enabled()):
            module, kept = head.module, recipe._replace(hidden=recipe.hidden.new_empty(0))

            def of_rows(hidden: Tensor, targets: Tensor) -> Tensor:
                def plain(hidden: Tensor) -> Tensor:
                    return losses(kept.after_head(head.linear(hidden)), targets)

                def tiled(hidden: Tensor) -> Tensor:
                    result: Tensor = _RowLosses.apply(  # type: ignore[no-untyped-call]
                        hidden, module.weight, module.bias, targets, kept, losses
                    )
                    return result

                return head.compute(plain if head.num_tokens is None else tiled, plain, hidden)

            if isinstance(recipe.hidden, SharedHidden):
                return recipe.hidden.row_by_row(of_rows, targets)
            return of_rows(recipe.hidden, targets)


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


def _detach(logits: TiledLogits, *_args: Any) -> TiledLogits:
    return TiledLogits(logits._recipe._replace(hidden=logits._recipe.hidden.detach(), trains=False))


def _argmax(logits: TiledLogits, _func: object, _self: object, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % logits.ndim != logits.ndim - 1:
        return NotImplemented
    recipe, head = logits._recipe, logits._recipe.head
    rows = in_values(recipe.hidden.detach()).flatten(0, -2)
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


TiledLogits.handlers = CHOOSING | {
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "mul", "div", "tanh", "__mul__", "__rmul__", "__truediv__"),
        _elementwise,
    ),
    "to": _to,
    "detach": _detach,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
    "row_losses": _row_losses,
}
