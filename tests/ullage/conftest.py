import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from amount import short_searches
from tiny import TINY

from hwprofiles.profile import FOR_LIBRARIES_BYTES
from planner.plan.document import Plan, load_plan
from ullage.main import main
from ullage.this_machine import planning  # noqa: F401 - its searches are short too

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpoint"))  # objects.py
sys.path.insert(0, str(Path(__file__).parent))  # report_objects.py

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="session")
def plan_args(tiny_model: Path) -> list[str]:
    model = ["--model", str(tiny_model), "--seq-len", "128", "--hardware", "rtx-4090"]
    return ["plan", *model, "--memory", "device=" + str(FOR_LIBRARIES_BYTES + 3_000_000)]


@pytest.fixture(scope="session")
def plan_path(plan_args: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    with short_searches():
        assert main([*plan_args, "--output", str(path), "--json"]) == 0
    return path


@pytest.fixture(scope="session")
def plan(plan_path: Path) -> Plan:
    return load_plan(plan_path)


@pytest.fixture(scope="session")
def host_plan(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that this machine can execute, within seconds."""
    path = tmp_path_factory.mktemp("plan") / "host.json"
    model = ["--model", str(tiny_model), "--seq-len", "32", "--hardware", "epyc-turin-2c"]
    with short_searches():
        assert main(["plan", *model, "--output", str(path), "--json"]) == 0
    return path


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run the program as a process of its own, in an empty folder."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ullage", *arguments],
            cwd=tmp_path,
            env={**os.environ, "ULLAGE_HOME": str(tmp_path), **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    return run
