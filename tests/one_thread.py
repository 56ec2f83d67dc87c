"""Tests compute with one thread where a file or a ``conftest.py`` imports this fixture.

Sums then have one order, and tiny models only lose by sharing their work.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
