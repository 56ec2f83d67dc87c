import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import TINY

sys.path.insert(0, str(Path(__file__).parent))  # made_figures.py


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a model that is planned in some hundredths of a second."""
    path = tmp_path_factory.mktemp("model") / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `ullage whatif` as a process of its own, in an empty folder."""

    def started(*arguments: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ullage", "whatif", *arguments],
            cwd=tmp_path,
            env={**os.environ, "ULLAGE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return started
