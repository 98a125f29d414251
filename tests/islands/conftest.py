"""What the tests of islands share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def close_loops() -> Iterator[None]:
    """Closes the loops of islands that were left in the middle, before tests that watch which functions are entered."""
    yield
    gc.collect()
