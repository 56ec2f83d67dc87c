"""Lets the tests of this folder share `saving.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "faults"))  # test_power_loss.py
