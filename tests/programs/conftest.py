"""Lets the tests of this folder share the programs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))  # rank_pool.py
sys.path.insert(0, str(Path(__file__).parent))

from one_thread import one_thread  # noqa: F401 - of all tests of this folder

from ullage.this_machine import planning  # noqa: F401 - its searches are short too
