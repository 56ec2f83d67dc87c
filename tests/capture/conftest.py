"""Lets the tests of this folder share `own_models.py`, and use the reference training of the executor's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from amount import short_searches


@pytest.fixture(scope="module", autouse=True)
def _short_searches():
    with short_searches():
        yield


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
