"""Groups of ranks: who is in one, by the positions that each rank has."""

from collections.abc import Callable

import pytest

from executor.distributed.mesh import Groups, Mesh
from planner.decisions import Choice

KINDS: dict[str, tuple[Callable[[Mesh], Groups], Callable[[Mesh], tuple[int, ...]]]] = {
    "tensor": (Mesh.tensor_groups, lambda rank: (rank.data,)),
    "expert": (Mesh.expert_groups, lambda rank: (rank.tensor, rank.data // rank.degrees.expert_parallel)),
    "context": (Mesh.context_groups, lambda rank: (rank.tensor, rank.reader)),
    "replicas": (lambda rank: rank.replicas(1), lambda rank: (rank.tensor,)),
    "replicas of experts": (
        lambda rank: rank.replicas(rank.degrees.expert_parallel),
        lambda rank: (rank.tensor, rank.expert),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tensor", [1, 2, 3])
@pytest.mark.parametrize("shared", [1, 2])
def test_a_group_has_the_ranks_whose_positions_agree(kind: str, tensor: int, shared: int) -> None:
    groups_of, position = KINDS[kind]
    degrees = Choice(data_parallel=4, tensor_parallel=tensor, expert_parallel=2, context_parallel=shared)
    ranks = [Mesh(degrees, rank) for rank in range(degrees.num_devices)]
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        alike.setdefault(position(rank), []).append(rank.rank)
    assert all(sorted(groups_of(rank)) == sorted(map(tuple, alike.values())) for rank in ranks)
