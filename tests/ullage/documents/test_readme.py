"""The README is short, says what the program prints, and holds what result files hold."""

import doctest
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from ullage.main import main

TIMES = "\N{MULTIPLICATION SIGN}"
ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLAN = re.compile(r"`ullage (plan [^`]*)` prints .*?```text\n(.*?)```", re.DOTALL)


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return loaded


def percent(share: float, sign: str = "") -> str:
    return f"{100 * share:{sign}.1f} %"


UNFITTED = {"in_memory_mpt", "reported", "roundpipe", "llama_factory", "qwen", "halo", "llmq", "unseen"}
"""Files of runs to none of which a profile was fitted."""


def unfitted() -> tuple[str, str]:
    """Return the number of runs on machines that were not fitted, and their mean errors, as the README shows them."""
    rows = [row for row in result("published_held_out.json")["rows"] if row["file"] in UNFITTED and "iteration" in row]
    first = [abs(row["iteration"]["first_error"]) for row in rows if "first_error" in row["iteration"]]
    now = [abs(row["iteration"]["error"]) for row in rows]
    return f"{len(rows)} runs on machines", f"| {percent(statistics.mean(first))}, {percent(statistics.mean(now))} |"


def test_machines_that_were_not_fitted_stand_beside_those_that_were() -> None:
    (row,) = (line for line in README.splitlines() if "fitted to none" in line)
    assert [part for part in unfitted() if part not in row] == []


def figures() -> dict[str, tuple[str, ...]]:
    """Return what must stand in one row of the README's table, by result file."""
    summaries = {(s["group"], s["quantity"]): s for s in result("published.json")["summaries"]}
    offloaded = summaries["file offloaded_update.json", "iteration"]
    found = [row for row in result("published_held_out.json")["rows"] if "iteration" in row]
    later = [row for row in found if row["file"] not in UNFITTED]
    unseen = sum(abs(row["iteration"]["first_error"]) for row in later) / len(later)
    executed = result("planning_memory.json")["summary"]["executed"]
    cells = result("cpu_peers.json")["cells"].values()
    assert all(cell["rows"]["ours"]["status"] == "ok" for cell in cells)
    (model,) = {cell["model"] for cell in cells}
    grid = result("planning_grid.json")["summary"]
    num_cores = result("demo.json")["num_cores"]
    cell = result("gpu_peers.json")["cells"]["llama-3.2-3b, 30 GB"]
    over_peer = cell["rows"]["zero-3-offload"]["iteration_s"] / cell["rows"]["ours"]["iteration_s"]
    plans = result("gpu_agreement.json")["rows"].values()
    return {
        "demo.json": (
            ", ".join(percent(error, "+") for error in result("demo.json")["iteration_errors"]),
            f"{len(result('demo.json')['iteration_errors'])} repeats",
            f"{num_cores} CPU cores",
        ),
        "published.json": (f"{offloaded['num_cases']} published runs", f"| {percent(offloaded['mean'])} |"),
        "published_held_out.json": (f"{len(later)} runs found later", f"| {percent(unseen)} |"),
        "planning_memory.json": (
            f"{executed['num_cases']} executed plans",
            f"{percent(executed['mean'])} mean, {percent(abs(executed['worst']))} worst error",
        ),
        "cpu_peers.json": (
            ", ".join(f"{cell['ours_over_best_peer']:.2f} {TIMES} {cell['best_peer']}" for cell in cells),
            f"{result('cpu_peers.json')['num_cores']} CPU cores",
            f"{model.removeprefix('llama-').removesuffix('m')} million parameters",
            f"each of {len(cells)} settings",
        ),
        "gpu_peers.json": (f"| {over_peer:.1f} {TIMES}, {cell['ours_over_in_memory']:.2f} {TIMES} |",),
        "gpu_agreement.json": (
            ", ".join(percent(row["error"], "+") for row in plans),
            f"{len(plans)} plans",
        ),
        "planning_grid.json": (
            f"{grid['planned']} plans",
            f"{percent(grid['median_gap'])} median, {percent(grid['worst_gap'])} worst",
        ),
    }


def words(text: str) -> str:
    return " ".join(text.split())


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 180
    assert len(README.encode()) <= 9_500


def test_examples_run() -> None:
    test = doctest.DocTestParser().get_doctest(README, {}, "README.md", "README.md", 0)
    assert len(test.examples) >= 3
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(("file", "parts"), figures().items())
def test_figures_come_from_result_files(file: str, parts: tuple[str, ...]) -> None:
    row = next(line for line in README.splitlines() if f"benchmarks/results/{file})" in line)
    assert [part for part in parts if part not in row] == []


def test_the_plan_is_what_the_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, shown = PLAN.findall(README)[0]
    assert PLAN.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")) == [(command, shown)]
    assert main([*command.split(), "--output", str(tmp_path / "plan.json")]) == 0
    printed = [words(line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in shown.splitlines() if words(line) not in printed] == []
