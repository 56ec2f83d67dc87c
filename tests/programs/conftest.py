"""Lets the tests of this folder share the programs. Plans are found quickly."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from amount import short_searches
from one_thread import one_thread  # noqa: F401 - of all tests of this folder

from ullage.this_machine import planning  # noqa: F401 - its searches are short too


@pytest.fixture(scope="module", autouse=True)
def _short_searches():
    with short_searches():
        yield
