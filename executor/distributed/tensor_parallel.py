"""Tensor parallelism: the collectives inside a model's modules.

The plan decides which shard of each weight a rank has ([Note: Tensor-parallel shards]). With
these shards the user's own modules compute the rank's heads, channels and part of the vocabulary. This module adds the
collectives that the planner counts inside units ([Note: Tensor parallelism] in :mod:`planner.models.sharding`). The
gradient of the input of column-parallel modules is all-reduced, once for all modules with the same input. The output of
row-parallel modules is all-reduced before the bias is added. An all-reduce returns the same bits to all ranks, so all
layers that are not sharded have the same bits too.

Weights are plain tensors, not ``DTensor``, for three reasons. A unit's slot is one flat range with parameters of any
layout, but ``DTensor`` has no placement for fused and padded parameters. The user's parameters stay the same objects.
And a rank that waits for one of our collectives notices when another rank fails.

Tensor-parallel ranks have the same RNG state, so that dropout of whole activations is the same on them. Between a
column-parallel and a row-parallel module each rank has heads or channels of its own, and the same state would drop the
same values of head i and of head i + n/2. So there each rank draws from a state of its own, as with Megatron-LM's
tracker. It is not kept anywhere: it is a hash of the shared state and the rank. So it is the same when a segment is
recomputed, where the shared state is that of the first pass, and a checkpoint holds it with the shared state. If
anything was drawn, the shared state advances by one number. If nothing was, ranks draw what one process does.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import nn

from executor.callbacks import replace_attribute
from executor.distributed.collectives import copy_to_group, reduce_from_group
from executor.distributed.groups import Group
from executor.distributed.products import Multiply, number_of, summed_product
from executor.distributed.shards import BindingError, ParameterShard
from executor.distributed.vocabulary import bind_head, embed
from planner.graph import Operator, Pattern, Unit

# Attributes of attention modules: numbers of heads or channels.
_COUNTS = ("num_heads", "num_key_value_heads", "split_size")
DIVIDED: Final = ("nf", *_COUNTS)
"""Attributes of modules that each rank has a part of; ``nf`` is the number of outputs of a Conv1D."""

Undo = Callable[[], None]
NoCompile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function that does the same, but is never traced by ``torch.compile``."""
MultiplyOf = Callable[[nn.Parameter], Multiply | None]
"""Returns what makes the gradient of a weight; ``None``: autograd does."""


@final
class DividedRng:
    """Switches between the RNG state that tensor-parallel ranks share, and one of this rank's own.

    Args:
        rank: number within the tensor-parallel group.
        device: device on which the model draws.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._device = device
        on_gpu = device.type == "cuda"
        self._rng: Any = torch.cuda if on_gpu else torch.random
        # torch.random's own seeds all devices.
        self._seed: Any = torch.cuda.manual_seed if on_gpu else torch.default_generator.manual_seed
        self._shared: torch.Tensor | None = None
        self._own = torch.empty(0)  # as it began

    def enter(self, module: nn.Module, _args: Any, _output: Any) -> None:
        """Begin to draw from this rank's own state: a forward hook of the last column-parallel module."""
        self._shared = None  # a recomputation may have ended before it left, and an error too
        if module.training:
            self._shared = self._rng.get_rng_state()
            digest = hashlib.blake2b(self._shared.numpy().tobytes(), digest_size=8, salt=bytes([self._rank % 256]))
            self._seed(int.from_bytes(digest.digest(), "little") >> 1)
            self._own = self._rng.get_rng_state()

    def leave(self) -> None:
        """Draw from the shared state again, before the row-parallel module."""
        if self._shared is not None:
            has_drawn = not torch.equal(self._own, self._rng.get_rng_state())
            self._rng.set_rng_state(self._shared)
            self._shared = None
            if has_drawn:
                torch.rand((), device=self._device)


def bind_tensor_parallel(
    model: nn.Module,
    units: tuple[Unit, ...],
    shards: Mapping[str, ParameterShard],
    group: Group,
    no_compile: NoCompile,
    device: torch.device,
    multiply_of: MultiplyOf,
) -> list[Undo]:
    """Make modules compute this rank's shard of every layer, with collectives; return functions that undo this.

    Keys of ``shards`` are the units' names of parameters. ``no_compile`` keeps functions with collectives out of
    compiled graphs. ``device`` is where the model computes. ``multiply_of``: see :data:`MultiplyOf`.

    Raises:
        BindingError: tensor-parallel ranks cannot share a module.
    """
    rng = DividedRng(group.rank, device)
    undo: list[Undo] = []
    banks: dict[nn.Module, None] = {}  # modules of experts, each once: several units may share one
    for operator in (operator for unit in units for operator in unit.operators):
        found = [shards[name] for name in operator.parameter_names]
        if operator.kind == "head":
            head = model.get_submodule(operator.name)
            undo += _copy_input([head], group, no_compile)
            undo += bind_head(model, head, found[0], group)
        elif operator.kind == "experts":
            banks[_owner(model, found[0])] = None
        elif operator.pattern is Pattern.COLUMN:
            undo += _bind_column_parallel(model, operator, found, group, rng, no_compile)
        elif operator.kind == "embedding" and operator.pattern is Pattern.ROW:
            module = _owner(model, found[0])
            undo.append(replace_attribute(module, "forward", embed(module, found[0], group)))
        elif operator.pattern is Pattern.ROW:
            module = _owner(model, found[0])
            forward = _row_parallel_forward(module, found[0], group, rng, multiply_of)
            undo.append(replace_attribute(module, "forward", no_compile(forward)))
    return undo + [undone for bank in banks for undone in _bind_experts(bank, group, no_compile)]


def _owner(model: nn.Module, shard: ParameterShard) -> nn.Module:
    return model.get_submodule(shard.name.rpartition(".")[0])


def _bind_column_parallel(
    model: nn.Module,
    operator: Operator,
    shards: list[ParameterShard],
    group: Group,
    rng: DividedRng,
    no_compile: NoCompile,
) -> list[Undo]:
    """Make modules compute a shard of their outputs."""
    undo: list[Undo] = []
    modules = list(dict.fromkeys(_owner(model, shard) for shard in shards if shard.dim is not None))
    ranks = shards[0].mesh.degrees.tensor_parallel
    for module in modules:
        undo += _divide(module, ("nf",), ranks)
    if operator.kind == "qkv":
        undo += _divide(model.get_submodule(operator.name.rpartition(".")[0]), _COUNTS, ranks)
    undo += _copy_input(modules, group, no_compile)
    undo.append(modules[-1].register_forward_hook(no_compile(rng.enter)).remove)
    # Parameters that are not sharded (norms of heads) see only this rank's heads, so their gradients are summed.
    return undo + [_all_reduce_gradient(shard.leaf, group) for shard in shards if shard.dim is None]


def _divide(module: nn.Module, names: tuple[str, ...], ranks: int) -> list[Undo]:
    there = {name: getattr(module, name) for name in names if hasattr(module, name)}
    assert all(count % ranks == 0 for count in there.values())  # the planner refuses others
    return [replace_attribute(module, name, count // ranks) for name, count in there.items()]


def _copy_input(modules: list[nn.Module], group: Group, no_compile: NoCompile) -> list[Undo]:
    """Call :func:`copy_to_group` once for several modules with the same input, of which the last one runs last."""
    given = made = None

    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal given, made
        values, *others = args
        if given is not values or made is None:
            given, made = values, copy_to_group(values, group)
        copied = made
        if module is modules[-1]:
            given = made = None
        return copied, *others

    hook = no_compile(before)
    return [module.register_forward_pre_hook(hook).remove for module in modules]


def _row_parallel_forward(
    module: Any, weight: ParameterShard, group: Group, rng: DividedRng, multiply_of: MultiplyOf
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the forward of a module that computes a partial sum of every output from a shard of the inputs.

    Raises:
        BindingError: the module is neither ``torch.nn.Linear`` nor Conv1D of ``transformers``.
    """
    # ``torch.nn.Linear`` has weights [outputs, inputs], Conv1D [inputs, outputs].
    if type(module).__name__ not in {"Linear", "Conv1D"} or weight.dim is None:
        raise BindingError(
            f"{weight.name} belongs to a {type(module).__name__}, but tensor-parallel ranks can only share "
            "torch.nn.Linear and Conv1D of transformers; plan with --parallel tensor=1"
        )
    by_columns = weight.dim == 0
    number = number_of(group)

    def forward(values: torch.Tensor) -> torch.Tensor:
        rng.leave()
        matrix = module.weight if by_columns else module.weight.t()
        return summed_product(values, matrix, module.bias, number, multiply_of(module.weight))

    return forward


def _bind_experts(module: nn.Module, group: Group, no_compile: NoCompile) -> list[Undo]:
    """Make experts compute with a shard of their channels. The gradient of routing weights is all-reduced too."""

    def before(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        values, chosen, weights = args
        return copy_to_group(values, group), chosen, copy_to_group(weights, group)

    def after(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(result, group)

    return [
        module.register_forward_pre_hook(no_compile(before)).remove,
        module.register_forward_hook(no_compile(after)).remove,
    ]


def _all_reduce_gradient(leaf: nn.Parameter, group: Group) -> Undo:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total)
        return total

    trains = leaf.requires_grad
    leaf.requires_grad_(True)  # a frozen parameter takes no hook, but may train later
    remove: Undo = leaf.register_hook(hook).remove  # type: ignore[no-untyped-call]
    leaf.requires_grad_(trains)
    return remove
