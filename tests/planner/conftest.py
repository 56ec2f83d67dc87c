"""Lets the tests of this folder share `cases.py`, `hazards.py` and others, and what `bounds/test_bounds.py` checks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "bounds"))

import pytest

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """A node of eight A100s with NVLink."""
    return load_profile("a100x8-nvlink")
