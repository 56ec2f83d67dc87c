"""Collectives through host memory that ranks share, against their sums and concatenations."""

import pytest
import torch
import transformers
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_exchanges import exchanged, unshared, values_of
from rank_failures import failed
from rank_programs import metered, trained_on_gpu
from rank_references import reference
from tiny import TINY
from training import Task, decide, uniform

from executor.distributed.watchdog import RankError
from hwprofiles.registry import load_profile
from planner.costs.model import CostModel
from planner.decisions import Decisions, Place, Precision, UnitDecision
from planner.graph import Batch, build_graph, units
from planner.lowering import lower
from planner.models import from_hf_config
from planner.schedule.tasks import Tier
from planner.simulate.machine import run_until_steady
from planner.simulate.prediction import memory_peaks


@settings(max_examples=examples(15, fewest=4), deadline=None)
@given(
    st.integers(2, 4),
    st.sampled_from([64, 256, 4096]),
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.lists(st.integers(0, 300), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.003]),
)
def test_collectives_of_any_length_in_any_number_of_rounds(processes, size, num_bytes, dtype, lengths, delay_s):
    """Sums are those of fp32 in the order of ranks, rounded once, with the same bits on all ranks."""
    found = processes.call(size, exchanged, num_bytes, dtype, lengths, delay_s)
    for number, length in enumerate(lengths):
        own = [values_of(rank, number, length, dtype) for rank in range(size)]
        rows = torch.stack([values_of(rank, number, size * length, dtype) for rank in range(size)])
        parts = _summed(rows, dtype).view(size, -1)
        for rank in range(size):
            expected = torch.cat(own), parts[rank], _summed(torch.stack(own), dtype)
            for ours, theirs in zip(found[rank][number], expected, strict=True):
                assert ours.tobytes() == theirs.float().numpy().tobytes()


def _summed(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row.float()
    return total.to(dtype)


@pytest.mark.parametrize("step", ["connect", "map", "pin"])
def test_a_rank_that_cannot_share_memory_is_named_on_all(processes, step):
    errors = processes.call(3, unshared, step)
    assert all(error.startswith("ranks cannot share host memory (") for error in errors), errors
    assert all("plan with --parallel collectives=fabric" in error for error in errors)


@pytest.mark.part(2)
@pytest.mark.parametrize(("zero_stage", "places"), [(0, ("gpu", "gpu")), (1, ("gpu", "stream")), (3, ("host", "cpu"))])
def test_ranks_on_gpus_wait_for_each_others_copies(processes, zero_stage, places):
    """The order of copies on streams is proven by a virtual GPU."""
    task = Task("qwen3", torch.float32, 2, iterations=3)
    decisions = decide(task, uniform(*places), data_parallel=2, zero_stage=zero_stage, collectives="host")
    results = processes.call(2, trained_on_gpu, task, decisions)
    assert [found for _, found in results] == [[], []]
    losses, _ = reference(task, 2, decisions)
    for rank, (seen, _) in enumerate(results):
        assert seen == pytest.approx(losses[rank], rel=1e-3)


@pytest.mark.parametrize("moment", ["kill", "gather", "scatter"])
def test_a_rank_that_ends_ends_those_that_wait_for_its_words(processes, moment):
    task = Task("gpt2", iterations=4)
    decisions = decide(task, uniform("host", "cpu"), data_parallel=3, zero_stage=3, collectives="host")
    processes.begin(3, failed, task, decisions, moment)
    first, _, third = processes.results(3)
    words = "has ended without reporting why" if moment == "kill" else "broken cable"
    for error in (first, third):
        assert isinstance(error, RankError)
        assert words in str(error)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_each_rank_holds_what_the_plan_says(processes, zero_stage):
    """The most is held while the gradient of the output embeddings is summed: whole, in rows, and its sum."""
    config = transformers.LlamaConfig(**TINY | {"vocab_size": 6000}, use_cache=False)
    batch = Batch(1, 4, 4)
    found = units(build_graph(from_hf_config(config.to_dict(), "metered"), batch))
    decisions = Decisions(
        policy="test",
        precision=Precision(weights="fp32"),
        data_parallel=2,
        zero_stage=zero_stage,
        collectives="host",
        units={unit.name: UnitDecision(params="gpu", activations="keep", update=(Place.GPU,)) for unit in found},
    )
    cost = CostModel.of(load_profile("a100x8-nvlink"), found, decisions)
    simulation = run_until_steady(lower(found, decisions, asynchronous=False), cost)
    predicted = memory_peaks(simulation.timeline, simulation.steady, cost)[Tier.GPU].peak_bytes
    for static_bytes, dynamic_bytes in processes.call(2, metered, config, batch, decisions):
        assert predicted - static_bytes == dynamic_bytes
