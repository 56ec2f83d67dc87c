"""Lets the tests of this folder use what those of the executor and of checkpoints have; see there."""

import sys
from pathlib import Path

from one_thread import one_thread  # noqa: F401 - of all tests of this folder

for folder in ("weights", "executor", "checkpoint", "checkpoint/faults"):
    sys.path.append(str(Path(__file__).parents[1] / folder))
