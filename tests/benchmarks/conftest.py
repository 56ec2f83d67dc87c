"""Plans of these tests are found quickly."""

import pytest
from amount import short_searches


@pytest.fixture(scope="module", autouse=True)
def _short_searches():
    with short_searches():
        yield
