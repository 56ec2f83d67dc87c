"""The README says what the program does and what result files hold."""

import doctest
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def result(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return loaded


def figures() -> dict[str, str]:
    """Return every figure of the README, from the committed result files."""
    errors = [f"{100 * error:+.1f} %" for error in result("demo.json")["iteration_errors"]]
    simulator = next(row for row in result("simulator_vs_simpy.json")["sizes"] if row["num_tasks"] == 7000)
    adamw = [row["ours_over_torch"] for row in result("cpu_adamw.json")["results"] if row["num_threads"] == 1]
    summaries = result("validate_offloaded_update.json")["summaries"]
    validated = next(s for s in summaries if (s["group"], s["quantity"]) == ("all", "iteration"))
    return {
        "validate_mean": f"{100 * validated['mean']:.0f} %",
        "validate_worst": f"{100 * validated['worst']:.0f} %",
        "demo_errors": ", ".join(errors),
        "tasks": f"{simulator['num_tasks']:,}",
        "ratio_lanes": f"{simulator['kernel_over_simpy_lanes']:.0f}",
        "ratio_resources": f"{simulator['kernel_over_simpy_resources']:.0f}",
        "adamw_low": f"{min(adamw):.1f}",
        "adamw_high": f"{max(adamw):.1f}",
    }


def test_examples_run() -> None:
    parser = doctest.DocTestParser()
    test = parser.get_doctest(README, {}, "README.md", "README.md", 0)
    assert len(test.examples) >= 5
    assert doctest.DocTestRunner().run(test).failed == 0


@pytest.mark.parametrize(("name", "figure"), figures().items())
def test_figures_come_from_result_files(name: str, figure: str) -> None:
    assert figure in README, f"{name} is {figure}"


def test_paths_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    local = [link for link in links if not link.startswith("http")]
    assert local
    assert [link for link in local if not (ROOT / link).exists()] == []
