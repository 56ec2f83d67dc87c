"""The benchmark of peers: it runs from end to end, and a row that trains otherwise counts for nothing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers.jobs import Cell, Job, Outcome
from benchmarks.peers.processes import Clock, Runner
from benchmarks.peers.rows import ROWS, Row, rows_for
from benchmarks.peers.summary import TOLERANCES, cell_summary, paired_ratio, verdict
from benchmarks.peers.worker import run

ROOT = Path(__file__).parents[2]
CELL = Cell("llama-tiny", "fp32", 2, 32, 2, 1.0, None, 1)
OURS, PEER, CEILING = (
    Row("ours", "ours", "ours"),
    Row("peer", "zero2"),
    Row("memory", "in_memory", "ceiling"),
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_command_from_end_to_end(tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    command = [sys.executable, "benchmarks/cpu/peers.py", "--tiny", "--profile", "epyc-turin-2c", "--rows", "ours"]
    subprocess.run([*command, "in-memory", "--output", str(output)], cwd=ROOT, check=True, capture_output=True)
    result = json.loads(output.read_text())
    assert {"command", "date", "cpu", "num_cores", "versions", "load_average_before", "num_timed"} <= result.keys()
    (cell,) = result["cells"].values()
    assert {name: row["status"] for name, row in cell["rows"].items()} == {"ours": "ok", "in-memory": "ok"}
    for row in cell["rows"].values():
        assert row["tokens_per_s"] == pytest.approx(cell["num_tokens"] / row["iteration_s"])
        assert row["loss_error"] < TOLERANCES["fp32"] / 10
        assert row["peak_rss_bytes"] > 0
        assert row["start_up_s"] > 0
    assert cell["plan"]["updated_params"].get("cpu", 0) > 0  # the device is too small for the optimizer
    assert all(cell[key] > 0 for key in ("ours_over_in_memory", "ours_over_bound", "replayed_over_measured"))
    assert abs(cell["memory_errors"]["gpu"]) < 0.05
    assert cell["memory_errors"]["host"] == 0
    assert "ours_over_best_peer" not in cell  # nobody was there


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("lr_factor", "status"), [(1.0, "ok"), (1.1, "failed"), (0.9, "failed")])
def test_gate_sees_a_wrong_learning_rate(lr_factor: float, status: str) -> None:
    job = Job(CELL, "in_memory", {"fused": False}, num_warm_up=2, num_timed=4)
    reference = run(job)
    other = run(dataclasses.replace(job, settings={"lr_factor": lr_factor}))
    assert verdict([other], reference.losses, CELL)[0] == status


def outcome(iteration_s: float, loss: float = 2.0) -> Outcome:
    return Outcome(losses=(3.0, loss), iteration_s=(iteration_s, iteration_s), total_s=2 * iteration_s)


def test_what_fails_the_gate_is_no_best_peer() -> None:
    rows = (OURS, PEER, dataclasses.replace(PEER, name="other"), CEILING)
    outcomes = {"ours": [outcome(2)], "peer": [outcome(1, loss=2.1)], "other": [outcome(3)], "memory": [outcome(1)]}
    summary = cell_summary(CELL, rows, outcomes, (3.0, 2.0))
    assert summary["rows"]["peer"]["status"] == "failed"
    assert summary["best_peer"] == "other"
    assert summary["ours_over_best_peer"] == pytest.approx(1.5)
    assert summary["ours_over_in_memory"] == pytest.approx(0.5)
    outcomes["ours"] = [outcome(2, loss=2.1)]
    assert "ours_over_best_peer" not in cell_summary(CELL, rows, outcomes, (3.0, 2.0))


def test_ratios_are_paired_by_round() -> None:
    disturbed = [outcome(1), outcome(10), outcome(1)], [outcome(2), outcome(20), outcome(2)]
    assert paired_ratio(disturbed[1], disturbed[0]) == pytest.approx(2)


@pytest.mark.parametrize(
    ("outcomes", "reference", "status"),
    [
        ([], (1.0,), "not run"),
        ([Outcome(error="ModuleNotFoundError: No module named 'deepspeed'")], (1.0,), "not installed"),
        ([outcome(1), Outcome(error="OutOfMemoryError: CUDA")], (3.0, 2.0), "error"),
        ([outcome(1)], (), "failed"),
        ([outcome(1, loss=float("nan"))], (3.0, 2.0), "failed"),
        ([outcome(1)], (3.0, 2.0), "ok"),
    ],
)
def test_statuses(outcomes: list[Outcome], reference: tuple[float, ...], status: str) -> None:
    assert verdict(outcomes, reference, CELL)[0] == status


def test_a_process_that_takes_too_long_is_an_outcome() -> None:
    runner = Runner(1, None, 60.0, Clock(60.0))
    assert runner.run(Job(CELL, "in_memory"), limit_s=0.2).error == "took more than 0 s"


@pytest.mark.usefixtures("threads")
def test_an_engine_that_raises_is_an_outcome() -> None:
    found = run(Job(CELL, "ours", plan="/there/is/none.json"))
    assert found.error is not None
    assert found.error.startswith("PlanError: ")


def test_rows_of_each_device() -> None:
    for device in ("cpu", "cuda"):
        names = [row.name for row in rows_for(device)]
        assert len(names) == len(set(names))
        assert names[0] == "ours"
    assert {row.kind for row in ROWS if row.name == "zenflow"} == {"other mathematics"}
    with pytest.raises(ValueError, match="there is no row 'nobody'"):
        rows_for("cpu", ("nobody",))
