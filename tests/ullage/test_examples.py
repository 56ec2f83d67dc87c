"""The examples run as they are, in processes of their own."""

import ast
from pathlib import Path

import forked
import pytest
from forked import completed

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    done = completed(forked.script, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "measured:" in done.stdout
    losses = [float(line.split("loss ")[1]) for line in done.stdout.splitlines() if line.startswith("iteration")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_imports_nothing_of_ours_but_ullage(script: Path) -> None:
    found = {
        alias.name
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found |= {node.module or "" for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.ImportFrom)}
    assert "ullage" in found
    assert not {name for name in found if name.partition(".")[0] in {"ullage", "planner", "executor", "hwprofiles"}} - {
        "ullage"
    }
