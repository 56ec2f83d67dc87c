"""Lets the tests of this folder share what those of the planner have: `cases.py`, `machines.py` and others."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "planner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "planner" / "bounds"))

import pytest

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """A node of eight A100s with NVLink."""
    return load_profile("a100x8-nvlink")
