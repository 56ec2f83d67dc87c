"""Muon where ranks have parts of the same matrices: each gets the bits of the whole matrix's update."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import mixed
from rank_programs import resumed, saved, trained
from rank_references import reference
from training import Task, decide, uniform

from executor.distributed.matrices import Run, update_matrices
from executor.distributed.mesh import Mesh
from executor.distributed.shards import ParameterShard
from executor.optimizer.muon import MuonParams, muon
from executor.optimizer.table import Rule
from planner.decisions import Choice
from planner.models.formulas.work import shared_orthogonalization_bytes
from planner.subgroups import shares


class Together:
    """An all-to-all among threads that stand for ranks."""

    def __init__(self, size):
        self.size = size
        self._barrier = threading.Barrier(size, timeout=20)
        self._sent = [None] * size

    def of(self, rank):
        def exchange(received, sent, num_received, num_sent):
            assert len(received) == sum(num_received)
            self._sent[rank] = torch.split(sent.clone(), list(num_sent))
            self._barrier.wait()
            received.copy_(torch.cat([parts[rank] for parts in self._sent]))
            self._barrier.wait()

        return exchange

    def run(self, work):
        with ThreadPoolExecutor(self.size) as pool:
            list(pool.map(work, range(self.size)))


class Member:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def shard_of(shape, dim, num_fused, rank, size):
    part = torch.Size(length // size if i == dim else length for i, length in enumerate(shape))
    mesh = Mesh(Choice(tensor_parallel=size), rank)
    return ParameterShard("0.weight", None, torch.Size(shape), None, part, None, dim, num_fused, mesh, False, None)


@st.composite
def matrices(draw):
    size = draw(st.integers(1, 4))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        dim, num_fused = draw(st.integers(0, 1)), draw(st.integers(1, 3))
        divided, other = size * num_fused * draw(st.integers(1, 6)), draw(st.integers(1, 20))
        found.append(((divided, other) if dim == 0 else (other, divided), dim, num_fused))
    return size, found


@settings(max_examples=examples(60, 15), deadline=None)
@given(matrices(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans(), st.integers(0, 99))
def test_parts_get_the_bits_of_the_whole(drawn, dtype, nesterov, given_memory, seed):
    """Of any shapes, divided by rows or columns, of fused parts; more ranks than matrices, or fewer."""
    torch.manual_seed(seed)
    (size, found), scale = drawn, 0.3
    wholes = [[torch.randn(shape) for _ in "pmg"] for shape, *_ in found]
    params = [MuonParams(lr=0.1, nesterov=nesterov, shape=shape) for shape, *_ in found]
    parts = [
        [
            Run(0, len(own[0]), Rule(None, its, scale), 1, shard, (own[2].to(dtype),), (*own[:2], weights))
            for whole, its, (shape, dim, num_fused) in zip(wholes, params, found, strict=True)
            for shard in [shard_of(shape, dim, num_fused, rank, size)]
            for own in [[shard.divided(values).clone().flatten() for values in whole]]
            for weights in [torch.empty_like(own[0], dtype=dtype)]
        ]
        for rank in range(size)
    ]
    together = Together(size)
    sizes = [part.size for part in parts[0]]
    of_ranks = [[found[i][0] for i in share] for share in shares(range(len(found)), sizes, size)]
    num_bytes = shared_orthogonalization_bytes(sizes, of_ranks)

    def work(rank):
        memory = torch.full((num_bytes,), 77, dtype=torch.uint8) if given_memory else None
        update_matrices(parts[rank], Member(rank, size), together.of(rank), memory)

    together.run(work)
    for i, ((p, m, g), its) in enumerate(zip(wholes, params, strict=True)):
        muon(p.view(-1), (m.view(-1),), g.to(dtype).float().mul_(scale).view(-1), its)
        for rank in range(size):
            part = parts[rank][i]
            expected, momentum = (part.shard.divided(values).flatten() for values in (p, m))
            for seen, wanted in zip(part.state, (expected, momentum, expected.to(dtype)), strict=True):
                assert torch.equal(seen, wanted)


def test_ranks_divide_the_products():
    """Of four equal matrices each of two ranks orthogonalizes two."""
    assert [len(share) for share in shares(range(4), [64] * 4, 2)] == [2, 2]
    one = math.prod((64, 64))
    shared = shared_orthogonalization_bytes([one // 2] * 4, [[(64, 64)] * 2] * 2)
    assert shared == 2 * 2 * one + 2 * 2 * one + 2 * (2 * one + 2 * one)


# --- whole plans ----------------------------------------------------------------------------------------------------

WAYS = [uniform("gpu", "gpu"), uniform("gpu", "stream"), uniform("host", "cpu"), mixed]
RANKS = {"gpt2-shared": (2, 2), "llama-shared": (2, 2), "qwen3-shared": (4, 1)}


@pytest.mark.part(3)
@pytest.mark.parametrize(("family", "degrees"), RANKS.items(), ids=RANKS)
def test_any_place_gives_the_same_bits_and_the_losses_of_one_rank(processes, family, degrees):
    """An orthogonalized value is rounded to 8 bits: after two steps a loss differs by much less than that."""
    tensor_parallel, data_parallel = degrees
    task = Task(family, torch.float32, optimizer="muon", iterations=3, num_micro_batches=1)
    found = []
    for i, choose in enumerate(WAYS):
        zero_stage = (0, 2, 3, 3)[i] if data_parallel > 1 else 0
        decisions = decide(
            task, choose, tensor_parallel=tensor_parallel, data_parallel=data_parallel, zero_stage=zero_stage
        )
        found.append(processes.call(tensor_parallel * data_parallel, trained, task, decisions))
    losses, _ = reference(task, data_parallel, decisions)
    for rank, (seen, final) in enumerate(found[0]):
        assert seen == pytest.approx(losses[rank // tensor_parallel], rel=2**-10)
        for other in found[1:]:
            assert other[rank][0] == seen
            assert all(other[rank][1][name].tobytes() == final[name].tobytes() for name in final)


def test_a_checkpoint_goes_on_with_matrices_shared_otherwise(processes, tmp_path):
    task = Task("gpt2-shared", torch.bfloat16, iterations=3, optimizer="muon")
    shared = decide(task, mixed, tensor_parallel=2)
    digests = {found[-1] for found in processes.call(2, saved, task, shared, tmp_path)}
    assert len(digests) == 1
    for degrees in ({"data_parallel": 2, "zero_stage": 3}, {"tensor_parallel": 2}):
        other = decide(task, uniform("gpu", "cpu"), **degrees)
        assert {found[-1] for found in processes.call(2, resumed, task, other, tmp_path)} == digests
