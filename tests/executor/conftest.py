"""Lets the tests of this folder share `training.py`, and computes with one thread."""

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "optimizer"))  # test_adamw.py
sys.path.insert(0, str(Path(__file__).parent / "training_state"))  # test_immutability.py

import pytest
import torch
from one_thread import one_thread  # noqa: F401 - of all tests of this folder
from virtual import NoVirtualGpuError, install, present

with contextlib.suppress(Exception):  # tests that need it say why there is none
    install()  # before the first backward of this process


@pytest.fixture
def gpu():
    """A GPU: CUDA's, or else the virtual one of these tests."""
    if torch.cuda.is_available():
        yield
        return
    try:
        with present():
            yield
    except NoVirtualGpuError as error:
        pytest.skip(str(error))
