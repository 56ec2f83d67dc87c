"""Layers that tensor-parallel ranks share: what their modules exchange.

[Note: Shared layers] Which part of which weight a rank has follows from the plan ([Note: Shares]); with it, the user's
own modules compute the rank's share of heads, channels and vocabulary. What is added is what the planner counts inside
units, [Note: Tensor parallelism] in :mod:`planner.models.sharding`: the input of column-parallel modules is spread (its
gradient is summed), once for all that take the same; what row-parallel modules make is summed before their bias is
added. Everything between is the same on all ranks, to the bit, because sums are. Weights are plain tensors and
collectives our own, rather than ``DTensor``: a unit's slot has one flat range whatever is cut in it (joint and padded
parameters have no placement), the user's parameters stay the objects that they are, and a rank that waits for a
collective notices when another one fails.
"""

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from executor.distributed.collectives import copy_to_group, reduce_from_group
from executor.distributed.groups import Group
from executor.distributed.products import number_of, summed_product
from executor.distributed.shards import BindingError, Share
from executor.distributed.vocabulary import Head, embed
from planner.graph import Operator, Pattern, Unit

_COUNTS = ("num_heads", "num_key_value_heads", "split_size")  # of attention modules: of heads, or of their channels

Undo = Callable[[], None]


Outside = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same, and that ``torch.compile`` leaves alone."""


def share_layers(
    model: nn.Module, units: tuple[Unit, ...], shares: Mapping[str, Share], group: Group, outside: Outside
) -> list[Undo]:
    """Make modules compute this rank's share of every layer, and exchange what they must; return what undoes it.

    Args:
        model: whose weights are shares.
        units: its units.
        shares: by the names that the units use.
        group: who shares the layers.
        outside: what is exchanged is not for compilers.

    Raises:
        BindingError: a module cannot be shared.
    """
    undo: list[Undo] = []
    banks: dict[nn.Module, None] = {}  # of experts: one may fall into several units
    for operator in (operator for unit in units for operator in unit.operators):
        found = [shares[name] for name in operator.parameter_names]
        if operator.kind == "head":
            head = model.get_submodule(operator.name)
            undo += _spread_input([head], group, outside)
            undo += Head(model, found[0], group).bind(model, head)
        elif operator.kind == "experts":
            banks[_owner(model, found[0])] = None
        elif operator.pattern is Pattern.COLUMN:
            undo += _share_columns(model, operator, found, group, outside)
        elif operator.kind == "embedding" and operator.pattern is Pattern.ROW:
            module = _owner(model, found[0])
            undo.append(replace_forward(module, embed(module, found[0], group)))
        elif operator.pattern is Pattern.ROW:
            module = _owner(model, found[0])
            undo.append(replace_forward(module, outside(_row(module, found[0], group))))
    return undo + [undone for bank in banks for undone in _share_experts(bank, group, outside)]


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Undo:
    """Have a module run another forward; return what undoes it."""
    module.forward = forward

    def undo() -> None:
        del module.forward

    return undo


def _owner(model: nn.Module, share: Share) -> nn.Module:
    return model.get_submodule(share.name.rpartition(".")[0])


def _share_columns(
    model: nn.Module, operator: Operator, shares: list[Share], group: Group, outside: Outside
) -> list[Undo]:
    """Let modules make a share of their outputs."""
    undo: list[Undo] = []
    modules = list(dict.fromkeys(_owner(model, share) for share in shares if share.dim is not None))
    ranks = shares[0].mesh.degrees.tensor_parallel
    for module in modules:
        undo += _divide(module, ("nf",), ranks)  # of a Conv1D: its outputs
    if operator.kind == "qkv":
        undo += _divide(model.get_submodule(operator.name.rpartition(".")[0]), _COUNTS, ranks)
    undo += _spread_input(modules, group, outside)
    # What each rank has whole among these (norms of heads) works on the rank's heads, so its gradient is a part.
    return undo + [_sum_gradient(share.leaf, group) for share in shares if share.dim is None]


def _divide(module: nn.Module, names: tuple[str, ...], ranks: int) -> list[Undo]:
    there = {name: getattr(module, name) for name in names if hasattr(module, name)}
    for name, count in there.items():
        assert count % ranks == 0  # or the planner had refused it
        setattr(module, name, count // ranks)

    def undo() -> None:
        for name, count in there.items():
            setattr(module, name, count)

    return [undo]


def _spread_input(modules: list[nn.Module], group: Group, outside: Outside) -> list[Undo]:
    hook = outside(_Spread(modules[-1], group).before)
    return [module.register_forward_pre_hook(hook).remove for module in modules]


@final
class _Spread:
    """Spreads what several modules take, once for all of them; ``last`` is the last to take it."""

    def __init__(self, last: nn.Module, group: Group) -> None:
        self._last = last
        self._group = group
        self._given: torch.Tensor | None = None
        self._made: torch.Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, *others = args
        if self._given is not values or self._made is None:
            self._given, self._made = values, copy_to_group(values, self._group)
        made = self._made
        if module is self._last:
            self._given = self._made = None
        return made, *others


def _row(module: Any, weight: Share, group: Group) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a module that makes a part of every output from a share of the inputs.

    Raises:
        BindingError: it is no plain product.
    """
    # ``torch.nn.Linear`` keeps (outputs, inputs), Conv1D of transformers (inputs, outputs).
    if type(module).__name__ not in {"Linear", "Conv1D"} or weight.dim is None:
        raise BindingError(
            f"{weight.name} belongs to a {type(module).__name__}, which tensor-parallel ranks cannot share, but only "
            "torch.nn.Linear and Conv1D of transformers; plan with --tensor-parallel 1"
        )
    by_columns = weight.dim == 0
    number = number_of(group)

    def forward(values: torch.Tensor) -> torch.Tensor:
        matrix = module.weight if by_columns else module.weight.t()
        return summed_product(values, matrix, module.bias, number)

    return forward


def _share_experts(module: nn.Module, group: Group, outside: Outside) -> list[Undo]:
    """Let experts compute with a share of their channels: the gradient of routing weights is then a part, too."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, chosen, weights = args
        return copy_to_group(values, group), chosen, copy_to_group(weights, group)

    def after(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(result, group)

    return [
        module.register_forward_pre_hook(outside(before)).remove,
        module.register_forward_hook(outside(after)).remove,
    ]


def _sum_gradient(leaf: nn.Parameter, group: Group) -> Undo:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    trains = leaf.requires_grad
    leaf.requires_grad_(True)  # it may be thawed later
    remove: Undo = leaf.register_hook(hook).remove  # type: ignore[no-untyped-call]
    leaf.requires_grad_(trains)
    return remove
