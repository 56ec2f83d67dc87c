"""What commands import before they answer: what takes long is imported only where it is needed."""

import subprocess
import sys

import pytest

HEAVY = {
    "highspy",
    "llvmlite",
    "matplotlib",
    "networkx",
    "numba",
    "numpy",
    "planner.checkpoints.choosing",
    "planner.plan.planning",
    "pydantic",
    "rich",
    "scipy",
    "torch",
    "transformers",
}
PLANNER = {"highspy", "llvmlite", "numpy", "planner.plan.planning", "pydantic"}


def imported(*arguments: str) -> set[str]:
    line = [sys.executable, "-X", "importtime", "-m", "ullage", *arguments]
    lines = subprocess.run(line, capture_output=True, text=True, check=False).stderr.splitlines()
    return HEAVY & {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--help"], set()),
        (["plan", "--help"], set()),
        (["plan", "--gpus", "none"], set()),
        (["plan", "--model", "opt-13c"], {"pydantic"}),
        (["plan", "--model", "opt-13b", "--hardware", "a100-8"], {"pydantic"}),
    ],
)
def test_help_and_refusals_import_nothing_heavy(arguments: list[str], heavy: set[str]) -> None:
    assert imported(*arguments) == heavy


def test_models_of_others_need_not_wait_for_transformers() -> None:
    program = "import sys, ullage.commands.execute.run; print(*sys.modules)"  # ullage.prepare, and more
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch._dynamo", "transformers"} & set(found)


@pytest.mark.usefixtures("plan_path")  # so that the simulator's kernel is compiled
def test_planning_imports_no_compiler(plan_args: list[str], tmp_path) -> None:
    assert imported(*plan_args, "--output", str(tmp_path / "p.json"), "--json") == PLANNER
