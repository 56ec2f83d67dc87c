"""How much tests try: ``make test`` a part of what ``make test-all`` tries, of every property and every table.

``examples`` says it of a property, the marker ``part`` of a table: of a test with ``@pytest.mark.part(3)`` one case in
three is run by ``make test``, and of one with ``@pytest.mark.part(0)`` none. ``short_searches`` says it of plans that
tests of other things need, ``small_measurements`` of calibrations.
"""

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from planner import search

ALL: Final = os.environ.get("ULLAGE_TESTS") == "all"
_FEWEST: Final = 3
SHORT: Final = {"_SIMULATIONS": 20, "_TIDY_SIMULATIONS": 8, "_TASKS": 0}
"""The constants of :mod:`planner.search` for plans that tests of other things need."""


def examples(number: int, fewest: int = _FEWEST) -> int:
    """Return how many examples of a property are tried, if ``number`` are tried in ``make test-all``."""
    return number if ALL else max(min(number, fewest), number // 10)


@contextlib.contextmanager
def short_searches() -> Iterator[None]:
    """Let searches end after a few simulations in ``make test`` unless a test says after how many, for other tests.

    Python that is started meanwhile searches as shortly.
    """
    with pytest.MonkeyPatch.context() as patched:
        if not ALL:
            for name, number in SHORT.items():
                patched.setattr(search, name, number)
            if planning := sys.modules.get("ullage.this_machine.planning"):  # which has a budget of its own
                patched.setattr(planning, "MOST_SIMULATIONS", SHORT["_SIMULATIONS"])
            patched.setenv("PYTHONPATH", str(Path(__file__).with_name("short_searches")), prepend=os.pathsep)
        yield


@contextlib.contextmanager
def small_measurements() -> Iterator[None]:
    """Let calibrations measure with little memory in ``make test``, for tests of what comes of what was measured."""
    with pytest.MonkeyPatch.context() as patched:
        if not ALL:
            for name, size in {
                "backend._QUICK_COPY_BYTES": 2**24,
                "disk._QUICK_FILE_BYTES": 2**26,
                "run._NUM_BYTES": 2**24,
                "traffic._POOL_PARAMS": 2**21,
                "traffic._THREADS_PARAMS": 2**20,
                "sampling.NUM_WINDOWS": 4,
            }.items():
                patched.setattr(f"ullage.calibrate.{name}", size)
        yield


def divided(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return which tests are run, and which are left to ``make test-all``."""
    run, left, seen = [], [], Counter[str]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        every = next((mark.args[0] for mark in item.iter_markers("part")), 1)
        is_left = not every or seen[test] % every
        (left if is_left and not ALL else run).append(item)
        seen[test] += 1
    return run, left
