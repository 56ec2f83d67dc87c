"""Lets the tests of this folder share `cases.py` and `hazards.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """A node of eight A100s with NVLink."""
    return load_profile("a100x8-nvlink")
