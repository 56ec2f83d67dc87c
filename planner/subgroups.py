"""How a unit's trained parameters are laid out in one flat range, and cut into shards and subgroups.

[Note: Whole matrices] An update of Muon needs the whole matrix. So a matrix lies in one rank's shard, whole, and in one
subgroup. Each shard has its matrices first, the larger ones before the smaller ones, and then its other parameters,
whole too. Subgroups are cut where a matrix begins or ends on every rank, and none has both kinds. So subgroups of all
ranks have the same sizes, and a rank with fewer parameters has padding. Ranks reduce a gradient straight to the rank
that updates the matrix, and nothing else is gathered. The price is that a shard is at least as long as its largest
matrix, however many ranks there are. Matrices go to ranks by size, each to the one that has least so far (Graham, 1969:
at most 4/3 of the shortest possible shard).

[Note: Shared matrices] Tensor-parallel ranks have parts of the same matrices. Masters and momenta stay divided. For an
update, the ranks divide the matrices of a subgroup among them in the same way, by size. Each rank sends the parts of
momenta to those who orthogonalize the matrices, and gets back its own parts of the results: so products are divided
too. Both exchanges are all-to-alls of 2 B per parameter. Matrices that each rank has whole are its own work.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from planner.models.formulas.work import newton_schulz, orthogonalization_bytes, shared_orthogonalization_bytes
from planner.models.kernels import flop
from planner.optimizers import OPTIMIZERS, Optimizer

SECTOR_PARAMS = 128
"""The number of float32 values in 512 B, the smallest sector."""

EXCHANGED_BYTES = 2
"""Bytes of a value that tensor-parallel ranks exchange: bf16."""

Extent = tuple[int, tuple[int, int] | None]
"""A parameter's size, and the shape of the hidden matrix that it is or, on tensor-parallel ranks, belongs to (see
[Note: Hidden matrices] in :mod:`planner.optimizers`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subgroup:
    """A piece of one rank's shard of a unit, the grain of placement and update.

    Attributes:
        num_params: its length, padding included.
        kind: what updates it.
        matrices: shapes of the whole matrices that an update orthogonalizes; those of the rank that has most to do.
        workspace_bytes: what that needs at most, on any rank, for one matrix after another.
        exchanged_bytes: what a tensor-parallel rank sends, and gets back, in one update; see [Note: Shared matrices].
    """

    num_params: int
    kind: Optimizer
    matrices: tuple[tuple[int, int], ...] = ()
    workspace_bytes: int = 0
    exchanged_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class UnitLayout:
    """The layout of a unit's flat range, which consists of equal shards.

    Attributes:
        starts: where each of its parameters begins.
        shard_params: the length of a shard.
        subgroups: of each shard, in order.
        has_gaps: whether there may be padding between parameters.
    """

    starts: tuple[int, ...]
    shard_params: int
    subgroups: tuple[Subgroup, ...]
    has_gaps: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of each subgroup."""
        return tuple(subgroup.num_params for subgroup in self.subgroups)


@functools.lru_cache(4096)  # equal layers have equal layouts, in every schedule of a search
def unit_layout(extents: tuple[Extent, ...], optimizer: Optimizer, num_shards: int, most: int) -> UnitLayout:
    """Return the layout of parameters in ``num_shards`` shards, with at most ``most`` parameters in a subgroup.

    A matrix with more parameters is a subgroup of its own.
    """
    others, grain = OPTIMIZERS[optimizer].others, OPTIMIZERS[optimizer].block_params or 1
    sizes = [size for size, _ in extents]
    if others is None or all(matrix is None for _, matrix in extents):
        # In grains: see [Note: Blocks] in planner.optimizers.
        starts = tuple(itertools.accumulate((-(-size // grain) for size in sizes), initial=0))
        shard = -(-starts[-1] // num_shards)
        cut = subgroups(shard, max(most // grain, 1), max(SECTOR_PARAMS // grain, 1))
        return UnitLayout(
            tuple(grain * start for start in starts[:-1]),
            grain * shard,
            tuple(Subgroup(grain * size, others or optimizer) for size in cut),
            has_gaps=any(size % grain for size in sizes),
        )
    matrices = shares([i for i, (_, matrix) in enumerate(extents) if matrix], sizes, num_shards)
    rest = shares([i for i, (_, matrix) in enumerate(extents) if not matrix], sizes, num_shards)
    width, rest_width = (max(sum(sizes[i] for i in share) for share in shares) for shares in (matrices, rest))
    begins = [0] * len(sizes)
    for rank in range(num_shards):
        for share, begin in ((matrices[rank], 0), (rest[rank], width)):
            at = rank * (width + rest_width) + begin
            for i in share:
                begins[i], at = at, at + sizes[i]
    cuts = _cuts([[sizes[i] for i in share] for share in matrices], most)
    found = [
        _whole(stop - start, optimizer, list(_between(matrices, extents, start, stop)))
        for start, stop in itertools.pairwise(cuts)
    ]
    found += [Subgroup(size, others) for size in subgroups(rest_width, most)]
    return UnitLayout(tuple(begins), width + rest_width, tuple(found), has_gaps=True)


def shares(indices: Sequence[int], sizes: Sequence[int], num_shards: int) -> list[list[int]]:
    """Divide parameters, of these sizes, over shards; one shard keeps their order."""
    if num_shards == 1:
        return [list(indices)]
    found: list[list[int]] = [[] for _ in range(num_shards)]
    lengths = [0] * num_shards
    for i in sorted(indices, key=lambda i: -sizes[i]):
        least = lengths.index(min(lengths))
        found[least].append(i)
        lengths[least] += sizes[i]
    return found


def _cuts(lengths: Sequence[Sequence[int]], most: int) -> list[int]:
    """Return where subgroups begin and end: as few as they can be at places that cut no matrix of any share.

    Args:
        lengths: of the matrices of each share.
        most: the most parameters of a subgroup with several.
    """
    ends = [list(itertools.accumulate(share)) for share in lengths]
    width = max(of_share[-1] for of_share in ends if of_share)
    allowed = [
        place
        for place in sorted(set(itertools.chain.from_iterable(ends)))
        if all(place in of_share or not of_share or place > of_share[-1] for of_share in ends)
    ]
    cuts = [0]
    for place, following in zip(allowed, [*allowed[1:], width + most + 1], strict=True):
        if following - cuts[-1] > most:
            cuts.append(place)
    return cuts


def _between(
    divided: Sequence[Sequence[int]], extents: Sequence[Extent], start: int, stop: int
) -> Iterator[tuple[Extent, ...]]:
    """Yield the matrices of each share between two cuts."""
    for share in divided:
        begins = itertools.accumulate((extents[i][0] for i in share), initial=0)
        yield tuple(extents[i] for i, begin in zip(share, begins, strict=False) if start <= begin < stop)


def _whole(num_params: int, optimizer: Optimizer, of_shards: Sequence[tuple[Extent, ...]]) -> Subgroup:
    """Return a subgroup with the matrices of the rank that has most FLOP, and workspace for those of all."""
    work = [_work(extents) for extents in of_shards]
    return Subgroup(
        num_params,
        optimizer,
        max((own for own, _, _ in work), key=lambda shapes: sum(flop(newton_schulz(*shape)) for shape in shapes)),
        max(workspace_bytes for _, workspace_bytes, _ in work),
        max(exchanged_bytes for *_, exchanged_bytes in work),
    )


def _work(extents: tuple[Extent, ...]) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Return the most that one of the tensor-parallel ranks does with some matrices; see [Note: Shared matrices].

    Returns:
        The shapes that it orthogonalizes, the bytes of workspace for that, and the bytes that it exchanges.
    """
    found = [(size, shape) for size, shape in extents if shape]
    own = tuple(shape for size, shape in found if size == math.prod(shape))
    shared = [(size, shape) for size, shape in found if size < math.prod(shape)]
    workspace_bytes = max(map(orthogonalization_bytes, own), default=0)
    if not shared:
        return own, workspace_bytes, 0
    sizes = [size for size, _ in shared]
    num_ranks = math.prod(shared[0][1]) // sizes[0]
    of_ranks = [tuple(shared[i][1] for i in share) for share in shares(range(len(sizes)), sizes, num_ranks)]
    most = max(of_ranks, key=lambda shapes: sum(flop(newton_schulz(*shape)) for shape in shapes))
    bytes_of_shared = shared_orthogonalization_bytes(sizes, of_ranks)
    return own + most, max(workspace_bytes, bytes_of_shared), 2 * EXCHANGED_BYTES * sum(sizes)


@functools.lru_cache(4096)  # equal layers have equal subgroups, in every schedule of a search
def subgroups(num_params: int, subgroup_params: int, grain: int = SECTOR_PARAMS) -> tuple[int, ...]:
    """Cut parameters into as few subgroups as possible, of sizes as equal as possible; return the sizes.

    A short subgroup at the end would take a slot and a turn in its queue for almost nothing. All but the last are
    multiples of ``grain``, unless that makes one of them too long: by default, whole sectors of a drive in float32.
    Data behind such a subgroup in memory can then be read and written without a copy.
    """
    count = -(-num_params // subgroup_params)
    if count <= 1:
        return (num_params,) * count
    whole = -(-num_params // (count * grain)) * grain
    if whole <= subgroup_params and (last := num_params - (count - 1) * whole) > 0:
        return (*(whole,) * (count - 1), last)
    size, longer = divmod(num_params, count)
    return (size + 1,) * longer + (size,) * (count - longer)
