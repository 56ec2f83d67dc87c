"""Lets the tests of this folder use what those of the executor and of checkpoints have; see there."""

import sys
from pathlib import Path

import pytest
import torch

for folder in ("weights", "executor", "checkpoint", "checkpoint/faults"):
    sys.path.append(str(Path(__file__).parents[1] / folder))


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
