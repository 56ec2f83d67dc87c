"""Models that are planned by their names and multiply in fp8, against the same models that torchao converted."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from plans import mixed
from rank_failures import FullDrive, killed
from rank_programs import by_name, saved, trained, trained_on_gpu
from rank_references import reference, trained_in_memory
from ranks import assert_same_bits
from training import Task, decide, uniform
from virtual import NoVirtualGpuError, install

from planner.decisions import Decisions

pytest.importorskip("torchao.float8")

TASK = Task("llama", num_micro_batches=2, iterations=2, products="fp8")


def decided(size: int, zero_stage: int, **settings: Any) -> Decisions:
    choose = mixed if zero_stage == 3 else uniform("gpu", "cpu", "recompute")
    return decide(TASK, choose, data_parallel=size, zero_stage=zero_stage, **settings)


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_give_the_bits_of_one_process(processes: Any, zero_stage: int) -> None:
    decisions = decided(2, zero_stage)
    assert_same_bits(processes.call(2, by_name, trained, TASK, decisions), reference(TASK, 2, decisions))


@pytest.mark.part(2)
@pytest.mark.parametrize("zero_stage", [3, 2])
def test_four_ranks_give_the_bits_of_training_in_memory(processes: Any, zero_stage: int) -> None:
    """The order of sums is that of the collective, so that memory is that of four processes too."""
    decisions = decided(4, zero_stage)
    found = processes.call(4, by_name, trained, TASK, decisions)
    expected = processes.call(4, trained_in_memory, TASK, decisions)
    for (seen, final), (losses, weights) in zip(found, expected, strict=True):
        assert seen == losses
        assert not [name for name, weight in weights.items() if final[name].tobytes() != weight.tobytes()]


def test_ranks_that_are_killed_in_backward_go_on_with_the_same_bits(processes: Any, tmp_path: Path) -> None:
    task, decisions = dataclasses.replace(TASK, iterations=3), decided(2, 3, fp8_weights=True)
    whole = processes.call(2, by_name, saved, task, decisions, tmp_path / "whole")
    processes.begin(2, by_name, killed, task, decisions, tmp_path / "cut")
    assert [type(gone) for gone in processes.results(2)] == [EOFError] * 2
    last = max(int(path.name[5:]) for path in (tmp_path / "cut").glob("step-*"))
    assert last >= 1
    again = processes.call(2, by_name, saved, task, decisions, tmp_path / "again", last, tmp_path / "cut")
    for (_, seen, end), (_, rest, same) in zip(whole, again, strict=True):
        assert rest == seen[-len(rest) :]
        assert len(rest) == (task.iterations - last) * (task.num_micro_batches + 1)
        assert same == end


def test_a_full_drive_costs_checkpoints_and_no_bits(processes: Any, tmp_path: Path) -> None:
    decisions = decided(1, 0)
    roomy = processes.call(1, by_name, saved, TASK, decisions, tmp_path / "roomy")
    full = processes.call(1, by_name, saved, TASK, decisions, tmp_path / "full", 0, None, FullDrive())
    assert full == roomy
    assert not list((tmp_path / "full").iterdir())


@pytest.mark.parametrize("fp8_weights", [None, True])
def test_a_virtual_gpu_sees_the_same_losses_and_no_race(processes: Any, *, fp8_weights: bool | None) -> None:
    """Also of what casts weights: the host those that are fetched, gathers those that are on the device."""
    try:
        install()
    except NoVirtualGpuError as error:
        pytest.skip(str(error))
    decisions = decided(2, 3, fp8_weights=fp8_weights)
    on_gpu = processes.call(2, by_name, trained_on_gpu, TASK, decisions)
    in_memory = processes.call(2, by_name, trained, TASK, decisions)
    for (seen, races), (losses, _) in zip(on_gpu, in_memory, strict=True):
        assert seen == pytest.approx(losses, rel=3e-2)  # last bits of products differ
        assert not races
