"""Lets the tests of this folder share `cases.py`, `hazards.py` and others, and what `bounds/test_bounds.py` checks."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "bounds"))

import pytest
from amount import short_searches

from hwprofiles.profile import HardwareProfile
from hwprofiles.registry import load_profile


@pytest.fixture(scope="module")
def short_plans():
    """Plans of a file that tests something else than the search: ``pytestmark = usefixtures("short_plans")``."""
    with short_searches():
        yield


@pytest.fixture(scope="session")
def profile() -> HardwareProfile:
    """A node of eight A100s with NVLink."""
    return load_profile("a100x8-nvlink")
