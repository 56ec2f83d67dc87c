"""A head that never holds all logits: forward and backward compute the loss in tiles of tokens.

[Note: Tiled logits] Each token has one logit per entry of the vocabulary, and the loss takes several times that memory.
A :class:`TiledHead` returns :class:`TiledLogits`: a tensor subclass that is computed when it is used. It records the
operations that models apply to logits before the loss (conversion, scaling, soft capping, dropping the last position).
``torch.nn.functional.cross_entropy`` then computes a tile of logits at a time. Any other operation computes all logits
first.

If the loss is one number, each tile makes its gradients at once, as Liger's fused loss does (arXiv 2410.10989).
Backward multiplies them by the gradient of the loss, so no logits are made twice. That rounds them once more, unless
the loss's gradient is a power of two. For losses of rows, backward computes each tile again, which is one more product;
and in fp16, whose gradients are lost without the loss's scale. Gradients then have the same bits as with whole logits.
In both ways, the gradient of the head's weight is a sum over tiles.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
        return TiledLogits(self, self.on_logits(self.module), hidden, trains=torch.is_grad_enabled())

    def tiles(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield tiles of tensors whose first dimension is the rows."""
        return zip(*(torch.split(tensor, self.num_tokens or max(len(tensor), 1)) for tensor in rows), strict=True)


_Step = Callable[[Tensor], Tensor]


@final
class TiledLogits(LazyRows):
    """Logits ``[..., vocabulary]`` that are computed when they are needed; see [Note: Tiled logits].

    Attributes:
        head: the head that computes it.
        reading: makes a context in which the head has the weights of this forward.
    """

    head: TiledHead
    reading: Reading
    _hidden: Tensor
    _steps: tuple[_Step, ...]
    _trains: bool
    _whole: Tensor | None

    @staticmethod
    def __new__(
        cls, head: TiledHead, reading: Reading, hidden: Tensor, steps: tuple[_Step, ...] = (), *, trains: bool
    ) -> "TiledLogits":
        """Make the tensor, with the data type that the steps produce.

        ``hidden`` is the head's input, ``[..., width]``, ``steps`` are functions that follow the head, in order, and
        ``trains`` says whether gradients are needed.
        """
        dtype = _after(steps, hidden.new_empty((0, 1))).dtype
        shape = (*hidden.shape[:-1], head.module.weight.shape[0])
        self: TiledLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        self.head, self.reading, self._hidden, self._steps, self._trains = head, reading, hidden, steps, trains
        self._whole = None
        return self

    def __init__(self, *_: object, **__: object) -> None:
        """Do nothing: :meth:`__new__` has initialised it."""

    @property
    def stand_in(self) -> Tensor:
        """The input of the head."""
        return self._hidden

    def of(self, stand_in: Tensor) -> "TiledLogits":
        """Return the logits of other rows of that input."""
        return TiledLogits(self.head, self.reading, stand_in, self._steps, trains=self._trains)

    def then(self, step: _Step) -> "TiledLogits":
        """Return what a function makes of the logits."""
        return TiledLogits(self.head, self.reading, self._hidden, (*self._steps, step), trains=self._trains)

    def detached(self) -> "TiledLogits":
        """Return the logits without gradients."""
        return TiledLogits(self.head, self.reading, self._hidden.detach(), self._steps, trains=False)

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
            head = self.head
            with self.reading(), torch.set_grad_enabled(self._trains):
                self._whole = _after(self._steps, head.compute(head.linear, head.linear, in_values(self._hidden)))
        return self._whole

    def largest(self) -> Tensor:
        """Return the index of the largest logit of each row, in tiles."""
        rows, head = in_values(self._hidden.detach()).flatten(0, -2), self.head
        with self.reading(), torch.no_grad():
            best = [_after(self._steps, head.linear(inputs)).argmax(-1) for (inputs,) in head.tiles(rows)]
        return torch.cat(best).view(self.shape[:-1])

    def loss(self, losses: RowLosses, targets: Tensor, count: Tensor | int | None = None) -> Tensor:
        """Return the loss of each row of logits ``[rows, vocabulary]``, or their sum over ``count``, in tiles.

        Raises:
            OutOfOrderError: the head's weights are gone.
        """
        with self.reading(), torch.set_grad_enabled(self._trains and torch.is_grad_enabled()):
            hidden, of_rows = self._hidden, functools.partial(self._of_rows, losses=losses)
            if count is not None and self.head.num_tokens is not None and not _in_half(hidden):
                at_once = functools.partial(of_rows, count=count)
                return hidden.summed(at_once, targets) if isinstance(hidden, SharedHidden) else at_once(hidden, targets)
            rows = hidden.row_by_row(of_rows, targets) if isinstance(hidden, SharedHidden) else of_rows(hidden, targets)
        return rows if count is None else rows.sum() / count

    def _of_rows(
        self, hidden: Tensor, targets: Tensor, *, losses: RowLosses, count: Tensor | int | None = None
    ) -> Tensor:
        head, steps, dtype = self.head, self._steps, self.dtype  # not this tensor, which has the whole input

        def of_logits(logits: Tensor, targets: Tensor) -> Tensor:
            return losses(_after(steps, logits), targets)

        def plain(hidden: Tensor) -> Tensor:
            rows = of_logits(head.linear(hidden), targets)
            return rows if count is None else rows.sum() / count

        def tiled(hidden: Tensor) -> Tensor:
            weight, bias = head.module.weight, head.module.bias
            result: Tensor
            if count is None:
                result = _RowLosses.apply(hidden, weight, bias, targets, head, of_logits)  # type: ignore[no-untyped-call]
            else:
                outer = torch.ones((), dtype=dtype, device=hidden.device) / count
                result = _SumOfLosses.apply(  # type: ignore[no-untyped-call]
                    hidden, weight, bias, targets, head, of_logits, count, outer
                )
            return result

        return head.compute(plain if head.num_tokens is None else tiled, plain, hidden)


def _after(steps: tuple[_Step, ...], logits: Tensor) -> Tensor:
    for step in steps:
        logits = step(logits)
    return logits


def _in_half(hidden: Tensor) -> bool:
    """Return whether a head computes in fp16."""
    kind = hidden.device.type
    in_autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16
    return in_autocast or hidden.dtype is torch.float16


class _RowLosses(torch.autograd.Function):
    """The loss of each row, ``[rows]``. The head's weight and bias are arguments, so that they get gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        _bias: Tensor | None,
        targets: Tensor,
        head: TiledHead,
        losses: RowLosses,
    ) -> Tensor:
        ctx.head, ctx.losses = head, losses
        ctx.autocast = same_autocast(hidden)
        ctx.save_for_backward(hidden, targets)
        return torch.cat([losses(head.linear(inputs), wanted) for inputs, wanted in head.tiles(hidden, targets)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets = ctx.saved_tensors
        with ctx.autocast():
            _, made = _differentiated(ctx, hidden, targets, gradient, ctx.head, ctx.losses)
        return *made, None, None, None


class _SumOfLosses(torch.autograd.Function):
    """The sum of all rows' losses over a number. Forward makes the gradients too, but for that of the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        _weight: Tensor,
        _bias: Tensor | None,
        targets: Tensor,
        head: TiledHead,
        losses: RowLosses,
        count: Tensor | int,
        outer: Tensor,
    ) -> Tensor:
        rows, made = _differentiated(ctx, hidden, targets, outer.expand(len(hidden)), head, losses)
        ctx.save_for_backward(*made)
        return rows.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale = torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else Tensor.mul_
        # Views, because autograd copies a gradient that it does not alone refer to.
        made = [None if each is None else scale(each, gradient).view_as(each) for each in ctx.saved_tensors]
        return *made, None, None, None, None, None


def _differentiated(
    ctx: Any, hidden: Tensor, targets: Tensor, outer: Tensor, head: TiledHead, losses: RowLosses
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the losses of rows, and the gradients of the head's input, weight and bias, as far as they are wanted.

    Args:
        ctx: of a function whose first arguments these are.
        hidden: the head's input, ``[rows, width]``.
        targets: class indices, ``[rows]``.
        outer: gradients of the losses, ``[rows]``.
        head: computes logits.
        losses: of rows, from what the head computes and targets.
    """
    weight, wants = head.module.weight, ctx.needs_input_grad[:3]
    of_hidden = torch.empty_like(hidden) if wants[0] else None
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    found = []
    # What autograd saves of a tile is no activation of the plan's.
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        for inputs, wanted, of_rows, made in head.tiles(
            hidden, targets, outer, hidden if of_hidden is None else of_hidden
        ):
            with torch.enable_grad():
                logits = head.linear(inputs.detach()).detach().requires_grad_()
                rows = losses(logits, wanted)
            found.append(rows.detach())
            (of_logits,) = torch.autograd.grad(rows, logits, of_rows)
            del logits, rows
            own, weight = inputs.to(of_logits.dtype), weight.to(of_logits.dtype)  # autocast's, for its products
            if of_hidden is not None and of_hidden.dtype is of_logits.dtype:
                torch.mm(of_logits, weight, out=made)
            elif of_hidden is not None:
                made.copy_(of_logits @ weight)
            if of_weight is not None:
                torch.addmm(of_weight, of_logits.t(), own, out=of_weight)
            elif wants[1]:
                of_weight = of_logits.t() @ own
            if wants[2]:
                of_bias = of_logits.sum(0) + (0 if of_bias is None else of_bias)
            del of_logits  # else two tiles would exist at once
    return torch.cat(found), (of_hidden, of_weight, of_bias)


def _elementwise(logits: TiledLogits, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    """Record an elementwise function."""
    others = args[1:]  # the step must not hold the logits, and through them the head's input
    if any(
        isinstance(other, Tensor) and (other.numel() != 1 or other.requires_grad)
        for other in (*others, *kwargs.values())
    ):
        return NotImplemented
    return logits.then(lambda values: func(values, *others, **kwargs))


def _to(logits: TiledLogits, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    where = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, str | torch.device)]
    if any(isinstance(value, Tensor) for value in args[1:]) or any(torch.device(d) != logits.device for d in where):
        return NotImplemented
    return _elementwise(logits, func, *args, **kwargs)


def _detach(logits: TiledLogits, *_args: Any) -> TiledLogits:
    return logits.detached()


def _argmax(logits: TiledLogits, _func: object, _self: object, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim is None or dim % logits.ndim != logits.ndim - 1:
        return NotImplemented
    found = logits.largest()
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
    count = None if given["reduction"] == "none" else targets.new_ones(())
    if given["reduction"] == "mean":
        count = (targets != given["ignore_index"]).sum()
    return logits.loss(functools.partial(functional.cross_entropy, reduction="none", **options), targets, count)


def _summed(logits: TiledLogits, _func: object, _self: object, targets: Tensor, *args: Any) -> Tensor:
    """See :func:`executor.distributed.vocabulary.summed`."""
    losses, count = args
    return logits.loss(losses, targets, count)


TiledLogits.handlers = CHOOSING | {
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "mul", "div", "tanh", "__mul__", "__rmul__", "__truediv__"),
        _elementwise,
    ),
    "to": _to,
    "detach": _detach,
    "argmax": _argmax,
    "cross_entropy": _cross_entropy,
    "summed": _summed,
}
