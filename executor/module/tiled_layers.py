"""Norms and MLPs that compute a tile of tokens at a time.

[Note: Tiled layers] Norms and MLPs compute each token independently. Their inner tensors are most of a layer's
activations: the MLP of Llama-3-8B and the norm before it save 150 kB for each token in bf16, and backward needs more. A
tiled module saves only its input. For each tile, backward first runs the module's forward again, and then backward. So
inner tensors exist for only one tile at a time. The gradient of a weight is a sum over tiles, rounded after each tile.
All other gradients are computed token by token, as without tiles.

An autograd node of its own saves the input, before the module computes. So if a layer is recomputed
(``torch.utils.checkpoint``), the recomputation ends before its MLP, which backward runs again anyway. Backward does not
need the output of an MLP's last product, so that product is not recomputed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.stateless import _reparametrize_module

from executor.callbacks import Saved, forward_of, replace_attribute, same_autocast
from executor.memory.recompute_cache import running_again


def tile_modules(modules: Iterable[nn.Module], num_tokens: int) -> list[Callable[[], None]]:
    """Make modules compute a tile at a time; return functions that restore them.

    Args:
        modules: each maps ``[..., width]`` to a tensor with the same leading sizes, treats every vector independently,
            and draws no random numbers.
        num_tokens: number of vectors in a tile.
    """
    return [replace_attribute(module, "forward", TiledModule(module, num_tokens).forward) for module in modules]


@final
class TiledModule:
    """Computes one module, a tile at a time; see [Note: Tiled layers]."""

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.run: Callable[[Tensor], Tensor] = forward_of(module)
        last = getattr(module, "down_proj", None)
        self._last = last if type(last) is nn.Linear else None
        self._parameters = dict(module.named_parameters())
        self._reparametrized = functools.partial(_reparametrize_module, module, tie_weights=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the module's output for ``[..., width]``."""
        if hidden.shape[:-1].numel() <= self.num_tokens:
            return self.run(hidden)
        trained = {name: p for name, p in self._parameters.items() if p.requires_grad}  # some may be frozen later
        if not torch.is_grad_enabled() or not (hidden.requires_grad or trained):
            return self.in_tiles(hidden)
        anchor = hidden.new_empty(0).requires_grad_()  # makes a node that saves, even if the input needs no gradient
        saved: Any = Saved.apply(hidden, anchor)  # type: ignore[no-untyped-call]
        result: Tensor = _Tiles.apply(  # type: ignore[no-untyped-call]
            *saved, hidden.requires_grad, self, tuple(trained), *trained.values()
        )
        return result

    def in_tiles(self, hidden: Tensor) -> Tensor:
        """Compute without gradients."""
        result: Tensor | None = None
        start = 0
        with running_again():
            for inputs in torch.split(hidden.detach().flatten(0, -2), self.num_tokens):
                made = self.run(inputs)
                if result is None:
                    result = made.new_empty((*hidden.shape[:-1], made.shape[-1]))
                result.view(-1, made.shape[-1])[start : start + len(made)] = made
                start += len(made)
        assert result is not None
        return result

    @contextlib.contextmanager
    def for_gradients(self, trained: Mapping[str, Tensor], *, converts: bool) -> Iterator[list[Tensor]]:
        """Return a context for the module's computation in backward. It yields aliases of parameters, without hooks.

        Args:
            trained: the trained parameters, by name.
            converts: whether products convert their inputs (autocast).
        """
        aliases = {name: parameter.detach().requires_grad_() for name, parameter in trained.items()}
        with self._reparametrized(aliases), contextlib.ExitStack() as stack:
            if self._last is not None and not converts:
                only_backward = functools.partial(_only_backward, self._last)
                stack.callback(replace_attribute(self._last, "forward", only_backward))
            yield list(aliases.values())


class _Tiles(torch.autograd.Function):
    """A module's output. Its parameters are arguments, so that they get gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        saved: Tensor,
        anchor: Tensor,
        wants_hidden: bool,
        tiled: TiledModule,
        names: tuple[str, ...],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.autocast, ctx.converts = same_autocast(saved), torch.is_autocast_enabled(saved.device.type)
        ctx.saved, ctx.wants_hidden, ctx.tiled = anchor.grad_fn, wants_hidden, tiled
        ctx.trained = dict(zip(names, parameters, strict=True))
        return tiled.in_tiles(saved)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tiled: TiledModule = ctx.tiled
        hidden, _ = ctx.saved.saved_tensors
        rows = hidden.flatten(0, -2)
        of_hidden = torch.empty_like(rows) if ctx.wants_hidden else None
        sums: list[Tensor | None] = [None] * len(ctx.trained)
        outer = gradient.reshape(len(rows), gradient.shape[-1])
        with tiled.for_gradients(ctx.trained, converts=ctx.converts) as aliases:
            for start in range(0, len(rows), tiled.num_tokens):
                end = start + tiled.num_tokens
                inputs = rows[start:end].detach().requires_grad_(ctx.wants_hidden)
                with torch.enable_grad(), ctx.autocast():
                    # Some module hooks (those of torch.utils.flop_counter) refuse leaves as inputs.
                    made = tiled.run(inputs.view_as(inputs))
                wanted = [inputs, *aliases] if ctx.wants_hidden else aliases
                found = list(torch.autograd.grad(made, wanted, outer[start:end], allow_unused=True))
                del made
                if of_hidden is not None:
                    of_hidden[start:end] = found.pop(0)
                _add(found, sums)
                del found, inputs  # else two tiles would exist at once
        return None if of_hidden is None else of_hidden.view_as(hidden), None, None, None, None, *sums


def _add(values: Iterable[Tensor | None], sums: list[Tensor | None]) -> None:
    for at, value in enumerate(values):
        if (before := sums[at]) is None:
            sums[at] = value
        elif value is not None:
            before += value


def _only_backward(module: nn.Linear, inputs: Tensor) -> Tensor:
    """Return a linear layer's output without values. Its backward is that of the layer."""
    if not torch.is_grad_enabled():
        return functional.linear(inputs, module.weight, module.bias)
    result: Tensor = _OnlyBackward.apply(inputs, module.weight, module.bias)  # type: ignore[no-untyped-call]
    return result


class _OnlyBackward(torch.autograd.Function):
    """The backward of a linear layer; its output ``[rows, width]`` has no values."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs.new_empty(()).expand(len(inputs), len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        wants_inputs, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            gradient @ weight if wants_inputs else None,
            gradient.t() @ inputs if wants_weight else None,
            gradient.sum(0) if wants_bias else None,
        )
