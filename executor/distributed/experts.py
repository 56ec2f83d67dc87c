"""Experts that are divided over several units or ranks.

``transformers`` keeps all experts of a layer in two parameters, and computes them in one
module. If these experts are divided over units or ranks, this module's forward is replaced by one with the same
arithmetic (``grouped_mm``). Tokens are sorted by expert. The experts of each unit compute as one task of the schedule,
unit after unit. Expert-parallel ranks first exchange the numbers of tokens for each other's experts, then the tokens,
and finally the experts' outputs. An expert without tokens computes zero rows, so its gradient is zero, as if all
experts were one parameter.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import nn

from executor.callbacks import ModuleCallbacks, in_backward, replace_attribute
from executor.distributed.collectives import all_to_all
from executor.distributed.groups import Group
from executor.distributed.products import grouped_product
from executor.distributed.shards import BindingError, ParameterShard
from executor.distributed.tensor_parallel import Undo
from planner.graph import Unit

_Banks = dict[str, tuple[ParameterShard, ParameterShard]]
"""The experts of a layer, by the name of the unit that has them: ``[experts, 2 * ffn, hidden]`` of gate and up, and
``[experts, hidden, ffn]`` of down."""


def split_experts(
    model: nn.Module,
    units: tuple[Unit, ...],
    shards: Mapping[str, ParameterShard],
    group: Group | None,
    callbacks: ModuleCallbacks,
) -> list[Undo]:
    """Make experts compute unit by unit, each on its rank; return functions that restore their modules.

    Keys of ``shards`` are the units' names of parameters. ``group`` is ``None`` without expert parallelism.

    Raises:
        BindingError: the experts differ from those of ``transformers``.
    """
    banks: dict[str, _Banks] = {}
    before: dict[str, str] = {}  # the unit that dispatches tokens to the experts of a layer
    sender = ""
    for unit, operator in ((u, operator) for u in units for operator in u.operators):
        if operator.kind == "dispatch":
            sender = unit.name
        found = [shards[spec.name] for spec in operator.parameters]
        if operator.kind != "experts" or found[0].rows is None:
            continue
        path = found[0].name.rpartition(".")[0]
        of = {shard.name.rpartition(".")[2]: shard for shard in found}
        banks.setdefault(path, {})[unit.name] = of["gate_up_proj"], of["down_proj"]
        before[path] = sender
    undo = []
    group = group if group is not None and group.size > 1 else None
    for path, of_layer in banks.items():
        module = model.get_submodule(path)
        _check(path, module, of_layer)
        undo.append(replace_attribute(module, "forward", _Experts(module, of_layer, before[path], group, callbacks)))
    return undo


def _check(path: str, module: nn.Module, banks: _Banks) -> None:
    for shard in itertools.chain(*banks.values()):
        if shard.whole._backward_hooks:
            raise BindingError(
                f"{shard.name} has a hook, which would never run, because its experts are units of their own; remove "
                "it, or plan with --parallel expert-units=1 --parallel expert=1"
            )
    strange = [name for name in ("has_bias", "is_transposed", "has_post_expert_norm") if getattr(module, name, False)]
    if strange or not getattr(module, "has_gate", True) or not hasattr(module, "act_fn"):
        raise BindingError(
            f"{path} ({type(module).__name__}) has experts that are not two products with a gate, so they cannot be "
            "units of their own; plan with --parallel expert-units=1 --parallel expert=1"
        )


@final
@dataclasses.dataclass(frozen=True)
class _Experts:
    """The forward of a module of experts. ``_group`` is ``None`` if it has one rank."""

    _module: nn.Module
    _banks: _Banks
    _before: str
    _group: Group | None
    _callbacks: ModuleCallbacks

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each token's sum of experts' outputs, weighted by its routing weights, ``[tokens, hidden]``."""
        num_tokens, top = top_k_index.shape
        ids, order = torch.sort(top_k_index.reshape(-1))
        num_ranks = self._group.size if self._group else 1
        counts = torch.bincount(ids, minlength=num_ranks * self._num_own)
        visits = hidden_states[order // top]
        made = self._compute_on_all_ranks(visits, counts) if self._group else self._compute(visits, counts.tolist())
        weighted = made * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        weighted = weighted[_inverse(order)]
        result = weighted.view(num_tokens, top, -1).sum(1).to(hidden_states.dtype)
        self._mark_backward(next(reversed(self._banks)), result)
        return result

    @property
    def _num_own(self) -> int:
        """Number of this rank's experts."""
        return max(_rows(gate_up)[1] for gate_up, _ in self._banks.values())

    def _compute_on_all_ranks(self, visits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Send tokens to the ranks of their experts, and receive the outputs."""
        assert self._group is not None
        num_own, num_ranks = self._num_own, self._group.size
        every = [num_own] * num_ranks
        theirs = torch.empty_like(counts)  # tokens of every rank for every expert of this one
        self._group.all_to_all(theirs, counts, every, every)
        num_sent, num_received = torch.stack((counts, theirs)).view(2, num_ranks, -1).sum(-1).tolist()
        experts = torch.arange(num_own, device=counts.device).repeat(num_ranks)
        order = torch.sort(experts.repeat_interleave(theirs), stable=True).indices
        received = all_to_all(visits, self._group, num_sent, num_received)[order]
        made = self._compute(received, theirs.view(num_ranks, -1).sum(0).tolist())
        return all_to_all(made[_inverse(order)], self._group, num_received, num_sent)

    def _compute(self, visits: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the outputs of this rank's experts.

        Tokens are sorted by expert; ``counts`` has the number for each.
        """
        self._mark_backward(self._before, visits)
        starts = [0, *itertools.accumulate(counts)]
        made = []
        for unit, (gate_up, down) in self._banks.items():
            self._callbacks.on_forward(unit)
            first, stop = _rows(gate_up)
            own = visits[starts[first] : starts[stop]]
            made.append(self._apply(_trained(gate_up), _trained(down), own, counts[first:stop]))
            self._mark_backward(unit, made[-1])
        return torch.cat(made)

    def _apply(
        self, gate_up: torch.Tensor, down: torch.Tensor, visits: torch.Tensor, sizes: Sequence[int]
    ) -> torch.Tensor:
        gate, up = grouped_product(visits, gate_up, sizes).chunk(2, dim=-1)
        made: torch.Tensor = grouped_product(self._module.act_fn(gate) * up, down, sizes)  # type: ignore[operator]
        return made

    def _mark_backward(self, unit: str, values: torch.Tensor) -> None:
        if values.requires_grad and torch.is_grad_enabled() and not in_backward():
            values.register_hook(lambda _gradient: self._callbacks.on_backward(unit))  # type: ignore[no-untyped-call]


def _trained(shard: ParameterShard) -> torch.Tensor:
    return shard.leaf if shard.trains else shard.leaf.detach()


def _rows(shard: ParameterShard) -> tuple[int, int]:
    """Return the range of this rank's experts that a shard has."""
    assert shard.rows is not None
    return shard.rows


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
