import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from amount import short_searches

sys.path.insert(0, str(Path(__file__).parent))  # made_figures.py

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module", autouse=True)
def _short_searches():
    with short_searches():
        yield


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
