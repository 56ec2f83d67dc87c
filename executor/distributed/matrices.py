"""Muon's updates of matrices of which tensor-parallel ranks have parts.

See [Note: Shared matrices] in :mod:`planner.subgroups`. The arithmetic is that of :mod:`executor.optimizer.muon`. What
is exchanged is rounded to bf16 there too, so parts get the bits that the whole matrix would get.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from executor.distributed.groups import Group
from executor.distributed.shards import ParameterShard
from executor.optimizer.muon import MuonParams, apply_update, momentum_update, newton_schulz
from executor.optimizer.split import SplitMaster
from executor.optimizer.table import Rule
from planner.models.formulas.work import shared_orthogonalization_bytes
from planner.subgroups import shares


class Run(NamedTuple):
    """A range of a unit's flat parameters that all have the same update, and with what it is updated.

    Attributes:
        start, stop: the range.
        rule: the update. Of a part of a matrix it has Muon's hyper-parameters, with the shape of the whole matrix.
        step: number of the step, from 1.
        shard: which part of a matrix that ranks share it is: such a part is a run of its own.
        gradients: flat, consecutive.
        state: master copy, buffers, and perhaps where new weights are written, flat; of a part, perhaps its gradient.
    """

    start: int
    stop: int
    rule: Rule
    step: int
    shard: ParameterShard | None = None
    gradients: Sequence[torch.Tensor] = ()
    state: Sequence[torch.Tensor | SplitMaster] = ()

    @property
    def size(self) -> int:
        """Number of values."""
        return self.stop - self.start


Exchange = Callable[[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]], None]
"""An all-to-all, see :meth:`executor.distributed.groups.Group.all_to_all`."""


def update_matrices(parts: Sequence[Run], group: Group, exchange: Exchange, memory: torch.Tensor | None = None) -> None:
    """Take one step of Muon for matrices that a group shares. All its ranks call this together.

    Args:
        parts: of the same matrices in the same order on all ranks.
        group: the ranks.
        exchange: its all-to-all for the memory that the parts are in.
        memory: uint8 workspace, on the same device, see
            :func:`planner.models.formulas.work.shared_orthogonalization_bytes`; ``None``: it is allocated.
    """
    of_ranks = shares(range(len(parts)), [part.size for part in parts], group.size)
    num_sent = [sum(parts[i].size for i in share) for share in of_ranks]
    num_received = [num_sent[group.rank]] * group.size
    shapes = [[_matrix(parts[i]) for i in share] for share in of_ranks]
    num_bytes = shared_orthogonalization_bytes([part.size for part in parts], shapes)
    if memory is None:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=parts[0].state[0].device)
    values = memory[:num_bytes].view(torch.bfloat16)
    sent = values[len(values) - sum(num_sent) :]
    received, operands = values[: sum(num_received)], values[sum(num_received) : len(values) - sum(num_sent)]

    def send(target: torch.Tensor, values: torch.Tensor, *counts: Sequence[int]) -> None:
        in_bytes = ([values.itemsize * count for count in each] for each in counts)
        exchange(target.view(torch.uint8), values.view(torch.uint8), *in_bytes)  # gloo does not take all types

    order = [parts[i] for share in of_ranks for i in share]
    places = torch.split(sent, [part.size for part in order])
    for part, place in zip(order, places, strict=True):
        (given,), (_, momentum, *_) = part.gradients, part.state
        assert isinstance(momentum, torch.Tensor)
        gradient = memory[: 4 * part.size].view(torch.float32).copy_(given).mul_(part.rule.scale)
        place.copy_(momentum_update(momentum, gradient, _params(part)))
    send(received, sent, num_received, num_sent)
    for i, of_matrix in zip(of_ranks[group.rank], _by_matrix(received, parts, of_ranks[group.rank]), strict=True):
        _orthogonalize(parts[i], of_matrix, operands)
    send(sent, received, num_sent, num_received)
    for part, place in zip(order, places, strict=True):
        master, _, *weights = part.state
        apply_update(master, place, _params(part))
        for target in weights:
            assert isinstance(master, torch.Tensor)
            assert isinstance(target, torch.Tensor)
            target.copy_(master)


def _params(part: Run) -> MuonParams:
    assert isinstance(part.rule.params, MuonParams)
    return part.rule.params


def _matrix(part: Run) -> tuple[int, int]:
    shape = _params(part).shape
    assert shape is not None
    rows, columns = shape
    return rows, columns


def _by_matrix(received: torch.Tensor, parts: Sequence[Run], own: Sequence[int]) -> list[list[torch.Tensor]]:
    """Return, for each of the rank's own matrices, the parts that all ranks have sent."""
    stops = itertools.accumulate(parts[i].size for i in own)
    if not own:
        return []
    by_rank = received.view(-1, sum(parts[i].size for i in own))
    return [[row[stop - parts[i].size : stop] for row in by_rank] for i, stop in zip(own, stops, strict=True)]


def _orthogonalize(part: Run, of_ranks: Sequence[torch.Tensor], operands: torch.Tensor) -> None:
    """Orthogonalize a whole matrix that the ranks have parts of, in place."""
    shape, shard = _matrix(part), part.shard
    assert shard is not None
    whole = operands[: math.prod(shape)].view(shape)
    for rank, values in enumerate(of_ranks):
        _of_rank(shard, rank, whole).copy_(_unfused(shard, values))
    result = newton_schulz(whole, _params(part), operands)
    for rank, values in enumerate(of_ranks):
        _unfused(shard, values).copy_(_of_rank(shard, rank, result))


def _of_rank(shard: ParameterShard, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """Return the view of a rank's part of a whole matrix, with fused parts in a dimension of their own."""
    dim = shard.dim
    assert dim is not None
    sizes = (shard.num_fused, shard.mesh.degrees.tensor_parallel, -1)
    return torch.unflatten(whole, dim, sizes).select(dim + 1, rank)


def _unfused(shard: ParameterShard, values: torch.Tensor) -> torch.Tensor:
    assert shard.dim is not None
    return torch.unflatten(values.view(shard.shape), shard.dim, (shard.num_fused, -1))
