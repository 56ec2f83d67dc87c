"""Lets the tests of this folder share `training.py`, and computes with one thread: sums then have one order."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from together import Processes, ready


@pytest.fixture(scope="session")
def processes():
    pool = Processes(4)
    pool.call(4, ready)  # starting takes longer than any test
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
