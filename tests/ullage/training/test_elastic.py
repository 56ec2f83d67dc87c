"""Plans and batches of an elastic run: the same sequences an iteration, whoever is there."""

import functools
import json
import os
from types import SimpleNamespace

import pytest
import torch
from amount import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from narrow import narrow_llama
from torch import nn

from hwprofiles.registry import load_profile
from planner.choices.request import Request
from planner.decisions import FP32
from planner.plan.document import Plan, PlanError
from planner.plan.planning import make_plan
from ullage.this_machine.planning import _divided
from ullage.training.batches import Batches, tokens_for
from ullage.training.elastic import IterationLog, Start, _requests, in_words, planned_for, read_progress
from ullage.training.loop import Step


@functools.cache
def planned() -> Plan:
    machine = _divided(load_profile("epyc-turin-2c"), 8)
    return make_plan(Request(narrow_llama(1), machine, precision=FP32, seq_len=32, micro_batch=1))


def cut(micro_batch: int, num_micro_batches: int, data_parallel: int) -> Plan:
    sizes = {"micro_batch": micro_batch, "num_micro_batches": num_micro_batches, "data_parallel": data_parallel}
    return planned().model_copy(update={"decisions": planned().decisions.model_copy(update=sizes)})


class Tokens(nn.Module):
    """Has the sum of its tokens as its loss, and keeps the sequences that it has seen with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert labels is input_ids
        assert not use_cache
        return SimpleNamespace(loss=self.one * input_ids.double().sum(-1).mean())


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_ranks_read_the_same_sequences_however_many_there_are(
    micro_batch: int, num_micro_batches: int, planned_ranks: int, ranks: int
) -> None:
    first = cut(micro_batch, num_micro_batches, planned_ranks)
    count = first.decisions.num_sequences
    model = Tokens()
    reference = Batches(cut(count, 1, 1), tokens_for(first, {}))
    expected = [sum(loss.item() for loss in reference.losses(model)) for _ in range(2)]
    requests = list(_requests(first, ranks))
    # Each has the same work as its longest rank at most, and smaller micro-batches only for less work.
    work = [request.micro_batch * request.num_micro_batches for request in requests]
    assert work == sorted(set(work), reverse=True)
    for request in requests:
        assert (request.micro_batch * request.num_micro_batches - request.micro_batch) * ranks < count
        plan = cut(request.micro_batch, request.num_micro_batches, ranks)
        of_ranks = [Batches(plan, tokens_for(plan, {}), reader=rank, num_sequences=count) for rank in range(ranks)]
        for number, value in enumerate(expected):
            means = [sum(loss.item() for loss in batches.losses(model)) for batches in of_ranks]
            assert sum(means) / ranks == pytest.approx(value, rel=1e-12)
            assert {batches.position for batches in of_ranks} == {(number + 1) * count}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_stages_become_more_or_fewer(ranks: int) -> None:
    """Each number of stages that divides the ranks is planned for, and stages read the same sequences."""
    decided = cut(4, 15, 1).decisions.model_copy(update={"pipeline_parallel": 2})
    first = planned().model_copy(update={"decisions": decided})
    requests = [request for request in _requests(first, ranks) if request.pipeline_parallel > 1]
    assert [request.pipeline_parallel for request in requests] == [n for n in range(2, ranks + 1) if ranks % n == 0]
    for request in requests:
        readers = ranks // request.pipeline_parallel
        assert readers * request.micro_batch * request.num_micro_batches == 60
        assert request.num_micro_batches >= request.pipeline_parallel
    assert {request.pipeline_parallel for request in _requests(first, ranks)} >= {1}


def test_a_plan_for_other_ranks_is_made_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    first = cut(2, 1, 3)
    assert planned_for(first, 3, tmp_path) is first
    found = planned_for(first, 1, tmp_path)
    (path,) = tmp_path.iterdir()
    assert (found.decisions.micro_batch * found.decisions.num_micro_batches, found.decisions.data_parallel) == (6, 1)
    path.write_text(found.model_copy(update={"seq_len": 64}).sealed().to_json(), "utf-8")
    assert planned_for(first, 1, tmp_path).seq_len == 64
    shared = first.decisions.model_copy(update={"tensor_parallel": 2})
    with pytest.raises(PlanError, match=r"shares layers over 2 ranks, but 1 are there; .* a multiple of 2 ranks"):
        planned_for(first.model_copy(update={"decisions": shared}), 1, tmp_path)


def test_progress_tells_what_each_start_has_cost(tmp_path) -> None:
    def run(first: int, last: int) -> Start | None:
        progress = IterationLog(tmp_path, planned(), 1, 9)
        told = [progress.add(Step(n, 1.0, 0.25), n) for n in range(first, last)]
        assert told[1:] == [None] * len(told[1:])
        progress.close()
        return told[0]

    path = tmp_path / "iterations.jsonl"
    assert run(0, 5) is None
    with path.open("a") as file:
        file.write("\n" + json.dumps({"iteration": 5})[:9])  # killed while it wrote
    start = run(3, 7)
    assert start is not None
    assert (start.iteration, start.ranks, start.lost_iterations) == (3, 1, 2)
    assert -0.25 <= start.down_s < 10
    assert [line["iteration"] for line in read_progress(path)] == [0, 1, 2, 3, 4, 3, 4, 5, 6]
    run(7, 9)
    assert run(9, 10) is None, "trained longer, as somebody has asked for"
    kept = IterationLog(tmp_path, planned(), 1, 9).starts
    assert [each.lost_iterations for each in kept] == [2, 0]
    assert "2 times" in in_words(kept)
    assert "2 iterations computed again" in in_words(kept)


def test_a_file_system_that_does_not_answer_does_not_stop_training(tmp_path) -> None:
    progress = IterationLog(tmp_path, planned(), 1, 9)
    os.mkfifo(tmp_path / "iterations.jsonl")  # who opens it waits for a reader
    for number in range(3):
        progress.add(Step(number, 1.0, 0.25), number)
    progress.close(0.0)
    with (tmp_path / "iterations.jsonl").open(encoding="utf-8") as reader:
        progress.close()
        assert json.loads(reader.read().split("\n")[1])["iteration"] == 0
