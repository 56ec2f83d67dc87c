"""Searches are what these tests are about, so they are as long as anybody's."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_plans():
    """Leave them so."""
